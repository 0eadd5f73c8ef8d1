"""Whose key it is: the same answer the first time and ever after."""

from __future__ import annotations

import base64
import hashlib

import pytest

from resilient_llm.sidecar.auth import TenantKeys, basic_pairs, keys_in

ACME, GLOBEX = b"key-of-acme-0123456789", b"key-of-globex-9876543210"


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@pytest.mark.parametrize("times", [1, 3])
def test_a_key_is_that_of_its_tenant_however_often_it_comes(times: int) -> None:
    keys = TenantKeys({digest(ACME): "acme", digest(GLOBEX): "globex"})
    for _ in range(times):
        assert keys.tenant_of(keys_in([(b"authorization", b"Bearer " + ACME)])) == "acme"
        assert keys.tenant_of(keys_in([(b"x-api-key", GLOBEX)])) == "globex"
        assert keys.tenant_of(keys_in([(b"api-key", ACME), (b"authorization", b"bearer " + ACME)])) == "acme"
        assert keys.tenant_of(keys_in([(b"api-key", ACME), (b"authorization", b"Bearer " + GLOBEX)])) is None
        assert keys.tenant_of(keys_in([(b"authorization", b"Basic " + ACME)])) is None
        assert keys.tenant_of(keys_in([])) is None


def test_what_a_key_is_known_by_is_no_key() -> None:
    keys = TenantKeys({digest(ACME): "acme"})
    for _ in range(2):
        for no_key in (digest(ACME), digest(digest(ACME)), digest(ACME).hex().encode(), ACME + b"0"):
            assert keys.tenant_of(keys_in([(b"x-api-key", no_key)])) is None
        assert keys.tenant_of(keys_in([(b"x-api-key", ACME)])) == "acme"


def test_a_key_that_is_a_tenants_no_more_is_nobodys() -> None:
    before = TenantKeys({digest(ACME): "acme"})
    assert before.tenant_of(keys_in([(b"x-api-key", ACME)])) == "acme"
    after = TenantKeys({digest(GLOBEX): "acme"})  # as a reload makes it
    assert after.tenant_of(keys_in([(b"x-api-key", ACME)])) is None
    assert after.tenant_of(keys_in([(b"x-api-key", GLOBEX)])) == "acme"


@pytest.mark.parametrize("pair", [b"", b"u", b"us", b"user:key", b"user:keys", b"user:\xff/+~"])
def test_the_pair_in_basic_is_found_however_it_is_padded(pair: bytes) -> None:
    encoded = base64.b64encode(pair)
    for written in (encoded, encoded.rstrip(b"="), encoded + b"=="):
        url_safe = written.translate(bytes.maketrans(b"+/", b"-_"))
        for text in (b"Basic " + written, b"x=basic   " + written + b", more", b"BASIC " + url_safe):
            assert basic_pairs(text)[0].startswith(pair)
    assert basic_pairs(b"Bearer " + encoded) == basic_pairs(b"basically") == basic_pairs(b"Basic ")[1:] == []
