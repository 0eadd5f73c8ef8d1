"""Apps and policies for tests of the ASGI door."""

from __future__ import annotations

from typing import Any

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from resilient_llm import Call, Outcome, Reply
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.call import CallNext
from resilient_llm.ordering import Placement
from tests.asgi.server import Connection, respond


class Spy:
    """A policy that lets everything pass and keeps the calls and how they ended."""

    placement = Placement.ADMISSION

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.outcomes: list[tuple[float, Outcome]] = []

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        self.calls.append(call)
        call.on_finish(lambda outcome: self.outcomes.append((anyio.current_time(), outcome)))
        reply = await call_next(call)
        self.replies.append(reply)
        return reply


def app_that_takes(duration: float, status: int = 200) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(duration)
        await respond(send, status, scope["path"].encode())

    return app


def guard(app: ASGIApp, *policies: Any, **options: Any) -> ResilienceMiddleware:
    return ResilienceMiddleware(app, tenant="x-tenant-id", policies=policies, **options)


def of(tenant: str, **options: Any) -> Connection:
    return Connection(headers=[(b"X-Tenant-Id", tenant.encode())], **options)
