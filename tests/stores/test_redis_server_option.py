"""What a `RedisStore` may be made of: anything else is refused when it is made, and no password is shown."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.asyncio import ConnectionPool, Redis

from resilient_llm import ConfigurationError
from resilient_llm.stores import RedisStore


@pytest.mark.parametrize(
    "server",
    [
        "redis://u:s3cret@h?nonsense=1",
        "redis://u:s3cret#x@h",
        "redis://u:s3cret@h:70000000",
        "redis://u:s3cret@h:6379/production",
        "http://u:s3cret@h",
        b"redis://u:s3cret@h",
        redis.Redis(password="s3cret"),
        Redis,
        ConnectionPool(password="s3cret"),
        None,
    ],
)
def test_what_cannot_be_a_server_is_refused(server: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"allowed are a URL and a client of redis\.asyncio"
    ) as caught:
        RedisStore(server)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
