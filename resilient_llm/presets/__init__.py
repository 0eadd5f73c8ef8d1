"""Settings for common providers and kinds of services: one line to begin with, every option open.

Only settings, and where they come from. What policies do with them is theirs.
"""

from resilient_llm.presets.circuits import CIRCUITS, circuit_breaker
from resilient_llm.presets.preset import Preset, Source
from resilient_llm.presets.providers import (
    ANTHROPIC,
    AZURE_OPENAI,
    BEDROCK,
    GEMINI,
    GROQ,
    MISTRAL,
    OPENAI,
    OPENROUTER,
    PRESETS,
    VLLM,
    get,
)

__all__ = [
    "ANTHROPIC",
    "AZURE_OPENAI",
    "BEDROCK",
    "CIRCUITS",
    "GEMINI",
    "GROQ",
    "MISTRAL",
    "OPENAI",
    "OPENROUTER",
    "PRESETS",
    "VLLM",
    "Preset",
    "Source",
    "circuit_breaker",
    "get",
]
