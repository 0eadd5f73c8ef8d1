"""What becomes of a request on its way to a target: where it goes, what opens it, which model it asks for."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import NoTargetError, Request, Target
from resilient_llm.message import Headers
from resilient_llm.presets import (
    ANTHROPIC,
    AZURE_OPENAI,
    BEDROCK,
    GEMINI,
    GROQ,
    MISTRAL,
    OPENAI,
    OPENROUTER,
    VLLM,
)
from resilient_llm.routing.rewrite import keeps_model, rewrite
from resilient_llm.transports.http1_request import place_of, written

SECRET = "sk-of-the-target"
CALLERS: Headers = [
    (b"Host", b"gateway.example"),
    (b"Authorization", b"Bearer CANARY-1"),
    (b"X-Api-Key", b"CANARY-2"),
    (b"api-key", b"CANARY-3"),
    (b"x-goog-api-key", b"CANARY-4"),
    (b"OpenAI-Organization", b"CANARY-5"),
    (b"openai-project", b"CANARY-6"),
    (b"Cookie", b"session=CANARY-7"),
    (b"cookie", b"other=CANARY-8"),
    (b"proxy-authorization", b"Basic CANARY-9"),
    (b"cf-aig-authorization", b"Bearer CANARY-10"),
    (b"X-Amz-Security-Token", b"CANARY-11"),
    (b"x-litellm-api-key", b"CANARY-12"),
    (b"helicone-auth", b"Bearer CANARY-13"),
    (b"Ocp-Apim-Subscription-Key", b"CANARY-14"),
]
OTHERS: Headers = [
    (b"Accept", b"application/json"),
    (b"Content-Type", b"application/json"),
    (b"anthropic-version", b"2023-06-01"),
    (b"anthropic-beta", b"one"),
    (b"Anthropic-Beta", b"two"),
    (b"OpenAI-Beta", b"assistants=v2"),
    (b"Idempotency-Key", b"stays"),
    (b"x-request-timeout", b"30"),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    (b"User-Agent", b"x-token-counter/1"),
]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": "gpt-4o", "stream": True}


def post(url: str, body: object = CHAT, headers: Headers | None = None) -> Request:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    given: Headers = [(b"Host", b"gateway.example"), (b"Content-Length", str(len(sent)).encode())]
    return Request("POST", url, [*given, *(headers or [])], sent)


def at(url: str, **options: Any) -> Target:
    return Target(name="target", url=url, **options)


OPENAI_CHAT = "http://gateway.example/v1/chat/completions"
AZURE_CHAT = "https://mine.openai.azure.com/openai/deployments/own/chat/completions?api-version=2024-10-21"
GEMINI_CHAT = (
    "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse"
)
VERTEX = "/v1/projects/p/locations/eu/publishers"
VERTEX_CHAT = f"https://eu-aiplatform.googleapis.com{VERTEX}/google/models/gemini-2.5-pro:generateContent"
VERTEX_CLAUDE = f"https://eu-aiplatform.googleapis.com{VERTEX}/anthropic/models/claude:rawPredict"
CONVERSE = "https://bedrock-runtime.us-east-1.amazonaws.com/model/anthropic.claude-v2%3A1/converse-stream"
ARN = "arn:aws:bedrock:eu-west-1:1:inference-profile/eu.claude"
AZURE = "https://res.openai.azure.com"


@pytest.mark.parametrize(
    ("target", "asked", "expected"),
    [
        # Whatever is before the route of an OpenAI SDK's request is its base URL.
        (OPENAI.target(model="m"), OPENAI_CHAT, "https://api.openai.com/v1/chat/completions"),
        (OPENAI.target(), "http://h/chat/completions", "https://api.openai.com/v1/chat/completions"),
        (
            GROQ.target(),
            "http://h/api/v1/chat/completions",
            "https://api.groq.com/openai/v1/chat/completions",
        ),
        (MISTRAL.target(), "http://h/v1/embeddings", "https://api.mistral.ai/v1/embeddings"),
        (OPENROUTER.target(), "http://h/v1/models?limit=2", "https://openrouter.ai/api/v1/models?limit=2"),
        (OPENAI.target(), "http://h/x/v1/responses/resp_1", "https://api.openai.com/v1/responses/resp_1"),
        (
            OPENAI.target(),
            "http://h/v1/responses/input_tokens",
            "https://api.openai.com/v1/responses/input_tokens",
        ),
        (
            OPENAI.target(),
            "http://h/v1/audio/transcriptions",
            "https://api.openai.com/v1/audio/transcriptions",
        ),
        (OPENAI.target(), "http://h/v1/chat/completions/", "https://api.openai.com/v1/chat/completions"),
        (VLLM.target(url="http://[::1]:8000/v1/"), OPENAI_CHAT, "http://[::1]:8000/v1/chat/completions"),
        (at("https://api.perplexity.ai"), OPENAI_CHAT, "https://api.perplexity.ai/chat/completions"),
        (at("https://h"), "http://g/own/route?a=1&b=2", "https://h/own/route?a=1&b=2"),
        (at("https://h/v1"), "http://g/v1/own/route#part", "https://h/v1/own/route"),
        # What Azure's SDK asks for without a deployment
        (OPENAI.target(), "http://h/openai/models?api-version=1", "https://api.openai.com/v1/models"),
        (
            AZURE_OPENAI.target(url=AZURE),
            "http://h/openai/models?api-version=1",
            f"{AZURE}/openai/models?api-version=1",
        ),
        (at("https://h/v1"), "http://g/openai-like/models", "https://h/v1/openai-like/models"),
        # Azure: with a version the deployment is in the path, without one it is like OpenAI.
        (AZURE_OPENAI.target(url=AZURE, model="dep"), OPENAI_CHAT, f"{AZURE}/openai/v1/chat/completions"),
        (
            AZURE_OPENAI.target(url=f"{AZURE}/openai/v1", model="dep"),
            AZURE_CHAT,
            f"{AZURE}/openai/v1/chat/completions",
        ),
        (
            AZURE_OPENAI.target(url=AZURE, model="my dep", api_version="2024-10-21"),
            OPENAI_CHAT,
            f"{AZURE}/openai/deployments/my%20dep/chat/completions?api-version=2024-10-21",
        ),
        (
            AZURE_OPENAI.target(url=f"{AZURE}/openai", api_version="preview"),
            "http://h/v1/responses",
            f"{AZURE}/openai/responses?api-version=preview",
        ),
        (
            AZURE_OPENAI.target(url=AZURE, api_version="2024-10-21"),
            OPENAI_CHAT,
            f"{AZURE}/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21",
        ),
        (
            AZURE_OPENAI.target(url=f"{AZURE}/openai/v1", api_version="preview"),
            OPENAI_CHAT,
            f"{AZURE}/openai/v1/chat/completions?api-version=preview",
        ),
        (
            AZURE_OPENAI.target(url=AZURE, model="dep"),
            AZURE_CHAT,
            f"{AZURE}/openai/deployments/dep/chat/completions?api-version=2024-10-21",
        ),
        (
            AZURE_OPENAI.target(url=AZURE),
            AZURE_CHAT,
            f"{AZURE}/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21",
        ),
        (OPENAI.target(model="m"), AZURE_CHAT, "https://api.openai.com/v1/chat/completions"),
        (
            at("https://r.services.ai.azure.com/models", api_version="2024-05-01-preview"),
            OPENAI_CHAT,
            "https://r.services.ai.azure.com/models/chat/completions?api-version=2024-05-01-preview",
        ),
        # Anthropic: the version is part of the route, and may be part of the base URL.
        (
            ANTHROPIC.target(model="c"),
            "http://h/v1/messages?beta=true",
            "https://api.anthropic.com/v1/messages?beta=true",
        ),
        (
            ANTHROPIC.target(),
            "http://h/x/v1/messages/count_tokens",
            "https://api.anthropic.com/v1/messages/count_tokens",
        ),
        (ANTHROPIC.target(url="https://h/a/v1"), "http://h/v1/messages", "https://h/a/v1/messages"),
        (ANTHROPIC.target(dialect="openai"), OPENAI_CHAT, "https://api.anthropic.com/v1/chat/completions"),
        # Gemini and Vertex AI: the model is in the path.
        (
            GEMINI.target(model="gemini-flash"),
            GEMINI_CHAT,
            "https://generativelanguage.googleapis.com/v1beta/models/gemini-flash:streamGenerateContent?alt=sse",
        ),
        (
            GEMINI.target(),
            GEMINI_CHAT.replace("v1beta", "v1"),
            "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse",
        ),
        (
            GEMINI.target(model="tunedModels/mine", url="https://h"),
            GEMINI_CHAT,
            "https://h/v1beta/tunedModels/mine:streamGenerateContent?alt=sse",
        ),
        (
            GEMINI.target(model="m", url="https://h"),
            "http://g/v1alpha/models/x:countTokens",
            "https://h/v1alpha/models/m:countTokens",
        ),
        (
            GEMINI.target(model="m"),
            "http://g/v1beta/interactions",
            "https://generativelanguage.googleapis.com/v1beta/interactions",
        ),
        (
            GEMINI.target(model="m"),
            VERTEX_CHAT,
            "https://generativelanguage.googleapis.com/v1beta/models/m:generateContent",
        ),
        (
            GEMINI.target(model="m", dialect="openai"),
            OPENAI_CHAT,
            "https://generativelanguage.googleapis.com/v1beta/openai/chat/completions",
        ),
        (
            at(
                "https://us-aiplatform.googleapis.com/v1/projects/q/locations/us",
                provider="gcp.vertex_ai",
                model="m",
            ),
            GEMINI_CHAT,
            "https://us-aiplatform.googleapis.com/v1/projects/q/locations/us/publishers/google/models/m:streamGenerateContent?alt=sse",
        ),
        (
            at("https://us-aiplatform.googleapis.com", model="claude-2"),
            VERTEX_CLAUDE,
            f"https://us-aiplatform.googleapis.com{VERTEX}/anthropic/models/claude-2:rawPredict",
        ),
        (
            at("https://us-aiplatform.googleapis.com"),
            VERTEX_CHAT,
            f"https://us-aiplatform.googleapis.com{VERTEX}/google/models/gemini-2.5-pro:generateContent",
        ),
        # Bedrock: the model is a segment of the path, whatever is in it.
        (
            BEDROCK.target(url="https://bedrock-runtime.eu-west-1.amazonaws.com", model=ARN),
            CONVERSE,
            f"https://bedrock-runtime.eu-west-1.amazonaws.com/model/{quote(ARN, safe='')}/converse-stream",
        ),
        (
            BEDROCK.target(url="https://bedrock-runtime.eu-west-1.amazonaws.com"),
            CONVERSE,
            "https://bedrock-runtime.eu-west-1.amazonaws.com/model/anthropic.claude-v2%3A1/converse-stream",
        ),
        (
            BEDROCK.target(url="https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1", dialect="openai"),
            OPENAI_CHAT,
            "https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1/chat/completions",
        ),
        (
            BEDROCK.target(url="https://bedrock-runtime.eu-west-1.amazonaws.com", model="m"),
            "https://bedrock-runtime.us-east-1.amazonaws.com/guardrail/g/version/1/apply",
            "https://bedrock-runtime.eu-west-1.amazonaws.com/guardrail/g/version/1/apply",
        ),
        # Nothing is said of where it goes.
        (Target(name="t", model="m"), "http://h/v1/chat/completions?a=1", "http://h/v1/chat/completions?a=1"),
        (Target(name="t", provider="azure.ai.openai"), AZURE_CHAT, AZURE_CHAT),
    ],
)
def test_where_it_goes(target: Target, asked: str, expected: str) -> None:
    changed = rewrite(post(asked), target, SECRET)
    assert changed.url == expected
    again = rewrite(changed, target, SECRET)
    assert again is changed


@pytest.mark.parametrize(
    ("target", "asked", "why"),
    [
        (ANTHROPIC.target(), VERTEX_CLAUDE, "route"),
        (at("https://us-aiplatform.googleapis.com", dialect="anthropic"), "http://h/v1/messages", "route"),
        (at("https://us-aiplatform.googleapis.com", dialect="gemini"), GEMINI_CHAT, "route"),
        (AZURE_OPENAI.target(url=AZURE, api_version="1"), "http://h/v1/images/edits", "route"),
        (OPENAI.target(), "http://h/v1/chat/../files", "path"),
        (OPENAI.target(), "http://h/v1/%2e%2e/files", "path"),
        (OPENAI.target(), "http://h/v1/..%5Cfiles", "path"),
    ],
)
def test_what_a_target_does_not_have(target: Target, asked: str, why: str) -> None:
    with pytest.raises(NoTargetError) as caught:
        rewrite(post(asked, b""), target, SECRET)
    assert caught.value.rejected == (f"{target.name}:{why}",)


@pytest.mark.parametrize(
    ("target", "asked", "header"),
    [
        (OPENAI.target(), OPENAI_CHAT, (b"authorization", b"Bearer sk-of-the-target")),
        (GROQ.target(), OPENAI_CHAT, (b"authorization", b"Bearer sk-of-the-target")),
        (VLLM.target(url="http://h"), OPENAI_CHAT, (b"authorization", b"Bearer sk-of-the-target")),
        (ANTHROPIC.target(), "http://h/v1/messages", (b"x-api-key", b"sk-of-the-target")),
        (ANTHROPIC.target(dialect="openai"), OPENAI_CHAT, (b"authorization", b"Bearer sk-of-the-target")),
        (
            ANTHROPIC.target(auth="bearer"),
            "http://h/v1/messages",
            (b"authorization", b"Bearer sk-of-the-target"),
        ),
        (AZURE_OPENAI.target(url=AZURE), OPENAI_CHAT, (b"api-key", b"sk-of-the-target")),
        (
            AZURE_OPENAI.target(url=AZURE, auth="bearer"),
            OPENAI_CHAT,
            (b"authorization", b"Bearer sk-of-the-target"),
        ),
        (
            at("https://r.services.ai.azure.com/anthropic"),
            "http://h/v1/messages",
            (b"x-api-key", b"sk-of-the-target"),
        ),
        (GEMINI.target(), GEMINI_CHAT, (b"x-goog-api-key", b"sk-of-the-target")),
        (GEMINI.target(dialect="openai"), OPENAI_CHAT, (b"authorization", b"Bearer sk-of-the-target")),
        (
            at("https://us-aiplatform.googleapis.com"),
            VERTEX_CHAT,
            (b"authorization", b"Bearer sk-of-the-target"),
        ),
        (BEDROCK.target(url="https://h"), CONVERSE, (b"authorization", b"Bearer sk-of-the-target")),
        (at("https://h", auth="X-Gateway-Key"), OPENAI_CHAT, (b"x-gateway-key", b"sk-of-the-target")),
        (Target(name="here"), GEMINI_CHAT, (b"x-goog-api-key", b"sk-of-the-target")),
    ],
)
def test_what_opens_it(target: Target, asked: str, header: tuple[bytes, bytes]) -> None:
    callers: Headers = [
        (b"Authorization", b"Bearer CANARY"),
        (b"X-API-Key", b"CANARY"),
        (b"API-Key", b"CANARY"),
    ]
    changed = rewrite(post(asked, headers=[*callers, (b"X-Goog-Api-Key", b"CANARY")]), target, SECRET)
    secrets = [one for one in changed.headers if b"CANARY" in one[1] or SECRET.encode() in one[1]]
    assert secrets == [header]


@pytest.mark.parametrize("secret", [SECRET, None])
def test_nothing_of_the_callers_credentials_leaves_for_another_origin(secret: str | None) -> None:
    request = post(
        "https://user:CANARY-20@gateway.example/v1/chat/completions"
        "?key=CANARY-21&a=1&api_key=CANARY-22&%6Bey=CANARY-23&token=CANARY-24&X-Amz-Signature=CANARY-25&b=",
        headers=[*CALLERS[1:], *OTHERS],
    )
    changed = rewrite(request, OPENAI.target(), secret)
    assert "CANARY" not in changed.url
    assert changed.url == "https://api.openai.com/v1/chat/completions?a=1&b="
    assert b"CANARY" not in b"".join(name + value for name, value in changed.headers)
    kept = [
        one for one in changed.headers if one[0].lower() not in (b"host", b"content-length", b"authorization")
    ]
    assert kept == OTHERS
    assert changed.header(b"authorization") == (None if secret is None else b"Bearer " + SECRET.encode())
    assert b"CANARY" in b"".join(value for _, value in request.headers)  # the caller's own is as it was


def test_where_it_stays_with_a_secret_the_callers_own_still_goes() -> None:
    asked = "https://u:CANARY@api.openai.com/v1/chat/completions?key=CANARY"
    changed = rewrite(post(asked, headers=CALLERS[1:]), Target(name="here"), SECRET)
    assert changed.url == "https://api.openai.com/v1/chat/completions"
    assert b"CANARY" not in b"".join(value for _, value in changed.headers)
    assert changed.header(b"host") == b"gateway.example"


def test_where_it_stays_without_a_secret_it_is_the_callers() -> None:
    request = post("https://api.openai.com:443/v1/chat/completions?key=own", headers=CALLERS[1:])
    changed = rewrite(request, OPENAI.target(model="other"), None)
    assert changed.url == "https://api.openai.com/v1/chat/completions?key=own"
    assert changed.headers[2:] == CALLERS[1:]
    assert changed.json["model"] == "other"


def test_what_changes_nothing_is_the_same_request_and_stays_the_librarys_own() -> None:
    request = post("https://api.openai.com/v1/chat/completions?key=own", headers=CALLERS[1:])
    assert rewrite(request, Target(name="here"), None) is request
    assert rewrite(request, Target(name="here", model="gpt-4o"), None) is request


def test_host_and_length_are_right_and_headers_keep_their_order() -> None:
    request = post(OPENAI_CHAT, headers=[(b"content-md5", b"x"), *OTHERS])
    changed = rewrite(request, at("http://Other.example:8080/v1", model="a-much-longer-name"), None)
    assert changed.body is not None
    assert changed.headers == [
        (b"Host", b"Other.example:8080"),
        (b"Content-Length", str(len(changed.body)).encode()),
        *OTHERS,
    ]
    assert rewrite(request, at("https://h:443/v1"), None).header(b"host") == b"h"
    assert rewrite(request, at("https://h:443/v1"), None).header(b"content-md5") == b"x"


def test_a_host_of_the_targets_own_is_sent_once_in_place_of_the_urls() -> None:
    target = Target(name="t", url="http://10.0.0.1:8080/v1", headers={"Host": "virtual.example"})
    changed = rewrite(post(OPENAI_CHAT, headers=OTHERS), target, None)
    assert changed.url == "http://10.0.0.1:8080/v1/chat/completions"
    assert [one for one in changed.headers if one[0].lower() == b"host"] == [(b"host", b"virtual.example")]
    head, _ = written(changed, place_of(changed.url))
    assert head.lower().count(b"host: ") == 1


def test_a_body_without_a_length_gets_none() -> None:
    request = Request("POST", OPENAI_CHAT, [(b"Transfer-Encoding", b"chunked")], b'{"model": "a"}')
    assert rewrite(request, Target(name="t", model="b"), None).headers == [(b"Transfer-Encoding", b"chunked")]


def test_headers_of_the_target_take_the_place_of_the_callers() -> None:
    target = OPENROUTER.target(
        headers={"HTTP-Referer": "https://mine", "OpenAI-Beta": "none", "OpenAI-Project": "p"}
    )
    changed = rewrite(post(OPENAI_CHAT, headers=[*CALLERS[1:], *OTHERS]), target, SECRET)
    assert [value for name, value in changed.headers if name.lower() == b"openai-beta"] == [b"none"]
    assert changed.header(b"http-referer") == b"https://mine"
    assert changed.header(b"openai-project") == b"p"


KEYS = st.one_of(
    st.sampled_from(["model", "mode", "messages", '"model"', "mo\\del", "models/x", "модель"]),
    st.text(max_size=6),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12) | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n")])


@given(
    before=st.dictionaries(KEYS, VALUES, max_size=4),
    old=VALUES,
    after=st.dictionaries(KEYS, VALUES, max_size=4),
    separators=SEPARATORS,
    ensure_ascii=st.booleans(),
    duplicate=st.booleans(),
    escaped=st.booleans(),
    model=st.one_of(st.just("gpt-4o"), st.text(min_size=1, max_size=20).filter(str.isprintable)),
)
def test_only_the_value_of_the_model_differs(
    *,
    before: dict[str, object],
    old: object,
    after: dict[str, object],
    separators: tuple[str, str],
    ensure_ascii: bool,
    duplicate: bool,
    escaped: bool,
    model: str,
) -> None:
    """A document made of what stands around each top-level model, so that what must come out is known."""
    comma, colon = separators

    def write(value: object) -> str:
        return json.dumps(value, separators=separators, ensure_ascii=ensure_ascii)

    def write_all(items: dict[str, object]) -> list[str]:
        return [f"{write(key)}{colon}{write(value)}" for key, value in items.items() if key != "model"]

    key = '"\\u006dod\\u0065l"' if escaped else '"model"'
    hole = "\0\0"
    parts = [*write_all(before), f"{key}{colon}{hole}", *write_all(after)]
    parts += [f'"model"{colon}{hole}'] if duplicate else []
    template = " {" + comma.join(parts) + "}\n"
    body = template.replace(hole, write(old)).encode("utf-8", "surrogatepass")
    expected = template.replace(hole, json.dumps(model)).encode("utf-8", "surrogatepass")

    request = post(OPENAI_CHAT, body)
    target = at("https://h/v1", model=model)
    changed = rewrite(request, target, None)
    assert changed.body == expected
    assert changed.json == json.loads(expected) == {**json.loads(body), "model": model}
    assert changed.header(b"content-length") == str(len(expected)).encode()
    assert request.body == body
    assert rewrite(changed, target, None) is changed


@given(body=st.binary(max_size=40) | st.text('{}[]"model:, \\', max_size=40).map(str.encode))
def test_what_is_no_object_with_a_model_stays_as_it_is(body: bytes) -> None:
    request = post(OPENAI_CHAT, body)
    if "model" not in request.json and not body.startswith(b"--"):
        assert rewrite(request, at("https://h/v1", model="m"), None).body == body


@given(
    extra=st.lists(st.sampled_from([*CALLERS[1:], *OTHERS]), max_size=12),
    secret=st.sampled_from([None, SECRET]),
)
def test_no_credential_survives_whatever_is_around_it(extra: Headers, secret: str | None) -> None:
    changed = rewrite(post(OPENAI_CHAT, headers=extra), OPENAI.target(model="m"), secret)
    assert b"CANARY" not in b"".join(value for _, value in changed.headers)
    stayed = [one for one in extra if b"CANARY" not in one[1]]
    assert changed.headers[2:] == [
        *stayed,
        *([(b"authorization", b"Bearer " + SECRET.encode())] if secret else []),
    ]


def test_the_parsed_body_is_at_hand() -> None:
    request = post(OPENAI_CHAT)
    parsed = request.json
    changed = rewrite(request, at("https://h/v1", model="m"), None)
    assert changed._json == {**CHAT, "model": "m"}
    assert changed.json["messages"] is parsed["messages"]
    assert rewrite(request, at("https://h/v1"), None)._json is parsed


@pytest.mark.parametrize(
    ("asked", "body", "expected"),
    [
        ("models/x:embedContent", {"model": "models/x", "content": 1}, {"model": "models/m", "content": 1}),
        ("interactions", {"model": "x"}, {"model": "m"}),
        (
            "models/x:batchEmbedContents",
            {"requests": [{"model": "models/x", "content": '"model": "models/x"'}, {"model": "models/x"}]},
            {"requests": [{"model": "models/m", "content": '"model": "models/x"'}, {"model": "models/m"}]},
        ),
        ("models/x:generateContent", {"contents": [{"role": "model"}]}, {"contents": [{"role": "model"}]}),
    ],
)
def test_how_gemini_names_its_models(asked: str, body: object, expected: object) -> None:
    changed = rewrite(post(f"http://h/v1beta/{asked}", body), GEMINI.target(model="m"), SECRET)
    assert json.loads(changed.body or b"") == expected


def form(*fields: tuple[str, bytes], boundary: str = "b-1") -> bytes:
    parts = (
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + value + b"\r\n"
        for head, value in fields
    )
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


@pytest.mark.parametrize(
    "content_type", [b"multipart/form-data; boundary=b-1", b'Multipart/Form-Data; a=b; Boundary="b-1"']
)
def test_the_model_in_a_form(content_type: bytes) -> None:
    sound = b'\r\n--b-2\r\nname="model"\r\n\r\n\0\xff' * 50
    heads = (
        'name="file"; filename="model"',
        'name="prompt"',
        'name="model"',
        "name=model; x=y",
        'name="model2"',
    )
    fields = [sound, b"model", b"whisper-1", b"", b"stays"]
    body = form(*zip(heads, fields, strict=True))
    headers: Headers = [(b"Content-Type", content_type)]
    request = post("http://h/v1/audio/transcriptions", body, headers)
    changed = rewrite(request, OPENAI.target(model="gpt-4o-transcribe"), SECRET)
    fields[2] = fields[3] = b"gpt-4o-transcribe"
    assert changed.body == form(*zip(heads, fields, strict=True))
    assert changed.header(b"content-length") == str(len(changed.body)).encode()
    assert rewrite(changed, OPENAI.target(model="gpt-4o-transcribe"), SECRET) is changed


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (b"--b-1\r\nbroken", [(b"content-type", b"multipart/form-data; boundary=b-1")], "body"),
        (b"--b-1\r\n\r\n\r\n--b-1--", [(b"content-type", b"multipart/form-data")], "body"),
        (b"--other--", [(b"content-type", b"multipart/form-data; boundary=b-1")], "body"),
        (b"\x1f\x8b...", [(b"Content-Encoding", b"gzip")], "encoded_body"),
        ('{"model": "x"}'.encode("utf-16-le"), [], "body"),
    ],
)
def test_a_body_whose_model_cannot_be_replaced_is_refused(body: bytes, headers: Headers, why: str) -> None:
    request = post(OPENAI_CHAT, body, headers)
    with pytest.raises(NoTargetError, match="cannot be replaced") as caught:
        rewrite(request, at("https://h/v1", model="m"), None)
    assert caught.value.rejected == (f"target:{why}",)
    assert rewrite(request, at("https://h/v1"), None).body == body  # nothing is to be replaced


def test_an_upload_that_can_be_read_once_keeps_its_model_and_says_so() -> None:
    async def never(_limit: int) -> Request:
        raise AssertionError

    upload = Request(
        "POST", OPENAI_CHAT, [(b"host", b"gateway.example")], None, template="own", buffer_upload=never
    )
    target = at("https://h/v1", model="m")
    changed = rewrite(upload, target, SECRET)
    assert (changed.url, changed.body, changed.template) == ("https://h/v1/chat/completions", None, "own")
    assert changed.buffer_upload is None  # it would bring back the caller's URL and credentials
    assert keeps_model(upload, target)
    assert not keeps_model(upload, at("https://h/v1"))
    assert not keeps_model(post(OPENAI_CHAT), target)
