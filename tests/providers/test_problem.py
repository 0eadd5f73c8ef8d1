"""One shape for all spellings of an error."""

import pytest

from resilient_llm.providers import Problem, parse, read_problem


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}},
            Problem(message="m", type="t", param="p", code="c"),
        ),
        ({"error": {"message": "m", "code": "429"}}, Problem(message="m", status=429)),
        ({"error": {"message": "m", "code": 1302}}, Problem(message="m")),
        ({"error": {"message": "m", "code": True, "status": 700}}, Problem(message="m")),
        ({"error": {"message": ["m"], "type": 5, "param": {}, "code": ""}}, Problem()),
        ({"error": "invalid_client", "error_description": "d"}, Problem(message="d", code="invalid_client")),
        ({"error": "boom", "code": "c", "type": "t"}, Problem(message="boom", code="c", type="t")),
        ({"error": {}}, Problem()),
        ({"error": []}, Problem()),
        ({"errors": [{"code": 10000, "message": "m"}], "success": False}, Problem(message="m")),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, Problem(message="field required")),
        ({"detail": [1]}, Problem()),
        ({"type": "about:blank", "title": "Gone", "status": 410}, Problem(message="Gone", status=410)),
        (
            {"type": "https://example.org/probs/x", "detail": "d"},
            Problem(message="d", type="https://example.org/probs/x"),
        ),
        ({"__type": "ns#SomeException:http://x", "Message": "m"}, Problem(message="m", code="SomeException")),
        ({"choices": [{"error": {"code": 502, "message": "m"}}]}, Problem(message="m", status=502)),
        ({"type": "response.failed", "response": {"error": {"code": "c"}}}, Problem(code="c")),
        (
            {
                "error": {
                    "code": "BadRequest",
                    "innererror": {"code": "inner"},
                    "details": {"error_code": "narrow"},
                }
            },
            Problem(code="BadRequest", details=("narrow", "inner")),
        ),
        ([], Problem()),
        (None, Problem()),
        (5, Problem()),
    ],
    ids=repr,
)
def test_a_body_becomes_a_problem(body: object, problem: Problem) -> None:
    assert read_problem(body) == problem


def test_the_narrowest_name_comes_first() -> None:
    body = {
        "error": {"code": "c", "type": "t", "details": [{"reason": "r"}, 5, {"violations": [{"quotaId": 1}]}]}
    }
    headers = [(b"date", b"x"), (b"X-Amzn-ErrorType", b" Header:http://x"), (b"x-amzn-errortype", b"")]
    assert read_problem(body, headers).names == ("Header", "r", "c", "t")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000, None], ids=lambda b: repr(b)[:20]
)
def test_what_is_no_json_is_nothing(body: bytes | None) -> None:
    assert parse(body) is None
