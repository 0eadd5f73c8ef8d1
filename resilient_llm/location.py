"""Where a request goes, and which provider answers there.

Reads URLs only. Provider names are the values of `gen_ai.provider.name` in OpenTelemetry's GenAI conventions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from resilient_llm._kept import LONGEST_URL

__all__ = ["Location", "locate"]

_HOSTS = {
    "api.anthropic.com": "anthropic",
    "api.cohere.ai": "cohere",
    "api.cohere.com": "cohere",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.openai.com": "openai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "generativelanguage.googleapis.com": "gcp.gemini",
}

_DOMAINS = (
    (".openai.azure.com", "azure.ai.openai"),
    (".cognitiveservices.azure.com", "azure.ai.openai"),
    (".services.ai.azure.com", "azure.ai.inference"),
    (".inference.ai.azure.com", "azure.ai.inference"),
    (".api.openai.com", "openai"),  # data residency: eu.api.openai.com
    ("aiplatform.googleapis.com", "gcp.vertex_ai"),
    (".rep.googleapis.com", "gcp.vertex_ai"),
    (".ml.cloud.ibm.com", "ibm.watsonx.ai"),
)


class Location(NamedTuple):
    """Hold the parts of a URL that say who is asked for what."""

    host: str
    path: str
    provider: str | None
    """The provider known to answer at this host."""


def locate(url: str) -> Location:
    """Take apart a URL; it may be relative. Its query, where keys hide, is neither looked at nor kept."""
    if "?" in url:
        url = url.partition("?")[0]
    return _kept(url) if len(url) <= LONGEST_URL else _take_apart(url)


def _take_apart(url: str) -> Location:
    scheme, separator, rest = url.partition("://")
    authority, slash, path = (rest if separator else scheme).partition("/")
    host = authority.rpartition("@")[2].partition(":")[0].lower()
    location = slash + path.partition("#")[0]
    return Location(host, location, _provider(host, location))


_kept = lru_cache(maxsize=1024)(_take_apart)


def _provider(host: str, path: str) -> str | None:
    known = _HOSTS.get(host)
    if known is not None:
        return known
    if host.startswith("bedrock-") and (".amazonaws." in host or host.endswith(".api.aws")):
        return "aws.bedrock"
    for domain, provider in _DOMAINS:
        if host.endswith(domain):
            if provider == "azure.ai.inference" and "/openai/" in path:
                return "azure.ai.openai"  # one Azure host serves both
            return provider
    return None
