"""An error body, whatever its spelling.

Providers and the servers compatible with them write errors in a dozen shapes; here they become one. What the
names in it mean is told in `codes`, and the bytes themselves are forwarded as they came.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from resilient_llm.core.json_parse import parse_json
from resilient_llm.message import Headers
from resilient_llm.providers.codes import DAILY_QUOTA

__all__ = ["Problem", "parse", "read_problem", "reports_error"]

JSONObject: TypeAlias = Mapping[str, object]

_MESSAGES = ("message", "error_description", "detail", "msg", "title", "Message")
_ENVELOPES = frozenset({"error", "about:blank", "response.failed"})
"""Types that say no more than that this is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Hold what an error body says; what it does not say is `None`."""

    message: str | None = None
    code: str | None = None
    type: str | None = None
    param: str | None = None
    status: int | None = None
    """A number from 100 to 599 that the body gives as its code or status."""
    details: tuple[str, ...] = ()
    """Names for the same thing from deeper inside, which are narrower."""

    @property
    def names(self) -> tuple[str, ...]:
        """Give every name of the error, narrowest first."""
        return (*self.details, *(name for name in (self.code, self.type) if name is not None))


def parse(body: bytes | None) -> object:
    """Parse a body as JSON; `None` when it is none."""
    if not body:
        return None
    try:
        try:
            return parse_json(body)
        except UnicodeDecodeError:  # in some text; whoever it is for may be less strict
            return json.loads(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def read_problem(body: object, headers: Headers | None = None) -> Problem:
    """Read a parsed error body and the header in which AWS names an error. Never raises."""
    body = _unwrap(body)
    details = tuple(_header_names(headers or []))
    error = _error_in(body)
    if isinstance(error, str):
        outer = body if isinstance(body, Mapping) else {}
        description = outer.get("error_description")
        return Problem(
            message=description if isinstance(description, str) else error,
            # OAuth's `error` is a code with a description beside it; alone it is prose.
            code=error if isinstance(description, str) else _text(outer.get("code")),
            type=_text(outer.get("error_type")) or _kind(outer.get("type")),
            details=details,
        )
    if not isinstance(error, Mapping):
        return Problem(details=details)
    code, status = _code(error)
    return Problem(
        message=_message(error),
        code=code,
        type=_kind(error.get("type")) or _kind(error.get("status")),
        param=_text(error.get("param")),
        status=status,
        details=(*details, *_details(error)),
    )


def reports_error(body: object) -> bool:
    """Tell whether the parsed body of a 2xx, or of an event of its stream, is an error and no answer."""
    if not isinstance(body, dict):
        body = _unwrap(body)
        if not isinstance(body, dict):
            return False
    if body.get("type") in ("error", "response.failed") or body.get("object") == "error":
        return True
    choices = body.get("choices")
    if isinstance(choices, list) and choices:
        return _has_failed(choices[0]) and all(map(_has_failed, choices))
    error = body.get("error")
    if isinstance(error, dict):  # some replies have the fields of an error, all of them null
        return any(value is not None for value in error.values())
    return bool(error)


def _has_failed(choice: object) -> bool:
    return isinstance(choice, dict) and (choice.get("finish_reason") == "error" or bool(choice.get("error")))


def _unwrap(body: object) -> object:
    """Take the object out of the list that Google puts it in."""
    return body[0] if isinstance(body, list) and body else body


def _error_in(body: object) -> object:
    """Find the part that describes the error: a mapping, or a string that is its message."""
    if not isinstance(body, Mapping):
        return None
    inner = [body, body.get("response"), *_items(body.get("choices"))]
    for holder in inner:
        error = holder.get("error") if isinstance(holder, Mapping) else None
        if error and isinstance(error, Mapping | str):
            return error
    first = next(_items(body.get("errors")), None)
    return first if isinstance(first, Mapping) else body


def _items(value: object) -> Iterator[object]:
    return iter(value) if isinstance(value, list) else iter(())


def _message(error: JSONObject) -> str | None:
    for name in _MESSAGES:
        value = error.get(name)
        if isinstance(value, list):  # FastAPI's list of what does not validate
            value = next((item.get("msg") for item in value if isinstance(item, Mapping)), None)
        if isinstance(value, str):
            return value
    return None


def _code(error: JSONObject) -> tuple[str | None, int | None]:
    """Read `code` and `status`, each of which may hold a name or an HTTP status."""
    name = _text(error.get("code")) or _short(_text(error.get("__type")))
    numbers = (_status(error.get(key)) for key in ("code", "status", "status_code", "statusCode"))
    status = next((number for number in numbers if number is not None), None)
    return (None if name is not None and name.isdigit() else name), status


def _status(value: object) -> int | None:
    if isinstance(value, str) and len(value) == len("500") and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
        return value
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _kind(value: object) -> str | None:
    kind = _text(value)
    return None if kind is None or kind in _ENVELOPES or kind.isdigit() else kind


def _short(name: str | None) -> str | None:
    """Cut AWS's `namespace#Name:http://...` down to the name."""
    return None if name is None else name.partition(":")[0].rpartition("#")[2] or None


def _header_names(headers: Headers) -> Iterator[str]:
    for key, value in headers:
        if key.lower() == b"x-amzn-errortype":
            name = _short(value.decode("latin-1").strip())
            if name is not None:
                yield name


def _details(error: JSONObject) -> Iterator[str]:
    details = error.get("details")
    if isinstance(details, Mapping):
        yield from _names_in(details, "error_code")  # Anthropic
    for detail in _items(details):  # Google
        if isinstance(detail, Mapping):
            if any(_is_daily(violation) for violation in _items(detail.get("violations"))):
                yield DAILY_QUOTA
            yield from _names_in(detail, "reason")
    yield from _names_in(error.get("innererror"), "code")  # Azure
    metadata = error.get("metadata")  # OpenRouter
    yield from _names_in(metadata, "error_type", "limit_source")
    if isinstance(metadata, Mapping) and "flagged_input" in metadata:
        yield "content_policy_violation"  # the only mark of a moderated prompt, behind a bare 403


def _names_in(holder: object, *keys: str) -> Iterator[str]:
    if isinstance(holder, Mapping):
        for key in keys:
            name = _text(cast("JSONObject", holder).get(key))
            if name is not None:
                yield name


def _is_daily(violation: object) -> bool:
    return isinstance(violation, Mapping) and "perday" in str(violation.get("quotaId")).lower()
