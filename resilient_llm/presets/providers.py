"""What is known of each provider: how its own SDK retries, and which limits it publishes.

Every number has a source, and numbers without one are left out. Limits depend on the account: its tier, its history
and what was negotiated; these are the standard ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from types import MappingProxyType

from resilient_llm.core.backoff import Backoff
from resilient_llm.policies import CircuitBreaker, ConcurrencyLimit, Retry
from resilient_llm.presets.preset import Preset, Source, named, tabulate

__all__ = [
    "ANTHROPIC",
    "AZURE_OPENAI",
    "BEDROCK",
    "GEMINI",
    "GROQ",
    "MISTRAL",
    "OPENAI",
    "OPENROUTER",
    "PRESETS",
    "VLLM",
    "get",
]

_READ_ON = date(2026, 11, 29)


def _source(about: str, url: str, as_of: str | None = None) -> Source:
    return Source(about, url, None if as_of is None else date.fromisoformat(as_of), _READ_ON)


_OPENAI_DOCS = "https://developers.openai.com/api/docs"
_OPENAI_SDK = "https://github.com/openai/openai-python/blob/main/src/openai/_constants.py"
_FLAGSHIP = {
    "tier-1": (500, 500_000),
    "tier-2": (5_000, 1_000_000),
    "tier-3": (5_000, 2_000_000),
    "tier-4": (10_000, 4_000_000),
    "tier-5": (15_000, 40_000_000),
}

OPENAI = Preset(
    name="openai",
    provider="openai",
    dialect="openai",
    url="https://api.openai.com/v1",
    tiers=tabulate(
        ("gpt-6-astra gpt-6-sol", _FLAGSHIP),
        (
            "gpt-6-luna",
            {
                "tier-1": (500, 500_000),
                "tier-2": (5_000, 2_000_000),
                "tier-3": (5_000, 4_000_000),
                "tier-4": (10_000, 10_000_000),
                "tier-5": (30_000, 180_000_000),
            },
        ),
        (
            "gpt-4o",
            {
                "tier-1": (500, 30_000),
                "tier-2": (5_000, 450_000),
                "tier-3": (5_000, 800_000),
                "tier-4": (10_000, 2_000_000),
                "tier-5": (10_000, 30_000_000),
            },
        ),
        (
            "gpt-4o-mini",
            {
                "tier-1": (500, 200_000),
                "tier-2": (5_000, 2_000_000),
                "tier-3": (5_000, 4_000_000),
                "tier-4": (10_000, 10_000_000),
                "tier-5": (30_000, 150_000_000),
            },
        ),
    ),
    paced=True,
    note="Limits are an organization's, by model; a project may have lower ones. gpt-4o-mini has 10,000 requests a "
    "day too in tier 1. The free tier has no access to most models.",
    sources=(
        _source("limits of gpt-6-astra", f"{_OPENAI_DOCS}/models/gpt-6-astra", "2026-09-24"),
        _source("limits of gpt-6-sol", f"{_OPENAI_DOCS}/models/gpt-6-sol", "2026-09-22"),
        _source("limits of gpt-6-luna", f"{_OPENAI_DOCS}/models/gpt-6-luna", "2026-10-05"),
        _source("limits of gpt-4o", f"{_OPENAI_DOCS}/models/gpt-4o", "2026-09-24"),
        _source("limits of gpt-4o-mini", f"{_OPENAI_DOCS}/models/gpt-4o-mini", "2026-09-24"),
        _source(
            "enforced over shorter times: 60,000 a minute as 1,000 a second",
            "https://help.openai.com/en/articles/6891753-what-are-the-best-practices-for-managing-my-rate-limits-in-the-api",
        ),
        _source("SDK 3.57: 2 retries, 0.5 to 8 s; 600 s for a reply; 1,000 connections", _OPENAI_SDK),
    ),
)
"""OpenAI, account tiers `tier-1` to `tier-5`."""

_CLAUDE_LIMITS = "https://platform.claude.com/docs/en/api/rate-limits"
_CLAUDE = {"start": (1_000, 2_000_000), "build": (5_000, 5_000_000), "scale": (10_000, 10_000_000)}

ANTHROPIC = Preset(
    name="anthropic",
    provider="anthropic",
    dialect="anthropic",
    url="https://api.anthropic.com",
    openai_url="https://api.anthropic.com/v1",
    tiers=tabulate(
        ("claude-opus-5-5 claude-opus-5 claude-sonnet-5 claude-haiku-5-5 claude-haiku-4-5", _CLAUDE),
        ("claude-sonnet-5-5", {"start": _CLAUDE["start"]}),
        ("claude-opus-4-8+claude-opus-4-7+claude-opus-4-6+claude-opus-4-5", _CLAUDE),
        ("claude-sonnet-4-6+claude-sonnet-4-5", _CLAUDE),
        (
            "claude-fable-5-1+claude-fable-5",
            {"start": (1_000, 500_000), "build": (2_000, 1_500_000), "scale": (4_000, 4_000_000)},
        ),
    ),
    paced=True,
    note="Anthropic limits input and output tokens apart. The tokens here are those of the input, which does not count "
    "what was read from its cache; the output may be a fifth of that, and is left to its headers and 429s. New "
    "organizations may start below the start tier.",
    sources=(
        _source("limits of claude-haiku-5-5", _CLAUDE_LIMITS, "2026-10-08"),
        _source(
            "limits of claude-opus-5-5, claude-sonnet-5 and claude-haiku-4-5", _CLAUDE_LIMITS, "2026-09-26"
        ),
        _source("limits of claude-opus-5, Opus 4.x, Sonnet 4.x and Fable 5", _CLAUDE_LIMITS, "2026-08-28"),
        _source(
            "claude-sonnet-5-5 and Fable 5.1; 60 a minute may be enforced as one a second", _CLAUDE_LIMITS
        ),
        _source(
            "SDK 2.14: 2 retries, 0.5 to 8 s; 600 s for a reply; 1,000 connections",
            "https://github.com/anthropics/anthropic-sdk-python/blob/main/src/anthropic/_constants.py",
        ),
    ),
)
"""Anthropic, account tiers `start`, `build` and `scale`."""

_AZURE_DOCS = "https://learn.microsoft.com/en-us/azure/foundry/openai"

AZURE_OPENAI = Preset(
    name="azure",
    provider="azure.ai.openai",
    dialect="openai",
    tiers=tabulate(
        (
            "gpt-4.1",
            {
                "tier-1": (1_000, 1_000_000),
                "tier-2": (3_000, 3_000_000),
                "tier-3": (9_000, 9_000_000),
                "tier-4": (18_000, 18_000_000),
                "tier-5": (30_000, 30_000_000),
                "tier-6": (45_000, 45_000_000),
            },
        ),
        (
            "gpt-4.1-mini",
            {
                "tier-1": (5_000, 5_000_000),
                "tier-2": (16_000, 16_000_000),
                "tier-3": (46_000, 46_000_000),
                "tier-4": (90_000, 90_000_000),
                "tier-5": (150_000, 150_000_000),
                "tier-6": (225_000, 225_000_000),
            },
        ),
        (
            "gpt-5-mini",
            {
                "tier-1": (1_000, 1_000_000),
                "tier-2": (2_000, 2_000_000),
                "tier-3": (4_000, 4_000_000),
                "tier-4": (7_000, 7_000_000),
                "tier-5": (10_000, 10_000_000),
                "tier-6": (15_000, 15_000_000),
            },
        ),
        (
            "gpt-5.4",
            {
                "tier-1": (10_000, 1_000_000),
                "tier-2": (20_000, 2_000_000),
                "tier-3": (40_000, 4_000_000),
                "tier-4": (70_000, 7_000_000),
                "tier-5": (100_000, 10_000_000),
                "tier-6": (150_000, 15_000_000),
            },
        ),
        ("gpt-6-astra gpt-6-sol gpt-6-luna", {"tier-1": (1_000, 1_000_000)}),
    ),
    paced=True,
    note="Quotas of Global Standard deployments, by subscription, region and model. A deployment has what it was "
    "assigned of its quota: give that, as requests_per_minute and tokens_per_minute. Azure counts a request's "
    "max_tokens as used.",
    sources=(
        _source("tier 1", f"{_AZURE_DOCS}/quotas-limits", "2026-08-20"),
        _source("tiers 2 to 6", f"{_AZURE_DOCS}/quotas-limits", "2026-02-18"),
        _source(
            "evaluated over 1 or 10 s; 2 retries of the OpenAI SDK",
            f"{_AZURE_DOCS}/how-to/quota",
            "2026-05-06",
        ),
        _source("SDK 3.57: 0.5 to 8 s between retries; 600 s for a reply; 1,000 connections", _OPENAI_SDK),
    ),
)
"""Azure OpenAI, quota tiers `tier-1` to `tier-6`."""

GEMINI = Preset(
    name="gemini",
    provider="gcp.gemini",
    dialect="gemini",
    url="https://generativelanguage.googleapis.com/v1beta",
    openai_url="https://generativelanguage.googleapis.com/v1beta/openai",
    retries=Retry(max_attempts=5, backoff=Backoff(initial=1, multiplier=2, maximum=60)),
    note="Google publishes no numbers; AI Studio shows a project's. Its tokens per minute are those of the input.",
    sources=(
        _source("limits: none published", "https://ai.google.dev/gemini-api/docs/rate-limits", "2026-10-17"),
        _source(
            "5 attempts, from 1 to 60 s, doubling",
            "https://github.com/googleapis/python-genai/blob/main/google/genai/_api_client.py",
        ),
    ),
)
"""Google's Gemini API."""

MISTRAL = Preset(
    name="mistral",
    provider="mistral_ai",
    dialect="openai",
    url="https://api.mistral.ai/v1",
    retries=Retry(max_attempts=5, backoff=Backoff(initial=1, multiplier=2, maximum=8)),
    note="Mistral publishes no numbers; its admin console shows an organization's, in requests per second (`burst`).",
    sources=(
        _source("limits: none published", "https://docs.mistral.ai/deployment/ai-studio/tier"),
        _source("5 attempts, from 1 to 8 s, doubling", "https://docs.mistral.ai/resources/error-glossary"),
    ),
)
"""Mistral's API."""

BEDROCK = Preset(
    name="bedrock",
    provider="aws.bedrock",
    dialect="bedrock",
    retries=Retry(max_attempts=3, backoff=Backoff(initial=1, multiplier=2, maximum=20)),
    note="Quotas are an account's, by model and region, and may be lower than the defaults that AWS lists; Service "
    "Quotas shows them. They count input and output together, and some models at a higher rate.",
    sources=(
        _source(
            "limits: see Service Quotas",
            "https://docs.aws.amazon.com/bedrock/latest/userguide/quotas-runtime.html",
        ),
        _source(
            "3 attempts, from 1 to 20 s, doubling (standard mode)",
            "https://github.com/boto/botocore/blob/develop/botocore/retries/standard.py",
        ),
    ),
)
"""Amazon Bedrock."""

OPENROUTER = Preset(
    name="openrouter",
    provider="openrouter",
    dialect="openai",
    url="https://openrouter.ai/api/v1",
    tiers=tabulate(("*", {"free": (20, None)})),
    note="The limit is on all models that end in `:free` together, besides 50 requests a day or, once 10 credits were "
    "bought, 1,000. Other models have no limit of OpenRouter's, but those of whoever serves them.",
    sources=(_source("limits", "https://openrouter.ai/docs/api-reference/limits", "2026-10-06"),),
)
"""OpenRouter, tier `free`."""

GROQ = Preset(
    name="groq",
    provider="groq",
    dialect="openai",
    url="https://api.groq.com/openai/v1",
    tiers=tabulate(
        ("openai/gpt-oss-120b openai/gpt-oss-20b", {"free": (30, 8_000), "developer": (1_000, 250_000)}),
        ("openai/gpt-oss-safeguard-20b", {"free": (30, 8_000), "developer": (1_000, 150_000)}),
    ),
    note="Limits are an organization's, by model. The free plan has 1,000 requests and 200,000 tokens a day too. The "
    "headers on requests speak of the day's.",
    sources=(
        _source("free plan", "https://console.groq.com/docs/rate-limits", "2026-10-01"),
        _source("developer plan", "https://console.groq.com/docs/rate-limits", "2026-08-14"),
    ),
)
"""Groq, plans `free` and `developer`."""

VLLM = Preset(
    name="vllm",
    dialect="openai",
    circuit=CircuitBreaker(key="target"),
    concurrency=ConcurrencyLimit(key="target"),
    note="vLLM has no rate limits: it queues what it cannot batch, --max-num-seqs at a time. A `max` of the "
    "concurrency limit a little above that keeps the queue on this side, where tenants take turns.",
    sources=(
        _source("max_num_seqs", "https://github.com/vllm-project/vllm/blob/main/vllm/config/scheduler.py"),
    ),
)
"""vLLM, and other servers of your own that speak OpenAI's API."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            OPENAI,
            ANTHROPIC,
            AZURE_OPENAI,
            GEMINI,
            MISTRAL,
            BEDROCK,
            OPENROUTER,
            GROQ,
            VLLM,
        )
    }
)
"""Every preset by its name."""


def get(name: str) -> Preset:
    """Give the preset of a name, as from a configuration file.

    Raises `ConfigurationError` for an unknown name, with those there are.
    """
    return named(PRESETS, "preset", name)
