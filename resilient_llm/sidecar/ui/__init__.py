"""The page for operators: what the sidecar is doing now, and what became of its last calls.

It shows, and changes nothing. The numbers come from the app and its router; what a browser needs is in `static`.
"""

from resilient_llm.sidecar.ui.live import Live
from resilient_llm.sidecar.ui.page import Page
from resilient_llm.sidecar.ui.recent import Recent
from resilient_llm.sidecar.ui.shapes import Snapshot
from resilient_llm.sidecar.ui.snapshot import SNAPSHOT, merge, snapshot, taking_from

__all__ = ["SNAPSHOT", "Live", "Page", "Recent", "Snapshot", "merge", "snapshot", "taking_from"]
