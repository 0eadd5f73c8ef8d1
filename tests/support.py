"""Doubles and harnesses for tests of the library itself; what users need is in `resilient_llm.testing`."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, suppress
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


Step = Outcome | float | anyio.Event | BaseException
"""What a provider does with one attempt: end it so, take so many seconds or until an event and succeed, or raise."""


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
                elif isinstance(step, anyio.Event):
                    await step.wait()
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


A_HANG = 20.0
"""Seconds after which something in real time will not happen any more, however slow or busy the machine is."""


async def until(condition: Callable[[], object | Awaitable[object]], *, within: float = A_HANG) -> None:
    """Look again and again, in real time, until a condition holds; `TimeoutError` when it never does."""
    with anyio.fail_after(within):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await anyio.sleep(0.01)


class Stalls:
    """What a machine with other work to do adds to the figures of a test in real time, in seconds.

    `longest` is the longest time for which nothing could happen, `total` the sum of all such times, but for those that
    are not longer than `unless`.
    """

    def __init__(self, unless: float = 0.0) -> None:
        self._unless = unless
        self._longest = 0.0
        self._total = 0.0
        self._due = anyio.current_time()

    @property
    def longest(self) -> float:
        """Give the longest, which may not be over."""
        return max(self._longest, self._late())

    @property
    def total(self) -> float:
        """Give the sum, which may still grow."""
        return self._total + self._late()

    def tick(self, following: float) -> None:
        """Hear that something happened, and after how many seconds it should again, or never."""
        late = self._late()
        self._longest = max(self._longest, late)
        self._total += late
        self._due = anyio.current_time() + following

    def _late(self) -> float:
        late = 0.0 if self._due == math.inf else anyio.current_time() - self._due
        return late if late > self._unless else 0.0


async def _nothing() -> None: ...


@asynccontextmanager
async def stalls(
    probe: Callable[[], Awaitable[object]] = _nothing, *, every: float = 0.005, unless: float = 0.0
) -> AsyncIterator[Stalls]:
    """Measure, on asyncio, by how much a task that wakes `every` so many seconds and does `probe` comes late."""
    found = Stalls(unless)

    async def watch() -> None:
        while True:
            found.tick(every)
            await anyio.sleep(every)
            await probe()

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        found.tick(math.inf)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
