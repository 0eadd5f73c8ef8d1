"""Virtual models: names that callers ask for, and which model answers a call of one, by how much it asks for.

How complex a call is, and of what class, `complexity` and the classifiers say. Which deployment of the chosen model
answers is the router's to decide.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from resilient_llm._options import function, instance_of, label, names, number
from resilient_llm.errors import ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.outcome import Usage
from resilient_llm.policies._known_models import refuse_unknown
from resilient_llm.policies.tokens import TokenEstimate
from resilient_llm.pricing import Price, cost_of
from resilient_llm.routing.complexity import Complexity, Score
from resilient_llm.routing.features import Features, features_of
from resilient_llm.telemetry import names as telemetry_names

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.routing.classifier import Classifier

__all__ = ["Need", "Prefer", "Tier", "TierChoice", "TierRouter", "estimate_cost"]

logger = logging.getLogger("resilient_llm")

Prefer: TypeAlias = Literal["speed", "balance", "quality"]
Need: TypeAlias = Literal["vision", "audio", "files", "tools"]
"""What a call may need of its model beside text."""

_SHIFTS: Mapping[Prefer, float] = {"speed": -1.0, "balance": 0.0, "quality": 1.0}
_DEFAULT_ESTIMATE = TokenEstimate()


@dataclass(frozen=True, slots=True)
class Tier:
    """Say what `model` is for: calls of a complexity `up_to` this, and those of the `classes` of a classifier.

    `model` is a logical model, such as a `Router` knows. `lacks` is what it cannot do; a call that needs that goes to
    the next tier up. With a `price` the cost of each call is estimated.
    """

    model: str
    _: KW_ONLY
    up_to: float = 1.0
    classes: Collection[str] = ()
    lacks: Collection[Need] = ()
    price: Price | None = None

    def __post_init__(self) -> None:
        label(model=self.model)
        number(0, 1, up_to=self.up_to)
        names(classes=self.classes, lacks=self.lacks)
        instance_of(Price, none=True, price=self.price)
        if unknown := [need for need in self.lacks if need not in get_args(Need)]:
            raise ConfigurationError(f"lacks={unknown!r}: allowed are {', '.join(map(repr, get_args(Need)))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChoice:
    """Hold what was decided for a call, and why."""

    tier: Tier
    score: Score
    label: str | None = None
    """The class that decided; `None` where the score did."""
    rejected: tuple[str, ...] = ()
    """The models that were passed over, and what they lack: `small:vision`."""
    estimated_cost: float | None = None
    """In US dollars, before anything is sent; `None` where the tier has no price."""


@dataclass(frozen=True, eq=False)
class TierRouter:
    """Send calls of virtual models (`"auto"`) to the model of a tier; what names any other model passes untouched.

    `models` gives the tiers of each virtual model, cheapest first. A call goes to the first whose `up_to` is at least
    its complexity; `prefer` moves that by `shift`, down for `"speed"` and up for `"quality"`, for all virtual models
    or by name. With a `classifier` a call goes to the first tier that names its class, and by its complexity where
    none does, or the classifier cannot tell or fails. A tier that lacks what the call needs is passed over for the
    next one up, else down, that does not. The choice is made once, before any attempt, and `call.logical_model` is
    where it is kept.

    Raises `ConfigurationError`.
    """

    models: Mapping[str, Sequence[Tier]]
    _: KW_ONLY
    prefer: Prefer | Mapping[str, Prefer] = "balance"
    shift: float = 0.15
    classifier: Classifier | None = None
    complexity: Complexity = field(default_factory=Complexity)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    name: str = "tiers"
    placement: ClassVar[Placement] = Placement.TIERS

    def __post_init__(self) -> None:
        number(0, 1, shift=self.shift)
        label(name=self.name)
        if not isinstance(self.models, Mapping) or not self.models:
            raise ConfigurationError(
                f"models={self.models!r}: allowed are mappings from virtual models to tiers"
            )
        for model, tiers in self.models.items():
            label(models=model)
            self._check_tiers(model, tiers)
        instance_of(Complexity, complexity=self.complexity)
        instance_of(TokenEstimate, estimate=self.estimate)
        function(none=True, asynchronous=True, classifier=self.classifier)
        prefers = self.prefer if isinstance(self.prefer, Mapping) else dict.fromkeys(self.models, self.prefer)
        for model, prefer in prefers.items():
            if model not in self.models or not isinstance(prefer, str) or prefer not in _SHIFTS:
                raise ConfigurationError(
                    f"prefer={self.prefer!r}: allowed are 'speed', 'balance' and 'quality', for all or by virtual model"
                )
        asks = getattr(self.classifier, "model", None)
        if isinstance(asks, str) and asks in self.models:
            raise ConfigurationError(
                f"classifier: it asks {asks!r}, which is a virtual model here, and "
                "would be asked about its own calls: name a concrete model"
            )
        self._check_classes()

    def _check_classes(self) -> None:
        """Find classes that no call will ever be of: nobody tells classes, or the classifier has no such label."""
        named = {found for tiers in self.models.values() for tier in tiers for found in tier.classes}
        if named and self.classifier is None:
            raise ConfigurationError(f"classes={sorted(named)}: they need a classifier= that tells them")
        labels = getattr(self.classifier, "labels", None)
        if isinstance(labels, Collection) and (unknown := sorted(named.difference(labels))):
            raise ConfigurationError(f"classes={unknown}: the classifier's labels are {sorted(labels)}")

    def _check_tiers(self, model: str, tiers: Sequence[Tier]) -> None:
        if not isinstance(tiers, Sequence) or not tiers or not all(isinstance(tier, Tier) for tier in tiers):
            raise ConfigurationError(f"models[{model!r}]={tiers!r}: allowed are lists of tiers")
        limits = [tier.up_to for tier in tiers]
        if limits != sorted(limits) or limits[-1] != 1:
            raise ConfigurationError(
                f"models[{model!r}]: up_to is {limits}; allowed are tiers in the order of up_to, the last up to 1"
            )
        if virtual := [tier.model for tier in tiers if tier.model in self.models]:
            raise ConfigurationError(f"models[{model!r}]: {virtual[0]!r} is a virtual model itself")

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` for a tier whose model the router further in does not know."""
        after = policies[policies.index(self) + 1 :]
        for model, tiers in self.models.items():
            refuse_unknown(after, **{f"models[{model!r}]": [tier.model for tier in tiers]})

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Choose a tier for a call of a virtual model, and await the rest of the pipeline."""
        model = call.logical_model or call.profile.model
        if model is not None and model in self.models:
            found = await self._classify(call)
            choice = self.choose(call, model, found)
            call.logical_model = choice.tier.model
            self._record(call, model, choice)
        return await call_next(call)

    async def _classify(self, call: Call) -> str | None:
        if self.classifier is None:
            return None
        try:
            found = await self.classifier(call)
        except Exception:
            logger.exception("classifier=%r failed", self.classifier)
            return None
        return found if isinstance(found, str) else None

    def choose(self, call: Call, model: str, found: str | None = None) -> TierChoice:
        """Say which tier of a virtual model a call goes to; `found` is the class that a classifier found for it."""
        tiers = self.models[model]
        features = features_of(call.request.json)
        score = self.complexity.of(features)
        at = None if found is None else _of_class(tiers, found)
        if at is None:
            found, at = None, self._of_score(model, score)
        tier, rejected = _capable(tiers, at, _needs(features))
        return TierChoice(
            tier=tier,
            score=score,
            label=found,
            rejected=rejected,
            estimated_cost=None if tier.price is None else estimate_cost(call, tier.price, self.estimate),
        )

    def _of_score(self, model: str, score: Score) -> int:
        prefer = self.prefer.get(model, "balance") if isinstance(self.prefer, Mapping) else self.prefer
        value = min(1.0, max(0.0, score.value + _SHIFTS[prefer] * self.shift))
        return next(index for index, tier in enumerate(self.models[model]) if value <= tier.up_to)

    def _record(self, call: Call, model: str, choice: TierChoice) -> None:
        attributes: dict[str, AttributeValue] = {
            telemetry_names.ROUTE_REASON: "tier",
            telemetry_names.ROUTE_FROM: model,
            telemetry_names.ROUTE_SELECTED: choice.tier.model,
            telemetry_names.ROUTE_REJECTED: choice.rejected,
            telemetry_names.TIER_SCORE: choice.score.value,
            telemetry_names.TIER_CONTRIBUTIONS: choice.score.explain(),
        }
        if choice.label is not None:
            attributes[telemetry_names.TIER_CLASS] = choice.label
        if choice.estimated_cost is not None:
            attributes[telemetry_names.TIER_ESTIMATED_COST] = choice.estimated_cost
        call.telemetry.event(call, telemetry_names.TIER_CHOSEN, attributes)


def estimate_cost(call: Call, price: Price, estimate: TokenEstimate = _DEFAULT_ESTIMATE) -> float:
    """Estimate what a call will cost, in US dollars, before it is sent: its prompt, and all that the answer may have.

    Nothing of the prompt is taken to be cached, so that it is rather too much.
    """
    prompt = estimate.prompt(call)
    return cost_of(price, Usage(input_tokens=prompt, output_tokens=estimate(call) - prompt)) or 0.0


def _of_class(tiers: Sequence[Tier], found: str) -> int | None:
    return next((index for index, tier in enumerate(tiers) if found in tier.classes), None)


def _needs(features: Features) -> frozenset[Need]:
    seen: Mapping[Need, int] = {
        "vision": features.images,
        "audio": features.audio,
        "files": features.files,
        "tools": features.tools,
    }
    return frozenset(need for need, count in seen.items() if count)


def _capable(tiers: Sequence[Tier], at: int, needs: frozenset[Need]) -> tuple[Tier, tuple[str, ...]]:
    """Give the first tier from `at` on, up and then down, that lacks nothing that is needed, and those passed over.

    Where every tier lacks something it is the one at `at`: its provider says best what is wrong.
    """
    rejected: list[str] = []
    for tier in (*tiers[at:], *reversed(tiers[:at])):
        lacks = sorted(needs.intersection(tier.lacks))
        if not lacks:
            return tier, tuple(rejected)
        rejected += [f"{tier.model}:{need}" for need in lacks]
    return tiers[at], ()
