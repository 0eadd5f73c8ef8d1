"""How much a request asks of a model, from 0 to 1, by rules that can be read, explained and tuned.

The score is a sum of contributions, each with a weight of its own. No model is asked, and what the score is used for
is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from resilient_llm._options import instance_of, number
from resilient_llm.routing.features import Features, features_of
from resilient_llm.routing.keywords import Keywords, Work

if TYPE_CHECKING:
    from resilient_llm.message import JSONObject

__all__ = ["Complexity", "ComplexityWeights", "Score"]

_WORTH_SAYING = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class ComplexityWeights:
    """Say what each thing that is seen of a request adds to its score, at most; a negative weight takes away.

    What is counted adds in proportion up to `full_...`: with `full_question=1000` a question of 500 tokens adds half
    of `question`, and one of 5000 all of it. Weights are numbers from -1 to 1. Raises `ConfigurationError`.
    """

    reasoning: float = 0.35
    """Words that ask to think something through."""
    coding: float = 0.3
    """Words of programming; a block of code counts as two."""
    creation: float = 0.2
    """Words that ask to write something new."""
    routine: float = -0.25
    """Words that ask for what a small model can do: to translate, summarise, classify."""
    question: float = 0.2
    """The length of the last thing the user says."""
    prompt: float = 0.15
    """The length of the whole prompt."""
    output: float = 0.1
    """The length that the answer may have, where the request sets one."""
    tools: float = 0.15
    images: float = 0.1
    audio: float = 0.1
    files: float = 0.1
    schema: float = 0.05
    """The answer has to be JSON."""
    thinking: float = 0.3
    """The caller asks for much reasoning (`reasoning_effort`, `thinking`)."""
    full_words: float = 2.0
    full_question: float = 1_000.0
    full_prompt: float = 16_000.0
    full_output: float = 8_000.0
    full_tools: float = 4.0

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name.startswith("full_"):
                number(0, math.inf, inside=True, **{option.name: getattr(self, option.name)})
            else:
                number(-1, 1, **{option.name: getattr(self, option.name)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Hold a complexity from 0 to 1, and what it is the sum of."""

    value: float
    contributions: Mapping[str, float]
    """By weight; what contributes nothing is left out. Their sum is cut off at 0 and 1."""

    def explain(self) -> tuple[str, ...]:
        """Say what contributed, the largest first: `reasoning +0.35`."""
        ranked = sorted(self.contributions.items(), key=lambda item: -abs(item[1]))
        return tuple(f"{name} {amount:+.2f}" for name, amount in ranked if abs(amount) >= _WORTH_SAYING)


@dataclass(frozen=True, kw_only=True)
class Complexity:
    """Score the body of a request in any dialect, from 0 (anything can answer it) to 1.

    Pure, and never raises whatever the body; linear time, and bounded work on long prompts.
    """

    weights: ComplexityWeights = field(default_factory=ComplexityWeights)
    keywords: Keywords = field(default_factory=Keywords.default, repr=False)

    def __post_init__(self) -> None:
        instance_of(ComplexityWeights, weights=self.weights)
        instance_of(Keywords, keywords=self.keywords)

    def __call__(self, body: JSONObject) -> Score:
        """Score a body."""
        return self.of(features_of(body))

    def of(self, features: Features) -> Score:
        """Score what is seen of a body."""
        weights = self.weights
        words = self.words(features)
        seen = {
            "reasoning": words.get("reasoning", 0) / weights.full_words,
            "coding": words.get("coding", 0) / weights.full_words,
            "creation": words.get("creation", 0) / weights.full_words,
            "routine": words.get("routine", 0) / weights.full_words,
            "question": features.question_size / weights.full_question,
            "prompt": features.prompt_size / weights.full_prompt,
            "output": min(features.output_tokens, 1e12) / weights.full_output,
            "tools": features.tools / weights.full_tools,
            "images": features.images,
            "audio": features.audio,
            "files": features.files,
            "schema": features.schema,
            "thinking": features.thinking,
        }
        contributions = {name: getattr(weights, name) * min(1.0, amount) for name, amount in seen.items()}
        contributions = {name: amount for name, amount in contributions.items() if amount}
        return Score(value=min(1.0, max(0.0, sum(contributions.values()))), contributions=contributions)

    def words(self, features: Features) -> Mapping[Work, int]:
        """Count the words in a question that say what kind of work it asks for; a block of code counts as two."""
        counts = dict(self.keywords.find(features.question))
        if features.code:
            counts["coding"] = counts.get("coding", 0) + 2
        return counts
