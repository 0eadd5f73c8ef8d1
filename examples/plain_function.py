"""Policies around any function: an asynchronous one that is retried, and a synchronous one on a thread.

Prints:
    the answer to life, at the third attempt
    the embedding of 3 texts, made on a thread
    the engine is busy
    circuit open: come back in 15 s
"""

import asyncio
import itertools
import threading

from resilient_llm import Backoff, CircuitBreaker, CircuitOpenError, Outcome, Pipeline, Retry, Verdict


class EngineBusyError(Exception):
    """What a client library raises."""


def what_it_means(error: Exception) -> Outcome | None:
    """Tell the policies what an exception means; `None` lets it pass as it is."""
    busy = Outcome(verdict=Verdict.FAILURE, error_type="engine_busy", retryable=True)
    return busy if isinstance(error, EngineBusyError) else None


pipeline = Pipeline(
    [Retry(backoff=Backoff(initial=0.05)), CircuitBreaker(consecutive_failures=3)],
    classify_error=what_it_means,
)
attempts = itertools.count(1)


async def generate(prompt: str) -> str:
    if next(attempts) != 3:
        raise EngineBusyError
    return f"the answer to {prompt}, at the third attempt"


@pipeline
def embed(texts: list[str]) -> str:
    where = "the event loop" if threading.current_thread() is threading.main_thread() else "a thread"
    return f"the embedding of {len(texts)} texts, made on {where}"


async def main() -> None:
    print(await pipeline.run(generate, "life"))
    print(await embed(["a", "b", "c"]))
    for _ in range(2):
        try:
            await pipeline.run(generate, "everything")
        except EngineBusyError:  # the function's own exception, once the attempts are used up
            print("the engine is busy")
        except CircuitOpenError as refused:
            print(f"circuit open: come back in {refused.retry_after:.0f} s")


if __name__ == "__main__":
    asyncio.run(main())
