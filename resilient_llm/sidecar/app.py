"""The sidecar as an ASGI app: requests come in, one setup answers them, and another can take its place.

Which setup answers is decided when a request comes in, and holds until it is answered. Sockets, signals and files are
the server's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
from starlette.types import Receive, Scope, Send

from resilient_llm.sidecar.access_log import Entry
from resilient_llm.sidecar.build import Setup, build
from resilient_llm.sidecar.disconnect import connection_of
from resilient_llm.sidecar.exchange import CutShortError, Exchange
from resilient_llm.sidecar.headers import first_of
from resilient_llm.sidecar.inbound import ClientGoneError
from resilient_llm.sidecar.refusal import RefusedError, plain, refusal
from resilient_llm.sidecar.ui import Recent

if TYPE_CHECKING:
    from resilient_llm.message import Headers
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.engine import Engine
    from resilient_llm.telemetry import Telemetry

__all__ = ["Sidecar"]

logger = logging.getLogger("resilient_llm")

_PROBES = frozenset({"/healthz", "/readyz"})
_BROKEN = (500, "internal_error", "Something broke in the sidecar.")
_SHUTTING_DOWN = (503, "shutting_down", "The sidecar had to stop before there was an answer. Ask again.")
_LAST_WORD = 1.0


class Sidecar:
    """Answer requests as a configuration says.

    `engine` carries what goes to providers, and is closed by `aclose`. Raises `ConfigError` for a configuration that
    cannot work. Where the telemetry's listener is a `Recent`, it keeps what was answered, for people to look at.
    """

    def __init__(self, config: Config, engine: Engine, *, telemetry: Telemetry | None = None) -> None:
        listener = None if telemetry is None else telemetry.listener
        self.recent = listener if isinstance(listener, Recent) else None
        self._engine = engine
        self._telemetry = telemetry
        self.setup = build(config, engine, telemetry=telemetry)
        self._retired: list[Setup] = []
        self.draining = False
        """Whether it is about to stop, and should get no new requests."""

    @property
    def running(self) -> int:
        """Count the requests that are being answered, also those that began before a reload."""
        return sum(setup.running for setup in (self.setup, *self._retired))

    @property
    def retired(self) -> Sequence[Setup]:
        """Give the setups that were replaced, and under which something still runs."""
        return self._retired

    async def reload(self, config: Config) -> None:
        """Answer from now on as another configuration says; what is under way ends as it began.

        Raises `ConfigError`, and changes nothing, when that one cannot work.
        """
        before = self.setup
        after = build(config, self._engine, telemetry=self._telemetry, previous=before)
        self.setup, before.successor, before.retired = after, after, True
        self._retired.append(before)
        await self._dispose()

    async def aclose(self) -> None:
        """Close connections and stores."""
        for setup in (*self._retired, self.setup):
            await setup.aclose()
        self._retired.clear()
        await self._engine.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._attend(scope, receive, send)
            return
        setup = self.setup
        first = first_of(scope["headers"])
        loop = setup.door.pipeline.loop()
        entry = Entry(scope["method"], first, loop.time)
        exchange = Exchange(setup, loop, scope, receive, send, entry, first)
        setup.running += 1
        try:
            await exchange.answer()
            await exchange.delivered()
        except ClientGoneError:
            entry.left = True
        except CutShortError:
            entry.failed("cut_short")
            raise
        except anyio.get_cancelled_exc_class():
            entry.failed("shutting_down")
            if not exchange.has_begun:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _LAST_WORD):
                    await self._refuse(entry, scope, send, _SHUTTING_DOWN)
            raise
        except Exception as error:
            if exchange.has_begun and isinstance(
                error, OSError
            ):  # so servers say that a client takes nothing any more
                entry.left = True
                return
            logger.exception("request %s met a defect", entry.request_id)
            entry.failed("internal_error")
            if exchange.has_begun:
                raise
            await self._refuse(entry, scope, send, _BROKEN)
        finally:
            self._note(setup, entry, scope)
            if setup.retired and not setup.running:
                with anyio.CancelScope(shield=True):
                    await self._dispose()

    def _note(self, setup: Setup, entry: Entry, scope: Scope) -> None:
        """Note that a request is over."""
        setup.running -= 1
        if entry.left:
            connection = connection_of(scope)
            if connection is not None and connection.rejection is not None:
                entry.turned_away(connection.rejection)
                if entry.call is None:
                    setup.count_refusal(connection.rejection.code)
        if self.recent is not None:
            self.recent.add(entry)
        if setup.config.server.access_log:
            entry.write()

    async def _attend(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is no request for a provider."""
        if scope["type"] == "http":
            await self._probe(scope, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    async def _refuse(self, entry: Entry, scope: Scope, send: Send, why: tuple[int, str, str]) -> None:
        entry.replied(why[0], {})
        for message in refusal(RefusedError(*why), entry.path, scope["method"], []):
            await send(message)

    async def _dispose(self) -> None:
        """Close what belonged to setups that nothing runs under any more."""
        for setup in [setup for setup in self._retired if not setup.running]:
            self._retired.remove(setup)
            setup.successor = self.setup  # what that one has taken over, whoever came in between
            await setup.aclose()

    async def _probe(self, scope: Scope, send: Send) -> None:
        ready = scope["path"] == "/healthz" or not self.draining
        status, word = (200, b"ok\n") if ready else (503, b"draining\n")
        headers: Headers = [(b"content-type", b"text/plain")]
        if scope["method"] not in ("GET", "HEAD"):
            status, word = 405, b"Not by this method.\n"
            headers.append((b"allow", b"GET, HEAD"))
        for message in plain(status, word, headers, scope["method"]):
            await send(message)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return
