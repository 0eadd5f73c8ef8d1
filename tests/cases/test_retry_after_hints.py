"""Field cases RA-*: what `Retry-After` and its relatives mean, read from replies seen in production.

How long is then really waited, and when the loop stops, is shown where `Retry` is tested.
"""

import math

import pytest

from resilient_llm.core.hints import Hint, HintSource, retry_hint
from resilient_llm.core.ratelimit_headers import Level, rate_limit_levels

HeaderList = list[tuple[bytes, bytes]]

Y2035 = 2_051_222_400.0  # Mon, 01 Jan 2035 00:00:00 GMT
DATE = (b"Date", b"Mon, 01 Jan 2035 00:00:00 GMT")


def fields(**values: str) -> HeaderList:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in values.items()]


def gemini(delay: object, *, kind: str = "type.googleapis.com/google.rpc.RetryInfo") -> dict[str, object]:
    quota = {
        "@type": "type.googleapis.com/google.rpc.QuotaFailure",
        "violations": [{"quotaId": "x-PerDay-y"}],
    }
    details = [quota, {"@type": kind, "retryDelay": delay}]
    return {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": details}}


def assert_hint(hint: Hint | None, delay: float | None, source: HintSource) -> None:
    if delay is None:
        assert hint is None
    else:
        assert hint is not None
        assert hint.delay == pytest.approx(delay, rel=1e-9, abs=0)
        assert hint.source == source


@pytest.mark.parametrize(
    ("status", "headers", "delay", "source"),
    [
        pytest.param(429, fields(retry_after="0"), 0.0, "retry-after", id="RA-01-zero-seconds"),
        pytest.param(429, fields(retry_after_ms="0"), 0.0, "retry-after-ms", id="RA-01-zero-milliseconds"),
        pytest.param(
            503, fields(retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), 0.0, "retry-after", id="RA-02-past-date"
        ),
        pytest.param(
            503,
            [DATE, *fields(retry_after="Sun, 31 Dec 2034 23:59:59 GMT")],
            0.0,
            "retry-after",
            id="RA-02-past-date-beside-date",
        ),
        pytest.param(429, fields(retry_after="1800"), 1800.0, "retry-after", id="RA-03-half-an-hour"),
        pytest.param(429, fields(retry_after="120"), 120.0, "retry-after", id="RA-03-at-the-cap"),
        pytest.param(429, fields(retry_after="121"), 121.0, "retry-after", id="RA-03-over-the-cap"),
        pytest.param(429, fields(retry_after="9" * 25), math.inf, "retry-after", id="RA-03-overlong"),
        pytest.param(429, fields(retry_after="9" * 5000), math.inf, "retry-after", id="RA-03-beyond-int"),
        pytest.param(
            429, fields(retry_after_ms="9" * 25), math.inf, "retry-after-ms", id="RA-03-overlong-milliseconds"
        ),
        pytest.param(
            429, fields(retry_after_ms="4321", retry_after="5"), 4.321, "retry-after-ms", id="RA-04-a-ms-wins"
        ),
        pytest.param(
            429,
            fields(retry_after="5", retry_after_ms="4321"),
            4.321,
            "retry-after-ms",
            id="RA-04-a-any-order",
        ),
        pytest.param(
            429, fields(retry_after_ms="abc", retry_after="7"), 7.0, "retry-after", id="RA-04-b-malformed-ms"
        ),
        pytest.param(429, fields(retry_after_ms="17"), 0.017, "retry-after-ms", id="RA-04-c-ms-alone"),
        pytest.param(
            429,
            [DATE, *fields(retry_after_ms="-1", retry_after="Mon, 01 Jan 2035 00:00:09 GMT")],
            9.0,
            "retry-after",
            id="RA-04-malformed-ms-then-date",
        ),
        pytest.param(524, fields(retry_after="120"), 120.0, "retry-after", id="RA-14-524"),
        pytest.param(503, fields(retry_after="3"), 3.0, "retry-after", id="RA-14-503"),
        *(
            pytest.param(status, fields(retry_after="3"), 3.0, "retry-after", id=f"RA-14-{status}")
            for status in (408, 409, 425, 429, 500, 502, 504, 520, 521, 522, 523, 529)
        ),
    ],
)
def test_a_hint_is_read(status: int, headers: HeaderList, delay: float, source: HintSource) -> None:
    assert_hint(retry_hint(headers, status=status, wall_now=Y2035), delay, source)


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(fields(retry_after="-1"), id="RA-02-signed-seconds"),
        pytest.param(fields(retry_after="+1"), id="RA-02-plus-sign"),
        pytest.param(fields(retry_after_ms="-1"), id="RA-02-signed-milliseconds"),
        pytest.param(fields(retry_after="-0"), id="RA-02-negative-zero"),
    ],
)
def test_a_signed_number_is_no_hint(headers: HeaderList) -> None:
    assert retry_hint(headers, status=503, wall_now=Y2035) is None


@pytest.mark.parametrize("skew", [600.0, -600.0], ids=["RA-07-clock-ahead", "RA-07-clock-behind"])
@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([DATE, *fields(retry_after="Mon, 01 Jan 2035 00:00:30 GMT")], id="retry-after"),
        pytest.param(
            [
                DATE,
                *fields(
                    anthropic_ratelimit_tokens_remaining="0",
                    anthropic_ratelimit_tokens_reset="2035-01-01T00:00:30Z",
                ),
            ],
            id="rfc3339",
        ),
        pytest.param(
            [DATE, *fields(x_ratelimit_remaining="0", x_ratelimit_reset="2051222430")], id="epoch-seconds"
        ),
        pytest.param(
            [DATE, *fields(x_ratelimit_remaining="0", x_ratelimit_reset="2051222430000")],
            id="epoch-milliseconds",
        ),
    ],
)
def test_ra_07_a_date_is_measured_against_the_date_beside_it(headers: HeaderList, skew: float) -> None:
    hint = retry_hint(headers, status=429, wall_now=Y2035 + skew)
    assert hint is not None
    assert hint.delay == 30.0


@pytest.mark.parametrize(
    "date", [None, b"", b"yesterday", b"Mon, 01 Jan 2035 00:00:00", b"2035-01-01T00:00:00Z"]
)
def test_ra_07_without_a_valid_date_the_local_clock_counts(date: bytes | None) -> None:
    headers = fields(retry_after="Mon, 01 Jan 2035 00:00:30 GMT")
    if date is not None:
        headers.append((b"date", date))
    assert retry_hint(headers, status=429, wall_now=Y2035 + 10) == Hint(20.0, "retry-after")


@pytest.mark.parametrize(
    ("reset", "seconds"),
    [
        pytest.param("6m0s", 360.0, id="RA-08-6m0s"),
        pytest.param("1s", 1.0, id="RA-08-1s"),
        pytest.param("17ms", 0.017, id="RA-08-17ms"),
        pytest.param("1m30.951s", 90.951, id="RA-08-1m30.951s"),
        pytest.param("1h30m", 5400.0, id="RA-08-1h30m"),
        pytest.param("0s", 0.0, id="RA-08-0s"),
        pytest.param("500ms", 0.5, id="RA-08-500ms"),
        pytest.param("6m0", None, id="RA-08-6m0"),
        pytest.param("m", None, id="RA-08-m"),
        pytest.param("-1s", None, id="RA-08-minus-1s"),
        pytest.param("1s ago", None, id="RA-08-trailing-text"),
        pytest.param("", None, id="RA-08-empty"),
    ],
)
def test_a_go_duration_is_read_whole(reset: str, seconds: float | None) -> None:
    headers = fields(x_ratelimit_remaining_tokens="0", x_ratelimit_reset_tokens=reset)
    (level,) = rate_limit_levels(headers, Y2035)
    assert level.reset == (None if seconds is None else pytest.approx(seconds, rel=1e-9, abs=0))
    assert_hint(retry_hint(headers, status=429, wall_now=Y2035), seconds, "ratelimit-reset")


RA_09 = {
    "anthropic_ratelimit_requests_remaining": "12",
    "anthropic_ratelimit_requests_reset": "2035-01-01T00:00:05Z",
    "anthropic_ratelimit_tokens_remaining": "0",
    "anthropic_ratelimit_tokens_reset": "2035-01-01T00:00:40Z",
}


@pytest.mark.parametrize(
    ("changes", "delay", "source"),
    [
        pytest.param({}, 40.0, "ratelimit-reset", id="RA-09-the-exhausted-one"),
        pytest.param(
            {"anthropic_ratelimit_tokens_reset": "2035-01-01T00:00:40+00:00"},
            40.0,
            "ratelimit-reset",
            id="RA-09-numeric-offset",
        ),
        pytest.param(
            {"anthropic_ratelimit_tokens_reset": "2035-01-01T02:00:40.250+02:00"},
            40.25,
            "ratelimit-reset",
            id="RA-09-fraction-and-offset",
        ),
        pytest.param(
            {"anthropic_ratelimit_requests_reset": "2035-01-01T00:01:40Z"},
            40.0,
            "ratelimit-reset",
            id="RA-09-the-other-one-resets-later",
        ),
        pytest.param(
            {
                "anthropic_ratelimit_requests_remaining": "0",
                "anthropic_ratelimit_requests_reset": "2035-01-01T00:01:40Z",
            },
            100.0,
            "ratelimit-reset",
            id="RA-09-the-latest-of-two-exhausted",
        ),
        pytest.param({"retry_after": "7"}, 7.0, "retry-after", id="RA-09-retry-after-wins"),
    ],
)
def test_the_exhausted_bucket_says_when(changes: dict[str, str], delay: float, source: HintSource) -> None:
    headers = fields(**RA_09 | changes)
    assert_hint(retry_hint(headers, status=429, wall_now=Y2035), delay, source)


AZURE = fields(x_ratelimit_limit_tokens="-1", x_ratelimit_remaining_tokens="-1", x_ratelimit_reset_tokens="0")


@pytest.mark.parametrize("status", [200, 429, 503])
def test_ra_11_a_negative_number_is_unknown(status: int) -> None:
    assert rate_limit_levels(AZURE, Y2035) == ()
    assert retry_hint(AZURE, status=status, wall_now=Y2035) is None


def test_ra_11_a_negative_number_hides_no_other_bucket() -> None:
    headers = AZURE + fields(x_ratelimit_remaining_requests="0", x_ratelimit_reset_requests="9")
    assert rate_limit_levels(headers, Y2035) == (Level("requests", None, 0, 9.0),)
    assert retry_hint(headers, status=429, wall_now=Y2035) == Hint(9.0, "ratelimit-reset")


RA_12 = fields(x_ratelimit_remaining_requests="4999", x_ratelimit_reset_requests="6m0s")


@pytest.mark.parametrize("status", [200, 429, 500, 503])
def test_ra_12_a_reset_with_permits_left_is_no_wait(status: int) -> None:
    assert retry_hint(RA_12, status=status, wall_now=Y2035) is None
    assert rate_limit_levels(RA_12, Y2035) == (Level("requests", None, 4999, 360.0),)


def test_ra_12_an_exhausted_bucket_without_retry_after_is_an_upper_bound() -> None:
    headers = fields(x_ratelimit_remaining_requests="0", x_ratelimit_reset_requests="6m0s")
    assert retry_hint(headers, status=429, wall_now=Y2035) == Hint(360.0, "ratelimit-reset")
    assert retry_hint(headers, status=200, wall_now=Y2035) is None


@pytest.mark.parametrize(
    ("body", "delay"),
    [
        pytest.param(gemini("45.837906927s"), 45.837906927, id="RA-13-nine-digits"),
        pytest.param(gemini("58s"), 58.0, id="RA-13-whole-seconds"),
        pytest.param([gemini("58s")], 58.0, id="RA-13-in-a-list"),
        pytest.param(gemini("0s"), 0.0, id="RA-13-zero"),
        pytest.param(gemini("9" * 30 + "s"), math.inf, id="RA-13-overlong"),
        pytest.param(gemini("1.0123456789s"), None, id="RA-13-ten-digits"),
        pytest.param(gemini("-58s"), None, id="RA-13-negative"),
        pytest.param(gemini("58"), None, id="RA-13-no-unit"),
        pytest.param(gemini("1m"), None, id="RA-13-go-duration"),
        pytest.param(gemini(58), None, id="RA-13-number"),
        pytest.param(gemini("58s", kind="google.rpc.ErrorInfo"), None, id="RA-13-another-type"),
        pytest.param({"error": "RESOURCE_EXHAUSTED"}, None, id="RA-13-error-is-text"),
        pytest.param([], None, id="RA-13-empty-list"),
        pytest.param({"error": {"details": ["58s", None]}}, None, id="RA-13-details-are-text"),
        pytest.param(None, None, id="RA-13-no-body"),
    ],
)
def test_gemini_says_it_in_the_body(body: object, delay: float | None) -> None:
    assert_hint(retry_hint([], status=429, wall_now=Y2035, body=body), delay, "body")


def test_ra_13_a_header_comes_before_the_body() -> None:
    hint = retry_hint(fields(retry_after="3"), status=429, wall_now=Y2035, body=gemini("58s"))
    assert hint == Hint(3.0, "retry-after")
