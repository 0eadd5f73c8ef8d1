"""Doubles and harnesses for tests of the library itself; what users need is in `resilient_llm.testing`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import Any

import anyio

from resilient_llm import (
    AttemptError,
    Call,
    Outcome,
    Pipeline,
    Policy,
    Profile,
    Reply,
    Request,
    Scope,
    Target,
    Telemetry,
    Verdict,
)
from resilient_llm.outcome import SUCCESS

FAILURE = Outcome(verdict=Verdict.FAILURE, error_type="500", status=500, retryable=True)
THROTTLED = Outcome(verdict=Verdict.THROTTLED, error_type="429", status=429, retryable=True)
BAD_REQUEST = Outcome(verdict=Verdict.FATAL, scope=Scope.REQUEST, error_type="400", status=400)


class Nothing:
    """An empty body."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        return
        yield b""  # makes it a generator

    async def aclose(self) -> None:
        """Hold nothing."""


Step = Outcome | float | BaseException
"""What a provider does with one attempt: end it so, take so many seconds and succeed, or raise."""


class Provider:
    """The innermost handler of a pipeline: plays a script, one step or list of steps per attempt.

    After the script it succeeds. Attempts finish when they return, like a reply that was complete.
    """

    def __init__(self, *script: Step | list[Step], duration: float = 0.0) -> None:
        self.script = list(script)
        self.duration = duration
        self.attempts: list[tuple[float, Call]] = []
        self.running = 0
        self.peak = 0

    async def __call__(self, attempt: Call) -> Reply:
        """Play the next step."""
        self.attempts.append((anyio.current_time(), attempt))
        steps = self.script.pop(0) if self.script else SUCCESS
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await anyio.sleep(self.duration)
            for step in steps if isinstance(steps, Sequence) else [steps]:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, float):
                    await anyio.sleep(step)
                elif not step.ok:
                    raise AttemptError(step)
        finally:
            self.running -= 1
        attempt.finish(SUCCESS)
        return Reply(200, [], Nothing(), complete=True)

    @property
    def times(self) -> list[float]:
        """Say when each attempt began, from the first."""
        return [round(at - self.attempts[0][0], 9) for at, _ in self.attempts]


class Door:
    """A door without HTTP: makes calls, finishes them as doors must, and keeps what became of them."""

    def __init__(
        self,
        *policies: Policy,
        provider: Callable[[Call], Awaitable[Reply]],
        telemetry: Telemetry | None = None,
    ) -> None:
        self.pipeline = Pipeline(policies, provider, door="client", telemetry=telemetry)
        self.calls: list[Call] = []

    async def __call__(
        self,
        *,
        tenant: str | None = None,
        model: str = "gpt-4o",
        target: str = "api.example",
        deadline: float = math.inf,
        body: bytes | None = b"{}",
        repeat_safe: bool = True,
        priority: int = 0,
    ) -> Reply:
        """Carry one call through the pipeline."""
        profile = Profile(provider="openai", operation="chat", model=model, repeat_safe=repeat_safe)
        telemetry = self.pipeline.telemetry.begin()
        call = Call(
            Request("POST", f"https://{target}/v1/chat/completions", [], body),
            read=lambda _request: profile,
            target=Target(name=target),
            loop=self.pipeline.loop(),
            telemetry=telemetry,
            started=anyio.current_time(),
            tenant=tenant,
            deadline=deadline,
            priority=priority,
        )
        self.calls.append(call)
        telemetry.start(call)
        try:
            return await self.pipeline.handle(call)
        except BaseException as error:
            from resilient_llm.call import outcome_of  # noqa: PLC0415 - what doors use, not part of the public surface

            call.finish(outcome_of(error, call))
            raise


class _CancelAt:
    """Await something, and cancel `scope` when it has suspended for the n-th time."""

    def __init__(self, awaitable: Awaitable[Any], n: int, scope: anyio.CancelScope) -> None:
        self.awaitable = awaitable
        self.n = n
        self.scope = scope
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.awaitable.__await__()
        resume: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731
        while True:
            try:
                suspended = resume()
            except StopIteration as done:
                return done.value
            self.suspensions += 1
            if self.suspensions == self.n:
                self.scope.cancel()
            try:
                value = yield suspended
            except BaseException as error:  # noqa: BLE001 - handed in, whatever it is
                resume = lambda error=error: inner.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                resume = lambda value=value: inner.send(value)  # type: ignore[misc]  # noqa: E731


async def cancel_at_every_await(
    scenario: Callable[[], Awaitable[Any]], check: Callable[[], Awaitable[None]], *, most: int = 200
) -> int:
    """Run `scenario` again and again, cancelled at its first, second, third ... suspension, until it ends by itself.

    After each run `check` must pass. Returns how many suspensions there were.
    """
    for n in range(1, most + 1):
        with anyio.CancelScope() as scope:
            await _CancelAt(scenario(), n, scope)
        await check()
        if not scope.cancel_called:
            return n - 1
    msg = f"the scenario had not ended by itself after {most} suspensions"
    raise AssertionError(msg)
