"""Several synthetic upstreams behind one neutral transport, and the log of what they saw."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

from resilient_llm._loop import EventLoop
from resilient_llm._options import instance_of, label, seconds
from resilient_llm.errors import ConfigurationError
from resilient_llm.lab.conditions import check_seed
from resilient_llm.lab.exchange import Exchange
from resilient_llm.lab.serving import Serving
from resilient_llm.lab.upstream import Upstream
from resilient_llm.lab.wording import DIALECTS, Asked, error_body
from resilient_llm.message import Reply, Request
from resilient_llm.streams import BufferedStream

__all__ = ["URL", "Network"]

URL: Final = "https://upstream.test/v1"
"""Where the upstream is that stands for all, and where requests of the lab go unless told otherwise."""


class Network:
    """Answer requests from synthetic upstreams, by the URL under which each stands.

    `upstreams` has an `Upstream` for each base URL, or one for each model there; a single one stands at `URL`. It is a
    neutral transport (`await network(request)`) for a `ClientDoor`; `POST .../chat/completions` (OpenAI's API) and
    `.../messages` (Anthropic's) are answered, streamed or not. A base URL that nothing stands at is a mistake, and
    ends the simulation; an unknown model is a 404.

    `read_timeout` is how long a client's HTTP library waits for a byte, in seconds, before it gives up; the SDKs'
    default is 600.

    A simulation begins with `begin`; without it the first request begins one. Use it in one simulation at a time.
    """

    def __init__(
        self,
        upstreams: Upstream | Mapping[str, Upstream | Mapping[str, Upstream]],
        *,
        read_timeout: float = 600.0,
    ) -> None:
        seconds(read_timeout=read_timeout, infinite=True)
        by_url = {URL: upstreams} if isinstance(upstreams, Upstream) else upstreams
        _check(by_url)
        self.upstreams: dict[str, Upstream] = {}
        """The upstreams by name: the URL without its scheme and version, and the model where each has its own."""
        self._names: dict[str, str | dict[str, str]] = {}
        for url, behind in by_url.items():
            base = url.rstrip("/")
            if isinstance(behind, Upstream):
                self._names[base] = self._add(base, None, behind)
            else:
                self._names[base] = {model: self._add(base, model, one) for model, one in behind.items()}
        self.log: list[Exchange] = []
        self._read_timeout = read_timeout
        self._serving: dict[str, Serving] = {}

    def _add(self, url: str, model: str | None, upstream: Upstream) -> str:
        name = url.partition("://")[2].removesuffix("/v1") or url
        if model is not None:
            name = f"{name}/{model}"
        if name in self.upstreams:
            raise ConfigurationError(f"upstreams: two of them would be called {name!r}")
        self.upstreams[name] = upstream
        return name

    @property
    def serving(self) -> Mapping[str, Serving]:
        """Give the upstreams at work, by name."""
        return self._serving

    def begin(self, seed: int | str = 0) -> None:
        """Begin a new simulation now: nothing is in flight, nothing used up, the log empty.

        The same seed brings the same chances to the same requests.
        """
        check_seed(seed)
        clock = EventLoop.current().time
        self.log = []
        self._serving = {
            name: Serving(
                upstream,
                rng=Random(f"{seed} {name}"),
                clock=clock,
                read_timeout=self._read_timeout,
            )
            for name, upstream in self.upstreams.items()
        }

    async def __call__(self, request: Request) -> Reply:
        """Answer a request.

        Raises httpx's exceptions where its connection fails, and `ConfigurationError`, which ends the simulation, for a
        URL that nothing stands at.
        """
        if not self._serving:
            self.begin()
        url = request.url.partition("?")[0]
        path = next((path for path in DIALECTS if url.endswith(path)), None)
        if path is None:
            raise ConfigurationError(f"the lab answers {' and '.join(DIALECTS)}, not {request.method} {url}")
        dialect = DIALECTS[path]
        name = self._names.get(url.removesuffix(path))
        if name is None:
            raise ConfigurationError(
                f"nothing is at {url.removesuffix(path)}, where a request goes; "
                f"upstreams are at {', '.join(self._names)}. "
                "Without a Router, whose targets have these URLs, give the traffic its url"
            )
        asked = Asked.of(request, dialect)
        if not isinstance(name, str):
            if asked.model not in name:
                body = error_body(dialect, 404)
                headers = [(b"content-type", b"application/json")]
                return Reply(404, headers, BufferedStream([body]), native=request, complete=True)
            name = name[asked.model]
        serving = self._serving[name]
        exchange = Exchange(
            call=request.template,
            upstream=name,
            model=asked.model,
            key=asked.key,
            arrived=serving.now(),
        )
        self.log.append(exchange)
        return await serving.answer(asked, exchange)


def _check(upstreams: object) -> None:
    if not isinstance(upstreams, Mapping) or not upstreams:
        raise ConfigurationError(
            f"upstreams={upstreams!r}: allowed are an Upstream, and mappings of base URLs to these"
        )
    for url, behind in upstreams.items():
        label(upstreams=url)
        if isinstance(behind, Mapping) and behind:
            for model, one in behind.items():
                label(**{f"upstreams[{url!r}]": model})
                instance_of(Upstream, none=False, **{f"upstreams[{url!r}][{model!r}]": one})
        elif not isinstance(behind, Upstream):
            raise ConfigurationError(
                f"upstreams[{url!r}]={behind!r}: allowed are an Upstream, and mappings of models to these"
            )
