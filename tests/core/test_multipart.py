"""One field of a form changes, and nothing else."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.multipart import with_field

TYPE = b"multipart/form-data; boundary=b"
HEAD = b'--b\r\nContent-Disposition: form-data; name="'


@given(st.binary(max_size=200), st.text(max_size=20), st.binary(max_size=20))
def test_a_form_as_httpx_writes_it(sound: bytes, prompt: str, value: bytes) -> None:
    request = httpx.Request(
        "POST",
        "http://h",
        files={"file": ("model.mp3", sound, "audio/mpeg")},
        data={"prompt": prompt, "model": "OLD", "other": "model"},
    )
    form = request.read()
    content_type = request.headers["content-type"].encode()
    changed = with_field(form, content_type, "model", value)
    before, after = form.split(b'name="model"\r\n\r\nOLD\r\n')
    assert changed == before + b'name="model"\r\n\r\n' + value + b"\r\n" + after
    assert with_field(form, content_type, "missing", b"x") is form


def test_a_preamble_and_an_epilogue_stay() -> None:
    form = b"before\r\n" + HEAD + b'model"\r\n\r\nOLD\r\n--b--\r\nafter --b'
    assert with_field(form, TYPE, "model", b"NEW") == form.replace(b"OLD", b"NEW")


@pytest.mark.parametrize(
    ("form", "content_type"),
    [
        (b"--b--", b"multipart/form-data"),
        (b"", TYPE),
        (b"no boundary", TYPE),
        (HEAD + b'model"', TYPE),
        (HEAD + b'model"\r\n\r\nOLD', TYPE),
        (HEAD + b'model"\r\n\r\nOLD\r\n--b\r\n', TYPE),
    ],
)
def test_what_is_no_form_is_an_error(form: bytes, content_type: bytes) -> None:
    with pytest.raises(ValueError):
        with_field(form, content_type, "model", b"NEW")
