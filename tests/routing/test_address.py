"""Where requests go: those that ask a target itself, and those whose caller has a base URL of another kind."""

from __future__ import annotations

from typing import Any

import pytest

from resilient_llm import Request, Target
from resilient_llm.presets import ANTHROPIC, AZURE_OPENAI, BEDROCK, GEMINI, GROQ, MISTRAL, OPENAI
from resilient_llm.routing.address import AT_TARGET
from resilient_llm.routing.rewrite import rewrite

AZURE = "https://res.openai.azure.com"
V1 = "https://h/v1"


def at(url: str, **options: Any) -> Target:
    return Target(name="target", url=url, **options)


def goes_to(url: str, target: Target) -> str:
    headers = [(b"host", b"gateway.example"), (b"content-length", b"17")]
    return rewrite(Request("POST", url, headers, b'{"model": "body"}'), target, "sk-of-the-target").url


@pytest.mark.parametrize(
    ("target", "path", "expected"),
    [
        # What ends as a route of another API does is none of these.
        (MISTRAL.target(), "/fim/completions", "https://api.mistral.ai/v1/fim/completions"),
        (MISTRAL.target(), "/v1/fim/completions", "https://api.mistral.ai/v1/fim/completions"),
        (MISTRAL.target(), "/v1/agents/completions", "https://api.mistral.ai/v1/agents/completions"),
        (MISTRAL.target(), "/v1/chat/moderations", "https://api.mistral.ai/v1/chat/moderations"),
        (at("https://h", dialect="openai"), "/beta/chat/completions", "https://h/beta/chat/completions"),
        (at("https://h"), "/my/embeddings", "https://h/my/embeddings"),
        (at("https://h"), "/x/v1/chat/completions", "https://h/x/v1/chat/completions"),
        # Nothing is left out of a path but what the target's URL has already.
        (at("https://h"), "/v1/chat/completions", "https://h/v1/chat/completions"),
        (at(V1), "/v1/files", "https://h/v1/files"),
        (at(V1), "/files", "https://h/v1/files"),
        (at(V1), "/v1/models/v1", "https://h/v1/models/v1"),
        (at(V1), "/v1/v1/files", "https://h/v1/v1/files"),
        (at(V1), "/v1", "https://h/v1"),
        (at(V1), "/v1/", "https://h/v1/"),
        (at(V1), "/v10/files", "https://h/v1/v10/files"),
        (at(V1), "/v1beta/x", "https://h/v1/v1beta/x"),
        (at(V1), "/a/b/v1/foo", "https://h/v1/a/b/v1/foo"),
        (at(V1), "/foo/", "https://h/v1/foo/"),
        (at(V1), "/", "https://h/v1/"),
        (at(V1), "", "https://h/v1"),
        (at("https://h/models"), "/models", "https://h/models/models"),
        (GROQ.target(), "/v1/models", "https://api.groq.com/openai/v1/models"),
        (GROQ.target(), "/openai/v1/models", "https://api.groq.com/openai/v1/models"),
        (ANTHROPIC.target(), "/v1/files/v1/content", "https://api.anthropic.com/v1/files/v1/content"),
        (ANTHROPIC.target(model="c"), "/v1/models/m", "https://api.anthropic.com/v1/models/m"),
        # Azure: from the resource on, wherever the target's URL ends.
        (AZURE_OPENAI.target(url=AZURE), "/openai/files", f"{AZURE}/openai/files"),
        (AZURE_OPENAI.target(url=AZURE), "/openai/v1/files", f"{AZURE}/openai/v1/files"),
        (AZURE_OPENAI.target(url=AZURE), "/v1/files", f"{AZURE}/openai/v1/files"),
        (AZURE_OPENAI.target(url=f"{AZURE}/openai"), "/openai/files", f"{AZURE}/openai/files"),
        (AZURE_OPENAI.target(url=f"{AZURE}/openai/v1"), "/openai/files", f"{AZURE}/openai/files"),
        (AZURE_OPENAI.target(url=f"{AZURE}/openai/v1"), "/v1/files", f"{AZURE}/openai/v1/files"),
        (
            AZURE_OPENAI.target(url=AZURE),
            "/openai/deployments/d/extensions/chat/completions",
            f"{AZURE}/openai/deployments/d/extensions/chat/completions",
        ),
        # A target's own name for the model takes the place of the caller's in the path, as it does in the body.
        (
            AZURE_OPENAI.target(url=AZURE, model="m"),
            "/openai/deployments/d/chat/completions",
            f"{AZURE}/openai/deployments/m/chat/completions",
        ),
        (at(V1, model="m"), "/deployments/d/logs", "https://h/v1/deployments/d/logs"),
        (
            GEMINI.target(model="m"),
            "/v1beta/models/g:countTokens",
            "https://generativelanguage.googleapis.com/v1beta/models/m:countTokens",
        ),
        (
            BEDROCK.target(url="https://h", model="a/b"),
            "/model/x%2Fy/converse",
            "https://h/model/a%2Fb/converse",
        ),
        # Google takes files elsewhere.
        (
            GEMINI.target(model="m"),
            "/upload/v1beta/files",
            "https://generativelanguage.googleapis.com/upload/v1beta/files",
        ),
    ],
)
def test_what_a_target_itself_is_asked_for_is_below_its_url(target: Target, path: str, expected: str) -> None:
    assert goes_to(f"{AT_TARGET}{path}", target) == expected


@pytest.mark.parametrize(
    ("target", "url", "expected"),
    [
        # A route that is known is known by all of it, below a root.
        (MISTRAL.target(), "http://g/v1/fim/completions", "https://api.mistral.ai/v1/fim/completions"),
        (MISTRAL.target(), "http://g/v1/chat/moderations", "https://api.mistral.ai/v1/chat/moderations"),
        (OPENAI.target(), "http://g/v1/models/v2", "https://api.openai.com/v1/models/v2"),
        (OPENAI.target(), "http://g/v1/files/", "https://api.openai.com/v1/files/"),
        (OPENAI.target(), "http://g/v1/deployments/d/logs", "https://api.openai.com/v1/deployments/d/logs"),
        # Roots
        (
            OPENAI.target(),
            "http://g/v1beta/openai/chat/completions",
            "https://api.openai.com/v1/chat/completions",
        ),
        (OPENAI.target(), "http://g/openai/v1/files", "https://api.openai.com/v1/files"),
        (
            OPENAI.target(),
            "http://g/v1/a/b/openai/chat/completions",
            "https://api.openai.com/v1/chat/completions",
        ),
        (OPENAI.target(), "http://g/x/deployments/d/embeddings", "https://api.openai.com/v1/embeddings"),
        # Where there is none nothing is left out: the provider says that it does not know it.
        (
            OPENAI.target(),
            "http://g/beta/chat/completions",
            "https://api.openai.com/v1/beta/chat/completions",
        ),
        (at("https://h/beta"), "http://g/beta/chat/completions", "https://h/beta/chat/completions"),
        # Azure
        (
            AZURE_OPENAI.target(url=AZURE, model="m"),
            f"{AZURE}/openai/deployments/d/extensions/chat/completions?api-version=1",
            f"{AZURE}/openai/deployments/m/extensions/chat/completions?api-version=1",
        ),
        (
            OPENAI.target(),
            f"{AZURE}/openai/deployments/d/extensions/chat/completions?api-version=1",
            "https://api.openai.com/v1/extensions/chat/completions",
        ),
        # Others
        (ANTHROPIC.target(), "http://g/v1/files/v1/content", "https://api.anthropic.com/v1/files/v1/content"),
        (
            GEMINI.target(),
            "http://g/v1beta/files/v2",
            "https://generativelanguage.googleapis.com/v1beta/files/v2",
        ),
        (
            GEMINI.target(),
            "http://g/upload/v1beta/files",
            "https://generativelanguage.googleapis.com/upload/v1beta/files",
        ),
    ],
)
def test_no_route_is_cut_down_to_another(target: Target, url: str, expected: str) -> None:
    assert goes_to(url, target) == expected


@pytest.mark.parametrize(
    ("target", "query", "expected"),
    [
        (at(V1), "token=next&auth=1&sig=2&signature=3&key=4", "token=next&auth=1&sig=2&signature=3&key=4"),
        (at(V1), "&&a=%20+&b&&", "&&a=%20+&b&&"),
        (at(V1), "api-version=1&API-Version=2", "api-version=1&API-Version=2"),
        (at(V1), "api_key=CANARY&a=1&%61ccess_token=CANARY&x-amz-signature=CANARY", "a=1"),
        (GEMINI.target(), "%6Bey=CANARY&alt=sse&pageToken=next", "alt=sse&pageToken=next"),
        (at(V1, dialect="gemini"), "key=CANARY&a", "a"),
        (
            AZURE_OPENAI.target(url=AZURE, api_version="own"),
            "a=1&api-version=theirs",
            "a=1&api-version=theirs",
        ),
        (AZURE_OPENAI.target(url=AZURE, api_version="own"), "a=1", "a=1&api-version=own"),
        (AZURE_OPENAI.target(url=AZURE, api_version="own"), "", "api-version=own"),
    ],
)
def test_a_targets_own_query_is_as_it_was_but_for_credentials(
    target: Target, query: str, expected: str
) -> None:
    assert goes_to(f"{AT_TARGET}/openai/files?{query}", target).partition("?")[2] == expected


def test_azures_api_without_versions_gets_none() -> None:
    target = AZURE_OPENAI.target(url=AZURE, api_version="2024-10-21")
    assert goes_to(f"{AT_TARGET}/openai/v1/files", target) == f"{AZURE}/openai/v1/files"
    assert goes_to(f"{AT_TARGET}/openai/v1/files?a", target) == f"{AZURE}/openai/v1/files?a"


def test_what_is_ambiguous_stays_behind_only_where_it_could_be_anothers_credential() -> None:
    query = "a&&token=1&auth=2&sig=3&signature=4"
    assert goes_to(f"https://elsewhere/v1/files?{query}", at(V1)) == "https://h/v1/files?a&"
    assert goes_to(f"https://h/v1/files?{query}&key=5", at(V1)) == f"https://h/v1/files?{query}"
