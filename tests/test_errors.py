"""The errors as objects: they survive a pickle and a copy, since process pools and task queues send them on."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any

import anyio
import pytest

import resilient_llm
from resilient_llm import Outcome, Pipeline, RateLimit, RateLimitedError, Verdict
from resilient_llm.core.budget import BudgetLevel
from resilient_llm.core.quota import LimitLevel
from resilient_llm.errors import AttemptError, BudgetExceededError, ResilientLLMError
from resilient_llm.message import Reply
from resilient_llm.sidecar.problems import Problem
from resilient_llm.streams import BufferedStream

_LEVEL = LimitLevel(scope="tenant", dimension="requests", limit=60.0, remaining=0.0, reset=60.0, window=60.0)
_GIVEN: dict[str, object] = {
    "cost": 7.0,
    "file": "gateway.toml",
    "in_flight": True,
    "level": _LEVEL,
    "levels": (_LEVEL, _LEVEL),
    "lines": {("targets", 0): 4},
    "message": "no room: 0 of 60 remain",
    "name": "rate_limit",
    "outcome": Outcome(verdict=Verdict.FAILURE, error_type="overloaded", status=529, retry_after=2.0),
    "problems": [Problem(("targets", 0), "has no url")],
    "rejected": ("a:circuit_open", "b:cooling"),
    "reply": None,
    "retry_after": 1.5,
    "unsuitable": True,
}
"""By their names, what constructors of errors ask for: a new one that asks for something else says so here."""


def _through_pickle(protocol: int) -> Callable[[Any], Any]:
    return lambda error: pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own


COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy} | {
    f"pickle {protocol}": _through_pickle(protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
}


def _modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(resilient_llm.__path__, "resilient_llm."):
        if not module.name.endswith("__main__"):
            yield module.name


def _kinds() -> list[type[ResilientLLMError]]:
    """Find every error of the package, whatever part of it may define one."""
    for module in _modules():
        with suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(module)
    found, left = {ResilientLLMError}, [ResilientLLMError]
    while left:
        for kind in left.pop().__subclasses__():
            if kind.__module__.startswith("resilient_llm.") and kind not in found:
                found.add(kind)
                left.append(kind)
    return sorted(found, key=lambda kind: kind.__qualname__)


def _made(kind: type[ResilientLLMError]) -> ResilientLLMError:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.append("out of time")
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = _GIVEN[name]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            positional.append(_GIVEN[name])
    return kind(*positional, **named)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("kind", _kinds())
def test_a_copy_of_an_error_is_of_its_kind_and_says_the_same(
    kind: type[ResilientLLMError], copied: str
) -> None:
    error = _made(kind)
    error.add_note("while it was tested")
    again = COPIES[copied](error)
    assert type(again) is kind
    assert again is not error
    assert (str(again), again.args) == (str(error), error.args)
    assert vars(again) == vars(error)
    for name, member in inspect.getmembers(kind, lambda member: isinstance(member, property)):
        assert getattr(again, name) == member.fget(error)


def test_all_errors_that_are_told_of_were_found() -> None:
    assert {kind.__name__ for kind in _kinds()} >= {
        *resilient_llm.errors.__all__,
        "DrainingError",
        "ConfigError",
    }


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_keeps_what_was_set_later(copied: str) -> None:
    error = BudgetExceededError("spent", retry_after=60)
    error.level = BudgetLevel("daily usd", 10.0, 10.0, 0.0, 0.0, 60.0)
    assert COPIES[copied](error).level == error.level


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_a_failed_attempt_leaves_its_reply_behind(copied: str) -> None:
    outcome = Outcome(
        verdict=Verdict.THROTTLED, error_type="rate_limit_exceeded", status=429, retry_after=2.0
    )
    error = AttemptError(outcome, reply=Reply(429, [], BufferedStream([b"{}"]), native=open))
    again = COPIES[copied](error)
    assert (again.outcome, again.reply, str(again)) == (outcome, None, "rate_limit_exceeded")
    assert error.reply is not None


async def _nothing() -> None: ...


def _refused() -> None:
    """Run into a limit, in a worker process."""

    async def twice() -> None:
        pipeline = Pipeline([RateLimit(requests_per_minute=1, max_wait=0)])
        await pipeline.run(_nothing)
        await pipeline.run(_nothing)

    anyio.run(twice)


@pytest.mark.realtime
def test_a_refusal_in_a_worker_of_a_process_pool_comes_out_of_it() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(RateLimitedError, match="of 1 requests of tenant remain") as raised:
            pool.submit(_refused).result(60)
        assert raised.value.limit == "requests of tenant"
        assert pool.submit(len, "abc").result(60) == 3
