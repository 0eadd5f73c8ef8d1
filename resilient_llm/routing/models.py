"""The models that calls ask for: which targets answer for each, and which models come after it.

What has been declared, checked once. What is known of a target is the fleet's, where one call goes its route's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from resilient_llm._options import instance_of
from resilient_llm.errors import ConfigurationError
from resilient_llm.target import Target

__all__ = ["Models", "Targets"]

Targets: TypeAlias = Mapping[str, Target | Sequence[Target]] | Sequence[Target]
"""Equivalent targets by the model that callers ask for, or those for whatever they ask for."""

_ANY = "*"


class Models:
    """Hold the targets of each model, the models that it falls back to, and what stands for an unknown one.

    Raises `ConfigurationError` for targets that are none, or have one name; and for models without targets.
    """

    __slots__ = ("_chains", "_default", "targets")

    def __init__(
        self, targets: Targets, fallbacks: Mapping[str, str | Sequence[str]], default: str | None
    ) -> None:
        instance_of(Mapping, fallbacks=fallbacks)
        self.targets = _by_model(targets)
        """The equivalent targets of each model, by its name; those for any model by a name that is none."""
        if default is not None:
            self._check(f"default={default!r}", default)
        for model, chain in fallbacks.items():
            self._check_fallbacks(model, chain)
        self._default = default
        self._chains = {model: (model, *_listed(fallbacks.get(model, ()))) for model in self.targets}

    def _check_fallbacks(self, model: str, chain: str | Sequence[str]) -> None:
        self._check(f"fallbacks={{{model!r}: ...}}", model)
        option = f"fallbacks={{{model!r}: {chain!r}}}"
        if not isinstance(chain, str | Sequence):
            raise ConfigurationError(f"{option}: allowed are names of models, or lists of these")
        for other in _listed(chain):
            self._check(option, other)
            if other == model:
                raise ConfigurationError(f"{option}: a model is no fallback for itself")

    def _check(self, option: str, model: str) -> None:
        if not isinstance(model, str) or model not in self.targets:
            raise ConfigurationError(
                f"{option}: {model!r} has no targets; models with targets are {self.listed()}"
            )

    @property
    def names(self) -> Collection[str] | None:
        """Give the models that calls may ask for; `None` for any, as with a default or one list of targets."""
        return None if self._default is not None or _ANY in self.targets else self.targets.keys()

    def listed(self) -> str:
        """Write their names for an error."""
        return ", ".join(map(repr, self.targets))

    def chain(self, model: str | None) -> tuple[str, ...] | None:
        """Give what answers for a model that is asked for, and what that falls back to; `None` for an unknown one."""
        chain = None if model is None else self._chains.get(model)
        if chain is not None:
            return chain
        if _ANY in self.targets:
            return self._chains[_ANY]
        name = self._default or (next(iter(self.targets)) if model is None else None)
        return None if name is None else self._chains[name]

    def of(self, target: Target) -> str:
        """Give the first model that one of the targets answers for."""
        return next(model for model, targets in self.targets.items() if target in targets)

    def every_target(self) -> Iterator[Target]:
        """Give the targets of all models, some of them perhaps twice."""
        for targets in self.targets.values():
            yield from targets

    def target(self, name: str) -> Target:
        """Give the target of that name. Raises `ConfigurationError` when there is none."""
        for target in self.every_target():
            if target.name == name:
                return target
        raise ConfigurationError(f"name={name!r}: no target is called so")


def _by_model(targets: Targets) -> Mapping[str, tuple[Target, ...]]:
    """Give the targets by model, checked."""
    if isinstance(targets, Mapping):
        models = {model: _group_of(model, given) for model, given in targets.items()}
    elif isinstance(targets, Sequence) and not isinstance(targets, str | bytes):
        models = {_ANY: tuple(targets)}
    else:
        raise ConfigurationError(
            f"targets={targets!r}: allowed are lists of Target, or a mapping of models to these"
        )
    names = dict[str, Target]()
    for model, group in models.items():
        if not isinstance(model, str) or not model or not group:
            raise ConfigurationError(
                f"targets: model {model!r} has {len(group)} targets; each needs a name and at least one"
            )
        for target in group:
            if not isinstance(target, Target):
                raise ConfigurationError(f"targets: {target!r} of model {model!r} is no Target")
            if names.setdefault(target.name, target) is not target:
                raise ConfigurationError(
                    f"targets: two of them are called {target.name!r}; give them names of their own"
                )
        if len({target.name for target in group}) < len(group):
            raise ConfigurationError(f"targets: model {model!r} has a target twice")
    if not models:
        raise ConfigurationError("targets: there are none")
    return models


def _group_of(model: str, given: object) -> tuple[Target, ...]:
    if isinstance(given, Target):
        return (given,)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"targets: {given!r} of model {model!r} is no Target, and no list of these")
    return tuple(given)


def _listed(models: str | Sequence[str]) -> Sequence[str]:
    return (models,) if isinstance(models, str) else models
