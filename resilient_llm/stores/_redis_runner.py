"""What the parts of a `RedisStore` ask with: scripts and commands, to one server or to whichever keeps their keys."""

from __future__ import annotations

from typing import TypeAlias

from resilient_llm.stores._redis_cluster import ClusterRunner
from resilient_llm.stores._redis_scripts import ScriptRunner

__all__ = ["Runner"]

Runner: TypeAlias = ScriptRunner | ClusterRunner
"""For a cluster there is a `ScriptRunner` for each of its servers, and one `ClusterRunner` that knows which to ask."""
