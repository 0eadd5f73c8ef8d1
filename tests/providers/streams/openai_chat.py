"""Streams of chat completions: OpenAI's own, Azure's, and those of servers that are more or less compatible."""

from __future__ import annotations

from typing import Any

from resilient_llm.outcome import Scope, Verdict
from resilient_llm.providers import OPENAI
from tests.providers.streams.example import EMPTY, TRUNCATED, Example, sse, tokens

ID = "chatcmpl-B9MHDbslfkBeAs8l4bebGdFOJ6PeG"
MODEL = "gpt-4o-2024-08-06"
DONE = sse("[DONE]")
USAGE = {
    "prompt_tokens": 19,
    "completion_tokens": 10,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 4, "audio_tokens": 0},
}


def data(delta: Any = None, finish: str | None = None, *, index: int = 0, **extra: Any) -> dict[str, Any]:
    """Make a chunk with one choice; without a delta, with none."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {
        "id": ID,
        "object": "chat.completion.chunk",
        "created": 1741569952,
        "model": MODEL,
        "service_tier": "default",
        "system_fingerprint": "fp_fc9f1d7035",
        "choices": [] if delta is None else [choice],
        **extra,
    }


def chunk(delta: Any = None, finish: str | None = None, *, index: int = 0, **extra: Any) -> bytes:
    return sse(data(delta, finish, index=index, **extra))


def says(text: str, **extra: Any) -> bytes:
    return chunk({"content": text}, **extra)


ROLE = chunk({"role": "assistant", "content": "", "refusal": None})
STOP = chunk({}, "stop")


def ok(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    """Make an example of a whole answer."""
    named: dict[str, Any] = {"model": MODEL, "id": ID, "finish_reasons": ("stop",)}
    return Example(name=name, dialect=OPENAI, stream=stream, kinds=kinds, **{**named, **expected})


def bad(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    """Make an example of an answer that stays away or breaks off."""
    named: dict[str, Any] = {"model": MODEL, "id": ID, "outcome": TRUNCATED}
    return Example(name=name, dialect=OPENAI, stream=stream, kinds=kinds, **{**named, **expected})


def nameless(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    return Example(name=name, dialect=OPENAI, stream=stream, kinds=kinds, **expected)


WHOLE = [
    ok(
        "with usage",
        ROLE
        + says("Hel", usage=None)
        + says("lo", usage=None)
        + says("!", usage=None)
        + STOP
        + chunk(usage=USAGE)
        + DONE,
        "mcccmue",
        usage=tokens(19, 10, cached=8, reasoning=4),
        text="Hello!",
    ),
    ok(
        "without usage",
        ROLE + says("Hello") + says(" you") + says(" there, and so on") + STOP + DONE,
        "mcccme",
        usage=tokens(None, 7, estimated=True),
        text="Hello you there, and so on",
    ),
    ok(
        "obfuscated",
        b"".join(says(word, obfuscation="x" * len(word)) for word in ("a", " bc", " def", " ghij"))
        + STOP
        + DONE,
        "ccccme",
        usage=tokens(None, 4, estimated=True),
        text="a bc def ghij",
    ),
    ok(
        "usage so far in every chunk, as vLLM can",
        b"".join(
            says("word ", usage={"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n})
            for n in (1, 2, 3, 4)
        )
        + chunk({}, "stop", usage={"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12})
        + DONE,
        "ccccme",
        usage=tokens(7, 5),
        text="word word word word ",
    ),
    ok(
        "a call of a tool",
        chunk(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "index": 0,
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": ""},
                    }
                ],
            }
        )
        + b"".join(
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
            for piece in ('{"', "city", '":"', "Paris", '"}')
        )
        + chunk({}, "tool_calls")
        + DONE,
        "ccccccme",
        finish_reasons=("tool_calls",),
        usage=tokens(None, 4, estimated=True),
        text=None,
    ),
    ok(
        "a function call of old",
        chunk({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}})
        + chunk({"function_call": {"arguments": "{}"}})
        + chunk({}, "function_call")
        + DONE,
        "ccme",
        finish_reasons=("function_call",),
        usage=tokens(None, 1, estimated=True),
        text=None,
    ),
    ok(
        "a refusal",
        ROLE + chunk({"refusal": "I'm sorry"}) + chunk({"refusal": ", no."}) + STOP + DONE,
        "mccme",
        usage=tokens(None, 4, estimated=True),
        text=None,
    ),
    ok(
        "sound",
        chunk({"role": "assistant", "content": None, "audio": {"id": "audio_1"}})
        + chunk({"audio": {"transcript": "Hello"}})
        + chunk({"audio": {"data": "UklGRg=="}})
        + chunk({"audio": {"expires_at": 1741573552}}, "stop")
        + DONE,
        "mccme",
        usage=tokens(None, 2, estimated=True),
        text=None,
    ),
    ok(
        "two choices",
        says("a") + says("b", index=1) + STOP + says("c", index=1) + chunk({}, "length", index=1) + DONE,
        "ccmcme",
        finish_reasons=("stop", "length"),
        usage=tokens(None, 1, estimated=True),
        text=None,
    ),
    ok(
        "log probabilities",
        b"".join(
            sse(
                data()
                | {
                    "choices": [
                        {
                            "index": 0,
                            "delta": {"content": word},
                            "logprobs": {"content": [{"token": word, "logprob": -0.25, "top_logprobs": []}]},
                            "finish_reason": None,
                        }
                    ]
                }
            )
            for word in ("yes", "no", "yes")
        )
        + STOP
        + DONE,
        "cccme",
        usage=tokens(None, 2, estimated=True),
        text="yesnoyes",
    ),
    ok(
        "two reasons to finish, the first of which it was",
        says("Hello") + chunk({}, "length") + STOP + DONE,
        "cmme",
        finish_reasons=("length",),
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    ok(
        "nothing to say",
        ROLE + STOP + DONE,
        "mme",
    ),
    ok(
        "cut off by the filter of what it says",
        says("I") + chunk({}, "content_filter") + DONE,
        "cme",
        finish_reasons=("content_filter",),
        usage=tokens(None, 1, estimated=True),
        text="I",
    ),
    ok(
        "no terminal marker",
        ROLE + says("Hello") + STOP,
        "mcm",
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    ok(
        "no reason to finish",
        ROLE + says("Hello") + DONE,
        "mce",
        finish_reasons=(),
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    ok(
        "more after the terminal marker",
        ROLE + says("Hello") + STOP + DONE + sse({"error": "too late"}) + says("!") + b": bye\n\n",
        "mcmemm",
        usage=tokens(None, 2, estimated=True),
        text="Hello",
        keepalives=1,
    ),
    ok(
        "a last event without its blank line",
        ROLE + says("Hello") + STOP + chunk(usage=USAGE).rstrip(),
        "mcm",
        usage=tokens(19, 10, cached=8, reasoning=4),
        text="Hello",
    ),
    ok(
        "a terminal marker without its blank line",
        ROLE + says("Hello") + b"data: [DONE]",
        "mc",
        finish_reasons=(),
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    ok(
        "half a terminal marker",
        ROLE + says("Hello") + STOP + b"data: [DO",
        "mcm",
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    ok(
        "a malformed event in the middle",
        ROLE + says("Hel") + b'data: {"id":"chatcmpl-B9M","choi\n\n' + says("lo") + STOP + DONE,
        "mcbcme",
        usage=tokens(None, 2, estimated=True),
        text="Hello",
        malformed=1,
    ),
    ok(
        "keep-alives of every kind",
        b": OPENROUTER PROCESSING\n\n"
        + ROLE
        + b"data:\n\ndata: \n\ndata: : keepalive\n\nevent: ping\ndata: {}\n\n"
        + says("Hello")
        + b": x\n"
        + STOP
        + DONE,
        "mmmmmcme",
        usage=tokens(None, 2, estimated=True),
        text="Hello",
        keepalives=6,
    ),
    ok(
        "characters of every kind",
        says("naïve — 你好 🙂")
        + says('"\\\n\t')
        + says("\u2028\u00a0\x7f")
        + says("a\ud83d\ude42".encode("utf-16", "surrogatepass").decode("utf-16"))
        + STOP
        + DONE,
        "ccccme",
        usage=tokens(None, 6, estimated=True),
        text='naïve — 你好 🙂"\\\n\t\u2028\u00a0\x7fa🙂',
    ),
]

COMPATIBLE = [
    ok(
        "Azure",
        sse(
            {
                "id": "",
                "object": "",
                "created": 0,
                "model": "",
                "choices": [],
                "prompt_filter_results": [
                    {"prompt_index": 0, "content_filter_results": {"hate": {"filtered": False}}}
                ],
            }
        )
        + ROLE
        + sse(
            {
                "id": ID,
                "object": "chat.completion.chunk",
                "created": 1,
                "model": MODEL,
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": "Hello"},
                        "finish_reason": None,
                        "content_filter_results": {"hate": {"filtered": False, "severity": "safe"}},
                    }
                ],
            }
        )
        + sse(
            {
                "id": "",
                "model": "",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": None,
                        "content_filter_results": {},
                        "content_filter_offsets": {"check_offset": 3},
                    }
                ],
            }
        )
        + STOP
        + DONE,
        "mmcmme",
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    ok(
        "Groq",
        chunk({"role": "assistant", "content": ""}, x_groq={"id": "req_1"})
        + says("Hello")
        + chunk(
            {},
            "stop",
            x_groq={
                "id": "req_1",
                "usage": {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23},
            },
        )
        + DONE,
        "mcme",
        usage=tokens(20, 3),
        text="Hello",
    ),
    ok(
        "DeepSeek's thinking and cache",
        chunk({"role": "assistant", "content": None, "reasoning_content": ""})
        + chunk({"content": None, "reasoning_content": "Hm"})
        + chunk({"content": None, "reasoning_content": "m."})
        + chunk({"content": "4", "reasoning_content": None})
        + chunk(
            {"content": ""},
            "stop",
            usage={
                "prompt_tokens": 16,
                "completion_tokens": 30,
                "total_tokens": 46,
                "prompt_cache_hit_tokens": 5,
                "completion_tokens_details": {"reasoning_tokens": 28},
            },
        )
        + DONE,
        "mcccme",
        usage=tokens(16, 30, cached=5, reasoning=28),
        text="4",
    ),
    ok(
        "OpenRouter's thinking, twice in each chunk",
        b"".join(
            chunk(
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning": word,
                    "reasoning_details": [{"type": "reasoning.text", "text": word, "index": 0}],
                }
            )
            for word in ("Let", " me", " think")
        )
        + says("4")
        + STOP
        + DONE,
        "ccccme",
        usage=tokens(None, 4, estimated=True),
        text="4",
    ),
    ok(
        "the same thinking under two names",
        b"".join(chunk({"reasoning": word, "reasoning_content": word}) for word in ("abcd", "efgh"))
        + STOP
        + DONE,
        "ccme",
        usage=tokens(None, 2, estimated=True),
    ),
    ok(
        "Mistral's parts",
        chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hmm."}]}]})
        + chunk({"content": [{"type": "text", "text": "Four"}]})
        + chunk({"content": [{"type": "reference", "reference_ids": [1]}]}, "stop")
        + DONE,
        "ccce",
        usage=tokens(None, 2, estimated=True),
        text=None,
    ),
    ok(
        "a picture",
        chunk(
            {
                "content": "",
                "images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}],
            }
        )
        + STOP
        + DONE,
        "cme",
        text=None,
    ),
    ok(
        "xAI leaves thinking out of the completion",
        says("4")
        + STOP
        + chunk(
            usage={
                "prompt_tokens": 10,
                "completion_tokens": 1,
                "total_tokens": 40,
                "completion_tokens_details": {"reasoning_tokens": 29},
            }
        )
        + DONE,
        "cmue",
        usage=tokens(10, 30, reasoning=29),
        text="4",
    ),
    ok(
        "text completions",
        b"".join(
            sse({"id": ID, "object": "text_completion", "model": MODEL, "choices": [choice]})
            for choice in (
                {"index": 0, "text": "Once", "finish_reason": None},
                {"index": 0, "text": " upon", "finish_reason": None},
                {"index": 0, "text": "", "finish_reason": "length"},
            )
        )
        + DONE,
        "ccme",
        finish_reasons=("length",),
        usage=tokens(None, 3, estimated=True),
        text="Once upon",
    ),
    nameless(
        "chunks without a usable choice",
        sse({"usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}})
        + sse({"choices": [{"index": 0, "finish_reason": None}]})
        + sse({"choices": [{"index": 0, "delta": {"content": "ok"}, "finish_reason": "stop"}]})
        + sse({"choices": [None, 1, "x"]})
        + sse({"choices": None}),
        "umcmm",
        finish_reasons=("stop",),
        usage=tokens(3, 5),
        text="ok",
    ),
    nameless(
        "a plain JSON reply that says it is a stream",
        b'{"id":"1","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},'
        b'"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n',
        "",
        model="m",
        id="1",
        finish_reasons=("stop",),
        usage=tokens(1, 2),
        text="Hello",
    ),
    nameless(
        "Assistants",
        sse({"object": "thread.run", "id": "run_1", "status": "queued"}, "thread.run.created")
        + sse(
            {
                "object": "thread.message.delta",
                "id": "msg_1",
                "delta": {"content": [{"index": 0, "type": "text", "text": {"value": "Hello"}}]},
            },
            "thread.message.delta",
        )
        + sse("[DONE]", "done"),
        "mce",
        id="run_1",
        text=None,
    ),
]

CUT = [
    bad(
        "after some tokens",
        ROLE + says("Hello") + says(" you"),
        "mcc",
        usage=tokens(None, 3, estimated=True),
        text="Hello you",
    ),
    bad("after the role", ROLE, "m"),
    bad(
        "one of two choices unfinished",
        says("a") + says("b", index=1) + STOP,
        "ccm",
        finish_reasons=("stop",),
        usage=tokens(None, 1, estimated=True),
        text=None,
    ),
    bad(
        "in the middle of an event",
        ROLE + says("Hello") + STOP + b'data: {"id":"chatcmpl-B9M","choices":[],"usa',
        "mcm",
        finish_reasons=("stop",),
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    bad("a terminal marker after the role", ROLE + DONE, "me"),
    nameless("no bytes at all", b"", "", outcome=EMPTY),
    nameless("comments only", b": ping\n\n: ping\n\n", "", outcome=EMPTY, keepalives=2),
    nameless("empty events only", b"data:\n\ndata: \n\n", "mm", outcome=EMPTY, keepalives=2),
    nameless("the terminal marker only", DONE, "e", outcome=EMPTY),
    nameless(
        "the terminal marker first, and then an error",
        DONE + sse({"error": {"message": "m", "type": "server_error"}}) + says("Hello") + DONE,
        "e!ce",
        outcome=EMPTY,
        usage=tokens(None, 2, estimated=True),
        text="Hello",
        model=MODEL,
        id=ID,
    ),
    nameless("something else", b"<html><body>502 Bad Gateway</body></html>", "", outcome=EMPTY),
    nameless("malformed from the start", b"data: {\n\n", "b", outcome=TRUNCATED, malformed=1),
    nameless("no objects", sse("null") + sse("1") + sse('"x"') + sse("[]"), "mmmm", outcome=TRUNCATED),
]

FAILURE = (Verdict.FAILURE, Scope.TARGET)
ERRORS = [
    nameless(
        "as the first event",
        sse(
            {
                "error": {
                    "message": "The server had an error",
                    "type": "server_error",
                    "param": None,
                    "code": None,
                }
            }
        ),
        "!",
        outcome=(*FAILURE, "server_error"),
        status=500,
    ),
    bad(
        "after some tokens",
        ROLE
        + says("Hello")
        + sse(
            {
                "error": {
                    "message": "Rate limit reached",
                    "type": "requests",
                    "param": None,
                    "code": "rate_limit_exceeded",
                }
            }
        ),
        "mc!",
        outcome=(Verdict.THROTTLED, Scope.TARGET, "rate_limit_exceeded"),
        status=429,
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    bad(
        "followed by a terminal marker that means nothing",
        ROLE + sse({"error": {"message": "m", "type": "server_error"}}) + DONE,
        "m!e",
        outcome=(*FAILURE, "server_error"),
        status=500,
    ),
    bad(
        "beside choices, as the SDK sees it",
        ROLE + chunk({"content": "x"}, error={"message": "m", "code": 503}),
        "m!",
        outcome=(*FAILURE, "503"),
        status=503,
        usage=tokens(None, 1, estimated=True),
        text="x",
    ),
    bad(
        "one after the other",
        ROLE + sse({"error": {"code": "rate_limit_exceeded"}}) + sse({"error": {"code": "server_error"}}),
        "m!!",
        outcome=(Verdict.THROTTLED, Scope.TARGET, "rate_limit_exceeded"),
        status=429,
    ),
    nameless(
        "Azure's filter of the prompt",
        sse(
            {
                "error": {
                    "message": "The response was filtered",
                    "type": None,
                    "param": "prompt",
                    "code": "content_filter",
                    "status": 400,
                    "innererror": {"code": "ResponsibleAIPolicyViolation"},
                }
            }
        ),
        "!",
        outcome=(Verdict.FATAL, Scope.REQUEST, "content_filter"),
        status=400,
        retryable=False,
    ),
    bad(
        "OpenRouter's, in a choice",
        ROLE
        + says("Hello")
        + chunk({"content": ""}, "error", error={"code": "server_error", "message": "Provider disconnected"}),
        "mc!",
        outcome=(*FAILURE, "server_error"),
        status=500,
        finish_reasons=("error",),
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    nameless(
        "OpenRouter's, inside the choice",
        sse({"choices": [{"index": 0, "finish_reason": "error", "error": {"code": 502, "message": "m"}}]}),
        "!",
        outcome=(*FAILURE, "502"),
        status=502,
        finish_reasons=("error",),
    ),
    nameless(
        "vLLM's",
        sse(
            {
                "object": "error",
                "message": "This model's maximum context length is 4096 tokens.",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
        ),
        "!",
        outcome=(Verdict.FATAL, Scope.TARGET, "context_length_exceeded"),
        status=400,
        retryable=False,
    ),
    nameless("a bare string", sse({"error": "boom"}), "!", outcome=(*FAILURE, "500"), status=500),
    nameless(
        "by the name of the event alone",
        sse({"message": "upstream went away", "code": 502}, "error"),
        "!",
        outcome=(*FAILURE, "502"),
        status=502,
    ),
    nameless("in words", b"event:error\ndata:it broke\n\n", "!", outcome=(*FAILURE, "500"), status=500),
    nameless("with nothing to say", b"event:error\ndata:{}\n\n", "!", outcome=(*FAILURE, "500"), status=500),
    bad(
        "written without the data field",
        ROLE + b'{"error": {"message": "m", "code": "server_error"}}\n\n',
        "m",
        outcome=(*FAILURE, "server_error"),
        status=500,
    ),
    nameless(
        "a plain JSON error that says it is a stream",
        b'{"error": {"message": "slow down", "code": "rate_limit_exceeded"}}',
        "",
        outcome=(Verdict.THROTTLED, Scope.TARGET, "rate_limit_exceeded"),
        status=429,
    ),
    bad(
        "as the last event, without its blank line",
        ROLE + b'data: {"error": {"message": "m", "code": "server_error"}}',
        "m",
        outcome=(*FAILURE, "server_error"),
        status=500,
    ),
]

EXAMPLES = [*WHOLE, *COMPATIBLE, *CUT, *ERRORS]
