"""What the tests of `RateLimit` share: a provider that reports usage and headers, and calls that say what they cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

import anyio
import anyio.lowlevel

from resilient_llm import AttemptError, Call, Outcome, RateLimitedError, Reply, Usage
from resilient_llm.message import Headers
from resilient_llm.outcome import SUCCESS
from tests.support import Nothing


def by_body(call: Call) -> float:
    """Estimate what the body says: `door(body=b"400")`."""
    return float(call.request.body or b"0")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How one attempt ends: `tokens` are its reported usage, or `usage` is."""

    tokens: int | None = None
    usage: Usage | None = None
    outcome: Outcome = SUCCESS
    headers: Headers = field(default_factory=list)
    duration: float = 0.0


class Answers:
    """The innermost handler: plays a script, then succeeds; keeps when each attempt came, and what it was."""

    def __init__(self, *script: Answer, duration: float = 0.0, marks_sent: bool = False) -> None:
        self.script = list(script)
        self.otherwise = Answer(duration=duration)
        self.marks_sent = marks_sent
        self.attempts: list[tuple[float, Call]] = []

    async def __call__(self, attempt: Call) -> Reply:
        self.attempts.append((anyio.current_time(), attempt))
        if self.marks_sent:
            attempt.mark_sent()
        answer = self.script.pop(0) if self.script else self.otherwise
        await anyio.sleep(answer.duration)
        usage = answer.usage
        if answer.tokens is not None:
            usage = Usage(input_tokens=answer.tokens, output_tokens=0)
        outcome = replace(answer.outcome, usage=usage)
        reply = Reply(outcome.status or 200, answer.headers, Nothing(), complete=True)
        if not outcome.ok:
            raise AttemptError(outcome, reply=reply if outcome.status else None)
        attempt.finish(outcome)
        return reply

    @property
    def times(self) -> list[float]:
        """Say when each attempt began, from the first."""
        return [round(at - self.attempts[0][0], 6) for at, _ in self.attempts]

    @property
    def tenants(self) -> str:
        """Give the tenants of the attempts, in order; their names are single letters."""
        return "".join(str(attempt.tenant) for _, attempt in self.attempts)


async def together(calls: Iterable[Callable[[], Awaitable[object]]]) -> list[object]:
    """Start calls one after the other in one instant, and give what each returned or raised."""
    results: list[object] = []

    async def one(index: int, call: Callable[[], Awaitable[object]]) -> None:
        try:
            results[index] = await call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            results.append(None)
            group.start_soon(one, index, call)
            for _ in range(5):  # until it waits or is done, whatever the order in which tasks run
                await anyio.lowlevel.checkpoint()
    return results


def refusals(results: Iterable[object]) -> list[RateLimitedError]:
    """Pick the refusals out of results."""
    return [result for result in results if isinstance(result, RateLimitedError)]
