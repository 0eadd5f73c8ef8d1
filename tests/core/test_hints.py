"""Hints: order, grammar and choice of bucket, beyond what the field cases show."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.hints import Hint, retry_hint, should_retry

HeaderList = list[tuple[bytes, bytes]]

NOW = 2_051_222_400.0
GEMINI = {"error": {"details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "4s"}]}}
ALL = [
    (b"retry-after-ms", b"1000"),
    (b"retry-after", b"2"),
    (b"x-ratelimit-remaining-requests", b"0"),
    (b"x-ratelimit-reset-requests", b"3s"),
]


@pytest.mark.parametrize(
    ("headers", "hint"),
    [
        (ALL, Hint(1.0, "retry-after-ms")),
        (ALL[1:], Hint(2.0, "retry-after")),
        (ALL[2:], Hint(3.0, "ratelimit-reset")),
        ([], Hint(4.0, "body")),
    ],
)
def test_each_source_gives_way_to_the_one_before(headers: HeaderList, hint: Hint) -> None:
    assert retry_hint(headers, status=429, wall_now=NOW, body=GEMINI) == hint
    assert retry_hint(headers[::-1], status=429, wall_now=NOW, body=GEMINI) == hint


@pytest.mark.parametrize("status", [200, 201, 204, 301, 399])
def test_a_reply_that_did_not_fail_has_no_hint(status: int) -> None:
    assert retry_hint(ALL, status=status, wall_now=NOW, body=GEMINI) is None


@pytest.mark.parametrize(
    "value",
    [
        *(
            "nan",
            "inf",
            "Infinity",
            "-inf",
            "1_0",
            "1e3",
            "0x10",
            "1,2",
            "5, 5",
            "5;q=1",
            "1 0",
            "five",
        ),
        *("", ".5", "5.", "5..0", "1.2.3", "\u0665", "\u00b2", "\uff15", "5\n", "5\x00", "\x0b5"),
    ],
)
@pytest.mark.parametrize("name", [b"retry-after", b"retry-after-ms"])
def test_what_is_no_number_is_absent(name: bytes, value: str) -> None:
    assert retry_hint([(name, value.encode())], status=429, wall_now=NOW) is None


@pytest.mark.parametrize(
    ("value", "delay"),
    [(b"1m30s", 90.0), (b"5s", 5.0), (b" 500ms\t", 0.5), (b"1h0m0.5s", 3600.5), (b"0s", 0.0)],
)
def test_retry_after_may_be_a_duration_as_resets_are(value: bytes, delay: float) -> None:
    headers = [(b"retry-after", value)]
    assert retry_hint(headers, status=429, wall_now=NOW) == Hint(delay, "retry-after")
    assert (
        retry_hint([(b"retry-after-ms", value)], status=429, wall_now=NOW) is None
    )  # has its unit in its name


@pytest.mark.parametrize(
    "value", [b"1m 30s", b"-5s", b"+5s", b"1d", b"5S", b"PT30S", b"1.5.5s", b"s", b"6m0", b"1e3s"]
)
def test_a_duration_that_is_none_is_absent(value: bytes) -> None:
    assert retry_hint([(b"retry-after", value)], status=429, wall_now=NOW) is None


@pytest.mark.parametrize(
    ("value", "delay"), [(b"1.5", 1.5), (b" \t7\t ", 7.0), (b"007", 7.0), (b"0.0", 0.0), (b"0.25", 0.25)]
)
@pytest.mark.parametrize("name", [b"retry-after", b"Retry-After", b"RETRY-AFTER"])
def test_seconds_may_have_a_fraction_and_names_any_case(name: bytes, value: bytes, delay: float) -> None:
    assert retry_hint([(name, value)], status=429, wall_now=NOW) == Hint(delay, "retry-after")


@pytest.mark.parametrize(
    ("values", "delay"),
    [
        ((b"5", b"5"), 5.0),
        ((b"5", b"9"), 9.0),
        ((b"9", b"5"), 9.0),
        ((b"x", b"5"), 5.0),
        ((b"5", b"nan"), 5.0),
    ],
)
def test_of_a_repeated_header_the_longer_wait_counts(values: tuple[bytes, bytes], delay: float) -> None:
    headers = [(b"retry-after", value) for value in values]
    assert retry_hint(headers, status=503, wall_now=NOW) == Hint(delay, "retry-after")


def test_of_several_gemini_delays_the_longest_counts() -> None:
    details = [{"@type": "google.rpc.RetryInfo", "retryDelay": delay} for delay in ("2s", "8s", "x")]
    hint = retry_hint([], status=429, wall_now=NOW, body={"error": {"details": details}})
    assert hint == Hint(8.0, "body")


def openai(**values: str) -> HeaderList:
    return [
        (f"x-ratelimit-{name.replace('_', '-')}".encode(), value.encode()) for name, value in values.items()
    ]


@pytest.mark.parametrize(
    ("headers", "throttled", "failed"),
    [
        pytest.param(
            openai(remaining_requests="0", reset_requests="2s", remaining_tokens="5", reset_tokens="9s"),
            *(2.0, 2.0),
            id="only the exhausted one",
        ),
        pytest.param(
            openai(remaining_requests="7", reset_requests="6m0s", remaining_tokens="5", reset_tokens="9s"),
            *(9.0, None),
            id="five tokens may be too few, seven requests are not",
        ),
        pytest.param(openai(reset_requests="2s", reset_tokens="9s"), 9.0, None, id="none says what is left"),
        pytest.param(
            openai(remaining_requests="0", reset_tokens="9s"), None, None, id="the exhausted one says no time"
        ),
        pytest.param(
            openai(remaining_requests_day="0", reset_requests_day="50000.5"),
            *(50000.5, 50000.5),
            id="a bucket whose name is not known",
        ),
        pytest.param(
            openai(remaining_project_tokens="0", reset_project_tokens="3s", reset_requests="1m0s"),
            *(3.0, 3.0),
            id="a project's own limit",
        ),
        pytest.param([(b"ratelimit", b'"default";r=0;t=12')], 12.0, 12.0, id="IETF"),
        pytest.param([(b"RateLimit", b"limit=10, remaining=0, reset=12")], 12.0, 12.0, id="IETF draft 07"),
        pytest.param(openai(remaining_requests="0", reset_requests="soon"), None, None, id="malformed"),
    ],
)
def test_the_bucket_that_refused_is_found(
    headers: HeaderList, throttled: float | None, failed: float | None
) -> None:
    for status, delay in ((429, throttled), (503, failed)):
        expected = None if delay is None else Hint(delay, "ratelimit-reset")
        assert retry_hint(headers, status=status, wall_now=NOW) == expected


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        pytest.param(b"false", False, id="CLS-07-a"),
        pytest.param(b"true", True, id="CLS-07-b"),
        pytest.param(b"FALSE", False, id="CLS-07-c"),
        pytest.param(b"maybe", None, id="CLS-07-d"),
        (b" True\t", True),
        (b"", None),
        (b"0", None),
        (b"true, false", None),
    ],
)
@pytest.mark.parametrize("name", [b"x-should-retry", b"X-Should-Retry"])
def test_x_should_retry(name: bytes, value: bytes, answer: bool | None) -> None:
    assert should_retry([(b"content-type", b"true"), (name, value)]) is answer


def test_a_disagreement_about_retrying_means_no() -> None:
    assert should_retry([(b"x-should-retry", b"false"), (b"x-should-retry", b"true")]) is False
    assert should_retry([(b"x-should-retry", b"true"), (b"x-should-retry", b"false")]) is False
    assert should_retry([(b"x-should-retry", b"true"), (b"x-should-retry", b"what")]) is True
    assert should_retry([]) is None


def test_a_hint_is_a_value() -> None:
    hint = Hint(1.0, "body")
    assert hint == Hint(1.0, "body")
    assert not hasattr(hint, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        hint.delay = 2.0  # type: ignore[misc]


names = st.sampled_from(
    [
        *(
            b"Retry-After",
            b"retry-after-ms",
            b"date",
            b"ratelimit",
            b"ratelimit-policy",
            b"x-ratelimit-reset",
        ),
        *(
            b"x-ratelimit-remaining",
            b"anthropic-ratelimit-tokens-reset",
            b"anthropic-ratelimit-tokens-remaining",
        ),
        *(b"x-ratelimit-limit-tokens", b"ratelimit-limit"),
    ]
)
seeds = [
    *(
        "0",
        "17",
        "5.25",
        "-1",
        "nan",
        "6m0s",
        "17ms",
        "2035-01-01T00:00:40.5+23:59",
        "9999-12-31T23:59:59-23:59",
    ),
    *("0001-01-01T00:00:00+23:59", "Fri, 31 Dec 9999 23:59:60 GMT", "Monday, 01-Jan-35 00:00:60 GMT"),
    *(
        "Mon Jan  1 00:00:00 0001",
        "Mon, 31 Feb 2035 24:61:61 GMT",
        '"d";r=0;t=9',
        "limit=1, remaining=0, reset=9",
    ),
    *("2051222430", "2051222430000", "9" * 400),
]
values = st.one_of(
    st.sampled_from(seeds).map(str.encode),
    st.binary(max_size=40),
    st.text(alphabet='0123456789.,-+:;"=hmsnurtqw TZGM', max_size=40).map(str.encode),
    st.builds(
        lambda seed, at, byte: seed[:at] + byte + seed[at:],
        st.sampled_from(seeds).map(str.encode),
        st.integers(0, 30),
        st.binary(min_size=1, max_size=1),
    ),
)
leaves = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["1s", "google.rpc.RetryInfo"])
)
keys = st.sampled_from(["error", "details", "@type", "retryDelay"]) | st.text(max_size=3)
bodies = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=15,
)


@given(st.lists(st.tuples(names, values), max_size=8), st.integers(100, 599), bodies)
def test_no_reply_can_make_it_raise_or_go_back_in_time(
    headers: HeaderList, status: int, body: object
) -> None:
    hint = retry_hint(headers, status=status, wall_now=NOW, body=body)
    should_retry(headers)
    if hint is not None:
        assert status >= 400
        assert hint.delay >= 0.0
        assert not math.isnan(hint.delay)


@given(st.floats(0, 1e9).map(lambda number: f"{number:.6f}"))
def test_a_decimal_is_read_as_written(text: str) -> None:
    assert retry_hint([(b"retry-after", text.encode())], status=429, wall_now=NOW) == Hint(
        float(text), "retry-after"
    )
