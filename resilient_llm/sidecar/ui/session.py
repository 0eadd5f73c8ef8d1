"""Who may look: a page cannot send a bearer, so it trades the admin token for a cookie that opens the page only.

A session is an end and a proof that who gave it knew the token; nothing is kept of it, so it outlives a restart, and
ends with its time or with the token.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from resilient_llm.message import Headers, header

__all__ = ["COOKIE", "Sessions", "token_in"]

COOKIE = "resilient_llm_session"
_LASTS = 8 * 3600
_PATH = "/admin/ui"


class Sessions:
    """Open and check sessions that last `lasts` seconds, under a token."""

    def __init__(self, token: str, *, lasts: int = _LASTS) -> None:
        self._key = hmac.digest(token.encode(), b"resilient_llm session of /admin/ui", "sha256")
        self._lasts = lasts

    def cookie(self, *, secure: bool) -> bytes:
        """Give a `Set-Cookie` that opens a session; `secure` where the browser came by HTTPS."""
        end = str(time.time_ns() // 10**9 + self._lasts)
        value = f"{end}.{self._proof(end)}; Max-Age={self._lasts}"
        return self._written(value, secure=secure)

    @classmethod
    def no_cookie(cls, *, secure: bool) -> bytes:
        """Give a `Set-Cookie` that ends it."""
        return cls._written("; Max-Age=0", secure=secure)

    @staticmethod
    def _written(value: str, *, secure: bool) -> bytes:
        rest = "; Secure" if secure else ""
        return f"{COOKIE}={value}; Path={_PATH}; HttpOnly; SameSite=Strict{rest}".encode()

    def remaining(self, headers: Headers) -> float:
        """Give the seconds that the session of a request goes on; 0 where it has none."""
        end, _, proof = _cookie_in(headers).partition(".")
        if not (end.isascii() and end.isdigit() and len(end) <= 12):
            return 0.0
        if not hmac.compare_digest(self._proof(end).encode(), proof.encode()):
            return 0.0
        return max(0.0, min(float(self._lasts), int(end) - time.time_ns() / 1e9))

    def _proof(self, end: str) -> str:
        return hmac.new(self._key, end.encode(), hashlib.sha256).hexdigest()


def token_in(form: bytes) -> set[bytes]:
    """Give the token that a form was filled in with."""
    try:
        fields = parse_qs(form.decode("ascii"), max_num_fields=8)
    except ValueError:
        return set()
    return {value.strip().encode() for value in fields.get("token", ())}


def _cookie_in(headers: Headers) -> str:
    given = header(headers, b"cookie")
    try:
        cookie = SimpleCookie((given or b"").decode("latin-1")).get(COOKIE)
    except CookieError:
        return ""
    return "" if cookie is None else cookie.value
