"""Which models those further in know, for policies that send calls to a model by its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from resilient_llm.errors import ConfigurationError
from resilient_llm.ordering import Placement

__all__ = ["refuse_unknown"]


def refuse_unknown(after: Sequence[object], **options: Iterable[str]) -> None:
    """Raise `ConfigurationError` for a model in an option that neither the `Router` after it has nor a `TierRouter`.

    A policy of the application's own before the router may call models what it likes: then nothing is known.
    """
    virtual: set[str] = set()
    for policy in after:
        placement = getattr(policy, "placement", None)
        models = getattr(policy, "models", None)
        if placement is Placement.TIERS and isinstance(models, Collection):
            virtual.update(models)
        if placement is Placement.ROUTER and isinstance(models, Collection):
            _check({*models, *virtual}, options)
        if placement is None or placement is Placement.ROUTER:
            return


def _check(known: Collection[str], options: dict[str, Iterable[str]]) -> None:
    for option, models in options.items():
        for model in models:
            if model not in known:
                listed = ", ".join(map(repr, sorted(known)))
                raise ConfigurationError(
                    f"{option}={model!r}: the Router has no targets for it; it has some for {listed}"
                )
