"""The table of faults of `tests/streams`, through a sidecar: sockets between provider, sidecar and caller.

The rows are those of the client door. What a caller gets, and how often the provider is asked, must be the same;
besides, a reply must be whole HTTP, no terminal marker may be made up, and the access log has each call once, with the
tokens that the caller got. What is passed through (Gemini's API) is neither buffered nor gone on with.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm.testing import Fault, serve
from tests.sidecar.faults import LARGE, Case, Played, check_all, play, sidecar
from tests.sidecar.support import logged, over_sockets
from tests.streams.faults import PATHS, Call, Trouble, World, pool, request_of
from tests.streams.test_faults import to_an_sdk
from tests.support import A_HANG

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

MARKERS = {"chat": b"[DONE]", "responses": b"response.completed", "messages": b"message_stop"}
"""Gemini has none."""


@pytest.mark.parametrize("dialect", PATHS)
async def test_what_a_plain_client_gets(dialect: str) -> None:
    await check_all(dialect, partial(_is_as_the_table_says, dialect))


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_what_a_plain_client_gets_of_an_event_that_is_too_large(dialect: str) -> None:
    for case, each in (await play(dialect, LARGE)).items():  # megabytes take their time
        _is_as_the_table_says(dialect, case, each)


def _is_as_the_table_says(dialect: str, case: Case, each: Played) -> None:
    assert each.call.got == each.expected.got, case
    _was_asked_as_often(case, each, each.expected)
    [(status, body)] = each.replies
    _is_well_formed(case, dialect, status, body, each.call.got)
    _is_logged_once(case, dialect, each, status)


def _was_asked_as_often(case: Case, played: Played, expected: Call) -> None:
    """Check how often the provider was asked, and that it was left alone for as long as it should be."""
    asked, wanted = played.call.asked, len(expected.asked)
    assert len(asked) == wanted, case
    if wanted == 2:
        assert asked[-1] - asked[0] >= played.backoff - 0.01, case


def _is_well_formed(case: Case, dialect: str, status: int, body: bytes, got: str) -> None:
    """Check that events are whole, that errors are JSON, and that no end is made up."""
    if status != 200:
        assert json.loads(body), case
        return
    assert body.endswith((b"\n\n", b"\r\n\r\n")), case
    marker = MARKERS.get(dialect)
    if marker is not None:
        complete = "then" not in got and case.name != "no terminal marker"
        assert body.count(marker) >= 1 if complete else marker not in body, case


def _is_logged_once(case: Case, dialect: str, played: Played, status: int) -> None:
    """Check that the access log has the call, its attempts, and tokens that are not of both."""
    [entry] = played.entries
    got, attempts = played.call.got, len(played.expected.asked)
    assert (entry["status"], entry["attempts"], entry["retries"]) == (status, attempts, attempts - 1), case
    whole = got.startswith(("60 tokens", "59 tokens")) and "then" not in got
    assert entry["outcome"] == ("ok" if whole else "error"), case
    assert entry.get("output_tokens", 0) <= 60, case
    if whole:
        least, most = (
            (1, 1) if dialect == "gemini" else (55, 60)
        )  # what it says; an estimate where it says nothing
        assert least <= entry["output_tokens"] <= most, case


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_what_an_sdk_gets(dialect: str) -> None:
    """Its own retries are on, and rest where the sidecar says so."""

    def check(case: Case, each: Played) -> None:
        expected = to_an_sdk(case.name, each.expected)
        assert each.call.got == expected.got, case
        _was_asked_as_often(case, each, expected)
        assert len(each.entries) == 1, case

    await check_all(dialect, check, by_sdk=True)


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_caller_that_leaves_in_the_middle_ends_the_request_to_the_provider(dialect: str) -> None:
    world = World(pace=0.1)
    world.add("m", Trouble(fault=Fault(stall_after_tokens=3)), again=True)
    prefix = "/gemini" if dialect == "gemini" else ""
    left = anyio.Event()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        await world(scope, receive, send)
        if scope["type"] == "http":
            left.set()  # the provider plays on until it is left

    with logged() as log:
        async with serve(watched) as upstream, over_sockets(sidecar(upstream)) as (url, _), pool() as tcp:
            async with httpx2.AsyncClient(transport=tcp, timeout=60) as client:
                path = prefix + PATHS[dialect].format(model="m")
                async with client.stream("POST", url + path, json=request_of(dialect, "m")) as response:
                    body = b""
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if b"w2" in body:
                            break
                assert not left.is_set()
            with anyio.fail_after(A_HANG):  # well within a second, unless the machine has other things to do
                await left.wait()
            entry = await log.entry()
    assert (entry["outcome"], entry["attempts"]) == ("cancelled", 1)
