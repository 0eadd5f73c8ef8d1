"""An ordered list of policies, bound to what finally carries out a call.

The chain is built once; nothing is looked up while a call runs. Doors make calls and translate what
comes back; policies decide. Neither happens here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, get_args, overload

from resilient_llm._loop import LoopBound
from resilient_llm._options import at_least, flag, function, instance_of, label, takes
from resilient_llm.errors import ConfigurationError, DeadlineExceededError
from resilient_llm.function import ClassifyError, ClassifyResult, FunctionDoor, classify_error
from resilient_llm.ordering import Door, Placement, attempt_boundary, chained, check_order, policy_name
from resilient_llm.policies import CircuitBreaker
from resilient_llm.profile import Profile
from resilient_llm.telemetry import Telemetry

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext, Policy
    from resilient_llm.message import Reply

__all__ = ["Pipeline", "PipelineDescription", "PolicyDescription"]

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDescription:
    """Say what one policy is: its name, its type, whether it acts on calls or attempts, its options."""

    name: str
    type: str
    level: Literal["call", "attempt"]
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDescription:
    """Say what a pipeline is made of, outermost policy first."""

    name: str
    door: Door
    policies: tuple[PolicyDescription, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.door} door)"]
        for policy in self.policies:
            options = ", ".join(f"{name}={value!r}" for name, value in policy.options.items())
            lines.append(f"  {policy.level:<7} {policy.name}({options})")
        return "\n".join(lines)


class Pipeline:
    """Put policies, outermost first, around functions: `await pipeline.run(function, ...)` or `@pipeline`.

    `profile` says what the functions call (provider, operation, model), for telemetry and keys.
    `classify_error` says what an exception means (see `function.classify_error`), `classify_result` what a
    result means and used. Synchronous functions run on at most `max_threads` threads of this pipeline's own.
    Doors give a `handler` instead, which receives attempts.

    Raises `ConfigurationError` for an order that cannot work or settings that contradict each other.
    """

    def __init__(
        self,
        policies: Sequence[Policy] = (),
        handler: CallNext | None = None,
        *,
        door: Door = "callable",
        name: str = "default",
        telemetry: Telemetry | None = None,
        profile: Profile = Profile(operation="call"),  # noqa: B008 - immutable
        classify_error: ClassifyError = classify_error,
        classify_result: ClassifyResult | None = None,
        max_threads: int = 40,
    ) -> None:
        self.policies = _policies(policies)
        label(name=name)
        function(none=True, asynchronous=True, handler=handler)
        if door not in get_args(Door):
            allowed = ", ".join(map(repr, get_args(Door)))
            raise ConfigurationError(f"door={door!r}: allowed are {allowed}")
        instance_of(Telemetry, none=True, telemetry=telemetry)
        instance_of(Profile, profile=profile)
        _check_profile(profile)
        function(classify_error=classify_error)
        function(none=True, classify_result=classify_result)
        at_least(1, max_threads=max_threads)
        self.door: Door = door
        self.name = name
        self.telemetry = telemetry if telemetry is not None else Telemetry()
        check_order(self.policies, door)
        for policy in self.policies:
            check = getattr(policy, "check", None)
            if check is not None:
                check(self.policies)
            check_door = getattr(policy, "check_door", None)
            # A handler that is given to the door of functions may well receive requests with a prompt.
            if check_door is not None and (handler is None or door != "callable"):
                check_door(door)
        for policy in self.policies:
            observe = getattr(policy, "observe", None)
            if observe is not None:
                observe(self.telemetry)
        self.loop = LoopBound(f"pipeline {name!r}", _keep_nothing).bind
        """Give the event loop this pipeline belongs to; `EventLoopError` when it is another than the running one.

        The caller may know that one already; to ask for it costs as much as a small policy.
        """
        self._boundary = attempt_boundary(self.policies)
        self._circuits = tuple(policy for policy in self.policies if isinstance(policy, CircuitBreaker))
        self._keeps_deadlines = door == "asgi" or any(
            getattr(policy, "placement", None) is Placement.DEADLINE for policy in self.policies
        )
        self.replays = any(getattr(policy, "placement", None) is Placement.RETRY for policy in self.policies)
        """Whether a policy in here owns the retries, so that nobody above should."""
        self.holds_streams = self.replays or any(
            getattr(policy, "placement", None) is Placement.HEDGE for policy in self.policies
        )
        """Whether a stream is held back until it has content: until then another attempt may take its place."""
        self._functions = FunctionDoor(
            self,
            profile=profile,
            classify_error=classify_error,
            classify_result=classify_result,
            max_threads=max_threads,
        )
        self._entry = self._chain(self._functions.handle if handler is None else handler)

    def _chain(self, handler: CallNext) -> CallNext:
        attempt = chained(self.policies[self._boundary :], handler)
        if self.door != "asgi" and not self.replays:
            attempt = _single_attempt(attempt)
        return chained(self.policies[: self._boundary], attempt)

    def handle(self, call: Call) -> Awaitable[Reply]:
        """Carry a call through the policies to the handler, until the deadline it may have inherited."""
        if self._circuits:
            call.circuits = self._circuits
        if self._keeps_deadlines or call.deadline == math.inf:
            return self._entry(call)
        return self._until_deadline(call)

    async def _until_deadline(self, call: Call) -> Reply:
        msg = "the call was not done by the deadline it inherited"
        if call.remaining() <= 0:
            raise DeadlineExceededError(msg)
        with call.loop.scope(deadline=call.deadline):
            return await self._entry(call)
        raise DeadlineExceededError(msg)

    @overload
    def run(
        self, function: Callable[P, Awaitable[Result]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, object, Result]: ...
    @overload
    def run(
        self, function: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, object, Result]: ...
    def run(
        self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, object, object]:
        """Carry out `function(*args, **kwargs)` as one call and give its result.

        An `async def` runs here, anything else on a thread. A retry calls it again with the same arguments.
        Raises what the function raises, `RejectedError` and `DeadlineExceededError`; `TypeError` for a
        generator function.
        """
        return self._functions.run(function, args, kwargs)

    @overload
    def __call__(self, function: Callable[P, Awaitable[Result]], /) -> Callable[P, Awaitable[Result]]: ...
    @overload
    def __call__(self, function: Callable[P, Result], /) -> Callable[P, Awaitable[Result]]: ...
    def __call__(self, function: Callable[P, object], /) -> Callable[P, Awaitable[object]]:
        """Decorate a function, so that each call of it goes through this pipeline; it becomes asynchronous.

        Raises `TypeError` for what `run` would refuse.
        """
        self._functions.kind_of(function)

        @wraps(function)
        async def through_pipeline(*args: P.args, **kwargs: P.kwargs) -> object:
            return await self._functions.run(function, args, kwargs)

        return through_pipeline

    def describe(self) -> PipelineDescription:
        """Say what this pipeline is made of, for logs, admin pages and tests."""
        return PipelineDescription(
            name=self.name,
            door=self.door,
            policies=tuple(
                PolicyDescription(
                    name=policy_name(policy),
                    type=type(policy).__name__,
                    level="call" if index < self._boundary else "attempt",
                    options=_options(policy),
                )
                for index, policy in enumerate(self.policies)
            ),
        )


def _policies(policies: object) -> tuple[Policy, ...]:
    """Make a tuple of a list of policies; `ConfigurationError` for anything else, or if one of them is none."""
    if isinstance(policies, str | bytes | Mapping) or not isinstance(policies, Iterable):
        msg = f"policies={policies!r}: allowed are lists of policies, outermost first"
        raise ConfigurationError(msg)
    found = tuple(policies)
    for index, policy in enumerate(found):
        if not callable(policy) or isinstance(policy, type):
            msg = (
                f"policies[{index}]={policy!r}: allowed are callable objects (call, call_next); "
                "did you forget to create it?"
            )
            raise ConfigurationError(msg)
        takes(2, **{f"policies[{index}]": policy})
    return found


def _check_profile(profile: Profile) -> None:
    """Raise `ConfigurationError` for what is no profile of calls: those that dialects read are made one a call."""
    words = {"provider": profile.provider, "operation": profile.operation}
    if profile.model is not None:
        words["model"] = profile.model
    label(**{f"profile.{name}": word for name, word in words.items()})
    flags = {"stream": profile.stream, "repeat_safe": profile.repeat_safe, "resumable": profile.resumable}
    flag(**{f"profile.{name}": value for name, value in flags.items()})


def _single_attempt(call_next: CallNext) -> CallNext:
    """Make the one attempt of a call that nobody retries."""

    def attempt(call: Call) -> Awaitable[Reply]:
        return call.attempt(reason="initial").run(call_next)

    return attempt


def _options(policy: object) -> Mapping[str, object]:
    if not dataclasses.is_dataclass(policy):
        return {}
    return {
        field.name: getattr(policy, field.name)
        for field in dataclasses.fields(policy)
        if field.init and field.repr and field.name != "name"
    }


def _keep_nothing() -> None:
    """Forget nothing: a pipeline itself holds no state of a loop; its policies look after theirs."""
