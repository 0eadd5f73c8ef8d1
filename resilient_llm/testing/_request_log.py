"""What the fake provider saw: one record a request, and ways to wait for what it will see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import anyio

from ._checks import is_count
from ._fault import OK, Fault


@dataclass(slots=True, eq=False, kw_only=True)
class ProviderRequest:
    """One request as the provider saw it, filled in while it is served. Times are anyio's, in seconds."""

    number: int
    """Counts from 1, in order of arrival."""
    method: str
    path: str
    headers: dict[str, str]
    """By lower-case name; of a repeated header the last."""
    tenant: str | None
    arrived: float
    raw_body: bytes = b""
    body: dict[str, object] = field(default_factory=dict)
    """The JSON object sent, or {}."""
    dialect: str = ""
    """The API called: "openai.chat", ".responses" or ".embeddings", "anthropic.messages"; or ""."""
    model: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    fault: Fault = OK
    """The fault that was applied."""
    refused: Literal["requests", "tokens", "concurrency"] | None = None
    """Which of the provider's own limits refused it."""
    status: int | None = None
    """The status answered; None when the head was never sent."""
    answered: float | None = None
    """When the head of the response was sent."""
    tokens_sent: int = 0
    complete: bool = False
    """Whether the response was sent to its end."""
    ended: float | None = None
    disconnected_at: float | None = None
    """When the provider noticed that the client had gone before the end."""

    @property
    def request_id(self) -> str:
        """The id in the response's header."""
        return f"req_fake{self.number:06}"

    @property
    def api_key(self) -> str:
        """The credential sent, as either kind of API wants it, or ""."""
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
        return self.headers.get("x-api-key") or self.headers.get("api-key") or bearer

    @property
    def disconnected(self) -> bool:
        """Whether the client went away before its response was complete."""
        return self.disconnected_at is not None


class RequestLog:
    """The requests of one provider: those kept, and counts of all."""

    def __init__(self, max_kept: int | None) -> None:
        if max_kept is not None and not (is_count(max_kept) and max_kept >= 0):
            raise ValueError(f"max_requests_kept must be >= 0, got {max_kept!r}")
        self.requests: list[ProviderRequest] = []
        self.total = 0
        self.active = 0
        self.peak_active = 0
        self._max_kept = max_kept
        self._changed: anyio.Event | None = None

    def open(self, *, method: str, path: str, headers: dict[str, str], tenant: str | None) -> ProviderRequest:
        """Record the arrival of a request."""
        self.total += 1
        request = ProviderRequest(
            number=self.total,
            method=method,
            path=path,
            headers=headers,
            tenant=tenant,
            arrived=anyio.current_time(),
        )
        self.requests.append(request)
        if self._max_kept is not None:
            del self.requests[: -self._max_kept or len(self.requests)]
        self.active += 1
        self.peak_active = max(self.peak_active, self.active)
        self._notify()
        return request

    def close(self, request: ProviderRequest) -> None:
        """Record the end of a request; a second time is nothing."""
        if request.ended is None:
            request.ended = anyio.current_time()
            self.active -= 1
            self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds after some change."""
        while not condition():
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()
