"""How OpenAI's embeddings API puts it. Vectors mean nothing, but the same text always has the same one."""

# ruff: noqa: ARG002 - each method takes what some dialect needs

from __future__ import annotations

import base64
import math
import random
import struct
from collections.abc import Sequence

from ._dialect import JSONObject, Reply, positive_int
from ._openai import OpenAI


class OpenAIEmbeddings(OpenAI):
    """`POST /v1/embeddings`: vectors of length 1."""

    name = "openai.embeddings"
    streams = False

    def prompt(self, request: JSONObject) -> object:
        """Return the input."""
        return request.get("input")

    def max_tokens(self, request: JSONObject) -> int | None:
        """Return 0: nothing is generated."""
        return 0

    def message(self, reply: Reply) -> JSONObject:
        """Return a list of embeddings."""
        texts = reply.request.get("input")
        inputs: Sequence[object] = (
            [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else []
        )
        size = positive_int(reply.request, "dimensions") or 8
        packed = reply.request.get("encoding_format") == "base64"
        vectors = [_vector(repr(text), size) for text in inputs]
        data = [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if packed else vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": reply.prompt_tokens, "total_tokens": reply.prompt_tokens}
        return {"object": "list", "data": data, "model": reply.model, "usage": usage}

    def opening(self, reply: Reply) -> list[bytes]:
        """Return nothing: embeddings are not streamed."""
        return []

    def token(self, reply: Reply, index: int) -> bytes:
        """Return nothing: embeddings are not streamed."""
        return b""

    def closing(self, reply: Reply) -> list[bytes]:
        """Return nothing: embeddings are not streamed."""
        return []

    def terminal(self, reply: Reply) -> bytes:
        """Return nothing: embeddings are not streamed."""
        return b""


def _vector(text: str, size: int) -> list[float]:
    rng = random.Random(text)
    vector = [rng.gauss(0, 1) for _ in range(size)]
    length = math.hypot(*vector)
    return [value / length for value in vector]


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
