"""What goes wrong in a soak besides what providers do by themselves: reloads, killed and frozen processes."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import anyio
import httpx

from tests.soak.world import World


class Chaos:
    """Do one thing after another."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._acts: list[Callable[[], Awaitable[None]]] = [
            self._good_reload,
            self._bad_reload,
            self._admin_reload,
            self._killed_provider,
            self._frozen_provider,
            self._killed_store,
            self._frozen_store,
        ]
        self._turn = 0
        self.done: Counter[str] = Counter()
        self.last = ""

    @property
    def complete(self) -> bool:
        """Whether it has done everything it can."""
        return len(self.done) == len(self._acts)

    async def reign(self, every: float) -> None:
        """Go on until cancelled; whatever was stopped then runs again."""
        while True:
            await anyio.sleep(self._rng.uniform(0.5, 1.5) * every)
            act = self._acts[self._turn % len(self._acts)]
            self._turn += 1
            self.last = act.__name__.strip("_").replace("_", " ")
            with anyio.CancelScope(shield=True):
                await act()
            self.done[self.last] += 1

    async def _good_reload(self) -> None:
        self._world.write(weight=self._rng.choice([0.5, 1.0, 2.0]))
        await self._hang_up("the configuration was reloaded")

    async def _bad_reload(self) -> None:
        self._world.file.write_text(
            self._rng.choice(["[", "[server]\nprot = 1\n", "", '[targets.x]\nurl = "no"\n'])
        )
        await self._hang_up("the configuration was not reloaded")
        self._world.write()

    async def _hang_up(self, message: str) -> None:
        gateway = self._world.gateway
        before = sum(line["message"].startswith(message) for line in gateway.lines)
        gateway.signal(signal.SIGHUP)
        with anyio.fail_after(30):
            while sum(line["message"].startswith(message) for line in gateway.lines) == before:  # noqa: ASYNC110
                await anyio.sleep(0.05)

    async def _admin_reload(self) -> None:
        self._world.write()
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.post(f"{self._world.gateway.admin}/admin/reload", timeout=30)
        assert reply.json()["reloaded"] is True, reply.text

    async def _killed_provider(self) -> None:
        upstream = self._rng.choice(self._world.upstreams)
        upstream.kill()
        await anyio.sleep(self._rng.uniform(0.5, 2))
        await anyio.to_thread.run_sync(upstream.start)

    async def _frozen_provider(self) -> None:
        upstream = self._rng.choice(self._world.upstreams)
        upstream.signal(signal.SIGSTOP)
        await anyio.sleep(self._rng.uniform(0.5, 3))
        upstream.signal(signal.SIGCONT)

    async def _killed_store(self) -> None:
        self._world.store.kill()
        await anyio.sleep(self._rng.uniform(0.5, 2))
        await anyio.to_thread.run_sync(self._world.store.start)

    async def _frozen_store(self) -> None:
        self._world.store.freeze()
        await anyio.sleep(self._rng.uniform(0.5, 2))
        self._world.store.thaw()
