"""Which dialect a request is written in, and what it asks for."""

import json
from dataclasses import dataclass, replace

import pytest

from resilient_llm._kept import LONGEST_MODEL
from resilient_llm.message import Request
from resilient_llm.profile import Profile
from resilient_llm.providers import (
    ANTHROPIC,
    BEDROCK,
    DIALECTS,
    GEMINI,
    OPENAI,
    UNKNOWN,
    Dialect,
    dialect_for,
)

OPENAI_HOST = "https://api.openai.com"
AZURE = "https://my.openai.azure.com/openai"
FOUNDRY = "https://my.services.ai.azure.com"
GOOGLE = "https://generativelanguage.googleapis.com"
VERTEX = "https://europe-west1-aiplatform.googleapis.com/v1/projects/p/locations/l/publishers"
RUNTIME = "https://bedrock-runtime.eu-west-1.amazonaws.com"
MANTLE = "https://bedrock-mantle.us-east-1.api.aws"
KEY = b"idempotency-key"


@dataclass(frozen=True)
class Example:
    url: str
    dialect: Dialect
    profile: Profile
    body: object = None
    method: str = "POST"

    def __str__(self) -> str:
        return f"{self.method} {self.url}"


def chat(provider: str = "openai", model: str | None = "m", key: bytes | None = None) -> Profile:
    return Profile(provider=provider, operation="chat", model=model, idempotency_header=key)


BODY = {"model": "m", "messages": []}

EXAMPLES = [
    # OpenAI and what is compatible with it
    Example(f"{OPENAI_HOST}/v1/chat/completions", OPENAI, chat(key=KEY), BODY),
    Example(
        f"{OPENAI_HOST}/v1/chat/completions",
        OPENAI,
        Profile(provider="openai", operation="chat", model="m", stream=True, idempotency_header=KEY),
        {**BODY, "stream": True},
    ),
    Example("https://eu.api.openai.com/v1/chat/completions?x=/v1/messages", OPENAI, chat(key=KEY), BODY),
    Example("http://user:secret@127.0.0.1:8000/v1/chat/completions", OPENAI, chat(key=KEY), BODY),
    Example("https://openrouter.ai/api/v1/chat/completions", OPENAI, chat(key=KEY), BODY),
    Example("https://api.groq.com/openai/v1/chat/completions", OPENAI, chat("groq"), BODY),
    Example("https://api.mistral.ai/v1/chat/completions", OPENAI, chat("mistral_ai"), BODY),
    Example("https://api.deepseek.com/chat/completions", OPENAI, chat("deepseek"), BODY),
    Example("https://api.x.ai/v1/chat/completions", OPENAI, chat("x_ai"), BODY),
    Example("https://api.perplexity.ai/chat/completions", OPENAI, chat("perplexity"), BODY),
    Example("https://x.ml.cloud.ibm.com/ml/v1/text/chat/completions", OPENAI, chat("ibm.watsonx.ai"), BODY),
    Example(
        f"{AZURE}/deployments/gpt-4o/chat/completions?api-version=2024-10-21",
        OPENAI,
        chat("azure.ai.openai", "gpt-4o"),
        {"messages": []},
    ),
    Example(f"{AZURE}/v1/chat/completions", OPENAI, chat("azure.ai.openai"), BODY),
    Example(f"{FOUNDRY}/openai/v1/chat/completions", OPENAI, chat("azure.ai.openai"), BODY),
    Example(f"{FOUNDRY}/models/chat/completions", OPENAI, chat("azure.ai.inference"), BODY),
    Example(f"{GOOGLE}/v1beta/openai/chat/completions", OPENAI, chat("gcp.gemini"), BODY),
    Example(f"{MANTLE}/openai/v1/chat/completions", OPENAI, chat("aws.bedrock"), BODY),
    Example(
        f"{OPENAI_HOST}/v1/completions",
        OPENAI,
        Profile(provider="openai", operation="text_completion", model="m", idempotency_header=KEY),
        {"model": "m", "prompt": "p"},
    ),
    Example(
        f"{OPENAI_HOST}/v1/embeddings",
        OPENAI,
        Profile(provider="openai", operation="embeddings", model="m", idempotency_header=KEY),
        {"model": "m", "input": "p"},
    ),
    Example(
        f"{OPENAI_HOST}/v1/moderations",
        OPENAI,
        Profile(provider="openai", operation="moderation", idempotency_header=KEY),
        {"input": "p"},
    ),
    Example(f"{OPENAI_HOST}/v1/responses", OPENAI, chat(key=KEY), {"model": "m", "input": "p"}),
    Example(
        f"{OPENAI_HOST}/v1/responses/input_tokens",
        OPENAI,
        Profile(provider="openai", operation="count_tokens", model="m", idempotency_header=KEY),
        {"model": "m", "input": "p"},
    ),
    Example(
        f"{OPENAI_HOST}/v1/images/generations",
        OPENAI,
        Profile(
            provider="openai",
            operation="image_generation",
            model="m",
            repeat_safe=False,
            idempotency_header=KEY,
        ),
        {"model": "m", "prompt": "p"},
    ),
    Example(
        "http://localhost/v1/rerank",
        OPENAI,
        Profile(provider="openai", operation="rerank", model="m", idempotency_header=KEY),
        {"model": "m", "query": "q"},
    ),
    Example(f"{OPENAI_HOST}/v1/responses/resp_1", OPENAI, Profile(provider="openai"), method="GET"),
    Example(f"{OPENAI_HOST}/v1/chat/completions", OPENAI, Profile(provider="openai"), method="GET"),
    Example(f"{OPENAI_HOST}/v1/files/file-1", OPENAI, Profile(provider="openai"), method="DELETE"),
    Example(f"{OPENAI_HOST}/v1/batches", OPENAI, Profile(provider="openai", repeat_safe=False), {}),
    # Anthropic and who hosts it
    Example("https://api.anthropic.com/v1/messages", ANTHROPIC, chat("anthropic"), BODY),
    Example(
        "https://api.anthropic.com/v1/messages?beta=true",
        ANTHROPIC,
        Profile(provider="anthropic", operation="chat", model="m", stream=True),
        {**BODY, "stream": True},
    ),
    Example(
        "https://api.anthropic.com/v1/messages/count_tokens",
        ANTHROPIC,
        Profile(provider="anthropic", operation="count_tokens", model="m"),
        BODY,
    ),
    Example(
        "https://api.anthropic.com/v1/messages?beta=true",
        ANTHROPIC,
        Profile(provider="anthropic", operation="chat", model="m", repeat_safe=False),
        {**BODY, "thread": {"type": "create"}},
    ),
    Example(
        "https://api.anthropic.com/v1/messages/batches",
        ANTHROPIC,
        Profile(provider="anthropic", repeat_safe=False),
        {"requests": []},
    ),
    Example("https://api.anthropic.com/v1/models", ANTHROPIC, Profile(provider="anthropic"), method="GET"),
    Example("http://localhost:4000/v1/messages", ANTHROPIC, chat("anthropic"), BODY),
    Example(f"{FOUNDRY}/anthropic/v1/messages", ANTHROPIC, chat("azure.ai.inference"), BODY),
    Example(f"{MANTLE}/anthropic/v1/messages", ANTHROPIC, chat("aws.bedrock"), BODY),
    Example(
        f"{VERTEX}/anthropic/models/claude-x@1:streamRawPredict",
        ANTHROPIC,
        Profile(provider="gcp.vertex_ai", operation="chat", model="claude-x@1", stream=True),
        {"messages": []},
    ),
    Example(
        f"{VERTEX}/anthropic/models/claude-x:rawPredict", ANTHROPIC, chat("gcp.vertex_ai", "claude-x"), {}
    ),
    Example(
        f"{VERTEX}/anthropic/models/claude-x:predictLongRunning",
        ANTHROPIC,
        Profile(provider="gcp.vertex_ai", repeat_safe=False),
        {},
    ),
    # Gemini and Vertex AI
    Example(
        f"{GOOGLE}/v1beta/models/gemini-x:generateContent?key=AIza-FAKE",
        GEMINI,
        Profile(provider="gcp.gemini", operation="generate_content", model="gemini-x"),
        {"contents": []},
    ),
    Example(
        f"{VERTEX}/google/models/gemini-x:streamGenerateContent?alt=sse",
        GEMINI,
        Profile(provider="gcp.vertex_ai", operation="generate_content", model="gemini-x", stream=True),
        {"contents": []},
    ),
    Example(
        f"{GOOGLE}/v1beta/models/e:batchEmbedContents",
        GEMINI,
        Profile(provider="gcp.gemini", operation="embeddings", model="e"),
        {},
    ),
    Example(
        f"{GOOGLE}/v1beta/models/gemini-x:batchGenerateContent",
        GEMINI,
        Profile(provider="gcp.gemini", repeat_safe=False),
        {},
    ),
    Example(
        f"{GOOGLE}/v1beta/interactions",
        GEMINI,
        Profile(provider="gcp.gemini", operation="generate_content", model="gemini-x", stream=True),
        {"model": "gemini-x", "input": "p", "stream": True},
    ),
    Example(
        f"{GOOGLE}/v1beta/interactions",
        GEMINI,
        Profile(provider="gcp.gemini", operation="generate_content", model="deep", repeat_safe=False),
        {"agent": "deep", "input": "p", "background": True},
    ),
    Example(f"{GOOGLE}/v1beta/models", GEMINI, Profile(provider="gcp.gemini"), method="GET"),
    # Bedrock
    Example(
        f"{RUNTIME}/model/anthropic.claude-x-v1%3A0/invoke",
        BEDROCK,
        chat("aws.bedrock", "anthropic.claude-x-v1:0"),
    ),
    Example(
        f"{RUNTIME}/model/arn%3Aaws%3Abedrock%3Aeu%3A1%3Ainference-profile%2Fx/converse-stream",
        BEDROCK,
        Profile(
            provider="aws.bedrock",
            operation="chat",
            model="arn:aws:bedrock:eu:1:inference-profile/x",
            stream=True,
        ),
        {"messages": []},
    ),
    Example(
        f"{RUNTIME}/model/amazon.titan-embed-text-v2/invoke",
        BEDROCK,
        Profile(provider="aws.bedrock", operation="embeddings", model="amazon.titan-embed-text-v2"),
    ),
    Example(
        "http://localhost:8080/model/m/count-tokens",
        BEDROCK,
        Profile(provider="aws.bedrock", operation="count_tokens", model="m"),
    ),
    Example(f"{RUNTIME}/async-invoke", BEDROCK, Profile(provider="aws.bedrock", repeat_safe=False), {}),
    Example("https://api.deepseek.com/anthropic/v1/messages", ANTHROPIC, chat("deepseek"), BODY),
    Example("https://api.deepseek.com/user/balance", UNKNOWN, Profile(provider="deepseek"), method="GET"),
    # Nobody's
    Example("https://example.org/v1/files", UNKNOWN, Profile(repeat_safe=False), {"a": 1}),
    Example("https://example.org", UNKNOWN, Profile(), method="GET"),
    Example(
        "https://example.org/x",
        UNKNOWN,
        Profile(model="m", stream=True),
        {"model": "m", "stream": True},
        "PUT",
    ),
    Example(
        "https://api.cohere.com/v2/chat",
        UNKNOWN,
        Profile(provider="cohere", model="m", repeat_safe=False),
        BODY,
    ),
    Example("https://bedrock-museum.org/x", UNKNOWN, Profile(), method="GET"),
    Example("/v1/chat/completions", OPENAI, chat(key=KEY), BODY),
    Example("", UNKNOWN, Profile(), method="GET"),
]


def request(example: Example) -> Request:
    body = b"" if example.body is None else json.dumps(example.body).encode()
    return Request(example.method, example.url, [(b"host", b"x")], body)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_request_asks_for(example: Example) -> None:
    dialect = dialect_for(request(example))
    assert dialect is example.dialect
    assert replace(dialect.profile(request(example)), resumable=False) == example.profile


@pytest.mark.parametrize(
    ("url", "body", "resumable"),
    [
        (f"{OPENAI_HOST}/v1/chat/completions", BODY, True),
        (f"{OPENAI_HOST}/v1/chat/completions", {**BODY, "n": 1}, True),
        (f"{OPENAI_HOST}/v1/chat/completions", {**BODY, "n": 2}, False),  # several answers
        (f"{OPENAI_HOST}/v1/chat/completions", {"model": "m"}, False),
        (f"{OPENAI_HOST}/v1/completions", {"model": "m", "prompt": "x"}, False),
        (f"{OPENAI_HOST}/v1/responses", {"model": "m", "input": "x"}, False),
        ("https://api.anthropic.com/v1/messages", BODY, True),
        ("https://api.anthropic.com/v1/complete", {"model": "m", "prompt": "x"}, False),
        (f"{GOOGLE}/v1beta/models/m:streamGenerateContent", {"contents": []}, False),
    ],
)
def test_what_the_rest_of_an_answer_can_be_asked_for_of(
    url: str, body: dict[str, object], resumable: bool
) -> None:
    asked = Request("POST", url, [], json.dumps(body).encode())
    assert dialect_for(asked).profile(asked).resumable is resumable


@pytest.mark.parametrize(
    ("url", "framing"),
    [
        (f"{OPENAI_HOST}/v1/chat/completions", "events"),
        ("https://api.anthropic.com/v1/messages", "events"),
        (f"{GOOGLE}/v1beta/models/m:streamGenerateContent", "array"),
        (f"{GOOGLE}/v1beta/models/m:streamGenerateContent?key=k&alt=sse", "events"),
        (f"{GOOGLE}/v1beta/interactions", "events"),
        (f"{RUNTIME}/model/m/converse-stream", "unknown"),
        ("https://h.example/other", "unknown"),
    ],
)
def test_what_a_stream_is_written_in(url: str, framing: str) -> None:
    asked = Request("POST", url, [], b"{}")
    assert dialect_for(asked).framing(asked) == framing


def test_the_version_header_tells_an_anthropic_request_on_any_route() -> None:
    headers = [(b"Anthropic-Version", b"2023-06-01")]
    assert (
        dialect_for(Request("POST", "https://gateway.example/claude/messages", headers, b"{}")) is ANTHROPIC
    )


def test_the_dialect_is_found_once_and_anew_for_a_request_that_goes_elsewhere() -> None:
    asked = Request("POST", "https://gateway.example/claude/messages", [], b"{}")
    assert dialect_for(asked) is UNKNOWN
    assert dialect_for(asked.replace(body=b'{"model": "m"}')) is UNKNOWN
    assert dialect_for(asked.replace(url="https://gateway.example/v1/chat/completions")) is OPENAI
    assert dialect_for(asked.replace(headers=[(b"anthropic-version", b"2023-06-01")])) is ANTHROPIC
    assert asked.replace(body=b"").dialect is UNKNOWN  # as it goes where it went
    assert dialect_for(asked) is UNKNOWN


@pytest.mark.parametrize(
    ("body", "repeat_safe"),
    [
        ({}, True),
        ({"store": False, "background": False, "conversation": None}, True),
        ({"previous_response_id": "resp_1"}, True),
        ({"store": True}, False),
        ({"background": True}, False),
        ({"conversation": "conv_1"}, False),
        ({"conversation": {"id": "conv_1"}}, False),
    ],
)
def test_a_response_that_is_to_be_kept_is_not_safe_to_repeat(
    body: dict[str, object], repeat_safe: bool
) -> None:
    content = json.dumps({"model": "m", "input": "p", **body}).encode()
    for url in ("https://api.openai.com/v1/responses", "http://localhost/v1/chat/completions"):
        assert OPENAI.profile(Request("POST", url, [], content)).repeat_safe is repeat_safe


@pytest.mark.parametrize(
    "body", [None, b"", b"\x00", b"[]", b'{"model": 5, "stream": "maybe"}', b'{"model": ""}']
)
@pytest.mark.parametrize("dialect", [*DIALECTS, UNKNOWN], ids=lambda dialect: dialect.name)
def test_a_body_that_says_nothing_is_no_error(dialect: Dialect, body: bytes | None) -> None:
    profile = dialect.profile(Request("POST", "https://x.example/v1/chat/completions", [], body))
    assert profile.model is None
    assert profile.stream is False


@pytest.mark.parametrize("dialect", [*DIALECTS, UNKNOWN], ids=lambda dialect: dialect.name)
def test_yes_is_whatever_servers_take_for_it(dialect: Dialect) -> None:
    for value in (True, 1, "true", "1", "YES", "on", "t", "y"):
        body = json.dumps({"stream": value}).encode()
        assert dialect.profile(Request("POST", "https://x.example/v1/chat/completions", [], body)).stream
    for value in ("store", "background"):
        body = json.dumps({"model": "m", value: 1}).encode()
        assert not OPENAI.profile(
            Request("POST", "https://api.openai.com/v1/responses", [], body)
        ).repeat_safe


def test_the_unknown_dialect_takes_whatever_nobody_wants() -> None:
    assert UNKNOWN.matches(Request("BREW", "coffee:", [], None))


def test_names_differ() -> None:
    assert len({dialect.name for dialect in [*DIALECTS, UNKNOWN]}) == len(DIALECTS) + 1


@pytest.mark.parametrize("dialect", [ANTHROPIC, OPENAI], ids=lambda dialect: dialect.name)
def test_profiles_are_kept_but_for_names_without_end(dialect: Dialect) -> None:
    def profile(model: str) -> Profile:
        url = "https://x.example/v1/" + ("messages" if dialect is ANTHROPIC else "chat/completions")
        return dialect.profile(
            Request("POST", url, [], json.dumps({"model": model, "messages": []}).encode())
        )

    long = "m" * (LONGEST_MODEL + 1)
    assert profile("m") is profile("m")
    assert profile(long) == profile(long)
    assert profile(long) is not profile(long)
    assert profile(long).model == long
