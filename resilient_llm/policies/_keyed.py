"""State per key: one compartment, circuit or budget for each tenant, target or model.

Keeps it with its event loop and bounded, whatever keys callers invent. What the state is, and when
it is idle, its policy says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter
from types import CoroutineType
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from resilient_llm._loop import LoopBound
from resilient_llm._options import at_least, function
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.shared_keys import OVERFLOW, SHAREABLE, is_shareable
from resilient_llm.telemetry.names import LIMITER_NAME

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.outcome import Outcome

__all__ = [
    "MAX_REPORTED",
    "OVERFLOW",
    "Key",
    "Keyed",
    "is_of_target",
    "key_function",
    "named",
    "one_for_all",
    "series",
]

KeyName: TypeAlias = Literal["tenant", "target", "model"]
Key: TypeAlias = KeyName | tuple[KeyName, ...] | Callable[["Call"], Hashable]
"""What has a state of its own: an attribute of the call, several of them, or a function of it.

Calls whose key cannot be had, since the function fails or gives what is no key, share one, as those do for whom there
is no room: a call must not break of it, and must not go without a limit either. In a store a key is what every process
writes the same way (`shared_keys`).
"""

State = TypeVar("State")

MAX_REPORTED = 100
"""States with a gauge of their own: keys may come from users."""

_SWEEP = 32
_SHARED = "the call is counted with all that have no key of their own"

_NAMED: dict[str, Callable[[Call], Hashable]] = {
    "tenant": attrgetter("tenant"),
    "target": attrgetter("target.name"),
    "model": attrgetter("model"),
}


def key_function(key: Key, *, in_store: bool = False) -> Callable[[Call], Hashable]:
    """Make the function that gives a call's key, `OVERFLOW` where the application's fails.

    With `in_store` also where other processes may not write the key the same way. Raises `ConfigurationError` for a
    name that is none of `tenant`, `target`, `model`.
    """
    if callable(key) and not isinstance(key, type):
        if key is one_for_all:
            return key
        function(key=key)
        return _guarded(key, in_store=in_store)
    names = (key,) if isinstance(key, str) else key
    if (
        not isinstance(names, tuple)
        or not names
        or any(not isinstance(name, str) or name not in _NAMED for name in names)
    ):
        msg = f"key={key!r}: allowed are {', '.join(map(repr, _NAMED))}, a tuple of these, or a function of the call"
        raise ConfigurationError(msg)
    if len(names) == 1:
        return _NAMED[names[0]]
    parts = tuple(_NAMED[name] for name in names)
    return lambda call: tuple(part(call) for part in parts)


def _guarded(asked: Callable[[Call], Hashable], *, in_store: bool) -> Callable[[Call], Hashable]:
    """Guard a function of the application's, which may know nothing of calls without a tenant, or of a new target."""

    def key(call: Call) -> Hashable:
        try:
            found = asked(call)
            hash(found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
            hook_failed("key", asked, error, instead=_SHARED)
            return OVERFLOW
        if isinstance(found, CoroutineType):
            found.close()  # nobody awaits it
            hook_gave("key", asked, found, "keys that are had at once", instead=_SHARED)
            return OVERFLOW
        if in_store and type(found) is not str and not is_shareable(found):
            hook_gave("key", asked, found, f"with a store {SHAREABLE}", instead=_SHARED)
            return OVERFLOW
        return found

    return key


def is_of_target(key: Key, value: Hashable, target: str) -> bool:
    """Tell whether a value of `key` is a target's; of what functions give, the target's name is."""
    names = key if isinstance(key, tuple) else (key,)
    if len(names) > 1:
        return "target" in names and isinstance(value, tuple) and value[names.index("target")] == target
    return value == target and (names[0] == "target" or callable(names[0]))


def named(name: str, value: Hashable) -> str:
    """Give what has this value of a key its name for people: the policy's, and the value's."""
    parts = value if isinstance(value, tuple) else (value,)
    return ":".join([name, *(str(part) for part in parts)])


def series(name: str, key: Key, value: Hashable) -> str:
    """Give its name for telemetry, without a value that may be a tenant's: there are too many of these."""
    names = key if isinstance(key, tuple) else (key,)
    return named(name, value) if {"target", "model"}.issuperset(names) else name


class Keyed(Generic[State]):
    """Keep one state per key, at most `max_keys` of them.

    When there are as many, idle ones make room; while none is idle, further keys share one overflow
    state, and the call's span gets an event that says so. A key stays there until its last call in there has ended,
    or it would be counted in two places at once.
    """

    __slots__ = ("_function", "_idle", "_loop", "_make", "_max_keys", "_name", "_overflowing", "_states")

    def __init__(
        self,
        name: str,
        key: Key,
        make: Callable[[Hashable], State],
        *,
        idle: Callable[[State, float], bool],
        max_keys: int,
        in_store: bool = False,
    ) -> None:
        at_least(1, max_keys=max_keys)
        self._name = name
        self._function = key_function(key, in_store=in_store)
        self._make = make
        self._idle = idle
        self._max_keys = max_keys
        self._states: dict[Hashable, State] = {}
        self._overflowing: dict[Hashable, int] = {}
        """The keys that share the overflow state, with the number of their calls that are under way."""
        self._loop = LoopBound(name, self._forget)

    def _forget(self) -> None:
        self._states.clear()
        self._overflowing = {}  # calls that still end count down in the one they began in

    def of(self, call: Call) -> State:
        """Give the state for a call."""
        if self._loop.loop is not call.loop:
            self._loop.bind(call.loop)
        key = self._function(call)
        state = self._states.get(key)
        return self._new(key, call) if state is None else state

    def peek(self, key: Hashable) -> State | None:
        """Give the state of a key if it has one, from any thread; nothing is made or bound for a look."""
        return self._states.get(key)

    def change(self, change: Callable[[State, float], None]) -> None:
        """Change every state there is, each with the time of the loop they belong to, and in that loop.

        Called from elsewhere it is done as soon as the loop comes to it.
        """

        def change_all(now: float) -> None:
            for state in self.values():
                change(state, now)

        self._loop.run(change_all)

    def change_one(self, key: Hashable, change: Callable[[State, float], None]) -> None:
        """Change the state of one key as `change` does, made when there is none: who asks for it by name gets it.

        Raises `EventLoopError` where no event loop runs, neither here nor the one they belong to.
        """
        self._loop.bind_alive()
        self._loop.run(lambda now: change(self._of_key(key), now))

    def _of_key(self, key: Hashable) -> State:
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= self._max_keys:
                self._make_room()
            state = self._states[key] = self._make(key)
        return state

    def values(self) -> Iterator[State]:
        """Iterate over the states there are, safe against changes meanwhile."""
        return iter(list(self._states.values()))

    def items(self) -> Iterator[tuple[Hashable, State]]:
        """Iterate over the keys and their states, safe against changes meanwhile."""
        return iter(list(self._states.items()))

    def __len__(self) -> int:
        return len(self._states)

    def _new(self, key: Hashable, call: Call) -> State:
        if key in self._overflowing or (len(self._states) >= self._max_keys and not self._make_room()):
            call.telemetry.event(call, "keys_overflow", {LIMITER_NAME: self._name})
            self._keep_in_overflow(key, call)
            key = OVERFLOW
            if key in self._states:
                return self._states[key]
        state = self._states[key] = self._make(key)
        return state

    def _keep_in_overflow(self, key: Hashable, call: Call) -> None:
        under_way = self._overflowing
        under_way[key] = under_way.get(key, 0) + 1

        def ended(_outcome: Outcome) -> None:
            under_way[key] -= 1
            if not under_way[key]:
                del under_way[key]

        call.on_finish(ended)

    def _make_room(self) -> bool:
        """Forget idle states among the oldest few; those in use go to the back of the line."""
        now = self._loop.time()
        forgotten = 0
        for key in [key for key, _ in zip(self._states, range(_SWEEP), strict=False)]:
            state = self._states.pop(key)
            if self._idle(state, now):
                forgotten += 1
            else:
                self._states[key] = state
        return forgotten > 0


def one_for_all(_call: Call) -> Hashable:
    """Give all calls the same key."""
    return None
