"""The faults of `resilient-llm fake-provider`: by a name, or from a JSON file.

Reads them and says what is wrong with them; what a fault does is the fake provider's to know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import UnionType
from typing import Final, TypeAlias, get_args, get_origin, get_type_hints

from resilient_llm.testing import OK, Fault, Script, flapping, random_faults

__all__ = ["PRESETS", "FaultsError", "Scripts", "read_faults"]

Scripts: TypeAlias = Mapping[str | None, Script | list[Fault]]
"""What to play by model; None: for every model without a script of its own."""

_BROKEN_STREAMS: Final = (
    (0.1, Fault(cut_after_tokens=3)),
    (0.1, Fault(malformed_event_at=3)),
    (0.1, Fault(error_event_at=3)),
    (0.1, Fault(omit_done=True)),
    (0.05, Fault(empty_stream=True)),
    (0.05, Fault(stall_after_tokens=3)),
)
_FLAKY: Final = (
    (0.03, Fault(status=429, headers={"retry-after": "1"})),
    (0.04, Fault(status=503)),
    (0.02, Fault(reset=True)),
    (0.03, Fault(delay_headers=2.0)),
    (0.02, Fault(cut_after_tokens=3)),
)
_SLOW: Final = ((0.2, Fault(delay_first_token=5.0)), (0.2, Fault(token_delay=0.5)))
_THROTTLED: Final = ((0.3, Fault(status=429, headers={"retry-after": "2"})),)

PRESETS: Final[Mapping[str, Callable[[Random], Script]]] = {
    "none": lambda _rng: lambda _request: OK,
    "flaky": lambda rng: random_faults(_FLAKY, rng=rng),
    "throttled": lambda rng: random_faults(_THROTTLED, rng=rng),
    "outages": lambda _rng: flapping(up=20.0, down=10.0),
    "slow": lambda rng: random_faults(_SLOW, rng=rng),
    "broken-streams": lambda rng: random_faults(_BROKEN_STREAMS, rng=rng),
}

_FIELDS: Final[Mapping[str, object]] = get_type_hints(Fault)


class FaultsError(Exception):
    """Faults that cannot be read; the message says which and why."""


def read_faults(name_or_path: str, rng: Random) -> Scripts:
    """Give the faults of a preset's name or of a JSON file.

    A file holds a list of faults, or an object of such lists by model, `*` for all others. A fault is an
    object of the fields of `resilient_llm.testing.Fault`. With a `chance` (0 to 1) in every fault of a list
    each request draws one; without, they are played one a request, in order. Raises `FaultsError`.
    """
    if name_or_path in PRESETS:
        return {None: PRESETS[name_or_path](rng)}
    try:
        content = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        allowed = ", ".join(PRESETS)
        raise FaultsError(f"{name_or_path!r} is neither a file nor one of {allowed}") from error
    except (OSError, ValueError) as error:
        raise FaultsError(f"{name_or_path}: {error}") from error
    if not isinstance(content, dict):
        return {None: _script(content, name_or_path, rng)}
    return {
        None if model == "*" else model: _script(listed, f"{name_or_path}, {model}", rng)
        for model, listed in content.items()
    }


def _script(listed: object, where: str, rng: Random) -> Script | list[Fault]:
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise FaultsError(f'{where}: a list of faults is wanted, each an object, e.g. [{{"status": 503}}]')
    faults = [_fault(item, f"{where}, fault {number}") for number, item in enumerate(listed, 1)]
    chances = [item["chance"] for item in listed if "chance" in item]
    if not chances:
        return faults
    if len(chances) < len(faults):
        raise FaultsError(f"{where}: either every fault has a chance or none has")
    try:
        return random_faults(zip(chances, faults, strict=True), rng=rng)
    except (TypeError, ValueError) as error:
        raise FaultsError(f"{where}: {error}") from error


def _fault(item: Mapping[str, object], where: str) -> Fault:
    options = {name: value for name, value in item.items() if name != "chance"}
    for name, value in options.items():
        if name not in _FIELDS:
            raise FaultsError(f"{where}: {name!r}: allowed are chance, {', '.join(_FIELDS)}")
        if not _fits(value, _FIELDS[name]):
            raise FaultsError(f"{where}: {name}={value!r}: allowed is {_name(_FIELDS[name])}")
    if isinstance(headers := options.get("headers"), Mapping):
        options["headers"] = {name: str(value) for name, value in headers.items()}  # so that 2 may be a value
    try:
        return Fault(**options)  # type: ignore[arg-type]
    except ValueError as error:
        raise FaultsError(f"{where}: {error}") from error


def _fits(value: object, hint: object) -> bool:
    """Tell whether a JSON value is of a field's type."""
    alternatives = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [get_origin(kind) or kind for kind in alternatives]
    if isinstance(value, bool) or bool in kinds:
        return isinstance(value, bool) and bool in kinds
    return isinstance(value, tuple(kinds)) or (isinstance(value, int) and float in kinds)


def _name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
