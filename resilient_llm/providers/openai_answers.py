"""Answers in OpenAI's shapes, whole or event by event: completions, chat completions and responses.

What its many compatible servers add or leave out is known here; requests and errors are not.
"""

from __future__ import annotations

from resilient_llm.message import JSONObject
from resilient_llm.providers.answer import Answer, EventKind, count, objects

__all__ = ["read_body", "read_event", "read_usage"]

_ENDS = frozenset({"response.completed", "response.incomplete"})
# Events of the endpoints for sound and pictures that hold all of the result, or the last of it.
_RESULTS = frozenset(
    {"image_edit.completed", "image_generation.completed", "speech.audio.done", "transcript.text.done"}
)
_THINKING = frozenset({"reasoning", "reasoning_content", "thinking"})
_PIECES = (".delta", ".partial_image")
_ARRIVES_IN_PIECES = frozenset({"custom_tool_call", "function_call", "message", "reasoning"})
"""Items of a response whose content has come by the time they are done."""


def read_event(body: JSONObject, answer: Answer) -> EventKind:
    """Read the data of one event of a stream."""
    kind = body.get("type")
    if isinstance(kind, str) and "choices" not in body:
        return _read_response_event(kind, body, answer)
    said = _read_completion(body, answer)
    if not said and str(body.get("object")).endswith(".delta"):  # Assistants
        answer.do()
        said = True
    if said:
        return EventKind.CONTENT
    usage_only = isinstance(body.get("usage"), dict) and not body.get("choices")
    return EventKind.USAGE if usage_only else EventKind.META


def read_body(body: JSONObject, answer: Answer) -> None:
    """Read a reply that came in one piece."""
    if body.get("object") == "response":
        _read_response(body, answer)
    else:
        _read_completion(body, answer)


def read_usage(usage: object, answer: Answer) -> None:
    """Read a usage object under the names of either API.

    Some servers (xAI, Gemini's compatible route) leave thinking out of the completion; the total has it.
    """
    if not isinstance(usage, dict):
        return
    total = count(usage, "total_tokens")
    written = count(usage, "completion_tokens")
    if written is None:
        written = count(usage, "output_tokens")
    read = count(usage, "prompt_tokens")
    if read is None:
        read = count(usage, "input_tokens")
    if total is not None and read is not None:
        written = max(written or 0, total - read)
    elif written is None:  # embeddings and reranking have nothing else to count
        read = total if read is None else read
    cached = _detail(usage, "cached_tokens", "prompt_tokens_details", "input_tokens_details")
    if cached is None and "prompt_cache_hit_tokens" in usage:  # DeepSeek
        cached = count(usage, "prompt_cache_hit_tokens")
    answer.count_tokens(
        input=read,
        output=written,
        cached=cached,
        reasoning=_detail(usage, "reasoning_tokens", "completion_tokens_details", "output_tokens_details"),
    )


def _detail(usage: JSONObject, name: str, *holders: str) -> int | None:
    """Give the first number of this name in one of the objects that are called so."""
    for holder in holders:
        if holder in usage:  # most usage has none of them, and is read for each reply
            found = count(usage[holder], name)
            if found is not None:
                return found
    return None


def _read_completion(body: JSONObject, answer: Answer) -> bool:
    """Read a chunk or the whole of a completion; tell whether the model says anything in it."""
    answer.identify(model=body.get("model"), id=body.get("id"))
    groq = body.get("x_groq")
    usage = body.get("usage") or (groq.get("usage") if isinstance(groq, dict) else None)
    if usage:
        read_usage(usage, answer)
    said = False
    for position, choice in enumerate(objects(body.get("choices"))):
        index = choice.get("index")
        if type(index) is not int or index < 0:
            index = position
        answer.begin(index)
        text = choice.get("text")
        if isinstance(text, str) and text:
            answer.say(text, index)
            said = True
        message = choice.get("delta") or choice.get("message")
        if isinstance(message, dict):
            for name, value in message.items():
                if not value or name == "role":
                    continue
                if name == "content" and isinstance(value, str):  # of most answers all there is
                    answer.say(value, index)
                    said = True
                else:
                    said = _read_field(name, value, message, answer, index) or said
        answer.finish(choice.get("finish_reason"), index)
    return said


def _read_field(name: str, value: object, message: JSONObject, answer: Answer, index: int) -> bool:
    """Read a field of a message that is not empty, nor its text; tell whether it is the model's."""
    if name == "audio":
        return _read_sound(value, answer)
    if isinstance(value, str):
        _read_text(name, value, message, answer)
    elif name == "content":
        for part in objects(value):
            _read_part(part, answer, index)
    elif name == "tool_calls":
        for call in objects(value):
            answer.do(_arguments(call.get("function")))
    elif name == "function_call":
        answer.do(_arguments(value))
    elif name != "reasoning_details":  # OpenRouter's other rendering of `reasoning`
        answer.do()  # a picture, citations, whatever there will be
    return True


def _read_text(name: str, text: str, message: JSONObject, answer: Answer) -> None:
    if name == "reasoning_content" and message.get("reasoning"):
        pass  # the same under its older name
    elif name in _THINKING:
        answer.think(text)
    else:
        answer.do(text if name == "refusal" else "")


def _read_sound(sound: object, answer: Answer) -> bool:
    """Read a piece of speech; its name comes first without any, and at the end when it expires."""
    if not isinstance(sound, dict) or not (sound.get("data") or sound.get("transcript")):
        return False
    transcript = sound.get("transcript")
    answer.do(transcript if isinstance(transcript, str) else "")
    return True


def _arguments(function: object) -> str:
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else ""


def _read_part(part: JSONObject, answer: Answer, index: int) -> None:
    text = part.get("text")
    thinking = part.get("thinking")
    if isinstance(text, str):
        answer.say(text, index)
    elif thinking:  # Mistral
        for piece in objects(thinking):
            said = piece.get("text")
            answer.think(said if isinstance(said, str) else "")
    else:
        answer.do()


def _read_response_event(kind: str, body: JSONObject, answer: Answer) -> EventKind:
    """Read an event that has a type; of a response, or of the endpoints for sound and pictures."""
    sequence = count(body, "sequence_number")
    if sequence is not None:
        answer.sequence = sequence
    response = body.get("response")
    if isinstance(response, dict):
        _read_response(response, answer)
    read_usage(body.get("usage"), answer)
    if kind in _RESULTS:
        answer.finish("completed")
        return EventKind.END
    if kind in _ENDS:
        return EventKind.END
    if kind.endswith(_PIECES):
        delta = body.get("delta", True)
        if kind == "response.output_text.delta" and isinstance(delta, str):
            answer.say(delta)
        elif kind.startswith("response.reasoning") and isinstance(delta, str):
            answer.think(delta)
        else:
            answer.do("" if "audio.delta" in kind or not isinstance(delta, str) else delta)
        return EventKind.CONTENT if delta else EventKind.META
    item = body.get("item")
    item_kind = item.get("type") if isinstance(item, dict) else None
    called = kind == "response.output_item.added" and item_kind not in ("message", "reasoning", None)
    result = kind == "response.output_item.done" and item_kind not in (*_ARRIVES_IN_PIECES, None)
    if called or result:
        answer.do()
        return EventKind.CONTENT
    return EventKind.META


def _read_response(response: JSONObject, answer: Answer) -> None:
    """Read a response object; it has no reason to finish but its status and what kept it incomplete."""
    answer.identify(model=response.get("model"), id=response.get("id"))
    read_usage(response.get("usage"), answer)
    answer.begin()
    status = response.get("status")
    details = response.get("incomplete_details")
    if status == "failed" and response.get("background") is not True:  # or a job's end, and not this call's
        error = response.get("error")
        answer.problem = error if isinstance(error, dict) else {"message": "the response failed"}
    elif status in ("completed", "incomplete"):
        reason = details.get("reason") if isinstance(details, dict) else None
        answer.finish(reason or status)
