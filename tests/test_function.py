"""The callable door: async and synchronous functions under a pipeline."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import MethodType
from typing import Any, ClassVar, NoReturn

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx
import pytest

from resilient_llm import (
    Backoff,
    Bulkhead,
    CircuitBreaker,
    CircuitOpenError,
    CircuitState,
    ConfigurationError,
    Deadline,
    DeadlineExceededError,
    Outcome,
    Pipeline,
    Retry,
    Verdict,
    ambient,
)
from resilient_llm.function import classify_error

pytestmark = pytest.mark.anyio

FIXED = Backoff(initial=1.0, maximum=1.0, jitter="none")


class ThrottlingError(Exception):
    """What botocore raises: the parsed response on an attribute."""

    response: ClassVar[dict[str, object]] = {
        "Error": {"Code": "ThrottlingException", "Message": "slow down"},
        "ResponseMetadata": {"HTTPStatusCode": 429},
    }


async def add(a: int, b: int = 0) -> int:
    await anyio.sleep(1)
    return a + b


async def test_an_async_function_runs_and_its_result_comes_back() -> None:
    assert await Pipeline([Deadline(5)]).run(add, 1, b=2) == 3


async def test_a_decorated_function_keeps_its_name_and_arguments() -> None:
    pipeline = Pipeline([Deadline(5)])

    @pipeline
    async def double(n: int) -> int:
        """Double it."""
        return 2 * n

    assert await double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Double it.")


async def test_failures_are_retried_and_the_functions_own_exception_leaves() -> None:
    calls = 0

    async def fail() -> NoReturn:
        nonlocal calls
        calls += 1
        raise ConnectionResetError("gone")

    started = anyio.current_time()
    with pytest.raises(ConnectionResetError, match="gone") as raised:
        await Pipeline([Retry(backoff=FIXED)]).run(fail)
    assert calls == 3
    assert anyio.current_time() - started == pytest.approx(2)
    assert raised.value.__context__ is None


async def test_can_04_an_exception_of_ones_own_is_not_retried() -> None:
    calls = 0

    async def fail() -> NoReturn:
        nonlocal calls
        calls += 1
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await Pipeline([Retry(backoff=FIXED)]).run(fail)
    assert calls == 1


async def test_classify_error_and_result_are_the_users_to_say() -> None:
    answers = ["busy", "busy", "fine"]

    async def ask() -> str:
        return answers.pop(0)

    def result(value: object) -> Outcome:
        busy = Outcome(verdict=Verdict.THROTTLED, error_type="busy", retryable=True)
        return busy if value == "busy" else Outcome(verdict=Verdict.SUCCESS)

    assert await Pipeline([Retry(backoff=FIXED)], classify_result=result).run(ask) == "fine"


async def test_a_result_that_means_a_failure_comes_back_when_nothing_better_does() -> None:
    async def ask() -> str:
        return "busy"

    busy = Outcome(verdict=Verdict.THROTTLED, error_type="busy", retryable=True)
    pipeline = Pipeline([Retry(max_attempts=2, backoff=FIXED)], classify_result=lambda _value: busy)
    assert await pipeline.run(ask) == "busy"


async def test_the_deadline_and_the_circuit_hold_here_too() -> None:
    with pytest.raises(DeadlineExceededError):
        await Pipeline([Deadline(0.5)]).run(add, 1)

    async def fail() -> NoReturn:
        raise TimeoutError

    pipeline = Pipeline([CircuitBreaker(consecutive_failures=1)])
    with pytest.raises(TimeoutError):
        await pipeline.run(fail)
    with pytest.raises(CircuitOpenError):
        await pipeline.run(fail)


async def test_the_bulkhead_takes_the_tenant_from_the_context() -> None:
    pipeline = Pipeline([Bulkhead(max_concurrent=1)])
    started = anyio.current_time()

    async def of(tenant: str) -> None:
        with ambient(tenant=tenant):
            await pipeline.run(add, 1)

    async with anyio.create_task_group() as group:
        for tenant in "aab":
            group.start_soon(of, tenant)
    assert anyio.current_time() - started == pytest.approx(2)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_synchronous_function_runs_on_a_thread_and_never_blocks_the_loop(anyio_backend: str) -> None:
    main = threading.get_ident()

    def slow(n: int) -> tuple[int, bool]:
        time.sleep(0.05)
        return n, threading.get_ident() != main

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.005)
            ticks += 1

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        assert await Pipeline([Deadline(60)]).run(slow, 7) == (7, True)
        group.cancel_scope.cancel()
    assert ticks >= 3


async def _leave(pipeline: Pipeline, function: Callable[[], object], begun: threading.Event) -> None:
    """Run a function on a thread, and be cancelled once it has begun."""
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.run, function)
        await anyio.to_thread.run_sync(begun.wait, 5)
        group.cancel_scope.cancel()


async def _gives_its_slot_back(bulkhead: Bulkhead) -> None:
    with anyio.fail_after(5):
        while bulkhead.in_use():  # noqa: ASYNC110 - a thread's end has no event here
            await anyio.sleep(0.005)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_cancelled_caller_leaves_and_the_permit_stays_with_the_thread(anyio_backend: str) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    pipeline = Pipeline([bulkhead], max_threads=1)
    go_on, begun = threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        go_on.wait(5)

    await _leave(pipeline, stuck, begun)
    assert bulkhead.in_use() == 1
    go_on.set()
    await _gives_its_slot_back(bulkhead)
    with anyio.fail_after(5):
        assert await pipeline.run(lambda: "again") == "again"


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_function_that_was_left_ends_although_it_calls_another(anyio_backend: str) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    outer, inner = Pipeline([bulkhead]), Pipeline([])
    go_on, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(5)
        anyio.from_thread.run(inner.run, str)

    await _leave(outer, work, begun)
    assert bulkhead.in_use() == 1
    go_on.set()
    await _gives_its_slot_back(bulkhead)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_so_does_one_whose_own_call_goes_on_in_the_moment_when_it_is_left(anyio_backend: str) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    outer, inner = Pipeline([bulkhead]), Pipeline([])
    begun, go_on, lock = anyio.Event(), anyio.Event(), anyio.Lock()

    async def answer() -> None:
        begun.set()
        await go_on.wait()
        async with lock:  # asks whether it is cancelled
            pass

    def work() -> None:
        anyio.from_thread.run(inner.run, answer)

    async with anyio.create_task_group() as group:
        group.start_soon(outer.run, work)
        await begun.wait()
        go_on.set()
        group.cancel_scope.cancel()
    await _gives_its_slot_back(bulkhead)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_a_function_that_was_left_gives_the_event_loop_itself_runs_on(anyio_backend: str) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    outer, inner = Pipeline([bulkhead]), Pipeline([])
    loop = asyncio.get_running_loop()
    go_on, begun = threading.Event(), threading.Event()
    answers: list[object] = []

    def work() -> None:
        begun.set()
        go_on.wait(5)
        answers.append(asyncio.run_coroutine_threadsafe(inner.run(str), loop).result(5))

    await _leave(outer, work, begun)
    go_on.set()
    await _gives_its_slot_back(bulkhead)
    assert answers == [""]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_caller_cancelled_before_the_thread_begins_holds_nothing(anyio_backend: str) -> None:
    bulkhead = Bulkhead(max_concurrent=2)
    pipeline = Pipeline([bulkhead], max_threads=1)
    go_on, begun = threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        go_on.wait(5)

    never: list[int] = []
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.run, stuck)
        await anyio.to_thread.run_sync(begun.wait, 5)
        with anyio.move_on_after(0.02):
            await pipeline.run(never.append, 1)
        assert bulkhead.in_use() == 1
        go_on.set()
    assert bulkhead.in_use() == 0
    assert never == []


def _nested(pipeline: Pipeline, depth: int) -> int:
    """Call itself through the pipeline, from the thread it is on."""
    if not depth:
        return 0

    async def inner() -> int:
        return await pipeline.run(_nested, pipeline, depth - 1)

    return 1 + anyio.from_thread.run(inner)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("max_threads", [1, 2])
async def test_functions_that_call_each_other_do_not_wait_for_their_own_threads(
    anyio_backend: str, max_threads: int
) -> None:
    pipeline = Pipeline(max_threads=max_threads)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(pipeline.run, _nested, pipeline, 3)
        assert await pipeline.run(_nested, pipeline, 2) == 2


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_one_at_a_time_runs_beside_the_function_that_waits_for_it(anyio_backend: str) -> None:
    pipeline = Pipeline(max_threads=1)
    running, most = [0], [0]
    lock = threading.Lock()

    def leaf() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.002)
        with lock:
            running[0] -= 1

    async def many() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(pipeline.run, leaf)

    def outer() -> None:
        anyio.from_thread.run(many)

    with anyio.fail_after(60):
        await pipeline.run(outer)
        assert most == [1]
        await pipeline.run(leaf)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_nested_call_that_is_cancelled_leaves_its_thread_to_the_next(anyio_backend: str) -> None:
    pipeline = Pipeline(max_threads=1)
    go_on, begun = threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        go_on.wait(5)

    async def give_up() -> str:
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run, stuck)
            await anyio.to_thread.run_sync(begun.wait, 5)
            group.start_soon(pipeline.run, stuck)  # waits for the one before
            await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        go_on.set()
        return await pipeline.run(lambda: "next")

    def outer() -> str:
        return anyio.from_thread.run(give_up)

    with anyio.fail_after(10):
        assert await pipeline.run(outer) == "next"
        assert await pipeline.run(lambda: "after") == "after"


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("rings", [2, 3])
async def test_functions_of_several_pipelines_that_call_each_other_do_not_wait_in_a_ring(
    anyio_backend: str, rings: int
) -> None:
    pipelines = [Pipeline(max_threads=2) for _ in range(rings)]
    all_taken = threading.Barrier(2 * rings)

    def leaf() -> int:
        return 1

    def outer(after: Pipeline) -> int:
        all_taken.wait(60)

        async def inner() -> int:
            return await after.run(leaf)

        return anyio.from_thread.run(inner)

    results: list[int] = []

    async def call(at: int) -> None:
        results.append(await pipelines[at].run(outer, pipelines[(at + 1) % rings]))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for at in range(rings):
                group.start_soon(call, at)
                group.start_soon(call, at)
        assert results == [1] * 2 * rings
        assert [await pipeline.run(leaf) for pipeline in pipelines] == [1] * rings


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_nor_do_trees_of_them_that_branch_out(anyio_backend: str) -> None:
    pipelines = [Pipeline(max_threads=1) for _ in range(3)]
    leaves: list[int] = []

    def tree(depth: int) -> None:
        if not depth:
            leaves.append(depth)
            return

        async def branches() -> None:
            async with anyio.create_task_group() as group:
                for pipeline in pipelines:
                    group.start_soon(pipeline.run, tree, depth - 1)

        anyio.from_thread.run(branches)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for pipeline in pipelines:
                group.start_soon(pipeline.run, tree, 3)
    assert len(leaves) == 3**4


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_who_waits_for_another_pipelines_thread_that_works_waits_its_turn(anyio_backend: str) -> None:
    engine, door = Pipeline(max_threads=1), Pipeline(max_threads=8)
    running, most = [0], [0]

    def generate() -> None:  # on one thread at a time
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.002)
        running[0] -= 1

    def handle() -> None:
        anyio.from_thread.run(engine.run, generate)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(door.run, handle)
    assert most == [1]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_deadline_ends_the_wait_for_a_thread(anyio_backend: str) -> None:
    pipeline = Pipeline(max_threads=1)
    go_on, begun = threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        go_on.wait(60)

    never: list[int] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run, stuck)
            await anyio.to_thread.run_sync(begun.wait, 60)
            with ambient(timeout=0.02), pytest.raises(DeadlineExceededError):
                await pipeline.run(never.append, 1)
            go_on.set()
        assert await pipeline.run(lambda: "again") == "again"
    assert never == []


async def test_an_inherited_deadline_holds_without_a_policy() -> None:
    started = anyio.current_time()
    with ambient(timeout=0.5), pytest.raises(DeadlineExceededError, match="inherited"):
        await Pipeline().run(add, 1)
    assert anyio.current_time() - started == pytest.approx(0.5)


async def test_generators_are_refused_with_a_reason() -> None:
    async def stream() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="is a generator: a call ends when its function returns"):
        await Pipeline().run(stream)


async def _stream() -> AsyncIterator[int]:
    yield 1


class _Streams:
    """Stands for a function, and streams when it is called as one."""

    def __call__(self) -> Iterator[int]:
        yield 1


class _StreamsAsync:
    async def __call__(self) -> AsyncIterator[int]:
        yield 1


async def _gives_a_stream() -> Iterator[int]:
    return (number for number in range(3))


@pytest.mark.parametrize(
    "wrong",
    [
        _Streams(),
        _StreamsAsync(),
        _Streams().__call__,
        functools.partial(_Streams()),
        functools.partial(functools.partial(_stream)),
        MethodType(functools.partial(_stream), object()),
    ],
)
async def test_so_are_objects_that_are_called_as_generators(wrong: Any) -> None:
    with pytest.raises(TypeError, match="is a generator: a call ends when its function returns"):
        await Pipeline().run(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: (number for number in range(3)),
        lambda: _stream(),  # noqa: PLW0108 - it is no generator itself
        functools.lru_cache(_stream),
        functools.partial(lambda start: (number for number in range(start, 3)), 1),
        _gives_a_stream,
    ],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_so_are_generators_that_a_function_gives(wrong: Any, anyio_backend: str) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    with pytest.raises(
        TypeError, match=r"gave <(async_)?generator .*: a call ends when its function returns"
    ):
        await Pipeline([Retry(backoff=FIXED), bulkhead]).run(wrong)
    assert bulkhead.in_use() == 0


async def test_a_class_is_called_as_one_whatever_its_objects_do() -> None:
    assert type(await Pipeline().run(_Streams)) is _Streams
    assert type(await Pipeline().run(_StreamsAsync)) is _StreamsAsync


class _Engine:
    @functools.lru_cache(maxsize=4)  # noqa: B019 - as people do
    def count_tokens(self, text: str) -> int:
        return len(text.split())

    @functools.cache  # noqa: B019 - as people do
    def version(self) -> str:
        return "1"

    async def __call__(self, text: str = "") -> str:
        return text.upper()


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_methods_that_are_no_functions_run_by_their_own_names(anyio_backend: str) -> None:
    breaker = CircuitBreaker()
    pipeline = Pipeline([breaker])
    engine = _Engine()
    for _ in range(2):
        assert await pipeline.run(engine.count_tokens, "one two") == 2
        assert await pipeline(engine.version)() == "1"
    assert await pipeline.run(MethodType(engine, "bound")) == "BOUND"
    assert await pipeline.run(MethodType(functools.partial(engine.__call__), "bound")) == "BOUND"
    assert await pipeline.run(MethodType(len, "abc")) == 3
    assert set(breaker.states()) == {
        "_Engine.count_tokens",
        "_Engine.version",
        "_Engine",
        "_Engine.__call__",
        "len",
    }


@pytest.mark.parametrize("wrong", [_stream, None, 5])
async def test_a_decorator_refuses_what_could_not_be_run(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is a generator|is no function"):
        Pipeline()(wrong)


async def test_max_threads_must_make_sense() -> None:
    with pytest.raises(ConfigurationError, match="max_threads=0"):
        Pipeline(max_threads=0)


def test_what_exceptions_of_common_libraries_mean() -> None:
    throttled = classify_error(ThrottlingError())
    assert throttled is not None
    assert throttled.verdict is Verdict.THROTTLED
    refused = classify_error(httpx.ConnectError("no"))
    assert refused is not None
    assert (refused.verdict, refused.ambiguous) == (Verdict.FAILURE, False)
    response = httpx.Response(429, headers={"retry-after": "3"}, request=httpx.Request("GET", "http://x"))
    status = classify_error(httpx.HTTPStatusError("429", request=response.request, response=response))
    assert status is not None
    assert (status.verdict, status.retry_after) == (Verdict.THROTTLED, 3.0)
    assert classify_error(ValueError("bug")) is None


async def test_functions_of_one_decorator_are_each_a_target() -> None:
    def traced(function: Callable[[], Awaitable[str]]) -> Callable[[], Awaitable[str]]:
        @functools.wraps(function)
        async def inner() -> str:
            return await function()

        return inner

    @traced
    async def ask_one() -> str:
        raise ConnectionResetError

    @traced
    async def ask_other() -> str:
        return "hello"

    breaker = CircuitBreaker(consecutive_failures=1)
    pipeline = Pipeline([breaker])
    with pytest.raises(ConnectionResetError):
        await pipeline.run(ask_one)
    assert await pipeline.run(ask_other) == "hello"
    states = {str(key).rpartition(".")[2]: state for key, state in breaker.states().items()}
    assert states == {"ask_one": CircuitState.OPEN, "ask_other": CircuitState.CLOSED}


async def test_so_are_functions_that_were_only_given_a_name() -> None:
    def make(name: str) -> Callable[[], Awaitable[str]]:
        async def call() -> str:
            return name

        call.__name__ = name
        return call

    breaker = CircuitBreaker()
    pipeline = Pipeline([breaker])
    for name in ("chat", "embed"):
        assert await pipeline.run(make(name)) == name
    assert set(breaker.states()) == {"chat", "embed"}


def _client_method(name: str) -> Callable[..., str]:
    def _api_call(_self: object) -> str:
        return name

    _api_call.__name__ = name
    return _api_call


async def test_methods_that_were_given_a_name_go_by_it_as_those_of_botos_clients() -> None:
    one, other = (type(name, (), {"converse": _client_method("converse")}) for name in ("Bedrock", "Queue"))
    breaker = CircuitBreaker()
    pipeline = Pipeline([breaker])
    for client in (one(), other(), one()):
        assert await pipeline.run(client.converse) == "converse"
    assert set(breaker.states()) == {"Bedrock.converse", "Queue.converse"}


async def test_what_is_no_function_is_refused_with_what_to_do() -> None:
    for wrong in (add(1), None, "add"):
        with pytest.raises(TypeError, match=r"give run\(\) the function itself"):
            await Pipeline().run(wrong)  # type: ignore[call-overload]


@pytest.mark.parametrize("wrong", [lambda _: True, lambda _: 1 / 0])
async def test_a_function_that_judges_and_fails_breaks_no_call(
    wrong: Callable[[object], Any], caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline([Retry(backoff=FIXED)], classify_error=wrong, classify_result=wrong)
    times: list[float] = []

    async def at_last() -> str:
        times.append(anyio.current_time())
        if len(times) < 2:
            raise ConnectionResetError
        return "hello"

    assert await pipeline.run(at_last) == "hello"  # after what the library knows of errors itself
    assert len(times) == 2
    assert {record.getMessage().partition("=")[0] for record in caplog.records} == {
        "classify_error",
        "classify_result",
    }
    assert await Pipeline(classify_result=lambda _: None).run(add, 1) == 1


@pytest.mark.parametrize("policies", [[], [Retry(max_attempts=2, backoff=FIXED)]], ids=["bare", "retried"])
async def test_what_a_failed_call_was_given_is_let_go_of_with_its_exception(policies: list[Retry]) -> None:
    class Document:
        """What may be large."""

    async def ask(_document: Document) -> None:
        raise ConnectionResetError

    async def fail() -> weakref.ref[Document]:
        document = Document()
        with pytest.raises(ConnectionResetError):
            await Pipeline(policies).run(ask, document)
        return weakref.ref(document)

    gc.disable()
    try:
        assert (await fail())() is None
    finally:
        gc.enable()
