"""Rate-limit headers: the grammar of their values, and the limits gathered from them."""

import dataclasses
import math
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.ratelimit_headers import (
    Level,
    decimal,
    http_date,
    rate_limit_levels,
    read_buckets,
    server_time,
)

HeaderList = list[tuple[bytes, bytes]]

NOW = 2_051_222_400.0  # Mon, 01 Jan 2035 00:00:00 GMT


def reset_of(value: bytes, *more: tuple[bytes, bytes]) -> float | None:
    (level,) = rate_limit_levels(
        [(b"x-ratelimit-remaining", b"0"), (b"x-ratelimit-reset", value), *more], NOW
    )
    return level.reset


# -- limits ----------------------------------------------------------------------------------------


OPENAI = [
    (b"Date", b"Mon, 01 Jan 2035 00:00:00 GMT"),
    (b"x-ratelimit-limit-requests", b"5000"),
    (b"x-ratelimit-limit-tokens", b"160000"),
    (b"x-ratelimit-remaining-requests", b"4999"),
    (b"x-ratelimit-remaining-tokens", b"159976"),
    (b"x-ratelimit-reset-requests", b"12ms"),
    (b"x-ratelimit-reset-tokens", b"6m0s"),
    (b"x-request-id", b"req_1"),
]


@pytest.mark.parametrize(
    ("headers", "levels"),
    [
        pytest.param(
            OPENAI,
            (Level("requests", 5000, 4999, 0.012), Level("tokens", 160000, 159976, 360.0)),
            id="OpenAI",
        ),
        pytest.param(
            [
                (b"X-RateLimit-Limit-Project-Tokens", b"60000"),
                (b"X-RateLimit-Remaining-Project-Tokens", b"0"),
            ],
            (Level("tokens", 60000, 0, None),),
            id="OpenAI project",
        ),
        pytest.param(
            [
                (b"x-ratelimit-remaining-requests", b"59"),
                (b"x-ratelimit-remaining-tokens", b"9000"),
                (b"x-ratelimit-reset-requests", b"10"),
            ],
            (Level("requests", None, 59, 10.0), Level("tokens", None, 9000, None)),
            id="Azure",
        ),
        pytest.param(
            [
                (f"anthropic-ratelimit-{bucket}-{kind}".encode(), value.encode())
                for bucket, limit, remaining in (
                    *(("requests", "50", "49"), ("tokens", "90000", "0")),
                    *(("input-tokens", "80000", "0"), ("output-tokens", "10000", "10000")),
                )
                for kind, value in (
                    ("limit", limit),
                    ("remaining", remaining),
                    ("reset", "2035-01-01T00:00:30Z"),
                )
            ],
            (
                Level("requests", 50, 49, 30.0),
                Level("tokens", 90000, 0, 30.0),
                Level("input_tokens", 80000, 0, 30.0),
                Level("output_tokens", 10000, 10000, 30.0),
            ),
            id="Anthropic",
        ),
        pytest.param(
            [
                (b"x-ratelimit-limit-req-minute", b"60"),
                (b"x-ratelimit-limit-tokens-minute", b"50000"),
                (b"x-ratelimit-limit-tokens-month", b"4000000"),
                (b"x-ratelimit-remaining-req-minute", b"59"),
                (b"x-ratelimit-remaining-tokens-minute", b"47196"),
                (b"x-ratelimit-remaining-tokens-month", b"3950246"),
                (b"x-ratelimit-tokens-query-cost", b"2804"),
            ],
            (Level("requests", 60, 59, None), Level("tokens", 50000, 47196, None)),
            id="Mistral",
        ),
        pytest.param(
            [
                (b"X-RateLimit-Limit", b"20"),
                (b"X-RateLimit-Remaining", b"0"),
                (b"X-RateLimit-Reset", b"2051222460000"),
            ],
            (Level("requests", 20, 0, 60.0),),
            id="OpenRouter",
        ),
        pytest.param(
            [(b"RateLimit-Limit", b"100"), (b"RateLimit-Remaining", b"7"), (b"RateLimit-Reset", b"50")],
            (Level("requests", 100, 7, 50.0),),
            id="IETF draft 06",
        ),
        pytest.param(
            [(b"ratelimit-limit", b"100, 100;w=60"), (b"ratelimit-remaining", b"7")],
            (Level("requests", None, 7, None),),
            id="IETF draft 06 with policies",
        ),
        pytest.param(
            [(b"RateLimit", b"limit=100, remaining=7,reset=50"), (b"RateLimit-Policy", b"100;w=60")],
            (Level("requests", 100, 7, 50.0),),
            id="IETF draft 07",
        ),
        pytest.param(
            [(b"RateLimit-Policy", b'"default";q=100;w=60'), (b"RateLimit", b'"default";r=7;t=50')],
            (Level("requests", 100, 7, 50.0),),
            id="IETF draft 10",
        ),
        pytest.param(
            [
                (b"ratelimit", b'"PerMin";r=7;t=50, "perhr" ; r=0; t=2402;pk=:Zm9vPQ==:'),
                (b"ratelimit-policy", b'"permin";q=50;w=60,"perhr";q=1000;w=3600'),
            ],
            (Level("requests", 50, 7, 50.0), Level("requests", 1000, 0, 2402.0)),
            id="IETF two policies",
        ),
        pytest.param(
            [
                (
                    b"ratelimit-policy",
                    b'"tokens";q=9000;w=60, "burst";q=9;qu="tokens", "size";qu="content-bytes";q=5',
                ),
                (b"ratelimit", b'"tokens";r=1, "burst";r=2, "size";r=3'),
            ],
            (Level("tokens", 9000, 1, None), Level("tokens", 9, 2, None)),
            id="IETF units",
        ),
    ],
)
def test_each_familys_headers_become_levels(headers: HeaderList, levels: tuple[Level, ...]) -> None:
    assert rate_limit_levels(headers, NOW) == levels
    assert rate_limit_levels([(name.upper(), value) for name, value in headers], NOW) == levels


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"application/json"), (b"retry-after", b"5")],
        [(b"x-ratelimit-reset-requests", b"1s")],
        [(b"x-ratelimit-limit-requests", b"many"), (b"x-ratelimit-remaining-requests", b"4.5")],
        [(b"x-ratelimit-limit-requests", b"9" * 5000)],
        [(b"x-ratelimit-limit-requests", b"\xd9\xa5")],
        [(b"x-ratelimit-remaining-images", b"5")],
        [(b"x-ratelimit-policy", b"5"), (b"anthropic-ratelimit-unified-status", b"allowed")],
        [(b"x-ratelimit-limit-" + b"a" * 200, b"5")],
        [(b"ratelimit", b"")],
        [(b"ratelimit", b'"default"')],
        [(b"ratelimit", b"default;r=5")],
        [(b"ratelimit", b'"a\\"b";r=5')],
    ],
)
def test_what_says_nothing_usable_gives_no_level(headers: HeaderList) -> None:
    assert rate_limit_levels(headers, NOW) == ()


@pytest.mark.parametrize(
    "value",
    [b"-0.5", b"+0", b"1e3", b".5", b"5.", b"0.", b"0x0", b"0,0", b"1.2.3", b"nan", b"9" * 16, b"\xd9\xa5.0"],
)
def test_what_is_no_count_says_nothing(value: bytes) -> None:
    assert rate_limit_levels([(b"x-ratelimit-remaining-requests", value)], NOW) == ()


@pytest.mark.parametrize("kind", [b"limit", b"remaining"])
def test_a_negative_number_makes_the_bucket_unknown(kind: bytes) -> None:
    changed = [
        (name, b"-1" if name == b"x-ratelimit-" + kind + b"-tokens" else value) for name, value in OPENAI
    ]
    assert rate_limit_levels(changed, NOW) == (Level("requests", 5000, 4999, 0.012),)


def test_of_a_repeated_header_the_stricter_value_counts() -> None:
    other = [
        (b"x-ratelimit-limit-requests", b"4000"),
        (b"x-ratelimit-remaining-requests", b"9000"),
        (b"x-ratelimit-reset-requests", b"1s"),
        (b"x-ratelimit-remaining-requests", b"what"),
    ]
    for headers in (OPENAI + other, other + OPENAI):
        assert Level("requests", 4000, 4999, 1.0) in rate_limit_levels(headers, NOW)


def test_families_are_not_mixed() -> None:
    headers = [(b"x-ratelimit-remaining", b"5"), (b"ratelimit-remaining", b"7"), (b"ratelimit", b'"";r=9')]
    assert [bucket.remaining for bucket in read_buckets(headers, NOW)] == [5, 7, 9]


def test_a_level_is_a_value() -> None:
    level = Level("tokens", 1, 1, None)
    assert not hasattr(level, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        level.limit = 2  # type: ignore[misc]


# -- values ----------------------------------------------------------------------------------------


@given(st.text(alphabet="0123456789.-+eE_ ", max_size=20) | st.text(max_size=10))
def test_a_decimal_is_digits_and_perhaps_a_fraction(text: str) -> None:
    whole, dot, fraction = text.partition(".")
    valid = all(part and set(part) <= set("0123456789") for part in ([whole, fraction] if dot else [whole]))
    number = decimal(text.encode())
    if valid:
        assert number == (float(text) if float(text) < 1e15 else math.inf)
    else:
        assert number is None


@pytest.mark.parametrize("digits", [16, 25, 308, 309, 400, 5000, 50_000])
def test_an_overlong_number_is_over_any_cap(digits: int) -> None:
    assert decimal(b"9" * digits) == math.inf
    assert decimal(b"0" * digits + b"7") == 7.0
    assert reset_of(b"9" * digits) == math.inf
    assert reset_of(b"9" * digits + b"h") == math.inf


UNITS = {"h": Fraction(3600), "m": Fraction(60), "s": Fraction(1), "ms": Fraction(1, 1000)}
UNITS |= {"us": Fraction(1, 10**6), "\u00b5s": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
amounts = st.tuples(st.integers(0, 10**6), st.integers(0, 999) | st.none()).map(
    lambda parts: str(parts[0]) if parts[1] is None else f"{parts[0]}.{parts[1]:03}"
)


@given(st.lists(st.tuples(amounts, st.sampled_from(list(UNITS))), min_size=1, max_size=5))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[str, str]]) -> None:
    expected = float(sum(Fraction(amount) * UNITS[unit] for amount, unit in parts))
    text = "".join(amount + unit for amount, unit in parts)
    assert reset_of(text.encode()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"0", 0.0),
        (b"33011.382867", 33011.382867),
        (b"999999999", 999999999.0),
        (b"2051222430", 30.0),
        (b"2051222430.5", 30.5),
        (b"2051222400", 0.0),
        (b"1000000000", 0.0),
        (b"2051222430500", 30.5),
        (b"2035-01-01T00:00:05Z", 5.0),
        (b"2035-01-01t00:00:05z", 5.0),
        (b"2035-01-01T00:00:05.250000000Z", 5.25),
        (b"2034-12-31T19:00:05-05:00", 5.0),
        (b"2034-12-31T00:00:00Z", 0.0),
        *((bad, None) for bad in (b"", b"s", b"1.s", b".5s", b"1 s", b"1s 2s", b"1d", b"1S", b"s1")),
        (b"2035-01-01", None),
        (b"2035-01-01 00:00:05Z", None),
        (b"2035-01-01T00:00:05", None),
        (b"2035-01-01T00:00:05+0000", None),
        (b"2035-01-01T00:00:05.Z", None),
        (b"2035-01-01T00:00Z", None),
        (b"2035-02-30T00:00:05Z", None),
        (b"2035-01-01T24:00:01Z", None),
        (b"2035-01-01T00:00:05+24:00", None),
        (b"2035-01-01T00:00:05+10:75", None),
        (b"0000-01-01T00:00:05Z", None),
        (b"2035-W01-1T00:00:05Z", None),
    ],
)
def test_a_reset_is_a_span_or_an_instant(value: bytes, seconds: float | None) -> None:
    assert reset_of(value) == (None if seconds is None else pytest.approx(seconds, abs=1e-6))


@given(
    st.datetimes(datetime(2001, 1, 1), datetime(2100, 1, 1)),  # noqa: DTZ001
    st.integers(-23 * 60 - 59, 23 * 60 + 59),
)
def test_an_rfc_3339_instant_is_the_same_in_every_zone(moment: datetime, minutes: int) -> None:
    instant = moment.replace(tzinfo=UTC)
    text = instant.astimezone(timezone(timedelta(minutes=minutes))).isoformat()
    assert reset_of(text.encode()) == pytest.approx(max(0.0, instant.timestamp() - NOW), abs=1e-5)


# -- dates -----------------------------------------------------------------------------------------

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def imf_fixdate(at: datetime) -> str:
    day = WEEKDAYS[at.weekday()][:3]
    return f"{day}, {at.day:02} {MONTHS[at.month - 1]} {at.year:04} {at:%H:%M:%S} GMT"


def rfc_850(at: datetime) -> str:
    return (
        f"{WEEKDAYS[at.weekday()]}, {at.day:02}-{MONTHS[at.month - 1]}-{at.year % 100:02} {at:%H:%M:%S} GMT"
    )


def asctime(at: datetime) -> str:
    return f"{WEEKDAYS[at.weekday()][:3]} {MONTHS[at.month - 1]} {at.day:2} {at:%H:%M:%S} {at.year:04}"


@given(st.datetimes(datetime(1986, 1, 1), datetime(2085, 12, 31)))  # noqa: DTZ001
def test_every_form_of_a_date_is_the_same_instant(moment: datetime) -> None:
    moment = moment.replace(microsecond=0, tzinfo=UTC)
    for form in (imf_fixdate, rfc_850, asctime):
        assert http_date(form(moment).encode(), NOW) == moment.timestamp()


@pytest.mark.parametrize(
    ("value", "instant"),
    [
        (b"Sun, 06 Nov 1994 08:49:37 GMT", 784111777.0),
        (b"Sunday, 06-Nov-94 08:49:37 GMT", 784111777.0),
        (b"Sun Nov  6 08:49:37 1994", 784111777.0),
        (b"Sun Nov 06 08:49:37 1994", 784111777.0),
        (b"Wed, 06 Nov 1994 08:49:37 GMT", 784111777.0),
        (b"Sat, 31 Dec 2016 23:59:60 GMT", 1483228799.0),
        *(
            (bad, None)
            for bad in (
                b"Sun, 06 Nov 1994 08:49:37",
                b"Sun, 06 Nov 1994 08:49:37 UTC",
                b"Sun, 06 Nov 1994 08:49:37 +0000",
                b"Sun, 6 Nov 1994 08:49:37 GMT",
                b"sun, 06 nov 1994 08:49:37 gmt",
                b"Sun, 06 Nov 94 08:49:37 GMT",
                b"Sun, 06-Nov-1994 08:49:37 GMT",
                b"Sun, 06-Nov-94 08:49:37 GMT",
                b"Sunday, 06-Nov-1994 08:49:37 GMT",
                b"06 Nov 1994 08:49:37 GMT",
                b"Xxx, 06 Nov 1994 08:49:37 GMT",
                b"Sun, 06 Foo 1994 08:49:37 GMT",
                b"Sun, 31 Feb 1994 08:49:37 GMT",
                b"Sun, 00 Nov 1994 08:49:37 GMT",
                b"Sun, 06 Nov 0000 08:49:37 GMT",
                b"Sun, 06 Nov 1994 24:00:00 GMT",
                b"Sun, 06 Nov 1994 08:60:00 GMT",
                b"Sun, 06 Nov 1994 08:49:61 GMT",
                b"Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT",
                b"Sun, 06 Nov 1994 08:49:37 GMT\n",
                b"Sun,  06 Nov 1994 08:49:37 GMT",
                b"Sun Nov 6 08:49:37 1994",
                b"Sun Nov  6 08:49:37 1994 GMT",
                "Sun, \u0660\u0666 Nov 1994 08:49:37 GMT".encode(),
                b"",
            )
        ),
    ],
)
def test_a_date_is_one_of_three_forms_or_none(value: bytes, instant: float | None) -> None:
    assert http_date(value, NOW) == instant


@pytest.mark.parametrize(
    ("two_digits", "year"), [(b"35", 2035), (b"85", 2085), (b"86", 1986), (b"34", 2034), (b"00", 2000)]
)
def test_a_two_digit_year_is_at_most_fifty_years_ahead(two_digits: bytes, year: int) -> None:
    expected = datetime(year, 1, 1, tzinfo=UTC).timestamp()
    assert http_date(b"Monday, 01-Jan-" + two_digits + b" 00:00:00 GMT", NOW) == expected


def test_the_first_valid_date_is_the_servers_time() -> None:
    headers = [
        (b"date", b"now"),
        (b"DATE", b" Sun, 06 Nov 1994 08:49:37 GMT "),
        (b"date", b"Sun, 06 Nov 1994 08:49:38 GMT"),
    ]
    assert server_time(headers, NOW) == 784111777.0
    assert server_time(headers[:1], NOW) == NOW
    assert server_time([], NOW) == NOW


@pytest.mark.parametrize(
    "value",
    [
        b'"a";r=' + b" " * 1_000_000 + b'"',
        b'"a"' + b";r=1" * 250_000 + b"\x00",
        b'"' * 1_000_000,
        b"1" * 1_000_000 + b"x",
        b"1m" * 500_000 + b"x",
        b"1." * 500_000,
        b"limit=1," * 125_000,
        b"2035-01-01T00:00:00." + b"1" * 1_000_000,
    ],
    ids=range(8),
)
@pytest.mark.parametrize("name", [b"ratelimit", b"x-ratelimit-reset", b"x-ratelimit-limit"])
def test_a_hostile_value_is_refused_in_linear_time(name: bytes, value: bytes) -> None:
    # With quadratic backtracking this takes half an hour, so pytest's fault handler ends the run.
    levels = rate_limit_levels([(name, value)], NOW)
    assert all(level.reset is None for level in levels)
