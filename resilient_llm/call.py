"""One logical LLM call, its attempts, and their lifetimes.

A `Call` says what is asked, for whom and until when, and holds what must be undone when it ends.
No policy decides anything in here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import lru_cache
from threading import get_ident
from typing import TYPE_CHECKING, Protocol, TypeAlias

import anyio

from resilient_llm._kept import LONGEST_MODEL
from resilient_llm._spawn import spawn
from resilient_llm.attempt_options import Clocks, Streaming
from resilient_llm.errors import AttemptError, DeadlineExceededError, RejectedError
from resilient_llm.outcome import CANCELLED, DEADLINE_EXCEEDED, Outcome, Scope, Verdict

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop
    from resilient_llm.alternatives import EarlyChecked, Route
    from resilient_llm.core.retry_budget import RetryBudget
    from resilient_llm.message import Reply, Request
    from resilient_llm.profile import Profile
    from resilient_llm.target import Target
    from resilient_llm.telemetry import CallTelemetry

__all__ = [
    "Call",
    "CallNext",
    "Finish",
    "Policy",
    "outcome_of",
]

logger = logging.getLogger("resilient_llm")

Finish: TypeAlias = Callable[[Outcome], Awaitable[None] | None]
"""What a policy registers with `Call.on_finish`; it may return something to await."""

CallNext: TypeAlias = Callable[["Call"], Awaitable["Reply"]]
"""The rest of the pipeline, as a policy sees it."""

_CLEANUP_TIMEOUT = 5.0


class Policy(Protocol):
    """Decide about a call on its way in and out.

    A policy admits or refuses, registers what must be undone with `call.on_finish`, then awaits
    `call_next(call)`. A failed attempt comes back as an `AttemptError`, a success as a `Reply`.
    """

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Await `call_next(call)`, or raise a `RejectedError`.

        Usually an `async def`; one that has nothing to await, nor to do afterwards, may return `call_next(call)`.
        """
        ...


_STREAMING = Streaming()


Mark: TypeAlias = "tuple[int, Request, Target, Profile | None, tuple[object, ...]]"
"""How a call stood at some moment: how much there was to undo, where it went, as what, and what it held."""


class Call:
    """One logical LLM call, or one attempt of it (then `parent` is the call).

    `deadline` is on `anyio.current_time()`'s clock. An attempt's `number` counts from 1; a call's is 0.
    """

    __slots__ = (
        "__dict__",  # what few calls have, as below, and whatever the application's own policies note on one
        "__weakref__",
        "_callbacks",
        "_open",
        "_profile",
        "_read",
        "adopter",
        "attempts",
        "budget",
        "circuits",
        "clocks",
        "committed",
        "deadline",
        "enclosing",
        "ended",
        "estimated_by",
        "first_content",
        "inbound",
        "loop",
        "number",
        "outcome",
        "parent",
        "priority",
        "purpose",
        "reason",
        "request",
        "sent",
        "started",
        "streaming",
        "taken",
        "target",
        "telemetry",
        "tenant",
        "tokens",
        "work",
    )

    # What few calls have: set where it differs from what is said here, so that it costs the others nothing.
    answer_id: str | None = None
    """What the provider calls the answer, where the reply says so."""
    first_chunk: float | None = None
    """When the first bytes of the reply's body came, on `anyio.current_time()`'s clock."""
    retries: int = 0
    other_estimates: tuple[tuple[object, float], ...] = ()
    """By what else its tokens were estimated, and to how many: policies may have estimates of their own."""
    exhausted: bool = False
    """Whether a policy that owns retries gave up on the last failure."""
    hedges: int = 0
    fallbacks: int = 0
    retry_delay: float = 0.0
    wait_time: float = 0.0
    logical_model: str | None = None
    """The model that is to be routed to, where a policy has chosen another than the request names."""
    route: Route | None = None
    """Where its attempts have gone, and may still go; `None` without a `Router`."""
    made: bool = True
    """Of an attempt: whether it counts. One that was refused, or given up, before it was sent does not."""
    masked: Callable[[bytes], bytes] | None = None
    """What leaves keys out of what is told beside the answer; `None` where nobody is to be kept from them."""
    broke: Outcome | None = None
    """How the stream broke that is being gone on with: a failure of this call, made before its next attempt."""
    cost: float = 0.0
    """What its attempts have cost, in US dollars, as far as their prices are known."""
    scope: anyio.CancelScope | None = None
    """What its caller has entered for it alone: a deadline that has passed cancels it, and makes none of its own."""
    superseded: bool = False
    """Of an attempt: whether its call goes on with the reply of another, so that its own end is not the call's."""
    _kept_open: int = 0
    _deferred: Outcome | None = None
    _pending: list[Awaitable[None]] | None = None

    def __init__(  # noqa: PLR0917 - the callable door gives them by position
        self,
        request: Request,
        read: Callable[[Request], Profile],
        target: Target,
        loop: EventLoop,
        telemetry: CallTelemetry,
        started: float,
        tenant: str | None = None,
        deadline: float = math.inf,
        priority: int = 0,
        *,
        inbound: bool = False,
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.deadline = deadline
        self.priority = priority
        self.target = target
        self.inbound = inbound
        """Whether it came in through the ASGI door."""
        self.loop = loop
        self.telemetry = telemetry
        self.started = started
        self._read = read
        self._profile: Profile | None = None
        self.parent: Call | None = None
        self.number = 0
        self.reason = "initial"
        """Why an attempt is made: initial, retry, hedge or fallback."""
        self.tokens: float | None = None
        """Estimated tokens, of the prompt and the answer, once a policy has asked: by the first one's estimate."""
        self.estimated_by: object = None
        """What has made that estimate."""
        self.sent: bool | None = None
        """Whether the request is on its way to the provider or was; `None` where the door does not say."""
        self.work: object = None
        """What the callable door runs, in place of a request: a function with its arguments, and where it runs."""
        self.clocks: Clocks | None = None
        """How long parts of an attempt may take."""
        self.streaming = _STREAMING
        """How a streamed reply is passed on; what holds for a call holds for its attempts."""
        self.purpose: str | None = None
        """What the call is made for (batch, realtime, canary ...), for credentials that are kept for it."""
        self._begin()

    def _begin(self) -> None:
        """Set what a call and each of its attempts have of their own."""
        self.outcome: Outcome | None = None
        self.first_content: float | None = None
        """Seconds from `started` to the first content of the reply, once it came."""
        self.attempts = 0
        self.circuits: Sequence[EarlyChecked] = ()
        """The circuits that an attempt of it will have to pass."""
        self.budget: RetryBudget | None = None
        """What its retries and hedges draw on, where a policy that owns retries keeps one."""
        self.committed = False
        """Of an attempt: whether its reply was handed on, so that nothing of it is thrown away any more."""
        self.adopter: Call | None = None
        self.taken: tuple[object, ...] = ()
        """What it has taken that others may wait for, until it ends."""
        self.enclosing: Call | None = None
        """Of what runs code of the application's: what that itself runs inside of."""
        self.ended = 0.0
        """When what is undone now is undone, on `anyio.current_time()`'s clock: for what `on_finish` was given."""
        self._callbacks: list[Finish] = []
        self._open = [True]
        """Popped by whoever finishes: one `list.pop` is atomic, also against a finaliser."""

    @property
    def profile(self) -> Profile:
        """Give what the request asks for, read from its body when first needed."""
        profile = self._profile
        if profile is None:
            parent = self.parent
            shared = parent is not None and parent.request is self.request
            profile = self._profile = parent.profile if shared and parent else self._read(self.request)
        return profile

    @property
    def model(self) -> str | None:
        """Give the model asked for; of an attempt, what its target calls it."""
        return self.target.model or self.profile.model

    @property
    def operation(self) -> str:
        """Give the operation: chat, embeddings, text_completion ..."""
        return self.profile.operation

    @property
    def finished(self) -> bool:
        """Tell whether the call has ended."""
        return not self._open

    def remaining(self) -> float:
        """Give the seconds left until the deadline; may be negative."""
        return self.deadline - self.loop.time()

    def attempt(self, *, reason: str, request: Request | None = None) -> Call:
        """Begin the next attempt: a child with its own lifetime."""
        self.attempts += 1
        # Made without __init__, which would cost as much again: an attempt is its call but for a few things.
        child = object.__new__(Call)
        child.request = self.request if request is None else request
        child.tenant = self.tenant
        child.deadline = self.deadline
        child.priority = self.priority
        child.target = self.target
        child.inbound = self.inbound
        child.loop = self.loop
        child.telemetry = self.telemetry
        child.started = self.loop.time()
        child.parent = self
        child.number = self.attempts
        child.reason = reason
        child.tokens = self.tokens
        child.estimated_by = self.estimated_by
        child.sent = None if self.sent is None else False
        child.work = self.work
        child.clocks = self.clocks
        child.streaming = self.streaming
        child._read = self._read
        child._profile = self._profile
        child.purpose = self.purpose
        child._begin()
        return child

    def direct(self, target: Target, request: Request) -> None:
        """Send this attempt to `target`, as `request`."""
        profile = self.profile
        model, provider = target.model or profile.model, target.provider or profile.provider
        if model != profile.model or provider != profile.provider:
            short = profile.model is None or len(profile.model) <= LONGEST_MODEL
            self._profile = (_directed if short else _directed.__wrapped__)(profile, model, provider)
        self.target = target
        self.request = request

    def mark_sent(self) -> None:
        """Note that the request goes out now: from here on it may be carried out, and billed."""
        self.sent = True
        if self.parent is not None:
            self.parent.sent = True

    async def run(self, call_next: CallNext) -> Reply:
        """Carry out this attempt and finish it however it ends.

        On success its parent adopts it: both finish together when the reply has been read.
        """
        try:
            reply = await call_next(self)
        except BaseException as error:
            if isinstance(error, RejectedError) or (
                self.sent is False and not isinstance(error, AttemptError)
            ):
                self._take_back()
            await self.fail(error)
            raise
        if self.superseded:
            return reply
        self.adopter = self.parent
        self.committed = True
        if self.outcome is not None and self.parent is not None:
            self.parent.finish(self.outcome)  # a reply that was complete when it arrived
            if self.unsettled:
                await self.settle()
        return reply

    def _take_back(self) -> None:
        self.made = False
        if self.parent is not None:
            self.parent.attempts -= 1

    def answered(self, *, id: str | None, model: str | None, finish_reasons: Sequence[str]) -> None:  # noqa: A002 - as in answers
        """Keep what a reply says of itself, and tell telemetry of it, without keys, if anybody records."""
        self.answer_id = id
        if not self.telemetry.recording:
            return
        masked = (self.parent or self).masked
        if masked is not None:
            id, model = _shown(id, masked), _shown(model, masked)  # noqa: A001
            finish_reasons = [_shown(reason, masked) or "" for reason in finish_reasons]
        self.telemetry.answered(id=id, model=model, finish_reasons=finish_reasons)

    def on_finish(self, callback: Finish) -> None:
        """Register what must be undone when the call ends; at once if it has ended.

        Callbacks run once, in reverse order, in the call's event loop. One that returns an awaitable
        has it awaited, shielded from cancellation and for at most 5 s, by whoever owns the call.
        """
        if self._open:
            self._callbacks.append(callback)
        else:
            self._undo(callback, self.outcome or CANCELLED)

    def finish(self, outcome: Outcome) -> None:
        """End the call with `outcome`, once; later calls do nothing. Safe from any thread."""
        if get_ident() != self.loop.thread and not self.loop.is_here():
            self.loop.post(lambda: self.finish_alone(outcome))
            return
        if self._kept_open:
            self._deferred = self._deferred or outcome
            return
        try:
            self._open.pop()
        except IndexError:
            return
        self.outcome = outcome
        if self._callbacks:
            self._undo_all(self._callbacks, outcome)
        if self.adopter is not None:
            if self.first_content is not None:
                self.adopter.first_content = self.started + self.first_content - self.adopter.started
            self.adopter.finish(outcome)

    def finish_alone(self, outcome: Outcome) -> None:
        """End the call where nobody waits for it: what its callbacks left to await is awaited by a task of its own.

        To be called in the event loop; when that has ended nothing can be awaited any more.
        """
        self.finish(outcome)
        if not self.unsettled:
            return
        if self.loop.is_here():
            spawn(self.settle, name=f"settle {self!r}")
            return
        for pending in self._left_to_await():
            if isinstance(pending, Coroutine):
                pending.close()

    def mark(self) -> Mark:
        """Remember how it stands, for `retract`."""
        return len(self._callbacks), self.request, self.target, self._profile, self.taken

    async def retract(self, mark: Mark) -> None:
        """Undo what was registered since `mark`, as if the call had been cancelled, and go on from there.

        For a policy that tries the rest of the pipeline again after a refusal in there.
        """
        callbacks, request, target, profile, taken = mark
        while len(self._callbacks) > callbacks:
            self._undo(self._callbacks.pop(), CANCELLED)
        self.request, self.target, self._profile, self.taken = request, target, profile, taken
        if self._pending:
            await self.settle()

    def keep_open(self) -> Callable[[], None]:
        """Keep this call, and the call it is an attempt of, from ending until the function given back is called.

        For work that goes on although its caller has left. Call it in the event loop; twice does nothing.
        """
        owners = [self] if self.parent is None else [self, self.parent]
        for owner in owners:
            owner._kept_open += 1

        def release() -> None:
            while owners:
                owner = owners.pop(0)
                owner._kept_open -= 1
                if not owner._kept_open and owner._deferred is not None:
                    owner.finish_alone(owner._deferred)

        return release

    def _undo(self, callback: Finish, outcome: Outcome) -> None:
        self._undo_all([callback], outcome)

    def _undo_all(self, callbacks: list[Finish], outcome: Outcome) -> None:
        """Run callbacks, the last first, and keep what they leave to await; more may be added meanwhile."""
        try:
            self.ended = self.loop.time()
        except RuntimeError:  # trio's loop has ended, and its clock with it
            self.ended = self.started
        while callbacks:
            callback = callbacks.pop()
            try:
                pending = callback(outcome)
            except Exception:
                logger.exception("a callback of a finished call failed: %r", callback)
                continue
            if pending is not None:
                if self._pending is None:
                    self._pending = []
                self._pending.append(pending)

    async def end(self, outcome: Outcome) -> None:
        """End the call and await what its callbacks left to await."""
        self.finish(outcome)
        if self.unsettled:
            await self.settle()

    async def fail(self, error: BaseException) -> None:
        """End the call with what an exception that left the pipeline means, as `end` does."""
        outcome = outcome_of(error, self)
        if isinstance(error, GeneratorExit):  # nothing can be awaited any more by what is being closed
            self.finish_alone(outcome)
        else:
            await self.end(outcome)

    async def settle(self) -> None:
        """Await, shielded and bounded, what the callbacks left to await: all of it at once."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CLEANUP_TIMEOUT):
            while left := self._left_to_await():
                if len(left) == 1:
                    await _settled(left[0])
                    continue
                async with anyio.create_task_group() as tasks:
                    for pending in left:
                        tasks.start_soon(_settled, pending)

    def _left_to_await(self) -> list[Awaitable[None]]:
        """Take what the callbacks of this call, and of the one it ends with it, left to await."""
        left: list[Awaitable[None]] = []
        for owner in (self, self.adopter):
            if owner is not None and owner._pending is not None:
                left += owner._pending
                owner._pending = None
        return left

    @property
    def unsettled(self) -> bool:
        """Tell whether `settle` has something to do."""
        return self._pending is not None or (self.adopter is not None and self.adopter._pending is not None)

    def __repr__(self) -> str:
        kind = f"attempt {self.number}" if self.parent is not None else "call"
        state = "open" if self.outcome is None else self.outcome.verdict.value
        return f"<Call {kind} tenant={self.tenant!r} target={self.target.name!r} {state}>"


async def _settled(pending: Awaitable[None]) -> None:
    try:
        await pending
    except Exception:
        logger.exception("the clean-up of a finished call failed")


@lru_cache(maxsize=1024)
def _directed(profile: Profile, model: str | None, provider: str) -> Profile:
    """Give the profile of a request that goes to a target which calls its model, or itself, something else."""
    return replace(profile, model=model, provider=provider)


def outcome_of(error: BaseException, call: Call) -> Outcome:
    """Say what an exception that left the pipeline means for the call."""
    if isinstance(error, AttemptError):
        return error.outcome
    if isinstance(error, RejectedError):
        return Outcome(
            verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type=error.reason, retry_after=error.retry_after
        )
    if isinstance(error, DeadlineExceededError):
        return DEADLINE_EXCEEDED
    if not isinstance(error, Exception):  # a cancellation is none, on asyncio and on trio
        try:
            return DEADLINE_EXCEEDED if call.remaining() <= 0 else CANCELLED
        except RuntimeError:  # trio's loop has ended, and its clock with it
            return CANCELLED
    return Outcome(verdict=Verdict.FATAL, scope=Scope.LOCAL, error_type=type(error).__name__)


def _shown(said: str | None, masked: Callable[[bytes], bytes]) -> str | None:
    return None if said is None else masked(said.encode("utf-8", "replace")).decode("utf-8", "replace")
