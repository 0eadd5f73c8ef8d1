"""The callable door: any function under a pipeline, where there is no HTTP to get between.

Says how a function is run (in the event loop, or on a thread when it is synchronous) and what its
exceptions mean. Everything else is the pipeline's.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Token
from functools import partial
from types import AsyncGeneratorType, FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from resilient_llm import context
from resilient_llm._loop import LoopBound
from resilient_llm.call import Call
from resilient_llm.errors import AttemptError
from resilient_llm.message import Reply, Request
from resilient_llm.outcome import SUCCESS, Outcome, Verdict
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.profile import Profile
from resilient_llm.providers import BEDROCK, OPENAI, classify_exception
from resilient_llm.streams import BufferedStream
from resilient_llm.target import Target
from resilient_llm.threads import Threads, sheltered

if TYPE_CHECKING:
    from resilient_llm.attempt_options import Clocks
    from resilient_llm.pipeline import Pipeline

__all__ = ["ClassifyError", "ClassifyResult", "FunctionDoor", "Kind", "classify_error"]

ClassifyError: TypeAlias = Callable[[Exception], Outcome | None]
"""Say what an exception means; `None` when it is not the provider's, and passes as it is."""

ClassifyResult: TypeAlias = Callable[[object], Outcome | None]
"""Say what a result means, and what it used; `None` when it is as good as any."""

_MAX_KINDS = 1024
_METHODS = FunctionType, MethodType
_STREAMS = frozenset({GeneratorType, AsyncGeneratorType})
_NO_BYTES = BufferedStream([])


def classify_error(error: Exception) -> Outcome | None:
    """Say what an exception of a common client library means.

    Knows the transport errors of httpx, httpx2 and aiohttp, exceptions that carry an HTTP response (those
    of SDKs), botocore's `ClientError`, and Python's own connection and timeout errors.
    """
    known = classify_exception(error)
    if known is not None:
        return known
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore: a parsed response
        return _of_botocore(response)
    status = getattr(response, "status_code", None) or getattr(error, "status_code", None)
    if isinstance(status, int):
        raw = getattr(getattr(response, "headers", None), "raw", None)
        headers = list(raw) if isinstance(raw, list) else []
        body = getattr(response, "content", b"")
        return OPENAI.classify(status, headers, body if isinstance(body, bytes) else b"")
    if isinstance(error, TimeoutError):
        return Outcome(verdict=Verdict.FAILURE, error_type="timeout", retryable=True, ambiguous=True)
    if isinstance(error, ConnectionError):
        return Outcome(verdict=Verdict.FAILURE, error_type="connection_error", retryable=True, ambiguous=True)
    return None


def _of_botocore(response: Mapping[str, object]) -> Outcome | None:
    metadata, problem = response.get("ResponseMetadata"), response.get("Error")
    if not isinstance(metadata, Mapping) or not isinstance(problem, Mapping):
        return None
    status = metadata.get("HTTPStatusCode")
    code = str(problem.get("Code", ""))
    headers = [(b"x-amzn-errortype", code.encode("ascii", "replace"))]
    return BEDROCK.classify(status if isinstance(status, int) else 500, headers, b"")


def _judged(
    option: str,
    judge: Callable[[Any], Outcome | None],
    what: object,
    *,
    otherwise: Callable[[Any], Outcome | None],
) -> Outcome | None:
    """Ask a function of the application's what something means; one that fails must not break a call."""
    try:
        found = judge(what)
        if found is None or isinstance(found, Outcome):
            return found
        hook_gave(option, judge, found, "an Outcome, and None")
    except Exception as failure:  # noqa: BLE001 - whatever it is
        hook_failed(option, judge, failure)
    return otherwise(what)


def _good(_result: object) -> None:
    """Take a result for a good one."""


class FunctionDoor:
    """Run functions through a pipeline, which has checked the options."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        profile: Profile,
        classify_error: ClassifyError,
        classify_result: ClassifyResult | None,
        max_threads: int,
    ) -> None:
        self._pipeline = pipeline
        self._profile = profile
        self._classify_error = classify_error
        self._classify_result = classify_result
        self._max_threads = max_threads
        self._kinds: dict[object, Kind] = {}
        self._threads: Threads | None = None
        self._loop = LoopBound(f"the threads of pipeline {pipeline.name!r}", self._forget_threads)

    async def run(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Carry out `function(*args, **kwargs)` as one call; raises what the function raises."""
        kind = self.kind_of(function)
        inherited = context.current.get()
        telemetry = self._pipeline.telemetry.begin()
        loop = self._pipeline.loop()
        call = Call(  # by position: a class called with names is given a dict of them, which costs half as much again
            kind.request,
            self._read,
            kind.target,
            loop,
            telemetry,
            loop.time(),
            inherited.tenant,
            inherited.effective_deadline(),
            inherited.priority,
        )
        call.work = function, args, kwargs, kind.threaded
        call.sent = False
        if inherited.purpose is not None:
            call.purpose = inherited.purpose
        telemetry.start(call)
        telemetry.attach()
        try:
            enclosing = context.enclosing.get()
            handled = self._pipeline.handle(call)
            reply = await (handled if enclosing is None else sheltered(call, enclosing, handled))
        except BaseException as error:
            await call.fail(error)
            if not isinstance(error, AttemptError):
                raise
            failure = error
        else:
            if call.unsettled:
                await call.settle()
            return reply.native
        finally:
            telemetry.detach()
        # Outside the except block, so that it leaves just as the function raised it.
        try:
            if failure.reply is not None:
                return failure.reply.native
            raise failure.__cause__ or failure
        finally:
            del failure  # or its traceback and this frame would hold each other, and the arguments

    def kind_of(self, function: Callable[..., object]) -> Kind:
        """Look at a function; raises `TypeError` for what cannot be run as a call."""
        if isinstance(function, FunctionType):
            # Those made anew for each call share their code, as do all of one decorator, which have their own names.
            known: object = function.__code__, function.__qualname__, function.__name__
        elif isinstance(function, MethodType):
            try:
                known = function.__func__.__code__, function.__name__, type(function.__self__)
            except AttributeError:  # bound is no function, but an object such as `lru_cache` makes
                return _look_at(function)
        else:
            return _look_at(function)
        kind = self._kinds.get(known)
        if kind is None:
            kind = _look_at(function)
            if len(self._kinds) < _MAX_KINDS:
                self._kinds[known] = kind
        return kind

    def _read(self, _request: Request) -> Profile:
        return self._profile

    def handle(self, attempt: Call) -> Awaitable[Reply]:
        """Make one attempt: the innermost step of the pipeline."""
        attempt.mark_sent()
        return self._run(attempt) if attempt.clocks is None else self._run_in_time(attempt, attempt.clocks)

    async def _run_in_time(self, attempt: Call, clocks: Clocks) -> Reply:
        """Make one attempt; of its clocks the nearest one counts."""
        limit = min(clocks.headers, clocks.first_content, clocks.whole_reply)
        with attempt.loop.scope(deadline=attempt.loop.time() + limit):
            return await self._run(attempt)
        raise AttemptError(
            Outcome(verdict=Verdict.FAILURE, error_type="timeout", retryable=True, ambiguous=True)
        ) from TimeoutError(f"the function was not done after {limit:g} s")

    async def _run(self, attempt: Call) -> Reply:
        work: Any = attempt.work
        function, args, kwargs, threaded = work
        recorder = attempt.telemetry.attempt(attempt)
        recorder.attach()
        attempt.enclosing = context.enclosing.get()
        inside = context.enclosing.set(attempt)
        try:
            if threaded:
                result = await self._run_on_thread(attempt, partial(function, *args, **kwargs))
                if inspect.isawaitable(result):
                    result = await result
            else:
                result = await function(*args, **kwargs)
        except Exception as error:
            outcome = _judged("classify_error", self._classify_error, error, otherwise=classify_error)
            if outcome is None:
                raise
            raise AttemptError(outcome) from error
        finally:
            _leave(inside)
            recorder.detach()
        if type(result) in _STREAMS:
            raise TypeError(_no_stream(f"{_name_of(_called(function))} gave {result!r}"))
        outcome = SUCCESS
        if self._classify_result is not None:
            outcome = _judged("classify_result", self._classify_result, result, otherwise=_good) or SUCCESS
        if outcome is not SUCCESS and not outcome.ok:
            raise AttemptError(outcome, reply=Reply(200, [], _NO_BYTES, result, complete=True))
        attempt.finish(outcome)
        return Reply(200, [], _NO_BYTES, result, True)  # noqa: FBT003 - made for every call, where naming it costs

    async def _run_on_thread(self, attempt: Call, function: Callable[[], object]) -> object:
        self._loop.bind()
        if self._threads is None:
            self._threads = Threads(self._max_threads)
        return await self._threads.run(attempt, function)

    def _forget_threads(self) -> None:
        self._threads = None


def _leave(inside: Token[Call | None]) -> None:
    """Be inside of a function no longer."""
    try:
        context.enclosing.reset(inside)
    except ValueError:
        return  # closed by a finaliser, in a context of its own


class Kind(NamedTuple):
    """What is looked up once for each function: what it is called, and where it runs."""

    target: Target
    request: Request
    threaded: bool


def _look_at(function: Callable[..., object]) -> Kind:
    if not callable(function):
        if inspect.iscoroutine(function):
            function.close()  # or it would be complained of, too, that nobody awaits it
        msg = (
            f"{function!r} is no function: give run() the function itself, and its arguments after it, "
            "as in `run(ask, question)`"
        )
        raise TypeError(msg)
    inner = _called(function)
    name = _name_of(inner)
    method = getattr(inner, "__call__", None)  # noqa: B004 - an object may be called asynchronously
    # Of an object its method runs; that of a class does not, since what is called is the class.
    runs = method if isinstance(method, _METHODS) and not isinstance(inner, type) else inner
    if inspect.isasyncgenfunction(runs) or inspect.isgeneratorfunction(runs):
        raise TypeError(_no_stream(f"{name} is a generator"))
    asynchronous = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(runs)
    return Kind(Target(name=name), Request("CALL", name, []), threaded=not asynchronous)


def _called(function: Callable[..., object]) -> Callable[..., object]:
    """Give what runs in the end of what was bound to arguments, or as a method without being a function."""
    while True:
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, MethodType) and not isinstance(function.__func__, FunctionType):
            function = function.__func__
        else:
            return function


def _no_stream(what: str) -> str:
    return (
        f"{what}: a call ends when its function returns, so limits would not cover the stream; "
        "collect it inside the function, or wrap the transport of the HTTP client it uses"
    )


def _name_of(function: Callable[..., object]) -> str:
    """Give the name by which a function is known to people, and its calls to circuits."""
    qualified: str = getattr(function, "__qualname__", type(function).__qualname__)
    name: str = getattr(function, "__name__", qualified)
    if name == qualified.rpartition(".")[2]:
        return qualified.rpartition("<locals>.")[2]
    # It was given another one, as the methods of boto3's clients are, all of which are made by one function.
    return f"{type(function.__self__).__qualname__}.{name}" if isinstance(function, MethodType) else name
