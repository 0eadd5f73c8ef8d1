"""Every way in which a stream fails, in every dialect, with a second attempt that would succeed and with none.

Each row says what the caller gets, when the provider is asked, and how long it takes, in seconds. The provider takes
0.5 s to the head of its reply, 0.5 s more to the first of 60 tokens and 0.1 s for each other one: 6.9 s in all. The
policies are `Retry(max_attempts=2)` with 1 s of backoff and `AttemptTimeout(headers=4, first_content=6,
content_gap=4)`, and those that a row names.

All rows are played in virtual time on both event loops to a plain client that reads the bytes; and, seven times as
fast, over real sockets to the providers' own SDKs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import anyio
import httpx2
import pytest

from resilient_llm import Stream
from resilient_llm.testing import Fault, serve
from tests.streams.faults import PATHS, SDKS, Call, Caller, Trouble, World, memory, plain_client, pool, sdk

pytestmark = pytest.mark.anyio

ASK_ON = Stream(resume="continue", prefill=lambda _call: True)


class Row(NamedTuple):
    """A fault, and what becomes of it if the second attempt is a good one, or fails alike."""

    trouble: Trouble
    retried: Call
    alone: Call


def same(trouble: Trouble, got: str, asked: tuple[float, ...], took: float) -> Row:
    """Make the row of a fault after which a second attempt is not made, or does not depend on the first."""
    call = Call(got, asked, took)
    return Row(trouble, call, call)


def unseen(trouble: Trouble, at: float, left: str, *, words: dict[str, str] | None = None) -> dict[str, Row]:
    """Make the rows of a fault that shows after `at` seconds, and that the caller sees nothing of but the time.

    If it shows again, what is left to the caller is an error, with a name of its own in each dialect.
    """
    again = at + 1
    return {
        dialect: Row(
            trouble,
            Call("60 tokens", (0, again), again + 6.9),
            Call(left.format((words or {}).get(dialect, "")), (0, again), again + at),
        )
        for dialect in PATHS
    }


def seen(trouble: Trouble, got: str, took: float, *, words: dict[str, str] | None = None) -> dict[str, Row]:
    """Make the rows of a fault that the caller sees: a second attempt would say again what was said."""
    return {
        dialect: same(trouble, got.format((words or {}).get(dialect, "")), (0,), took) for dialect in PATHS
    }


def server_error(dialect: str) -> str:
    return {"messages": "api_error", "gemini": "INTERNAL"}.get(dialect, "server_error")


NO_CAPACITY = {
    "chat": "server_error",
    "responses": "server_error",
    "messages": "api_error",
    "gemini": "UNAVAILABLE",
}
BROKEN = {dialect: server_error(dialect) for dialect in PATHS}
THROTTLED = {
    "chat": "rate_limit_exceeded",
    "responses": "rate_limit_exceeded",
    "messages": "rate_limit_error",
    "gemini": "RESOURCE_EXHAUSTED",
}
TOO_LONG = {
    "chat": "context_length_exceeded",
    "responses": "context_length_exceeded",
    "messages": "invalid_request_error",
    "gemini": "INVALID_ARGUMENT",
}

CUT = Trouble(fault=Fault(cut_after_tokens=40))
CUT_BUFFERED = Trouble(fault=Fault(cut_after_tokens=40), stream=Stream(resume="buffer"))
CUT_AND_GONE_ON = Trouble(fault=Fault(cut_after_tokens=40), then=Fault(), stream=ASK_ON)
CUT_AND_REFUSED = Trouble(fault=Fault(cut_after_tokens=40), then=Fault(status=400), stream=ASK_ON)
CUT_AT_40 = "40 tokens, then remote_protocol_error"
THROTTLED_AND_GONE_ON = Trouble(fault=Fault(error_event_at=20, status=429), then=Fault(), stream=ASK_ON)
REFUSED_AT_20 = Trouble(
    fault=Fault(error_event_at=20, status=400, code="content_filter"), then=Fault(), stream=ASK_ON
)
MALFORMED = Fault(malformed_event_at=10)
IN_ONE_PIECE: dict[str, object] = {
    "id": "1",
    "type": "message",
    "choices": [{"message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
}
NO_MARKER = Trouble(fault=Fault(omit_done=True))

TABLE: dict[str, dict[str, Row]] = {
    # Nothing was seen: whatever happens is made good, or is an error of the kind an SDK knows.
    "error before headers": unseen(Trouble(fault=Fault(status=503)), 0.5, "503 {}", words=NO_CAPACITY),
    "reset": unseen(Trouble(fault=Fault(reset=True)), 0.5, "502 read_error"),
    "silence": unseen(Trouble(fault=Fault(delay_headers=math.inf)), 4, "504 headers_timeout"),
    "headers, then pings": unseen(
        Trouble(fault=Fault(delay_first_token=math.inf, ping_every=0.3)), 6, "504 first_content_timeout"
    ),
    "error event first": unseen(
        Trouble(fault=Fault(error_event_at=0, status=500)), 0.5, "0 tokens, then {}", words=BROKEN
    ),
    "429 event first": unseen(
        Trouble(fault=Fault(error_event_at=0, status=429)), 0.5, "0 tokens, then {}", words=THROTTLED
    ),
    "empty stream": unseen(Trouble(fault=Fault(empty_stream=True)), 0.5, "502 empty_stream"),
    "204": unseen(Trouble(fault=Fault(status=204, body="")), 0.5, "502 empty_body"),
    "an empty object": unseen(Trouble(fault=Fault(body={})), 0.5, "502 unexpected_body"),
    "an answer in one piece": unseen(Trouble(fault=Fault(body=IN_ONE_PIECE)), 0.5, "502 unexpected_body"),
    "role, then cut": unseen(Trouble(fault=Fault(cut_after_tokens=0)), 0.5, "502 remote_protocol_error"),
    "role, then a proper end": unseen(
        Trouble(fault=Fault(end_after_tokens=0)),
        0.5,
        "502 {}",
        words=dict.fromkeys(PATHS, "truncated") | {"gemini": "empty_stream"},
    ),
    # Something was seen: the failure is told, and nothing is said twice.
    "cut after 40 of 60, truncated chunked body": seen(CUT, CUT_AT_40, 4.9),
    "reset after 40 of 60": seen(
        Trouble(fault=Fault(reset_after_tokens=40)), "40 tokens, then read_error", 4.9
    ),
    "proper end after 40 of 60": seen(
        Trouble(fault=Fault(end_after_tokens=40)), "40 tokens, then truncated", 4.9
    ),
    "stall after 20, with pings": seen(
        Trouble(fault=Fault(stall_after_tokens=20, ping_every=0.3)),
        "20 tokens, then content_gap_timeout",
        6.9,
    ),
    "429 event after 20": seen(
        Trouble(fault=Fault(error_event_at=20, status=429)), "20 tokens, then {}", 2.9, words=THROTTLED
    ),
    "oversize event after 20": seen(
        Trouble(giant_at=20, stream=Stream(max_event_size=65_536)), "20 tokens, then event_too_large", 3.0
    ),
    "oversize event first": seen(
        Trouble(giant_at=0, stream=Stream(max_event_size=65_536)), "502 event_too_large", 1.0
    ),
    # Not quite as it should be, and good all the same.
    "malformed event": seen(Trouble(fault=MALFORMED), "59 tokens, 1 malformed", 6.9),
    "malformed event, skipped": seen(
        Trouble(fault=MALFORMED, stream=Stream(malformed="skip")), "59 tokens", 6.9
    ),
    "one byte per read": seen(Trouble(fault=Fault(chunk_size=1)), "60 tokens", 6.9),
    "no terminal marker": {
        "chat": same(NO_MARKER, "60 tokens", (0,), 6.9),  # there is a reason to finish
        "messages": same(NO_MARKER, "60 tokens", (0,), 6.9),
        "responses": same(
            NO_MARKER, "60 tokens, then truncated", (0,), 6.9
        ),  # nothing but the marker says so
        "gemini": same(NO_MARKER, "60 tokens, then truncated", (0,), 6.9),  # no finishReason
    },
    "terminal marker, then cut": {
        **seen(Trouble(cut_at_end=True), "60 tokens", 6.9),
        "gemini": same(
            Trouble(cut_at_end=True), "60 tokens, then remote_protocol_error", (0,), 6.9
        ),  # has no marker
    },
    # Another answer than to tell it.
    "cut after 40, buffered": {
        dialect: Row(
            CUT_BUFFERED,
            Call("60 tokens", (0, 5.9), 12.8),
            Call("502 remote_protocol_error", (0, 5.9), 10.8),
        )
        for dialect in PATHS
    },
    "cut after 40, gone on with": {
        "chat": same(CUT_AND_GONE_ON, "60 tokens", (0, 5.9), 8.8),
        "messages": same(CUT_AND_GONE_ON, "60 tokens", (0, 5.9), 8.8),
        "responses": same(CUT_AND_GONE_ON, CUT_AT_40, (0,), 4.9),  # has no such thing
        "gemini": same(CUT_AND_GONE_ON, CUT_AT_40, (0,), 4.9),
    },
    "throttled after 20, gone on with": {
        "chat": same(THROTTLED_AND_GONE_ON, "60 tokens", (0, 3.9), 8.8),
        "messages": same(THROTTLED_AND_GONE_ON, "60 tokens", (0, 3.9), 8.8),
    },
    "refused after 20, not gone on with": {
        dialect: same(REFUSED_AT_20, "20 tokens, then content_filter", (0,), 2.9)
        for dialect in ("chat", "responses")
    },
    "all said, then cut, not gone on with": seen(
        Trouble(fault=Fault(omit_done=True), cut_at_end=True, stream=ASK_ON),
        "60 tokens, then remote_protocol_error",
        6.9,
    ),
    "cut after 40, prefill refused": {
        "chat": same(CUT_AND_REFUSED, CUT_AT_40, (0, 5.9), 6.4),
        "messages": same(CUT_AND_REFUSED, CUT_AT_40, (0, 5.9), 6.4),
        "responses": same(CUT_AND_REFUSED, CUT_AT_40, (0,), 4.9),
        "gemini": same(CUT_AND_REFUSED, CUT_AT_40, (0,), 4.9),
    },
    # Useless to repeat.
    "context too long": seen(
        Trouble(fault=Fault(status=400, code="context_length_exceeded", message="prompt is too long")),
        "400 {}",
        0.5,
        words=TOO_LONG,
    ),
    "content filter event first": {
        dialect: same(
            Trouble(fault=Fault(status=400, code="content_filter", error_event_at=0)),
            "0 tokens, then content_filter",
            (0,),
            0.5,
        )
        for dialect in ("chat", "responses")
    },
}
ROWS = [(name, dialect) for name, rows in TABLE.items() for dialect in rows]


def rounded(call: Call) -> Call:
    return Call(call.got, tuple(round(at, 6) for at in call.asked), round(call.took, 6))


@pytest.mark.parametrize("again", [False, True], ids=["then it succeeds", "again"])
@pytest.mark.parametrize(("name", "dialect"), ROWS)
async def test_what_a_plain_client_gets(name: str, dialect: str, again: bool) -> None:
    row = TABLE[name][dialect]
    world = World()
    world.add("m", row.trouble, again=again)
    async with memory(world) as transport:
        call = await world.call(plain_client, world.client("m", transport), dialect, "m")
    assert rounded(call) == (row.alone if again else row.retried)


WARM = "nothing"
PACES = (0.15, 0.6, 2.4)
"""Real seconds for one of the table's: what a machine was too slow for is played again, more slowly."""
SLACK = 10.0
"""Seconds of the table's by which a step may be late, on a machine with other things to do."""


def is_as(call: Call, expected: Call, pace: float) -> bool:
    """Tell whether what came is right, and everything happened when it should, and not before."""
    if call.got != expected.got or len(call.asked) != len(expected.asked):
        return False
    pairs = [*zip(call.asked, expected.asked, strict=True), (call.took, expected.took)]
    return all(should * pace - 0.02 <= at <= (should + SLACK) * pace for at, should in pairs)


def to_an_sdk(name: str, expected: Call) -> Call:
    """Say what an SDK makes of it: it reads every event and raises for what it cannot read."""
    return Call("10 tokens, then JSONDecodeError", (0,), 2.0) if name == "malformed event" else expected


@pytest.mark.realtime
@pytest.mark.parametrize("again", [False, True], ids=["then it succeeds", "again"])
@pytest.mark.parametrize("dialect", SDKS)
async def test_what_an_sdk_gets(dialect: str, again: bool) -> None:
    rows = {name: row[dialect] for name, row in TABLE.items() if dialect in row}
    expected = {name: to_an_sdk(name, row.alone if again else row.retried) for name, row in rows.items()}
    wrong: dict[str, Call] = {}
    for pace in PACES:
        calls = await played(dialect, rows, pace, again=again)
        wrong = {name: call for name, call in calls.items() if not is_as(call, expected[name], pace)}
        rows = {name: rows[name] for name in wrong}
        if not wrong:
            break
    assert wrong == {name: expected[name] for name in wrong}


async def played(dialect: str, rows: dict[str, Row], pace: float, *, again: bool) -> dict[str, Call]:
    """Play some of the table with an SDK, all at once, and say how each call went."""
    world = World(pace=pace)
    models = {name: f"m{number}" for number, name in enumerate([*rows, WARM])}
    world.add(models[WARM], Trouble(), again=False)
    calls: dict[str, Call] = {}
    for name, row in rows.items():
        world.add(models[name], row.trouble, again=again)

    async def play(name: str, caller: Caller, client: httpx2.AsyncClient) -> None:
        calls[name] = await world.call(caller, client, dialect, models[name])

    async with serve(world) as url, pool() as transport:
        clients = {name: world.client(model, transport) for name, model in models.items()}
        callers = {name: sdk(dialect, client, url) for name, client in clients.items()}
        await callers[WARM](clients[WARM], dialect, models[WARM])  # which takes a while the first time
        async with anyio.create_task_group() as group:
            for name in rows:
                group.start_soon(play, name, callers[name], clients[name])
                await anyio.sleep(0.05)  # all at once they would hold each other up
    return calls
