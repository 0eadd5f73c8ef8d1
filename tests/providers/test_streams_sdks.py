"""The providers' SDKs read the examples as they are read here, and raise for the error events written here."""

import json
from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pytest

from resilient_llm.core.sse import SSEParser
from resilient_llm.message import Request
from resilient_llm.providers import (
    ANTHROPIC,
    DIALECTS,
    GEMINI,
    OPENAI,
    UNKNOWN,
    Dialect,
    EventKind,
    StreamReader,
)
from tests.providers.streams import anthropic as messages
from tests.providers.streams import gemini, openai_chat, openai_responses
from tests.providers.streams.example import Example

CHAT = Request("POST", "https://api.openai.com/v1/chat/completions", [])
COMPLETIONS = Request("POST", "https://api.openai.com/v1/completions", [])
RESPONSES = Request("POST", "https://api.openai.com/v1/responses", [])
MESSAGES = Request("POST", "https://api.anthropic.com/v1/messages", [])
CONTENT = Request(
    "POST", "https://generativelanguage.googleapis.com/v1beta/models/m:streamGenerateContent", []
)
OTHER = Request("POST", "https://example.com/x", [])


def transport(stream: bytes) -> httpx2.Client:
    headers = {"content-type": "text/event-stream"}
    return httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=stream))
    )


def openai_client(stream: bytes) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="sk-fake", base_url="http://provider.example/v1", http_client=transport(stream), max_retries=0
    )


def chat_chunks(stream: bytes) -> Iterator[object]:
    yield from openai_client(stream).chat.completions.create(model="m", messages=[], stream=True)


def completion_chunks(stream: bytes) -> Iterator[object]:
    yield from openai_client(stream).completions.create(model="m", prompt="", stream=True)


def response_events(stream: bytes) -> Iterator[object]:
    yield from openai_client(stream).responses.create(model="m", input="", stream=True)


def message_events(stream: bytes) -> Iterator[object]:
    client = anthropic.Anthropic(
        api_key="sk-fake", base_url="http://provider.example", http_client=transport(stream), max_retries=0
    )
    yield from client.messages.create(model="m", max_tokens=1, messages=[], stream=True)


SDK_READS = [
    # It cannot read empty events, which some servers send nevertheless.
    *((chat_chunks, row) for row in openai_chat.WHOLE if not row.malformed and b"data:\n" not in row.stream),
    *((response_events, example) for example in openai_responses.WHOLE if example.id),
    *(
        (message_events, example)
        for example in messages.WHOLE
        if example.name != "events without their names"
    ),
]


def text_of(events: list[object]) -> str:
    """Put together what an application would show."""
    said = []
    for event in events:
        choices = getattr(event, "choices", None) or []
        said += [choice.delta.content or "" for choice in choices if choice.delta is not None]
        if getattr(event, "type", None) == "response.output_text.delta":
            said.append(event.delta)  # type: ignore[attr-defined]
        if getattr(event, "type", None) == "content_block_delta" and event.delta.type == "text_delta":  # type: ignore[attr-defined]
            said.append(event.delta.text)  # type: ignore[attr-defined]
        if getattr(event, "type", None) == "completion":
            said.append(event.completion)  # type: ignore[attr-defined]
    return "".join(said)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    ("read", "example"),
    [row for row in SDK_READS if row[1].text is not None and not row[1].keepalives],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_sdk_reads_the_same_text(read: object, example: Example) -> None:
    events = list(read(example.stream))  # type: ignore[operator]
    assert text_of(events) == example.text


@pytest.mark.parametrize(
    ("read", "example"), SDK_READS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_the_sdk_takes_the_example_for_what_its_api_sends(read: object, example: Example) -> None:
    for event in read(example.stream):  # type: ignore[operator]
        assert event is not None


@pytest.mark.parametrize("dialect", [OPENAI, UNKNOWN], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("code", ["truncated", None])
def test_the_openai_sdk_raises_for_an_error_in_a_completion(dialect: Dialect, code: str | None) -> None:
    for request, read, start in (
        (CHAT, chat_chunks, openai_chat.ROLE + openai_chat.says("Hello")),
        (COMPLETIONS, completion_chunks, b""),
    ):
        error = dialect.error_event(request, 502, "the stream broke off", code=code, sequence=7)
        chunks = read(start + error)
        with pytest.raises(openai.APIError, match="the stream broke off") as caught:
            for _ in chunks:
                pass
        assert caught.value.code == code
        assert caught.value.type == "server_error"
        assert isinstance(caught.value.body, dict)


@pytest.mark.parametrize("code", ["truncated", None])
def test_the_openai_sdk_raises_for_an_error_in_a_response(code: str | None) -> None:
    stream = openai_responses.stream(pieces=("Hello",))
    reader = StreamReader(OPENAI)
    reader.feed(stream)
    error = OPENAI.error_event(
        RESPONSES, 502, "the stream broke off", code=code, sequence=reader.answer.sequence
    )
    seen: list[object] = []
    with pytest.raises(openai.APIError, match="the stream broke off") as caught:
        seen.extend(response_events(stream + error))
    assert caught.value.code == code
    assert [event.sequence_number for event in seen] == list(range(len(seen)))  # type: ignore[attr-defined]
    [event] = SSEParser().feed(error)
    assert event.event == "error"
    # What the API's reference says it looks like, for clients that go by that.
    fields = openai.types.responses.ResponseErrorEvent.model_validate_json(event.data, strict=True)
    assert fields.message == "the stream broke off"
    assert fields.code == (code or "server_error")
    assert fields.sequence_number == len(seen)


def test_an_error_before_any_event_of_a_response_is_the_first() -> None:
    [event] = SSEParser().feed(OPENAI.error_event(RESPONSES, 503, "m"))
    assert json.loads(event.data)["sequence_number"] == 0


@pytest.mark.parametrize(
    ("status", "kind"), [(502, "api_error"), (504, "timeout_error"), (529, "overloaded_error")]
)
@pytest.mark.parametrize("code", ["truncated", None])
def test_the_anthropic_sdk_raises_for_an_error_in_a_message(status: int, kind: str, code: str | None) -> None:
    error = ANTHROPIC.error_event(MESSAGES, status, "the stream broke off", code=code)
    events = message_events(messages.start() + messages.HELLO + error)
    with pytest.raises(anthropic.APIStatusError, match="the stream broke off") as caught:
        for _ in events:
            pass
    assert (caught.value.type, caught.value.error_code) == (kind, code)


def test_googles_sdk_looks_for_an_error_that_comes_first_in_the_data() -> None:
    [event] = SSEParser().feed(GEMINI.error_event(CONTENT, 503, "m", code="truncated"))
    assert event.event == "message"
    assert event.data.startswith('{"error": ')
    assert json.loads(event.data)["error"]["code"] == 503


def test_the_google_sdk_reads_the_same_text_and_raises_for_an_error() -> None:
    genai = pytest.importorskip("google.genai")

    def chunks(stream: bytes) -> list[str]:
        options = genai.types.HttpOptions(httpx_client=transport(stream))
        models = genai.Client(api_key="fake", http_options=options).models
        return [chunk.text for chunk in models.generate_content_stream(model="m", contents="hi")]

    assert "".join(chunks(gemini.WHOLE[0].stream)) == gemini.WHOLE[0].text
    error = GEMINI.error_event(CONTENT, 503, "the stream broke off", code="truncated")
    for stream in (error, gemini.says("Hello") + error, gemini.says("Hello") + gemini.BARE_ERROR):
        with pytest.raises(genai.errors.ServerError) as caught:
            chunks(stream)
        assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")


STARTS = {
    "openai": (CHAT, openai_chat.ROLE + openai_chat.says("Hello")),
    "anthropic": (MESSAGES, messages.start() + messages.HELLO),
    "gemini": (CONTENT, gemini.says("Hello")),
    "bedrock": (OTHER, b"data: hello\n\n"),
    "unknown": (OTHER, b"data: hello\n\n"),
}


@pytest.mark.parametrize("dialect", [*DIALECTS, UNKNOWN], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("status", [400, 401, 429, 500, 502, 503, 504, 529])
def test_an_error_event_is_understood_by_whoever_reads_it_next(dialect: Dialect, status: int) -> None:
    """As a second gateway would, behind this one."""
    request, start = STARTS[dialect.name]
    reader = StreamReader(dialect)
    reader.feed(start)
    event = dialect.error_event(request, status, "line one\nline two \u2028 \ud800", code="truncated")
    assert event.endswith(b"\n\n")
    assert b"[DONE]" not in event
    [(kind, _)] = reader.feed(event)
    assert kind is EventKind.ERROR
    outcome = reader.close()
    assert not outcome.ok
    if dialect in (ANTHROPIC, GEMINI):  # the others' shapes do not tell every status
        assert outcome.verdict is dialect.classify(status, [], dialect.error_body(status, "m")).verdict
