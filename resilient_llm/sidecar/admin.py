"""What operators see and do: probes, metrics, health, the configuration, circuits by hand.

An ASGI app of its own, for a listener of its own. It shows what is known, and no secret; it decides nothing.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from resilient_llm.message import Headers, header
from resilient_llm.policies import Bulkhead
from resilient_llm.sidecar.auth import keys_in, same_secret
from resilient_llm.sidecar.problems import ConfigError, Problem
from resilient_llm.sidecar.refusal import plain

if TYPE_CHECKING:
    from resilient_llm.policies import CircuitBreaker
    from resilient_llm.sidecar.app import Sidecar
    from resilient_llm.sidecar.reload import Reloader

__all__ = ["Admin", "admin_token"]

logger = logging.getLogger("resilient_llm")

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_CIRCUIT = re.compile(r"/admin/circuits/([\w.-]+)/(isolate|close)")
_TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
_JSON: Headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]

Answer = tuple[int, Headers, bytes]


class Admin:
    """Answer operators.

    `token` is what they have to show, as a bearer; without one only loopback names are answered to, and no page in a
    browser is, since that could be anybody's. Probes are answered always.
    """

    def __init__(
        self,
        sidecar: Sidecar,
        reload: Reloader | None,
        *,
        metrics: Callable[[], tuple[bytes, str]] | None = None,
        token: str | None = None,
    ) -> None:
        self._sidecar = sidecar
        self._reload = reload
        self._metrics = metrics
        self._token = token
        self._routes: Mapping[tuple[str, str], Callable[[], Awaitable[Answer]]] = {
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/admin/health"): self._health,
            ("GET", "/admin/config"): self._config,
            ("POST", "/admin/reload"): self._do_reload,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        method: str = scope["method"]
        try:
            status, headers, body = await self._answer(scope)
        except Exception:
            logger.exception("an admin request met a defect")
            status, headers, body = 500, _TEXT, b"Something broke.\n"
        for message in plain(status, body, headers, method):
            await send(message)

    async def _answer(self, scope: Scope) -> Answer:
        path: str = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if path in ("/healthz", "/readyz"):
            draining = path == "/readyz" and self._sidecar.draining
            return (503, _TEXT, b"draining\n") if draining else (200, _TEXT, b"ok\n")
        if (refused := self._refusal(scope["headers"])) is not None:
            return refused
        route = self._routes.get((method, path))
        if route is not None:
            return await route()
        circuit = _CIRCUIT.fullmatch(path)
        if circuit is not None and method == "POST":
            return self._circuit(circuit[1], circuit[2])
        allowed = [known for known, where in self._routes if where == path] or ["POST"] * (
            circuit is not None
        )
        if allowed:
            return 405, [*_TEXT, (b"allow", ", ".join(allowed).encode())], b"Not by this method.\n"
        return 404, _TEXT, b"There is nothing here.\n"

    def _refusal(self, headers: Headers) -> Answer | None:
        if self._token is not None:
            if same_secret(keys_in(headers), self._token):
                return None
            return 401, [*_TEXT, (b"www-authenticate", b"Bearer")], b"The admin token is needed.\n"
        host = (header(headers, b"host") or b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in _LOOPBACK or header(headers, b"origin") is not None:
            return 403, _TEXT, b"Without admin.token_env this is for programs on this machine only.\n"
        return None

    async def _show_metrics(self) -> Answer:
        if self._metrics is None:
            return 404, _TEXT, b"telemetry.prometheus is off.\n"
        body, kind = self._metrics()
        return 200, [(b"content-type", kind.encode())], body

    async def _health(self) -> Answer:
        setup, reload = self._sidecar.setup, self._reload
        health: dict[str, object] = json.loads(setup.router.health().to_json())
        health["draining"] = self._sidecar.draining
        health["running"] = setup.running
        bulkheads = [policy for policy in setup.door.pipeline.policies if isinstance(policy, Bulkhead)]
        health["bulkheads"] = {
            bulkhead.name: {"in_use": bulkhead.in_use(), "queued": bulkhead.queued()}
            for bulkhead in bulkheads
        }
        if reload is not None:
            last = reload.last
            health["reload"] = {"count": last.count, "error": last.error, "after_restart": last.after_restart}
        return 200, _JSON, json.dumps(health).encode()

    async def _config(self) -> Answer:
        setup = self._sidecar.setup
        shown = {
            "config": setup.config.redacted(),
            "pipeline": str(setup.door.pipeline.describe()).splitlines(),
        }
        return 200, _JSON, json.dumps(shown, default=str).encode()

    async def _do_reload(self) -> Answer:
        if self._reload is None:
            return 409, _TEXT, b"This configuration did not come from a file.\n"
        try:
            done = await self._reload()
        except ConfigError as error:
            return 422, _JSON, json.dumps({"reloaded": False, "error": str(error)}).encode()
        return 200, _JSON, json.dumps({"reloaded": True, "after_restart": done.after_restart}).encode()

    def _circuit(self, target: str, action: str) -> Answer:
        """Isolate a target by its circuits, or close them."""
        found = self._sidecar.setup.circuits.get(target)
        if found is None:
            return 404, _TEXT, b"There is no such target.\n"
        changed: list[str] = []
        for name, breaker in found:
            for key in _keys(name, breaker):
                (breaker.isolate if action == "isolate" else breaker.close)(key)
                changed.append(key if isinstance(key, str) else "/".join(map(str, key)))
        if not changed:
            return 409, _TEXT, b"It has no circuit yet: there is one for each model once it was asked for.\n"
        logger.warning("circuits changed by hand", extra={"fields": {"action": action, "circuits": changed}})
        return 200, _JSON, json.dumps({action: changed}).encode()


def admin_token(variable: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Give the token that an environment variable has. Raises `ConfigError` when it is not set, or short."""
    if variable is None:
        return None
    token = environ.get(variable, "").strip()
    if len(token) < 16:
        why = "has a token of less than 16 characters" if token else "is not set"
        raise ConfigError([Problem(("admin", "token_env"), f"the environment variable {variable} {why}")])
    return token


def _keys(name: str, breaker: CircuitBreaker) -> list[str | tuple[str, ...]]:
    if breaker.key == "target":
        return [name]
    return [
        key
        for key in breaker.states()
        if isinstance(key, str | tuple) and (key == name or (isinstance(key, tuple) and key[0] == name))
    ]


async def _lifespan(receive: Receive, send: Send) -> None:
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
