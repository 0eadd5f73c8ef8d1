"""What kind of request it is (simple, code, reason, vision), by the same rules that score complexity.

A classifier without a model, for a `TierRouter`. Which model answers which kind is decided there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from resilient_llm._options import instance_of, number
from resilient_llm.routing.complexity import Complexity
from resilient_llm.routing.features import features_of

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import JSONObject

__all__ = ["Intent", "IntentClassifier"]

Intent: TypeAlias = Literal["simple", "code", "reason", "vision"]


@dataclass(frozen=True, kw_only=True)
class IntentClassifier:
    """Tell the kind of a request: `vision` with a picture, else what most of the words in its question speak for.

    Words of programming, and a block of code, speak for `code`; words that ask to think something through or to write
    something new, reasoning that the caller asks for and a question of `long_question` tokens for `reason`; words of
    routine for `simple`, which is also what is left, and wins where nothing speaks louder.
    """

    complexity: Complexity = field(default_factory=Complexity)
    long_question: float = 500.0
    labels: ClassVar[tuple[Intent, ...]] = ("simple", "code", "reason", "vision")

    def __post_init__(self) -> None:
        instance_of(Complexity, complexity=self.complexity)
        number(0, math.inf, long_question=self.long_question)

    async def __call__(self, call: Call) -> Intent:
        """Tell the kind of a call."""
        return self.of(call.request.json)

    def of(self, body: JSONObject) -> Intent:
        """Tell the kind of a body."""
        features = features_of(body)
        if features.images:
            return "vision"
        words = self.complexity.words(features)
        code = words.get("coding", 0)
        reason = words.get("reasoning", 0) + words.get("creation", 0)
        reason += 2 * features.thinking + (features.question_size >= self.long_question)
        if max(code, reason) <= words.get("routine", 0):
            return "simple"
        return "code" if code >= reason else "reason"
