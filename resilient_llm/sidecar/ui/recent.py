"""What became of the last requests, step by step, and what each tenant has had: kept while they are answered.

Memory is bounded, and what is kept are counted and named things only, as in the access log: no content, no key. What
of it is shown, and to whom, is decided elsewhere.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from resilient_llm.sidecar.ui.story import Story
from resilient_llm.sidecar.ui.tally import Tally
from resilient_llm.telemetry.listener import ListenedCall

if TYPE_CHECKING:
    from resilient_llm.sidecar.access_log import Entry
    from resilient_llm.sidecar.ui.shapes import CallRow

__all__ = ["Recent"]

_KEPT = 100
_LOOKS = 5.0
"""Seconds for which somebody is taken to look after having looked."""

_WAITED = 1.0
"""Seconds of waiting that make a call worth a look."""

_NO_CALL: dict[str, Any] = {"attempts": 0, "retries": 0, "fallbacks": 0, "hedges": 0, "cost_usd": None}


class _Kept(NamedTuple):
    """One request, put into words when somebody looks."""

    number: int
    ended_ns: int
    notable: bool
    fields: dict[str, Any]
    story: Story | None


class Recent:
    """Keep the last requests, and apart from them the last that did not simply succeed, `kept` of each.

    It is the `listener` of a `Telemetry`, and hears of each call what there is to be told. Under load the last hundred
    are of the last tenth of a second, and hardly ever those that somebody looks for.
    """

    def __init__(self, *, kept: int = _KEPT) -> None:
        self._all: deque[_Kept] = deque(maxlen=kept)
        self._notable: deque[_Kept] = deque(maxlen=kept)
        self._rows: dict[int, CallRow] = {}
        self._mark = secrets.token_hex(4)  # so that a page tells requests of this process from another's
        self._count = 0
        self.watched_until = -math.inf
        """Until when, on the loop's clock, somebody is taken to look."""
        self.tenants: dict[str | None, Tally] = {}
        """What each tenant has had; those without a key are nobody's."""

    def __call__(self) -> Story:
        """Make what hears of the next call."""
        return Story(self)

    def tally(self, tenant: str | None) -> Tally:
        """Give the counts of a tenant."""
        found = self.tenants.get(tenant)
        if found is None:
            found = self.tenants[tenant] = Tally()
        return found

    def add(self, entry: Entry) -> None:
        """Keep a request that has been answered."""
        fields, call = entry.fields(), entry.call
        self.tally(entry.tenant).add(fields)
        telemetry = None if call is None else call.telemetry
        listener = telemetry.listener if isinstance(telemetry, ListenedCall) else None
        story = listener if isinstance(listener, Story) else None
        notable = (
            fields["outcome"] != "ok"
            or fields.get("attempts", 0) > 1
            or fields.get("waited", 0.0) >= _WAITED
            or (story is not None and story.eventful)
        )
        self._count += 1
        kept = _Kept(self._count, time.time_ns(), notable, fields, story)
        self._all.append(kept)
        if notable:
            self._notable.append(kept)

    def calls(self) -> list[CallRow]:
        """Give what is kept, the latest first; whoever asks is taken to look for some seconds more."""
        self.watched_until = anyio.current_time() + _LOOKS
        kept = {one.number: one for one in (*self._all, *self._notable)}
        known, self._rows = self._rows, {}
        rows = []
        for number, one in sorted(kept.items(), reverse=True):
            row = known.get(number) or _row(one, f"{self._mark}-{number}")
            if one.story is None or one.story.ended:
                self._rows[number] = row  # nothing more will come
            rows.append(row)
        return rows


def _row(kept: _Kept, name: str) -> CallRow:
    fields, story = {**_NO_CALL, **kept.fields}, kept.story
    first_content = fields.get("first_content")
    return {
        "id": name,
        "ended": kept.ended_ns / 1e9,
        "notable": kept.notable,
        "request_id": fields["request_id"],
        "method": fields["method"],
        "path": fields["path"],
        "tenant": fields["tenant"],
        "model": fields["model"],
        "target": fields["target"],
        "status": fields["status"],
        "outcome": fields["outcome"],
        "error": fields["error"],
        "took": fields["duration"] * 1e3,
        "waited": fields.get("waited", 0.0) * 1e3,
        "first_content": None if first_content is None else first_content * 1e3,
        "attempts": fields["attempts"],
        "retries": fields["retries"],
        "fallbacks": fields["fallbacks"],
        "hedges": fields["hedges"],
        "input_tokens": fields.get("input_tokens"),
        "output_tokens": fields.get("output_tokens"),
        "cost_usd": fields["cost_usd"],
        "steps": [] if story is None else story.rows(),
        "left_out": 0 if story is None else story.left_out,
    }
