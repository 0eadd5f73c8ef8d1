import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.testing import VirtualClockEventLoop, run_virtual


def test_time_starts_at_zero_and_jumps_to_each_timer() -> None:
    async def main() -> list[float]:
        times = [anyio.current_time()]
        await anyio.sleep(0.1)
        times.append(anyio.current_time())
        await anyio.sleep(365 * 24 * 3600)
        times.append(anyio.current_time())
        return times

    started = time.monotonic()
    assert run_virtual(main) == [0.0, 0.1, 0.1 + 365 * 24 * 3600]
    assert time.monotonic() - started < 60


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=20))
def test_sleepers_wake_in_order_and_never_early(delays: list[float]) -> None:
    woken: list[tuple[float, float]] = []

    async def sleeper(delay: float) -> None:
        due = anyio.current_time() + delay
        await anyio.sleep(delay)
        woken.append((due, anyio.current_time()))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for delay in delays:
                group.start_soon(sleeper, delay)

    run_virtual(main)
    assert [now for _, now in woken] == sorted(now for _, now in woken)
    assert all(due <= now <= due + 1e-8 for due, now in woken)
    assert len(woken) == len(delays)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_run_virtual_passes_arguments_results_and_exceptions(backend: str) -> None:
    async def add(first: int, second: int) -> int:
        await anyio.sleep(3600)
        return first + second + int(anyio.current_time())

    async def fail() -> None:
        raise KeyError("x")

    which = "trio" if backend == "trio" else "asyncio"
    assert run_virtual(add, 1, 2, backend=which) == 3603  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        run_virtual(fail, backend=which)  # type: ignore[arg-type]


def test_options_are_validated() -> None:
    with pytest.raises(ValueError, match="backend must be 'asyncio' or 'trio', got 'curio'"):
        run_virtual(anyio.sleep, 1, backend="curio")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="patience must be >= 0"):
        VirtualClockEventLoop(patience=-1)


def test_it_is_a_loop_factory_of_asyncio() -> None:
    async def main() -> float:
        async with asyncio.timeout(100):
            await asyncio.sleep(99)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        assert runner.run(main()) == 99


def anyio_worker(work: Callable[[], None]) -> Callable[[], object]:
    return lambda: anyio.to_thread.run_sync(work, abandon_on_cancel=True)


def executor(work: Callable[[], None]) -> Callable[[], object]:
    return lambda: asyncio.get_running_loop().run_in_executor(None, work)


@pytest.mark.parametrize("kind", [anyio_worker, executor])
def test_time_does_not_run_away_from_a_working_thread(
    kind: Callable[[Callable[[], None]], Callable[[], asyncio.Future[None]]],
) -> None:
    async def main() -> list[float]:
        times = []
        with anyio.fail_after(30):  # reached at once if the clock jumped
            await kind(lambda: time.sleep(0.03))()
        times.append(anyio.current_time())
        with anyio.move_on_after(0.01):
            await kind(lambda: time.sleep(0.5))()
        times.append(anyio.current_time())
        return times

    # Work that ends before the next timer costs nothing; a timer that is due in the meantime fires.
    assert run_virtual(main) == [0.0, 0.01]


def test_the_clock_jumps_again_when_the_threads_are_idle() -> None:
    async def main() -> float:
        await anyio.to_thread.run_sync(lambda: None)
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        await anyio.sleep(80_000)
        return anyio.current_time()

    started = time.monotonic()
    assert run_virtual(main) == 80_000
    assert time.monotonic() - started < 60


def test_time_does_not_run_away_from_an_open_socket() -> None:
    async def main() -> tuple[bytes, float]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            writer = threading.Timer(0.03, theirs.send, [b"x"])
            writer.start()
            async with asyncio.timeout(30):
                data = await asyncio.get_running_loop().sock_recv(ours, 1)
            writer.join()
        return data, asyncio.get_running_loop().time()

    assert run_virtual(main) == (b"x", 0.0)


def test_another_thread_may_wake_a_loop_that_waits_for_nothing_else() -> None:
    async def main() -> float:
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Timer(0.03, loop.call_soon_threadsafe, [woken.set]).start()
        await woken.wait()
        return loop.time()

    assert run_virtual(main) == 0.0


async def wait_in_vain() -> None:
    await anyio.sleep(2)
    await anyio.Event().wait()


@pytest.mark.parametrize(
    ("hang", "name"), [(wait_in_vain, "wait_in_vain"), (anyio.sleep_forever, "sleep_forever")]
)
def test_a_deadlock_is_an_error_that_says_who_waits_where(
    hang: Callable[[], Coroutine[object, object, None]], name: str
) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(hang, name="the one that hangs")

    with (
        pytest.raises(RuntimeError, match=r"deadlock at \d s") as caught,
        asyncio.Runner(loop_factory=lambda: VirtualClockEventLoop(patience=0)) as runner,
    ):
        runner.run(main())
    message = str(caught.value)
    assert re.search(
        rf"\n  the one that hangs\n(    in .*\n)*    in {name} \(.*:\d+\)\n    in .*\n", message
    ), message
    assert re.search(r"\n  Task-\d+\n    in .*main \(.*test_virtual_loop.py:\d+\)\n", message), message


def test_sleeping_to_the_end_of_time_is_a_deadlock() -> None:
    with (
        pytest.raises(RuntimeError, match="deadlock at 0 s"),
        asyncio.Runner(loop_factory=lambda: VirtualClockEventLoop(patience=0)) as runner,
    ):
        runner.run(asyncio.sleep(float("inf")))


def test_living_threads_buy_patience_before_a_deadlock() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    started = time.monotonic()
    try:
        with (
            pytest.raises(RuntimeError, match="deadlock"),
            asyncio.Runner(loop_factory=lambda: VirtualClockEventLoop(patience=0.05)) as runner,
        ):
            runner.run(wait_in_vain())
    finally:
        stop.set()
        thread.join()
    assert time.monotonic() - started >= 0.05


def test_off_the_main_thread_silence_is_no_deadlock() -> None:
    woken = threading.Event()
    loops: list[VirtualClockEventLoop] = []

    async def main() -> None:
        event = asyncio.Event()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockEventLoop)
        loops.append(loop)
        loop.wake = event.set  # type: ignore[attr-defined]
        await event.wait()
        woken.set()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: VirtualClockEventLoop(patience=0)) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert not woken.wait(0.05)
    loops[0].call_soon_threadsafe(loops[0].wake)  # type: ignore[attr-defined]
    thread.join(60)
    assert woken.is_set()


def test_the_executors_threads_are_joined_in_real_time() -> None:
    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.03)

    run_virtual(main)  # a clock that ran away would warn that the threads did not finish in time
