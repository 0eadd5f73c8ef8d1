"""A tenant with a list of models names them in members that every parser takes for what they are."""

from __future__ import annotations

import json

import pytest

from resilient_llm.sidecar import parse
from resilient_llm.sidecar.app import Sidecar
from resilient_llm.testing import FakeProvider
from tests.sidecar.support import ASK, BEARER, KEY, MemoryEngine, ask

pytestmark = pytest.mark.anyio

TOML = """
[targets.main]
url = "http://provider.example/v1"
[tenants.acme]
key_env = "KEY_OF_ACME"
"""


@pytest.mark.parametrize("member", ["Model", "MODEL", "mOdel", "Models", "model\u017f", "MODELS"])
async def test_a_member_that_some_take_for_the_model_is_refused(
    member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    for restricted, status in (('models = ["gpt-4o"]\n', 400), ("", 200)):
        provider = FakeProvider()
        sidecar = Sidecar(parse(TOML + restricted), MemoryEngine(provider))
        answered = await ask(sidecar, {**ASK, member: "large"}, headers=[BEARER])
        assert answered.status == status
        assert len(provider.requests) == (status == 200)


async def test_what_is_no_member_of_the_body_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    sidecar = Sidecar(parse(TOML + 'models = ["gpt-4o"]\n'), MemoryEngine(FakeProvider()))
    asked = {**ASK, "metadata": {"Model": "x"}, "model_options": 1, "user": json.dumps({"Model": 1})}
    assert (await ask(sidecar, asked, headers=[BEARER])).status == 200
