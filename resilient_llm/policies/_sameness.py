"""Which calls may have one reply between them, and which of those ask the same.

How a request is compared is `core.request_key`'s, and what comes of it the policies'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeAlias

from resilient_llm._options import flag, function, names
from resilient_llm.core.determinism import has_one_answer
from resilient_llm.core.request_key import request_key
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies._hooks import hook_failed

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.ordering import Door

__all__ = ["Sameness", "When", "deterministic", "refuse_functions"]

When: TypeAlias = "Callable[[Call], bool]"
"""Says of a call whether all that ask the same may have the same answer."""


def deterministic(call: Call) -> bool:
    """Tell whether a call is expected to have the same answer every time; see `docs/coalesce.md`."""
    return call.profile.repeat_safe and has_one_answer(call.operation, call.request.json)


class Sameness:
    """Give calls that may have the same reply the same key.

    Raises `ConfigurationError` for options of the policies that are none.
    """

    def __init__(
        self,
        when: When | None,
        *,
        share: bool,
        ignore_fields: Collection[str],
        ignore_headers: Collection[str],
    ) -> None:
        function(when=when, none=True)
        flag(share=share)
        names(ignore_fields=ignore_fields, ignore_headers=ignore_headers)
        self._when = deterministic if when is None else when
        self._share = share
        self._fields = frozenset(ignore_fields)
        self._headers = frozenset(name.lower().encode() for name in ignore_headers)

    def key(self, call: Call) -> str | None:
        """Give the key of a call that may have the reply of another; `None` for one that may not, or does not want."""
        request = call.request
        if request.body is None or call.work is not None:
            return None
        wish = (request.header(b"cache-control") or b"").lower()
        if b"no-store" in wish or b"no-cache" in wish:
            return None
        try:
            if not self._when(call):
                return None
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
            hook_failed("when", self._when, error, instead="the call goes on by itself")
            return None
        return request_key(
            request.method,
            request.url,
            request.headers,
            request.body,
            tenant=call.tenant,
            share=self._share,
            ignored_fields=self._fields,
            ignored_headers=self._headers,
        )


def refuse_functions(name: str, door: Door) -> None:
    """Raise `ConfigurationError` at the door of functions, whose arguments nobody can compare."""
    if door == "callable":
        msg = f"{name} compares requests, and a function has none; put it on the transport of your LLM client"
        raise ConfigurationError(msg)
