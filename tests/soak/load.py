"""The clients of a soak: patient ones, slow ones, some that leave, some that nobody knows. Each notes what it got."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import aiohttp
import anyio

from tests.soak.replies import ASKS, STREAMED, Got, judge
from tests.soak.world import KEYS

_MOST = 200
_WAYS = (("patient", 76), ("slow", 8), ("leaves", 8), ("hurried", 4), ("unknown", 2), ("mistaken", 2))


class Load:
    """Ask, so many times a second on average, until told to pause."""

    def __init__(self, url: str, rate: float, rng: Random) -> None:
        self._url = url
        self._rate = rate
        self._rng = rng
        self._running: set[asyncio.Task[None]] = set()
        self._number = 0
        self.got: list[Got] = []

    @property
    def running(self) -> int:
        """How many requests are being made."""
        return len(self._running)

    def counts(self) -> Counter[str]:
        """Count what became of those that are over."""
        return Counter(got.what for got in self.got)

    async def ask_for(self, seconds: float, until: Callable[[], bool]) -> None:
        """Ask for so long and `until` is true; wait for the last answer, and close all connections."""
        end = anyio.current_time() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=4096) as session:
            while anyio.current_time() < end or not until():
                await anyio.sleep(self._rng.expovariate(self._rate))
                if len(self._running) < _MOST:
                    task = asyncio.create_task(self._ask(session))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
            if self._running:
                await asyncio.gather(*self._running)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        self._number += 1
        rng = self._rng
        (way,) = rng.choices([name for name, _ in _WAYS], [weight for _, weight in _WAYS])
        got = Got(f"soak-{self._number}", rng.choice(list(KEYS)), rng.choice(list(ASKS)))
        path, body = ASKS[got.kind]
        if got.kind in STREAMED and rng.random() < 0.6:
            body = body | STREAMED[got.kind]
        key = "nobody-s-key-0123456789" if way == "unknown" else KEYS[got.tenant]
        data = json.dumps({"model": "soak", **body})
        headers = {
            "authorization": f"Bearer {key}",
            "x-request-id": got.id,
            "content-type": "application/json",
        }
        patience = rng.uniform(0.02, 0.4) if way == "hurried" else None
        try:
            with anyio.move_on_after(patience):
                await self._carry(
                    session,
                    got,
                    way,
                    url=self._url + path,
                    data=data[: -5 if way == "mistaken" else None],
                    headers=headers,
                )
        except aiohttp.ClientError as error:
            got.what = f"no answer: {error!r}"
        got.what = got.what or "left"
        self.got.append(got)

    async def _carry(self, session: aiohttp.ClientSession, got: Got, way: str, **request: Any) -> None:
        body, whole = b"", False
        async with session.post(**request, timeout=aiohttp.ClientTimeout(total=60)) as response:
            got.status = response.status
            try:
                while chunk := await response.content.readany():
                    body += chunk
                    if way == "leaves" and response.status == 200:
                        return
                    if way == "slow":
                        await anyio.sleep(0.05)
                whole = True
            except aiohttp.ClientPayloadError:
                pass
            judge(got, {name.lower(): value for name, value in response.headers.items()}, body, whole=whole)
