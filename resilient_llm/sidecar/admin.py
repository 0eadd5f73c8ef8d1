"""The listener of operators: probes for anybody, and what they ask for once it is clear that they may.

An ASGI app of its own, for a listener of its own. What there is to see and to do is the desk's.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from resilient_llm.message import Headers, header
from resilient_llm.sidecar import formats
from resilient_llm.sidecar.auth import keys_in, same_secret
from resilient_llm.sidecar.browser import is_this_machine
from resilient_llm.sidecar.desk import JSON, TEXT, Answer, Desk
from resilient_llm.sidecar.headers import first_of
from resilient_llm.sidecar.inbound import ClientGoneError, read_body
from resilient_llm.sidecar.openapi import OPENAPI, description
from resilient_llm.sidecar.problems import ConfigError, Problem
from resilient_llm.sidecar.refusal import RefusedError, plain
from resilient_llm.sidecar.ui import Live, Page, taking_from
from resilient_llm.sidecar.ui.page import PATH

__all__ = ["Admin", "admin_token"]

logger = logging.getLogger("resilient_llm")

_MAX_BODY = 64 * 1024
_PATIENCE = 10.0


class Admin:
    """Answer operators.

    `token` is what they have to show, as a bearer; without one only loopback names are answered to, and no page in a
    browser is, since that could be anybody's. Probes are answered always.
    """

    def __init__(self, desk: Desk, *, token: str | None = None) -> None:
        self._desk = desk
        self._token = token
        self._page = Page(Live(taking_from(desk)), token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        method: str = scope["method"]
        path: str = scope["path"]
        is_page = path == PATH or path.startswith(f"{PATH}/")
        # Which has a way in of its own, where there is a token.
        if is_page and (self._token is not None or _is_from_here(scope["headers"])):
            await self._page(scope, receive, send)
            return
        try:
            status, headers, body = await self._answer(scope, receive)
        except ClientGoneError:
            return
        except RefusedError as error:
            status, headers, body = error.status, [*TEXT, *error.headers], f"{error}\n".encode()
        except Exception:
            logger.exception("an admin request met a defect")
            status, headers, body = 500, TEXT, b"Something broke.\n"
        for message in plain(status, body, headers, method):
            await send(message)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        path: str = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if path in ("/healthz", "/readyz"):
            if method != "GET":
                return 405, [*TEXT, (b"allow", b"GET, HEAD")], b"Not by this method.\n"
            why = self._desk.not_ready if path == "/readyz" else None
            return (200, TEXT, b"ok\n") if why is None else (503, TEXT, f"{why}\n".encode())
        if (refused := self._refusal(scope["headers"])) is not None:
            return refused
        if path == OPENAPI:
            return _described(method)
        body = b""
        if method == "POST":
            headers: Headers = scope["headers"]
            body = await read_body(
                receive, headers, first_of(headers), max_size=_MAX_BODY, patience=_PATIENCE
            )
        return await self._desk.answer(method, path, body)

    def _refusal(self, headers: Headers) -> Answer | None:
        if self._token is not None:
            if same_secret(keys_in(headers), self._token):
                return None
            return 401, [*TEXT, (b"www-authenticate", b"Bearer")], b"The admin token is needed.\n"
        if header(headers, b"origin") is not None or not _is_from_here(headers):
            return 403, TEXT, b"Without admin.token_env this is for programs on this machine only.\n"
        return None


def _described(method: str) -> Answer:
    if method != "GET":
        return 405, [*TEXT, (b"allow", b"GET, HEAD")], b"Not by this method.\n"
    return 200, JSON, json.dumps(description()).encode()


def _is_from_here(headers: Headers) -> bool:
    """Tell whether a request came to a loopback name, and by no page that came from elsewhere."""
    host = header(headers, b"host") or b""
    origin = header(headers, b"origin")
    return is_this_machine(host) and (origin is None or origin.lower() == b"http://" + host.lower())


def admin_token(variable: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Give the token that an environment variable has. Raises `ConfigError` when it is not set, or none to be shown."""
    if variable is None:
        return None
    token = environ.get(variable, "").strip()
    why = formats.fault_of_key(token, "token")
    if why is not None:
        raise ConfigError([Problem(("admin", "token_env"), f"the environment variable {variable} {why}")])
    return token


async def _lifespan(receive: Receive, send: Send) -> None:
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
