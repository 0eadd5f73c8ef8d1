"""Which requests have one answer."""

from __future__ import annotations

from typing import Any

import pytest

from resilient_llm.core.determinism import has_one_answer

FUNCTION = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("embeddings", {}),
        ("embeddings", {"input": "x", "user": "u"}),
        ("rerank", {}),
        ("moderation", {}),
        ("count_tokens", {}),
        ("chat", {"temperature": 0}),
        ("chat", {"temperature": 0.0, "n": 3, "stream": True}),
        ("chat", {"temperature": 1, "seed": 7}),
        ("chat", {"seed": 0}),
        ("text_completion", {"temperature": 0}),
        ("generate_content", {"generationConfig": {"temperature": 0}}),
        ("generate_content", {"generationConfig": {"seed": 3}}),
        ("chat", {"inferenceConfig": {"temperature": 0.0}}),
        ("chat", {"temperature": 0, "store": False, "background": None}),
        ("chat", {"temperature": 0, "tools": [FUNCTION, {"type": "custom", "name": "x"}]}),
        ("chat", {"temperature": 0, "tools": [{"name": "weather", "input_schema": {}}]}),
        ("chat", {"temperature": 0, "tools": []}),
        ("generate_content", {"generationConfig": {"seed": 3}, "tools": [{"functionDeclarations": []}]}),
    ],
)
def test_one_answer(operation: str, body: dict[str, Any]) -> None:
    assert has_one_answer(operation, body)


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("chat", {}),
        ("chat", {"temperature": 0.1}),
        ("chat", {"temperature": None, "seed": None}),
        ("chat", {"temperature": False, "seed": True}),
        ("chat", {"temperature": "0"}),
        ("chat", {"top_p": 0}),
        ("generate_content", {"generationConfig": []}),
        ("chat", {"temperature": 0, "store": True}),
        ("chat", {"temperature": 0, "background": True}),
        ("chat", {"temperature": 0, "conversation": "conv_1"}),
        ("chat", {"temperature": 0, "web_search_options": {}}),
        ("chat", {"temperature": 0, "mcp_servers": [{"url": "x"}]}),
        ("chat", {"temperature": 0, "tools": [FUNCTION, {"type": "web_search"}]}),
        ("chat", {"temperature": 0, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("chat", {"temperature": 0, "tools": [{"type": ["function"]}]}),
        ("chat", {"temperature": 0, "tools": "all"}),
        ("chat", {"temperature": 0, "tools": [{}]}),
        ("generate_content", {"generationConfig": {"temperature": 0}, "tools": [{"googleSearch": {}}]}),
        ("generate_content", {"generationConfig": {"temperature": 0}, "tools": {"googleSearch": {}}}),
        ("image_generation", {"seed": 1}),
        ("speech", {"temperature": 0}),
        ("request", {"temperature": 0}),
    ],
)
def test_many_answers(operation: str, body: dict[str, Any]) -> None:
    assert not has_one_answer(operation, body)
