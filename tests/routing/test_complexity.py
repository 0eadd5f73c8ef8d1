"""Complexity by rules: what raises it in each language and dialect, and that no body is too odd or too long."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import ConfigurationError
from resilient_llm.routing.complexity import Complexity, ComplexityWeights
from resilient_llm.routing.features import Features, features_of
from resilient_llm.routing.intent import IntentClassifier
from resilient_llm.routing.keywords import KEYWORDS, Keywords, Work

COMPLEXITY = Complexity()
INTENT = IntentClassifier(complexity=COMPLEXITY)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000}}
CODE = "What does this do?\n```python\nprint(1)\n```"


def chat(said: object, **more: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": said}], **more}


@pytest.mark.parametrize(
    ("text", "least", "most", "intent"),
    [
        ("hi", 0, 0.01, "simple"),
        ("What is the capital of France?", 0, 0.01, "simple"),
        ("Translate to German: good morning", 0, 0.01, "simple"),
        ("Is this review positive or negative? The food was cold.", 0, 0.05, "simple"),
        ("Summarize the following analysis in one sentence", 0, 0.01, "simple"),
        ("Book me a table for two tomorrow", 0, 0.05, "simple"),
        ("Why does my SQL query return duplicates?", 0.1, 0.2, "code"),
        ("Write a poem about autumn", 0.15, 0.25, "reason"),
        ("Refactor this function:\n```python\ndef f(): ...\n```", 0.3, 0.35, "code"),
        ("Prove step by step that the square root of 2 is irrational", 0.3, 0.4, "reason"),
        ("Write a blog article that compares three databases", 0.3, 0.4, "reason"),
        ("Fix the bug in this function, and analyse and evaluate the trade-offs", 0.6, 0.7, "reason"),
    ],
)
def test_questions_in_english(text: str, least: float, most: float, intent: str) -> None:
    assert least <= COMPLEXITY(chat(text)).value <= most
    assert INTENT.of(chat(text)) == intent


@pytest.mark.parametrize(
    ("language", "reasoning", "coding", "creation", "routine"),
    [
        (
            "German",
            "Bewerte Schritt für Schritt beide Architekturen",
            "Implementiere den Algorithmus",
            "Schreib ein Gedicht",
            "Übersetze das",
        ),
        (
            "French",
            "Démontre-le étape par étape",
            "Implémente cet algorithme",
            "Écris un poème",
            "Résume en une phrase",
        ),
        (
            "Spanish",
            "Resuelve la ecuación paso a paso",
            "Depura el código",
            "Escribe un cuento",
            "Resumir: traducción",
        ),
        (
            "Portuguese",
            "Avalie as hipóteses passo a passo",
            "Depure o código",
            "Escreva um poema",
            "Traduza em uma frase",
        ),
        (
            "Italian",
            "Dimostra l'ipotesi passo dopo passo",
            "Scrivi il codice della funzione",
            "Scrivi un racconto",
            "Riassumi in una frase",
        ),
        (
            "Russian",
            "Докажи гипотезу шаг за шагом",
            "Отладь код этой функции",
            "Напиши рассказ",
            "Переведи кратко",
        ),
        ("Chinese", "请一步一步证明这个定理", "请调试这个函数", "请写一首诗", "请翻译并总结"),
        (
            "Japanese",
            "段階的に分析してください",
            "この関数を実装して",
            "短い小説を書いて",
            "翻訳して要約して",
        ),
        ("Korean", "단계별로 분석해줘", "이 함수를 디버깅해줘", "소설을 써줘", "번역하고 요약해줘"),
    ],
    ids=lambda value: value if value.isascii() and value.isalpha() else "",
)
def test_words_of_every_language_count(
    language: str, reasoning: str, coding: str, creation: str, routine: str
) -> None:
    texts = {"reasoning": reasoning, "coding": coding, "creation": creation, "routine": routine}
    for work, text in texts.items():
        for written in (text, text.upper()):
            contributions = COMPLEXITY(chat(written)).contributions
            expected = getattr(ComplexityWeights(), work)
            # two words of the kind, or one (half of it) where the phrase is short
            assert abs(contributions.get(work, 0)) >= abs(expected) / 2, (language, work, written)
    assert INTENT.of(chat(reasoning)) == "reason"
    assert INTENT.of(chat(coding)) == "code"
    assert INTENT.of(chat(creation)) == "reason"
    assert INTENT.of(chat(routine)) == "simple"


def test_words_are_whole_where_the_script_has_words() -> None:
    find = Keywords.default().find
    assert find("a decoded barcode, disproven by plants and apiaries") == {}
    assert find("plan the code") == {"reasoning": 1, "coding": 1}
    assert find("PLAN, plan; plán!") == {"reasoning": 1}
    assert find("analyse analyse") == {"reasoning": 1}
    assert find("analyse the analysis") == {"reasoning": 2}
    assert find("Step-by-step") == {"reasoning": 1}
    assert find("step by stepping") == {}
    assert find("cos\u2019è") == find("cos'e") == {"routine": 1}
    assert find("L'algorithme d\u2019une fonction") == {"coding": 2}


def test_no_word_speaks_for_two_kinds() -> None:
    seen: dict[str, Work] = {}
    for work, table in KEYWORDS.items():
        assert sorted(table) == sorted(["en", "de", "fr", "es", "pt", "it", "ru", "zh", "ja", "ko"])
        for word in " ".join(table.values()).split():
            assert seen.setdefault(word, work) == work, word
            assert Keywords({work: [word]}).find(word.replace("*", "").replace("_", " ")) == {work: 1}, word


def test_words_can_be_added_or_replaced() -> None:
    ours = Complexity(keywords=Keywords.default({"reasoning": ["aktuar*"], "routine": ["ticket status"]}))
    assert ours(chat("Aktuarielle Frage")).contributions["reasoning"] > 0
    assert ours(chat("ticket  status?")).contributions["routine"] < 0
    assert ours(chat("prove it")).contributions["reasoning"] > 0
    assert "reasoning" not in Complexity(keywords=Keywords({}))(chat("prove it")).contributions


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"reasoning": ["*"]}, r"words='\*'"),
        ({"thinking": ["x"]}, r"words='thinking': allowed are 'reasoning'"),
    ],
)
def test_words_that_cannot_be_found(words: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Keywords(words)


QUESTION = "Prove the theorem"
ANSWERED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [*ANSWERED, {"role": "user", "content": QUESTION}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}, IMAGE]}]},
        {"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
        {
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "hello"}],
                },
            ]
        },
        {"contents": [{"parts": [{"text": QUESTION}]}]},
        {
            "contents": [
                {"role": "user", "parts": [{"text": QUESTION}]},
                {"role": "model", "parts": [{"text": "no"}]},
            ]
        },
        {"input": QUESTION},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]},
        {"input": [{"role": "user", "content": QUESTION}, {"type": "function_call_output", "call_id": "1"}]},
        {"prompt": QUESTION},
        {"prompt": ["hi", QUESTION]},
    ],
    ids=str,
)
def test_the_last_question_is_found_in_every_dialect(body: dict[str, Any]) -> None:
    features = features_of(body)
    assert features.question.endswith(QUESTION)
    assert COMPLEXITY(body).contributions["reasoning"] == pytest.approx(0.35)
    assert features.prompt_size < 20, "a picture is no text"


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({"tools": [{}, {}]}, {"tools": 2}),
        ({"functions": [{}]}, {"tools": 1}),
        ({"tools": [{"functionDeclarations": [{}, {}, {}]}]}, {"tools": 3}),
        ({"max_tokens": 4_000}, {"output_tokens": 4_000}),
        ({"max_completion_tokens": 1}, {"output_tokens": 1}),
        ({"max_output_tokens": 1}, {"output_tokens": 1}),
        ({"generationConfig": {"maxOutputTokens": 1}}, {"output_tokens": 1}),
        ({"response_format": {"type": "json_schema"}}, {"schema": True}),
        ({"response_format": {"type": "text"}}, {}),
        ({"text": {"format": {"type": "json_schema"}}}, {"schema": True}),
        ({"output_config": {"format": {"type": "json_schema"}}}, {"schema": True}),
        ({"generationConfig": {"responseSchema": {}}}, {"schema": True}),
        ({"generationConfig": {"responseMimeType": "application/json"}}, {"schema": True}),
        ({"reasoning_effort": "high"}, {"thinking": True}),
        ({"reasoning_effort": "low"}, {}),
        ({"reasoning": {"effort": "xhigh"}}, {"thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking": True}),
        ({"thinking": {"type": "disabled"}}, {}),
        ({"output_config": {"effort": "max"}}, {"thinking": True}),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": 9}}}, {"thinking": True}),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, {}),
        ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "HIGH"}}}, {"thinking": True}),
    ],
    ids=str,
)
def test_what_comes_along_is_seen(more: dict[str, Any], seen: dict[str, Any]) -> None:
    plain = features_of(chat("x"))
    assert features_of(chat("x", **more)) == Features(
        **{field.name: seen.get(field.name, getattr(plain, field.name)) for field in fields(Features)}
    )


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (IMAGE, "images"),
        ({"type": "input_image", "image_url": "x"}, "images"),
        ({"type": "image", "source": {"type": "base64", "data": "x"}}, "images"),
        ({"inlineData": {"mimeType": "image/png", "data": "x"}}, "images"),
        ({"file_data": {"mime_type": "video/mp4"}}, "images"),
        ({"image": {"format": "png", "source": {"bytes": "x"}}}, "images"),
        ({"type": "input_audio", "input_audio": {"data": "x"}}, "audio"),
        ({"inline_data": {"mime_type": "audio/wav"}}, "audio"),
        ({"type": "document", "source": {}}, "files"),
        ({"type": "file", "file": {}}, "files"),
        ({"fileData": {"fileUri": "x"}}, "files"),
        ({"inlineData": {"mimeType": "application/pdf"}}, "files"),
    ],
    ids=str,
)
def test_pictures_sound_and_files_are_seen(part: dict[str, Any], kind: str) -> None:
    for body in (chat([part, part]), {"contents": [{"parts": [part]}, {"parts": [part]}]}):
        features = features_of(body)
        assert {name: getattr(features, name) for name in ("images", "audio", "files")} == {
            "images": 0,
            "audio": 0,
            "files": 0,
            kind: 2,
        }
        assert COMPLEXITY(body).contributions[kind] == getattr(ComplexityWeights(), kind)
        assert INTENT.of(body) == ("vision" if kind == "images" else "simple")


def test_length_counts_in_tokens_whatever_the_script() -> None:
    assert features_of(chat("x" * 4_000)).question_size == 1_000
    assert features_of(chat("語" * 4_000)).question_size == 3_000
    assert features_of(chat("語" * 40_000)).question_size == 30_000
    assert COMPLEXITY(chat("x " * 1_000)).contributions["question"] == pytest.approx(0.1)
    assert COMPLEXITY(chat("x " * 9_000)).contributions["question"] == pytest.approx(0.2)
    history = [{"role": "user", "content": "x " * 16_000}, {"role": "assistant", "content": "y"}]
    body = {"messages": [*history, {"role": "user", "content": "z"}]}
    assert COMPLEXITY(body).contributions["prompt"] == pytest.approx(0.075, rel=0.01)
    assert COMPLEXITY(body).contributions["question"] < 0.001


def test_reasoning_that_is_asked_for_and_long_questions_are_for_thinkers() -> None:
    assert INTENT.of(chat("go on", reasoning_effort="high")) == "reason"
    assert INTENT.of(chat("word " * 600)) == "reason"
    assert INTENT.of(chat(CODE)) == "code"


def test_a_score_explains_itself() -> None:
    score = COMPLEXITY(chat("Plan the migration", tools=[{}] * 8, max_tokens=8_000, reasoning_effort="high"))
    assert score.explain() == ("thinking +0.30", "reasoning +0.17", "tools +0.15", "output +0.10")
    assert score.value == pytest.approx(sum(score.contributions.values()))


def test_weights_can_be_tuned() -> None:
    ours = Complexity(weights=ComplexityWeights(tools=1.0, full_tools=10, question=0, prompt=0))
    assert ours(chat("x", tools=[{}] * 5)).value == pytest.approx(0.5)
    assert ours(chat("x", tools=[{}] * 500)).value == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ComplexityWeights(tools=1.1), "tools=1.1: allowed are numbers from -1 to 1"),
        (lambda: ComplexityWeights(routine=math.nan), "routine=nan"),
        (lambda: ComplexityWeights(full_words=0), "full_words=0: allowed are numbers between 0 and inf"),
        (lambda: Complexity(weights={"tools": 1}), "allowed are ComplexityWeights"),  # type: ignore[arg-type]
        (lambda: Complexity(keywords=["x"]), "allowed are Keywords"),  # type: ignore[arg-type]
    ],
)
def test_options_that_cannot_work(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["user", "image", "json_schema", "enabled", "high", "語", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "parts",
                    "type",
                    "text",
                    "inlineData",
                    "mimeType",
                    "format",
                    "thinkingConfig",
                    "image",
                ]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
MEMBERS = [
    *("messages", "contents", "input", "prompt", "system", "tools", "max_tokens", "response_format", "text"),
    *("reasoning", "thinking", "generationConfig", "output_config"),
]


@given(st.dictionaries(st.sampled_from(MEMBERS), JSON, max_size=5))
def test_any_body_has_a_score(body: dict[str, object]) -> None:
    score = COMPLEXITY(body)
    assert 0 <= score.value <= 1
    assert all(name in {field.name for field in fields(ComplexityWeights)} for name in score.contributions)
    assert INTENT.of(body) in IntentClassifier.labels


@given(st.text(max_size=200))
def test_any_text_can_be_searched(text: str) -> None:
    assert set(COMPLEXITY.keywords.find(text)) <= set(get_args(Work))


def test_work_is_bounded_on_prompts_of_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    find = COMPLEXITY.keywords.find

    def noted(_self: Keywords, text: str) -> Any:
        searched.append(len(text))
        return find(text)

    monkeypatch.setattr(Keywords, "find", noted)
    text = "prove " + "x" * 2_000_000 + " step by step"
    assert COMPLEXITY(chat(text)).contributions["reasoning"] == pytest.approx(0.35), (
        "beginning and end are looked at"
    )
    assert COMPLEXITY({"messages": [{"role": "user", "content": ["x" * 99] * 50_000}]}).value <= 1
    wide: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x", **{str(n): "y" * 4 for n in range(200_000)}}]
    }
    assert features_of(wide).prompt_size <= 20_000
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    assert features_of({"input": deep}).prompt_size <= 1
    assert max(searched) <= 16_500
