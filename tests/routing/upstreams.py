"""Upstreams that play a script, and doors to routers in front of them."""

from __future__ import annotations

import random

import anyio

from resilient_llm import AttemptError, Backoff, Call, Credential, Reply, Retry, Router, Target
from resilient_llm.outcome import SUCCESS, Outcome, Scope, Verdict
from resilient_llm.routing.balancers import Priority
from tests.support import Door, Nothing

FIXED = Backoff(initial=1.0, multiplier=2.0, maximum=8.0, jitter="none")
OVERLOADED = Outcome(
    verdict=Verdict.FAILURE, scope=Scope.UPSTREAM, error_type="529", status=529, retryable=True
)
SILENT = Outcome(verdict=Verdict.FAILURE, error_type="first_content_timeout", retryable=True, ambiguous=True)
TOO_LONG = Outcome(verdict=Verdict.FATAL, error_type="context_length_exceeded", status=400)
DEAD_KEY = Outcome(verdict=Verdict.FATAL, scope=Scope.CREDENTIAL, error_type="invalid_api_key", status=401)

Step = Outcome | float


def throttled(retry_after: float) -> Outcome:
    return Outcome(
        verdict=Verdict.THROTTLED,
        error_type="429",
        status=429,
        retryable=True,
        retry_after=retry_after,
        retry_after_source="retry-after",
    )


class Upstreams:
    """Play a script for each target; what has none, or is through with it, answers after `duration` seconds."""

    duration = 0.0

    def __init__(self, **scripts: list[Step]) -> None:
        self.scripts = scripts
        self.asked: list[tuple[str, float]] = []
        self.began: float | None = None
        self.attempts: list[Call] = []

    async def __call__(self, attempt: Call) -> Reply:
        now = anyio.current_time()
        self.began = now if self.began is None else self.began
        name = self.called(attempt)
        self.asked.append((name, round(now - self.began, 6)))
        self.attempts.append(attempt)
        attempt.mark_sent()
        script = self.scripts.get(name, [])
        step = script.pop(0) if script else self.duration or SUCCESS
        if isinstance(step, float):
            await anyio.sleep(step)
        elif not step.ok:
            raise AttemptError(step)
        attempt.finish(SUCCESS)
        return Reply(200, [], Nothing(), complete=True)

    def called(self, attempt: Call) -> str:
        """Say whose script is played."""
        return attempt.target.name

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


class Keys(Upstreams):
    """Play a script for each key."""

    def called(self, attempt: Call) -> str:
        return (attempt.request.header(b"authorization") or b"").decode().removeprefix("Bearer ")


def key(name: str, **options: object) -> Credential:
    return Credential(name=name, value=lambda: name, **options)  # type: ignore[arg-type]


def keyed(name: str, *keys: Credential, **options: object) -> Target:
    return target(name, url=f"https://{name}.test/v1", provider="openai", credentials=keys, **options)


def target(name: str, **options: object) -> Target:
    return Target(name=name, **options)  # type: ignore[arg-type]


def router(*args: object, **options: object) -> Router:
    options.setdefault("balancer", Priority())
    options.setdefault("random", random.Random(1))
    return Router(*args, **options)  # type: ignore[arg-type]


def door(upstreams: Upstreams, *routing: Router, retry: Retry | None = None) -> Door:
    return Door(retry or Retry(backoff=FIXED), *routing, provider=upstreams)
