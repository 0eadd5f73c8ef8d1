"""The page over HTTP: its files, the way in, and who may have the stream of what it shows.

Only views are served here. The cookie opens nothing else of the admin listener, and no address in here changes anything
but whether its viewer is signed in.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

import anyio
from starlette.types import Receive, Scope, Send

from resilient_llm.message import Headers, header
from resilient_llm.sidecar.auth import keys_in, same_secret
from resilient_llm.sidecar.refusal import plain
from resilient_llm.sidecar.ui.events import Events
from resilient_llm.sidecar.ui.session import Sessions, token_in
from resilient_llm.sidecar.ui.view import Query

if TYPE_CHECKING:
    from resilient_llm.sidecar.ui.live import Live

__all__ = ["PATH", "Page"]

logger = logging.getLogger("resilient_llm")

PATH = "/admin/ui"

_KINDS: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMES = (
    "calls.js",
    "dom.js",
    "format.js",
    "icon.svg",
    "page.css",
    "page.js",
    "stream.js",
    "tables.js",
    "tree.js",
)
_FILES: Mapping[str, str] = {f"{PATH}/{name}": name for name in _NAMES}
"""What anybody may have who may ask at all: no file says anything of this sidecar."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_GUARDS: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_MAX_FORM = 4096
_PATIENCE = 10.0
"""Seconds that a form may take to come."""


class Page:
    """Serve the page to whoever shows `token`, as a bearer or by a session; to anybody without one.

    Who may ask without a token is the listener's to say. Snapshots come from `live`.
    """

    def __init__(self, live: Live, token: str | None) -> None:
        self._live = live
        self._token = token
        self._sessions = None if token is None else Sessions(token)
        self._events = Events(live)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for something below `PATH`."""
        path: str = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if path in (f"{PATH}/login", f"{PATH}/logout") and method == "POST":
            await self._change_session(scope, receive, send, in_=path.endswith("login"))
        elif method != "GET":
            await _say(send, scope, 405, "Not by this method.\n", [(b"allow", b"GET, HEAD")])
        elif path in _FILES:
            name = _FILES[path]
            await _say(send, scope, 200, _file(name), kind=_KINDS[name[name.index(".") :]])
        elif path == f"{PATH}/login":
            await _say(send, scope, 200, _file("login.html"), kind=_HTML)
        elif path == PATH:
            if self._remaining(scope["headers"]) > 0:
                await _say(send, scope, 200, _file("page.html"), kind=_HTML)
            else:
                await _say(send, scope, 303, "", [(b"location", f"{PATH}/login".encode())])
        elif path in (f"{PATH}/session", f"{PATH}/events"):
            await self._look(scope, receive, send, events=path.endswith("events"))
        else:
            await _say(send, scope, 404, "There is nothing here.\n")

    def _remaining(self, headers: Headers) -> float:
        """Give the seconds for which whoever asks may look."""
        if self._token is None or self._sessions is None or same_secret(keys_in(headers), self._token):
            return math.inf
        return self._sessions.remaining(headers)

    async def _look(self, scope: Scope, receive: Receive, send: Send, *, events: bool) -> None:
        remaining = self._remaining(scope["headers"])
        if remaining <= 0:
            await _say(send, scope, 401, "Sign in first.\n", [(b"www-authenticate", b"Bearer")])
        elif self._live.is_full:
            await _say(send, scope, 503, "As many look as may.\n", [(b"retry-after", b"10")])
        elif not events:
            ends_in = None if remaining == math.inf else round(remaining)
            await _say(send, scope, 200, json.dumps({"ends_in": ends_in}), kind="application/json")
        elif scope["method"] == "HEAD":
            await _say(send, scope, 200, "")
        else:
            query = Query.parse(scope["query_string"])
            await self._events.send_to(receive, send, query=query, remaining=remaining, headers=_GUARDS)

    async def _change_session(self, scope: Scope, receive: Receive, send: Send, *, in_: bool) -> None:
        headers: Headers = scope["headers"]
        if not _from_here(headers):
            await _say(send, scope, 403, "Not from another site.\n")
            return
        secure = header(headers, b"x-forwarded-proto") == b"https" or scope.get("scheme") == "https"
        location, cookie = f"{PATH}/login", Sessions.no_cookie(secure=secure)
        if in_:
            form = await _form(receive)
            if self._token is None or self._sessions is None:
                location = PATH
            elif form is not None and same_secret(token_in(form), self._token):
                location, cookie = PATH, self._sessions.cookie(secure=secure)
            else:
                client = (scope.get("client") or (None,))[0]
                logger.warning(
                    "somebody was not let in to the admin page", extra={"fields": {"client": client}}
                )
                await _say(
                    send, scope, 401, _file("refused.html"), [(b"www-authenticate", b"Bearer")], kind=_HTML
                )
                return
        await _say(send, scope, 303, "", [(b"location", location.encode()), (b"set-cookie", cookie)])


def _from_here(headers: Headers) -> bool:
    """Tell whether a form was sent by a page of this listener, as far as browsers say."""
    site = header(headers, b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin"
    origin = header(headers, b"origin")
    return origin is None or origin.partition(b"://")[2] == header(headers, b"host")


async def _form(receive: Receive) -> bytes | None:
    """Read a form; `None` for one that is too long, or comes too slowly."""
    form = b""
    with anyio.move_on_after(_PATIENCE):
        while len(form) <= _MAX_FORM:
            message = await receive()
            form += message.get("body", b"")
            if not message.get("more_body", False):
                return form if len(form) <= _MAX_FORM else None
    return None


def _file(name: str) -> bytes:
    found = _read.get(name)
    if found is None:
        found = _read[name] = files(__package__).joinpath("static", name).read_bytes()
    return found


_read: dict[str, bytes] = {}


async def _say(
    send: Send,
    scope: Scope,
    status: int,
    body: str | bytes,
    headers: Headers | None = None,
    *,
    kind: str = _TEXT,
) -> None:
    said = body if isinstance(body, bytes) else body.encode()
    more = [(b"content-type", kind.encode())] if said else []
    for message in plain(status, said, [*more, *_GUARDS, *(headers or [])], scope["method"]):
        await send(message)
