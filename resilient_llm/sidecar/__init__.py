"""The sidecar: the library's policies in a process of its own, in front of any provider.

It reads a file, makes policies of it, and carries HTTP requests to a client door and back. No resilience is in
here: what a call needs to survive, a policy of the library does.
"""

from __future__ import annotations

from resilient_llm.sidecar.app import Sidecar
from resilient_llm.sidecar.config import Config, load, parse
from resilient_llm.sidecar.problems import ConfigError

__all__ = ["Config", "ConfigError", "Sidecar", "load", "parse"]
