"""One member of a JSON object changes, and nothing else: quickly where it is certain which, by reading otherwise."""

from __future__ import annotations

import json
import time

import pytest

from resilient_llm.core.json_member import with_member


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (b'{"model":"a"}', b'{"model":"NEW"}'),
        (b' \n{ "model" \t:\r\n "a" , "b":1}', b' \n{ "model" \t:\r\n "NEW" , "b":1}'),
        # not a string, or one with escapes
        (b'{"model":null,"b":2}', b'{"model":"NEW","b":2}'),
        (b'{"model":{"model":"a"}}', b'{"model":"NEW"}'),
        (b'{"model":[1,"]}"],"z":-1e5}', b'{"model":"NEW","z":-1e5}'),
        (b'{"model":"a\\"b\\\\"}', b'{"model":"NEW"}'),
        # the name deeper inside, in texts, as a value, and before and after the member
        (b'{"x":{"model":"a"},"model":"b"}', b'{"x":{"model":"a"},"model":"NEW"}'),
        (b'{"model":"b","x":[{"model":"a"}]}', b'{"model":"NEW","x":[{"model":"a"}]}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"b"}', b'{"x":"\\"model\\":\\"a\\"","model":"NEW"}'),
        (b'{"x":"model","model":"b"}', b'{"x":"model","model":"NEW"}'),
        (b'{"\\"model":"a","model":"b"}', b'{"\\"model":"a","model":"NEW"}'),
        # written otherwise, with the plain name where it does not count
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"NEW"}'),
        (b'{"x":{"model":"a"},"\\u006Dodel":"b"}', b'{"x":{"model":"a"},"\\u006Dodel":"NEW"}'),
        (b'{"x\\\\":{"model":1},"\\u006d\\u006F\\u0064\\u0065\\u006c":"b"}', None),
        (b'{"x":["\\"model",{"model":1}],"model":"b"}', b'{"x":["\\"model",{"model":1}],"model":"NEW"}'),
        # several of one name: parsers differ in which counts
        (b'{"model":"a","x":1,"model":"b"}', b'{"model":"NEW","x":1,"model":"NEW"}'),
        (b'{"model":"a","\\u006dodel":"b"}', b'{"model":"NEW","\\u006dodel":"NEW"}'),
        # letters of several bytes, and halves of them
        ('{"é":"😀","x":{"model":1},"model":"ü","ö":"\\u00e4"}'.encode(), None),
        (b'{"x":"\\ud83d","model":"b"}', b'{"x":"\\ud83d","model":"NEW"}'),
        ('{"x":{"model":"\ud83d"},"model":"b"}'.encode("utf-8", "surrogatepass"), None),
    ],
)
def test_only_the_member_changes(document: bytes, expected: bytes | None) -> None:
    changed = with_member(document, "model", b'"NEW"')
    assert json.loads(changed) == {**json.loads(document), "model": "NEW"}
    if expected is not None:
        assert changed == expected
    assert with_member(changed, "model", b'"NEW"') == changed


def test_a_document_without_the_member_stays() -> None:
    assert with_member(b'{"a": {"model": 1}}', "model", b"2") == b'{"a": {"model": 1}}'


@pytest.mark.parametrize(
    "document", [b"", b"[]", b"nothing", b'{"a"', b'{"a" 1}', b'{"a":1 "b"}', b"\xff\xfe{"]
)
def test_what_is_no_object_is_an_error(document: bytes) -> None:
    with pytest.raises(ValueError):
        with_member(document, "model", b"1")


@pytest.mark.parametrize(
    "filler", [b'"x":"' + b'\\"model\\":' * 100_000 + b'"', b'"x":[' + b'"model",' * 100_000 + b"1]"]
)
def test_the_time_is_linear_in_the_document(filler: bytes) -> None:
    document = b"{" + filler + b',"model":"a"}'
    began = time.process_time()
    assert with_member(document, "model", b'"b"') == b"{" + filler + b',"model":"b"}'
    assert (
        time.process_time() - began < 10
    )  # a megabyte takes milliseconds; a square of it would take minutes
