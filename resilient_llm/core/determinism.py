"""Which requests have one answer, so that it may be given to everybody who asks.

A guess from what the request says: providers promise no more than that answers are mostly the same. In doubt a request
has many answers. What becomes of that is a policy's to say.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["has_one_answer"]

_ALWAYS = frozenset({"count_tokens", "embeddings", "moderation", "rerank"})
_SAMPLED = frozenset({"chat", "generate_content", "text_completion"})
_SETTINGS = ("generationConfig", "generation_config", "inferenceConfig", "options")
"""Where APIs keep what others have at the top: Gemini, Bedrock, Ollama."""
_PASSIVE_TOOLS = frozenset({"custom", "function"})
_ACTIVE = ("background", "conversation", "mcp_servers", "store", "web_search_options")
"""Members of a request that make something, or look at a world that changes."""


def has_one_answer(operation: str, body: Mapping[str, object]) -> bool:
    """Tell whether a request of `operation` with this JSON `body` is expected to have the same answer every time.

    Embeddings, rerankings, moderations and counts have. A model's words have where `temperature` is 0 or a `seed` is
    given, and nothing is to be kept or looked up: no `store`, no `background`, no tool that the provider runs. The
    call of a function is the caller's to carry out, each time it is answered so.
    """
    if operation in _ALWAYS:
        return True
    if operation not in _SAMPLED or any(body.get(name) not in (None, False) for name in _ACTIVE):
        return False
    return _is_settled(body) and all(map(_is_passive, _tools(body)))


def _is_settled(body: Mapping[str, object]) -> bool:
    for settings in (body, *(body.get(name) for name in _SETTINGS)):
        if isinstance(settings, Mapping):
            temperature, seed = settings.get("temperature"), settings.get("seed")
            if (
                isinstance(temperature, int | float)
                and not isinstance(temperature, bool)
                and temperature == 0
            ):
                return True
            if isinstance(seed, int) and not isinstance(seed, bool):
                return True
    return False


def _tools(body: Mapping[str, object]) -> list[object]:
    tools = body.get("tools")
    if tools is None:
        return []
    return tools if isinstance(tools, list) else [tools]


def _is_passive(tool: object) -> bool:
    """Tell whether a tool is run by the caller, if at all."""
    if not isinstance(tool, Mapping):
        return False
    kind = tool.get("type")
    if kind is not None:
        return isinstance(kind, str) and kind in _PASSIVE_TOOLS
    # Anthropic's own functions need no type; Gemini has the functions in one tool, each of its own tools in another.
    return "name" in tool or set(tool) in ({"functionDeclarations"}, {"function_declarations"})
