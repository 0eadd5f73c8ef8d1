"""What is wrong with a configuration, each thing in a line: where, what it is, what is allowed.

Turns the errors of pydantic and of the library's own constructors into one form. No value that may be a secret is
repeated.
"""

from __future__ import annotations

import datetime as dt
import difflib
import json
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from resilient_llm.errors import ConfigurationError
from resilient_llm.sidecar.toml_lines import line_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["ConfigError", "Problem", "at", "did_you_mean", "dotted", "needing", "problems_of", "shown"]

_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|key|keys|token|secret|password|credentials?|authorization|env)(_|$)", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"^(sk-|gsk_|AIza|Bearer )|://[^/\s]*@|^(?=.*[A-Za-z])(?=.*[0-9])[\w+/=.-]{24,}$")
_MAX_SHOWN = 60
_MAX_BITS = 1024
_HIDDEN = "..."
"""What the library writes in the place of a value that may be a secret."""
_AUTHORITY = re.compile(r"(?:[\w+.-]*://)?(?:\[[\da-fA-F:.]*\]?|[\w.-]*)(?::\d*)?", re.ASCII)
"""How a URL begins: its scheme, host and port."""
_MISSING = re.compile(r"^(\w+)=None: ")
_ABOUT = re.compile(r"(\w+)(?:\['([^']+)'\])?(?:=(.*?))?: (.*)", re.DOTALL)

_ALLOWED = {
    "bool_type": "allowed are true and false",
    "dict_type": "a table is expected",
    "float_type": "allowed are numbers",
    "int_from_float": "allowed are whole numbers",
    "int_type": "allowed are whole numbers",
    "list_type": "a list is expected",
    "model_type": "a table is expected",
    "model_attributes_type": "a table is expected",
    "string_type": "a string is expected",
    "finite_number": "allowed are finite numbers",
}


class Problem(NamedTuple):
    """Say what is wrong at a path; `value` is written as in the file, where there is one to show."""

    path: tuple[str | int, ...]
    message: str
    value: str | None = None


class ConfigError(ConfigurationError):
    """A configuration that cannot work; its text has one line for each problem."""

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        file: str | None = None,
        lines: Mapping[tuple[str | int, ...], int] | None = None,
    ) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: line_of(lines or {}, problem.path) or 0))
        self.file = file
        super().__init__("\n".join(_written(problem, file, lines or {}) for problem in self.problems))


@contextmanager
def at(*path: str | int, given: BaseModel | None = None) -> Iterator[None]:
    """Say of a `ConfigurationError` raised inside which part of the configuration it is about.

    One that begins with a key of the table that was `given` is about that: `url='ftp://x': allowed are ...`, or about a
    key of it: `headers['te']='x': cannot be given ...`. A key that is `None` is missing in a file.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ConfigurationError, ValueError) as error:
        found = _ABOUT.match(str(error))
        if given is None or found is None or found[1] not in type(given).model_fields:
            raise ConfigError([Problem(path, _MISSING.sub(r"\1 is missing: ", str(error)))]) from error
        about = (*path, found[1]) if found[2] is None else (*path, found[1], found[2])
        value = found[3] if found[3] != _HIDDEN else _in_part(about, getattr(given, found[1]))
        raise ConfigError([Problem(about, found[4], value)]) from error


@contextmanager
def needing(package: str, extra: str, *path: str | int) -> Iterator[None]:
    """Say of an `ImportError` raised inside which part needs that package, and which extra brings it."""
    try:
        yield
    except ImportError as error:
        message = f"needs {package}: pip install 'resilient-llm[{extra}]'"
        raise ConfigError([Problem(path, message)]) from error


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Give the end of a message about a name that is not known."""
    listed = ", ".join(sorted(known)) or "none"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"allowed are {listed}" + (f"; did you mean {near[0]}?" if near else "")


def dotted(path: Sequence[str | int]) -> str:
    """Write a path as TOML does."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if re.fullmatch(r"[\w-]+", part) else _quoted(part)
            text += f".{name}" if text else name
    return text


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Give the problems that pydantic has found."""
    return [_problem(details, model) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, model: type[BaseModel]) -> Problem:
    path, kind = details["loc"], details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path, model))
    if kind == "missing":
        return Problem(path, "is missing; it has to be given")
    if kind == "literal_error":
        value_shown = shown((), details["input"])  # one of a few words, whatever the key is called
        known = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        value = details["input"]
        tail = did_you_mean(value, known) if isinstance(value, str) else f"allowed are {', '.join(known)}"
        return Problem(path, tail, value_shown)
    value_shown = shown(path, details["input"])
    if kind == "value_error":
        return Problem(path, str(context.get("error", details["msg"])), value_shown)
    if bound := _bound(context):
        what = (
            "characters" if kind.startswith("string") else "entries" if kind.startswith("too_") else "numbers"
        )
        return Problem(path, f"allowed are {what} {bound}", value_shown)
    return Problem(path, _ALLOWED.get(kind, details["msg"]), value_shown)


def _bound(context: Mapping[str, object]) -> str:
    words = {
        "gt": "above",
        "ge": "from",
        "lt": "below",
        "le": "up to",
        "min_length": "from",
        "max_length": "up to",
    }
    return " and ".join(f"{word} {_plain(context[name])}" for name, word in words.items() if name in context)


def _plain(number: object) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _unknown_key(path: Sequence[str | int], model: type[BaseModel]) -> str:
    name = str(path[-1])
    known = _fields_at(model, path[:-1])
    message = f"unknown key; {did_you_mean(name, known)}"
    if _SECRET_NAME.search(name) and (env := [key for key in known if key.endswith("_env")]):
        return (
            "unknown key; secrets do not stand in this file: put it in an environment variable and name that "
            f"in {env[0]}"
        )
    return message


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> Collection[str]:
    """Give the keys that a table may have."""
    found: object = model
    for part in path:
        found = _step(found, part)
    inner = _model(found)
    return tuple(inner.model_fields) if inner is not None else ()


def _step(kind: object, part: str | int) -> object:
    inner = _model(kind)
    if inner is not None:
        field = inner.model_fields.get(str(part))
        return None if field is None else field.annotation
    for one in _alternatives(kind):
        if get_origin(one) is dict:
            return get_args(one)[1]
        if get_origin(one) is list:
            return get_args(one)[0]
    return None


def _model(kind: object) -> type[BaseModel] | None:
    for one in _alternatives(kind):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _alternatives(kind: object) -> Sequence[object]:
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [one for alternative in get_args(kind) for one in _alternatives(alternative)]
    return (kind,)


def shown(path: Sequence[str | int], value: object) -> str:
    """Write a value, but for one that may be a secret."""
    names = [part for part in path if isinstance(part, str)]
    if isinstance(value, str) and (_SECRET_VALUE.search(value) or (names and _SECRET_NAME.search(names[-1]))):
        return '"..."'
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, cast("Mapping[str, object]", value))) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(shown(path, one) for one in cast("list[object]", value)[:5]) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = _quoted(value)
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        text = hex(value)  # in decimal Python writes no number of thousands of digits
    else:
        text = value.isoformat() if isinstance(value, dt.date | dt.time) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _in_part(path: Sequence[str | int], value: object) -> str:
    """Write what the library hides; of a URL without credentials how it begins."""
    if path[-1] != "url" or not isinstance(value, str) or "@" in value:
        return f'"{_HIDDEN}"'
    found = _AUTHORITY.match(value)
    begins = "" if found is None else found[0]
    return shown(path, begins if begins == value else f"{begins}{_HIDDEN}")


def _quoted(text: str) -> str:
    """Write a string as TOML does, on one line, and so that it does nothing to a terminal."""
    return '"' + "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text) + '"'


def _written(problem: Problem, file: str | None, lines: Mapping[tuple[str | int, ...], int]) -> str:
    line = line_of(lines, problem.path)
    where = ":".join(str(part) for part in (file, line) if part is not None)
    what = dotted(problem.path)
    if problem.value is not None:
        what = f"{what} = {problem.value}"
    return ": ".join(part for part in (where, what, problem.message) if part)
