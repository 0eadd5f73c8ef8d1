"""What every dialect does, and how an error becomes an `Outcome`.

A dialect reads requests and writes errors in one provider's way; reading errors is the same for all, since
names differ between providers and gateways relay each other's. No policy decides anything in here.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar, Literal, Protocol, TypeAlias

from resilient_llm.core import sse
from resilient_llm.core.hints import retry_hint, should_retry
from resilient_llm.location import locate
from resilient_llm.message import Headers, JSONObject, Request
from resilient_llm.outcome import SUCCESS, Outcome, Scope, Verdict
from resilient_llm.profile import Profile
from resilient_llm.providers.answer import Answer, EventKind
from resilient_llm.providers.codes import CODES, find_code, find_phrase
from resilient_llm.providers.meaning import FAULT, OVERLOADED, Meaning, meaning_of_status, outcome_unknown
from resilient_llm.providers.problem import Problem, parse, read_problem, reports_error

__all__ = ["BaseDialect", "Dialect", "Framing", "asked", "kept_profile", "stored", "text"]

Framing: TypeAlias = Literal["events", "array", "unknown"]
"""What a stream is written in: server-sent events, a JSON array that comes bit by bit, or nobody knows what."""

# RFC 9110, section 9.2.2
IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

_FIRST_ERROR = 400
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[._-][A-Za-z0-9]+)*")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_MAX_NAME = 48
_MAX_WORD = 15
_MEAN_WORD = 3
_MAX_DIGITS = 3
_YES = frozenset({"1", "on", "t", "true", "y", "yes"})


@lru_cache(maxsize=1024)
def kept_profile(  # noqa: PLR0917 - a cache counts by position
    provider: str,
    operation: str,
    model: str | None,
    stream: bool,  # noqa: FBT001
    repeat_safe: bool,  # noqa: FBT001
    resumable: bool,  # noqa: FBT001
    idempotency_header: bytes | None = None,
) -> Profile:
    """Give a profile, the same one for the same values: requests ask for little that is new.

    Not for models with names longer than `LONGEST_MODEL`: for these there is `kept_profile.__wrapped__`.
    """
    return Profile(
        provider=provider,
        operation=operation,
        model=model,
        stream=stream,
        repeat_safe=repeat_safe,
        idempotency_header=idempotency_header,
        resumable=resumable,
    )


class Dialect(Protocol):
    """Read and write the messages of one kind of provider."""

    @property
    def name(self) -> str:
        """Give the dialect's name."""
        ...

    @property
    def marks_end(self) -> bool:
        """Tell whether a whole stream says so: by a terminal marker or by a reason to finish."""
        ...

    def matches(self, request: Request) -> bool:
        """Tell whether a request is written in this dialect."""
        ...

    def profile(self, request: Request) -> Profile:
        """Say what a request asks for."""
        ...

    def framing(self, request: Request) -> Framing:
        """Say how a stream that answers `request` is written."""
        ...

    def classify(
        self, status: int, headers: Headers, body: bytes | None, *, wall_now: float | None = None
    ) -> Outcome:
        """Say what a reply, or one event of its stream, means."""
        ...

    def read_event(self, event: str, body: JSONObject, answer: Answer) -> EventKind:
        """Say what an event of a stream is, and enter in `answer` what it tells.

        `event` is the type its framing gives it, `body` its data. Errors have been recognised before.
        """
        ...

    def read_body(self, body: JSONObject, answer: Answer) -> None:
        """Enter in `answer` what a reply that came in one piece tells."""
        ...

    def error_body(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """Write an error as the provider would, for its SDK to read."""
        ...

    def error_event(
        self,
        request: Request,
        status: int,
        message: str,
        *,
        code: str | None = None,
        sequence: int | None = None,
    ) -> bytes:
        """Write an error as the provider would in the stream that answers `request`, for its SDK to raise.

        `sequence` is the number of the last event before it, in an API that numbers them.
        """
        ...


class BaseDialect(ABC):
    """Classify replies by their status, their headers and the names in their error bodies."""

    name: ClassVar[str]
    provider: ClassVar[str]
    """Who is assumed to answer where the host does not say."""
    marks_end: ClassVar[bool] = True

    def profile(self, request: Request) -> Profile:
        """Say what a request of no known operation asks for; only its method can make it safe to repeat."""
        return Profile(
            provider=locate(request.url).provider or self.provider,
            model=text(request.json.get("model")),
            stream=asked(request.json.get("stream")),
            repeat_safe=request.method in IDEMPOTENT_METHODS,
        )

    def framing(self, request: Request) -> Framing:
        """Say how a stream is written: in events, by all that mark its end.

        One that is asked for with `1` or `"true"` may also be none: not every server takes that for a yes.
        """
        loosely = not isinstance(request.json.get("stream", True), bool)
        return "events" if self.marks_end and not loosely else "unknown"

    @abstractmethod
    def error_body(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """Write an error as the provider would, for its SDK to read."""

    def error_event(
        self,
        request: Request,  # noqa: ARG002 - for APIs with shapes of their own for events
        status: int,
        message: str,
        *,
        code: str | None = None,
        sequence: int | None = None,  # noqa: ARG002
    ) -> bytes:
        """Write the error's body as an event without a type."""
        return sse.encode(self.error_body(status, message, code=code))

    def classify(
        self, status: int, headers: Headers, body: bytes | None, *, wall_now: float | None = None
    ) -> Outcome:
        """Say what a reply means.

        `body` is decoded (see `decode_body`), as much of it as was read, or `None`. Below 400 only a JSON
        body can make it a failure, one that holds an error instead of an answer; the data of an event of a
        stream is judged the same way, with the stream's status. `wall_now`, in epoch seconds, is for a date
        in a reply that does not say what time it is; without it that is the system's. Never raises.
        """
        if status >= _FIRST_ERROR:
            parsed = parse(body)
            return _judge(status, read_problem(parsed, headers), headers, parsed, wall_now)
        if body is None or b'"error"' not in body:  # every shape of an error has this in it
            return SUCCESS
        parsed = parse(body)
        if not reports_error(parsed):
            return SUCCESS
        problem = read_problem(parsed, headers)
        return _judge(_effective_status(problem), problem, headers, parsed, wall_now)


def _effective_status(problem: Problem) -> int:
    """Give the status that an error in the body of a 200 stands for; 500 when it does not say."""
    if problem.status is not None and problem.status >= _FIRST_ERROR:
        return problem.status
    code = find_code(problem.names)
    if code is not None:
        return code.status
    return 500 if find_phrase(problem.names, 400, problem.message) is None else 400


def _judge(status: int, problem: Problem, headers: Headers, body: object, wall_now: float | None) -> Outcome:
    meaning, error_type = _meaning(status, problem)
    # The provider's word decides whether to ask again; what the error says about the target stays as it is.
    word = should_retry(headers)
    retryable = meaning.retryable if word is None else word
    hint = None
    if retryable or meaning.verdict is not Verdict.FATAL or meaning.scope is Scope.CREDENTIAL:
        if wall_now is None:
            wall_now = time.time()  # noqa: TID251 - a date in a reply is on the world's clock, not on anyio's
        hint = retry_hint(headers, status=status, wall_now=wall_now, body=body)
    return Outcome(
        verdict=meaning.verdict,
        scope=meaning.scope,
        error_type=error_type,
        status=status,
        retryable=retryable,
        retry_after=None if hint is None else hint.delay,
        retry_after_source=None if hint is None else hint.source,
        ambiguous=meaning in (FAULT, OVERLOADED) and outcome_unknown(status),
    )


def _meaning(status: int, problem: Problem) -> tuple[Meaning, str]:
    names = problem.names
    code = find_code(names)
    meaning = None if code is None else code.meaning
    if meaning is None:
        phrase = find_phrase(names, status, problem.message)
        if phrase is not None:
            return phrase.meaning, phrase.error_type
        meaning = meaning_of_status(status)
    narrowest = next((name for name in names if _is_name(name)), str(status))
    return meaning, meaning.error_type or narrowest


def _is_name(text: str) -> bool:
    """Tell a name, which may stand in logs, spans and labels, from prose, an id, and a key that was sent.

    One is known, or made of words: random letters and digits make none, or such as are too short or go on for too long.
    """
    if len(text) > _MAX_NAME or not _NAME.fullmatch(text):
        return False
    if text.lower() in CODES:
        return True
    words = _WORD.findall(text)
    if sum(map(str.isdigit, text)) > _MAX_DIGITS or max(map(len, words)) > _MAX_WORD:
        return False
    return len(words) * _MEAN_WORD <= len(text) and all(len(word) > 1 or word.isdigit() for word in words)


def stored(body: JSONObject) -> bool:
    """Tell whether a request asks for something that outlives its reply, and would then exist twice."""
    return asked(body.get("store")) or asked(body.get("background"))


def asked(value: object) -> bool:
    """Tell whether an option of a request is set: by `true`, or by what servers take for it (pydantic's list)."""
    if value is None or isinstance(value, bool):
        return value is True
    return value.lower() in _YES if isinstance(value, str) else value == 1


def text(value: object) -> str | None:
    """Give a non-empty string, or `None`."""
    return value if isinstance(value, str) and value else None
