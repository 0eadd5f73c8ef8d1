"""Make a prompt fit the context window of its model, before anything is sent.

Which messages may go is `core.context_fit`'s to decide. Nothing is summarised in here, and no request is changed
whose prompt fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from anyio import to_thread

from resilient_llm._options import at_least, instance_of, label, names, number, synchronous, takes
from resilient_llm.core.context_fit import Message, trim
from resilient_llm.core.json_splice import without_elements
from resilient_llm.errors import ConfigurationError, ContextWindowError
from resilient_llm.ordering import Placement
from resilient_llm.policies import _conversation
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.policies._known_models import refuse_unknown
from resilient_llm.policies.tokens import TokenEstimate, forget_estimates, has_output, output_limit
from resilient_llm.telemetry import names as telemetry_names

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import JSONObject, Reply, Request

__all__ = ["ContextFit", "OnOverflow", "Window"]

OnOverflow: TypeAlias = Literal["trim", "move", "refuse"]
"""What becomes of a call whose prompt does not fit."""


class KnowsWindows(Protocol):
    """Say how large the context windows of models are, as a `Router` can."""

    def context_window(self, model: str | None) -> int | None:
        """Give the tokens that the window of a model has; `None` when that is not known."""
        ...


Window: TypeAlias = int | Mapping[str, int] | KnowsWindows | Callable[["Call"], int | None]
"""How many tokens a context window has: of every model, of models by name, or as a router or a function says."""

_SURELY = 0.8
"""A prompt whose first, rough estimate is within this share of the room for it is not measured any closer."""
_MUCH = 64 * 1024
"""Bytes of a body that are not encoded on the event loop."""


class _Measured(NamedTuple):
    """A prompt, measured message by message; `place` is the member of the body that has these, if any does."""

    tokens: int
    place: str
    messages: Sequence[Message]


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextFit:
    """Make sure that prompt and answer fit the `window`, in tokens, of the model a call goes to.

    `on_overflow` says what becomes of one that does not, or several things of which the first that helps is done:
    `"trim"` takes the oldest exchanges out of the conversation, whole ones, and never instructions or what was said
    last; `"move"` sends the call to the first of the `larger` models that has the room. Where nothing helps, and
    with `"refuse"`, the call is refused. The answer needs what the request sets as its most, and `output_tokens`
    where it sets nothing. Trimming goes in steps of `granularity_ratio` of the window, so that a growing
    conversation begins with the same message for a while, which a provider's prompt cache needs.

    A model whose window nobody knows is left alone, and so is what a provider trims by itself (`truncation=auto`).
    Raises `ContextWindowError`.
    """

    window: Window
    on_overflow: OnOverflow | tuple[OnOverflow, ...] = "trim"
    larger: Sequence[str] = ()
    output_tokens: int = 1_000
    granularity_ratio: float = 0.1
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    name: str = "context_fit"
    placement: ClassVar[Placement] = Placement.CONTEXT
    _actions: tuple[OnOverflow, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        at_least(0, output_tokens=self.output_tokens)
        number(0, 1, granularity_ratio=self.granularity_ratio)
        label(name=self.name)
        instance_of(TokenEstimate, estimate=self.estimate)
        actions = self.on_overflow if isinstance(self.on_overflow, tuple) else (self.on_overflow,)
        if not actions or any(action not in ("trim", "move", "refuse") for action in actions):
            raise ConfigurationError(
                f"on_overflow={self.on_overflow!r}: allowed are 'trim', 'move', 'refuse', or a tuple of these"
            )
        object.__setattr__(self, "_actions", actions)
        self._check_windows()

    def _check_windows(self) -> None:
        names(larger=self.larger)
        if ("move" in self._actions) != bool(self.larger):
            raise ConfigurationError(
                f"larger={self.larger!r}: on_overflow='move' needs models to move to, and nothing else does"
            )
        if isinstance(self.window, Mapping):
            if not self.window:
                raise ConfigurationError("window={}: allowed are mappings with at least one model")
            names(window=list(self.window))
            for model, window in self.window.items():
                at_least(1, **{f"window[{model!r}]": window})
            if unknown := [model for model in self.larger if model not in self.window]:
                raise ConfigurationError(
                    f"larger={self.larger!r}: window= does not say how large {unknown} are"
                )
        elif isinstance(self.window, int):
            at_least(1, window=self.window)
            if self.larger:
                raise ConfigurationError(
                    f"window={self.window!r}: to move, give the window of each model by name"
                )
        elif isinstance(self.window, type) or not (
            callable(self.window) or hasattr(self.window, "context_window")
        ):
            raise ConfigurationError(
                f"window={self.window!r}: allowed are whole numbers from 1, mappings, routers and functions of a call"
            )
        elif not hasattr(self.window, "context_window"):
            synchronous(window=self.window)
            takes(1, window=self.window)

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` for a larger model that the router further in does not know."""
        refuse_unknown(policies[policies.index(self) + 1 :], larger=self.larger)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Make the call fit, and await the rest of the pipeline."""
        body = call.request.json
        if body and has_output(call) and body.get("truncation") != "auto":
            window = self._window(call)
            if window is not None:
                await self._fit(call, body, window)
        return await call_next(call)

    def _window(self, call: Call) -> int | None:
        windows = self.window
        if isinstance(windows, int):
            return windows
        model = call.logical_model or call.profile.model
        if isinstance(windows, Mapping):
            return windows.get(model or "")
        try:
            window = windows.context_window(model) if hasattr(windows, "context_window") else windows(call)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
            hook_failed("window", windows, error)
            return None
        if window is None or (isinstance(window, int) and not isinstance(window, bool) and window > 0):
            return window
        hook_gave("window", windows, window, "whole numbers from 1, and None")
        return None

    async def _fit(self, call: Call, body: JSONObject, window: int) -> None:
        since = call.loop.time()
        answer = output_limit(body, self.output_tokens)
        if self.estimate.of(body) <= _SURELY * (window - answer):
            return
        if self.estimate.encoding is not None and len(call.request.body or b"") > _MUCH:
            measured = await to_thread.run_sync(self._measure, body)
        else:
            measured = self._measure(body)
        call.telemetry.step(call, "count_tokens", since=since)
        if measured.tokens + answer <= window:
            return
        for action in self._actions:
            if action == "trim" and self._trim(call, measured, window, answer):
                return
            if action == "move" and self._move(call, measured, answer):
                return
        error = self._refusal(call, measured, window, answer)
        call.telemetry.rejected(call, error)
        raise error

    def _measure(self, body: JSONObject) -> _Measured:
        found = _conversation.find(body)
        if found is None:
            return _Measured(self.estimate.of(body), "", ())
        place, said = found
        messages = [_conversation.describe(message, self.estimate.of({place: [message]})) for message in said]
        rest = self.estimate.of({name: value for name, value in body.items() if name != place})
        return _Measured(rest + sum(message.tokens for message in messages), place, messages)

    def _trim(self, call: Call, measured: _Measured, window: int, answer: int) -> bool:
        """Take messages out of the conversation; `False`, and nothing, where that is not enough or not possible."""
        excess = measured.tokens + answer - window
        removed = trim(measured.messages, excess=excess, granularity=int(self.granularity_ratio * window))
        tokens = sum(measured.messages[index].tokens for index in removed)
        if tokens < excess or _is_signed(call.request):
            return False
        try:
            body = without_elements(call.request.body or b"", measured.place, removed)
        except ValueError:
            return False
        call.request = call.request.with_body(body)
        forget_estimates(call)
        call.telemetry.event(
            call,
            telemetry_names.CONTEXT_TRIMMED,
            {
                telemetry_names.CONTEXT_WINDOW: window,
                telemetry_names.CONTEXT_TOKENS: measured.tokens,
                telemetry_names.CONTEXT_REMOVED_TOKENS: tokens,
                telemetry_names.CONTEXT_REMOVED_MESSAGES: len(removed),
            },
        )
        return True

    def _move(self, call: Call, measured: _Measured, answer: int) -> bool:
        """Choose a model with a larger window; `False`, and nothing, where none is large enough."""
        before = call.logical_model
        for model in self.larger:
            call.logical_model = model
            window = self._window(call)
            if window is not None and measured.tokens + answer <= window:
                attributes: Mapping[str, str | int] = {
                    telemetry_names.ROUTE_FROM: before or call.profile.model or "",
                    telemetry_names.ROUTE_SELECTED: model,
                    telemetry_names.CONTEXT_WINDOW: window,
                    telemetry_names.CONTEXT_TOKENS: measured.tokens,
                }
                call.telemetry.event(call, telemetry_names.CONTEXT_MOVED, attributes)
                return True
        call.logical_model = before
        return False

    def _refusal(self, call: Call, measured: _Measured, window: int, answer: int) -> ContextWindowError:
        model = call.logical_model or call.profile.model or "its model"
        tried = {"trim": "trimming", "move": f"any of {', '.join(self.larger)}"}
        helped = " or ".join(tried[action] for action in self._actions if action in tried)
        return ContextWindowError(
            f"the prompt has about {measured.tokens} tokens and the answer may have {answer}, together more than the "
            f"{window} of {model}'s context window{f', and {helped} does not help' if helped else ''}: shorten the "
            "prompt, ask for a shorter answer, or use a model with a larger window",
            name=self.name,
        )


def _is_signed(request: Request) -> bool:
    """Tell whether a request carries a signature of its body (AWS's SigV4), so that it cannot be changed."""
    return (request.header(b"authorization") or b"").startswith(b"AWS4-")
