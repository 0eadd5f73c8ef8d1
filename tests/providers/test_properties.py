"""Whatever comes in, something sensible comes out."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.message import Request
from resilient_llm.outcome import Outcome, Scope, Verdict
from resilient_llm.profile import Profile
from resilient_llm.providers import DIALECTS, UNKNOWN, Dialect, dialect_for
from resilient_llm.providers.codes import CODES

NAMES = st.sampled_from(
    ["error", "type", "code", "message", "status", "details", "choices", "detail", "errors"]
)
WORDS = st.sampled_from(
    [*CODES, "error", "response.failed", "prompt is too long", "429", "google.rpc.RetryInfo"]
)
SCALARS = st.none() | st.booleans() | st.integers(-1, 700) | st.floats() | WORDS | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
BODIES = st.none() | st.binary(max_size=64) | VALUES.map(lambda value: json.dumps(value).encode())
HEADER_NAMES = st.sampled_from(
    [
        b"retry-after",
        b"Retry-After-Ms",
        b"date",
        b"x-should-retry",
        b"X-Amzn-ErrorType",
        b"x-ratelimit-reset-tokens",
    ]
)
HEADERS = st.lists(st.tuples(HEADER_NAMES | st.binary(max_size=8), st.binary(max_size=32)), max_size=6)
SPEAKERS = st.sampled_from([*DIALECTS, UNKNOWN])


def check(outcome: Outcome) -> None:
    """A hint is a wait; only a failure may be retried; a name fits a metric's label."""
    assert isinstance(outcome, Outcome)
    if outcome.ok:
        assert outcome == Outcome(verdict=Verdict.SUCCESS)
        return
    assert outcome.verdict in {Verdict.FAILURE, Verdict.THROTTLED, Verdict.FATAL}
    assert outcome.scope in {Scope.REQUEST, Scope.CREDENTIAL, Scope.TARGET, Scope.UPSTREAM}
    assert outcome.status is not None
    assert outcome.status >= 400
    assert outcome.error_type
    assert len(outcome.error_type) <= 48
    assert outcome.error_type.isascii()
    assert outcome.error_type.isprintable()
    assert outcome.retry_after is None or 0 <= outcome.retry_after <= math.inf
    assert not outcome.ambiguous or outcome.verdict is Verdict.FAILURE


@given(dialect=SPEAKERS, status=st.integers(400, 999), headers=HEADERS, body=BODIES)
def test_every_error_has_an_outcome(
    dialect: Dialect, status: int, headers: list[tuple[bytes, bytes]], body: bytes | None
) -> None:
    outcome = dialect.classify(status, headers, body)
    check(outcome)
    assert not outcome.ok
    assert outcome.status == status


@given(dialect=SPEAKERS, status=st.integers(100, 399), headers=HEADERS, body=BODIES)
def test_every_answer_has_an_outcome(
    dialect: Dialect, status: int, headers: list[tuple[bytes, bytes]], body: bytes | None
) -> None:
    check(dialect.classify(status, headers, body))


@given(status=st.integers(100, 599), headers=HEADERS, body=BODIES)
def test_all_dialects_read_errors_alike(
    status: int, headers: list[tuple[bytes, bytes]], body: bytes | None
) -> None:
    first, *rest = [dialect.classify(status, headers, body, wall_now=0.0) for dialect in [*DIALECTS, UNKNOWN]]
    assert all(outcome == first for outcome in rest)


@given(
    method=st.sampled_from(["GET", "POST", "PATCH", "", "post"]),
    url=st.text(max_size=40)
    | st.builds(
        "https://{}/{}{}".format,
        st.sampled_from(
            ["api.openai.com", "x.openai.azure.com", "bedrock-runtime.x.amazonaws.com", "h:1", ""]
        ),
        st.sampled_from(["", "v1/", "model/", "deployments/", "publishers/anthropic/models/"]),
        st.sampled_from(
            ["chat/completions", "responses", "v1/messages", "m:rawPredict", "m/invoke", ":", "/invoke"]
        ),
    ),
    headers=HEADERS,
    body=BODIES,
)
def test_every_request_has_a_profile(
    method: str, url: str, headers: list[tuple[bytes, bytes]], body: bytes | None
) -> None:
    request = Request(method, url, headers, body)
    assert isinstance(dialect_for(request).profile(request), Profile)


def test_every_code_stands_for_an_error() -> None:
    for name, code in CODES.items():
        assert name == name.lower()
        assert 400 <= code.status <= 599
