"""What operators ask for, done for one process: health, metrics, the configuration, a reload, changes by hand.

Who may ask is the admin listener's to find out. Nothing is decided here, and no secret told.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from resilient_llm.message import Headers
from resilient_llm.policies import Bulkhead
from resilient_llm.sidecar import by_hand
from resilient_llm.sidecar.merged import one_routing
from resilient_llm.sidecar.problems import ConfigError
from resilient_llm.sidecar.reload import ReloadDefectError
from resilient_llm.sidecar.ui.snapshot import SNAPSHOT, snapshot

if TYPE_CHECKING:
    from resilient_llm.sidecar.app import Sidecar
    from resilient_llm.sidecar.build import Setup
    from resilient_llm.sidecar.observability import Metrics
    from resilient_llm.sidecar.reload import Reloaded, Reloader

__all__ = ["JSON", "TEXT", "Answer", "Desk", "OneProcess", "change", "reloaded"]

TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
JSON: Headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]

_CHANGES = re.compile(
    r"/admin/(?:circuits/(?P<target>.+)/(?P<action>isolate|close)"
    r"|targets/(?P<weighed>.+)/weight|canary/(?P<canary>[^/]+))"
)

Answer: TypeAlias = tuple[int, Headers, bytes]
"""Status, headers and body."""


class Desk(Protocol):
    """Answer operators, whoever they turned out to be allowed to be."""

    @property
    def not_ready(self) -> str | None:
        """Say why what they operate should get no new requests; `None` where it should."""
        ...

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Answer one request."""
        ...


class OneProcess:
    """Do what operators ask for of this process. Satisfies `Desk`."""

    def __init__(
        self,
        sidecar: Sidecar,
        reload: Reloader | None,
        *,
        metrics: Metrics | None = None,
    ) -> None:
        self._sidecar = sidecar
        self._reload = reload
        self._metrics = metrics
        self._started = time.time_ns() / 1e9
        self._routes: Mapping[tuple[str, str], Callable[[], Awaitable[Answer]]] = {
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/admin/health"): self._health,
            ("GET", "/admin/config"): self._config,
            ("GET", SNAPSHOT): self._snapshot,
            ("POST", "/admin/reload"): self._do_reload,
        }

    @property
    def not_ready(self) -> str | None:
        """Say why it should get no new requests; `None` where it should."""
        return "draining" if self._sidecar.draining else None

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Answer a request of somebody who may ask."""
        route = self._routes.get((method, path))
        if route is not None:
            return await route()
        if method == "POST" and (done := change(self._sidecar.setup, path, body)) is not None:
            return done
        allowed = [known for known, where in self._routes if where == path]
        if _CHANGES.fullmatch(path) is not None:
            allowed = ["POST"]
        if allowed:
            return 405, [*TEXT, (b"allow", ", ".join(allowed).encode())], b"Not by this method.\n"
        return 404, TEXT, b"There is nothing here.\n"

    async def _show_metrics(self) -> Answer:
        if self._metrics is None:
            return 404, TEXT, b"telemetry.prometheus is off.\n"
        body, kind = await self._metrics()
        return 200, [(b"content-type", kind.encode())], body

    async def _health(self) -> Answer:
        setup, reload = self._sidecar.setup, self._reload
        routers = (setup.router, *setup.alone.values())
        health = one_routing([json.loads(router.health().to_json()) for router in routers])
        health["draining"] = self._sidecar.draining
        health["running"] = self._sidecar.running
        health["bulkheads"] = self._bulkheads()
        if setup.canaries:
            health["canaries"] = by_hand.canaries(setup)
        if reload is not None:
            last = reload.last
            health["reload"] = {"count": last.count, "error": last.error, "after_restart": last.after_restart}
        return 200, JSON, json.dumps(health).encode()

    def _bulkheads(self) -> Mapping[str, Mapping[str, int]]:
        """Say how full bulkheads are, those too that were replaced and are still passed by somebody."""
        there = {
            policy: None  # most are those of the setup before
            for setup in (self._sidecar.setup, *self._sidecar.retired)
            for policy in setup.door.pipeline.policies
            if isinstance(policy, Bulkhead)
        }
        found: dict[str, dict[str, int]] = {}
        for bulkhead in there:
            one = found.setdefault(bulkhead.name, {"in_use": 0, "queued": 0})
            one["in_use"] += bulkhead.in_use()
            one["queued"] += bulkhead.queued()
        return found

    async def _config(self) -> Answer:
        setup = self._sidecar.setup
        shown = {
            "config": setup.config.redacted(),
            "pipeline": str(setup.door.pipeline.describe()).splitlines(),
        }
        return 200, JSON, json.dumps(shown, default=str).encode()

    async def _snapshot(self) -> Answer:
        error = None if self._reload is None else self._reload.last.error
        seen = snapshot(self._sidecar, started=self._started, reload_error=error)
        return 200, JSON, json.dumps(seen, allow_nan=False).encode()

    async def _do_reload(self) -> Answer:
        if self._reload is None:
            return 409, TEXT, b"This configuration did not come from a file.\n"
        return await reloaded(self._reload)


async def reloaded(reload: Callable[[], Awaitable[Reloaded]]) -> Answer:
    """Do a reload, and say how it went."""
    try:
        done = await reload()
    except (ConfigError, ReloadDefectError) as error:
        said = {"reloaded": False, "error": str(error)}
        return 422 if isinstance(error, ConfigError) else 500, JSON, json.dumps(said).encode()
    return 200, JSON, json.dumps({"reloaded": True, "after_restart": done.after_restart}).encode()


def change(setup: Setup, path: str, body: bytes) -> Answer | None:
    """Change something by hand, of which the library logs and traces tell; `None` for a path that is no change's."""
    asked = _CHANGES.fullmatch(path)
    if asked is None:
        return None
    done: Mapping[str, object]
    try:
        if (target := asked["target"]) is not None:
            act = by_hand.isolate if asked["action"] == "isolate" else by_hand.restore
            done = {asked["action"]: act(setup, target)}
        elif (target := asked["weighed"]) is not None:
            done = {"weight": by_hand.set_weight(setup, target, body)}
        else:
            done = by_hand.change_canary(setup, asked["canary"], body)
    except by_hand.NotDoneError as error:
        return error.status, JSON, json.dumps({"error": str(error)}).encode()
    return 200, JSON, json.dumps(done).encode()
