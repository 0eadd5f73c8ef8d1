"""LiteLLM's router behind an OpenAI-compatible route, with the settings of proxy.yaml: the core of its proxy.

Usage: python -m integrations.litellm.app, with OPENAI_API_KEY and, for another server, OPENAI_BASE_URL. It prints its
own URL.
"""

# ruff: noqa: T201 - a program prints

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import litellm
import yaml
from litellm.router import Router
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from resilient_llm.testing import serve

SETTINGS = yaml.safe_load((Path(__file__).parent / "proxy.yaml").read_text())


def make_app() -> Starlette:
    """Make an app that answers chats."""
    litellm.suppress_debug_info = True
    router = Router(model_list=SETTINGS["model_list"], **SETTINGS["router_settings"])

    async def chat(request: Request) -> Response:
        asked = await request.json()
        try:
            reply: Any = await router.acompletion(**asked)
        except Exception as error:  # noqa: BLE001 - LiteLLM's exceptions are those of many providers
            body = {"error": {"message": str(error), "type": type(error).__name__, "code": None}}
            return JSONResponse(body, getattr(error, "status_code", 500))
        if asked.get("stream"):
            return StreamingResponse(events(reply), media_type="text/event-stream")
        return JSONResponse(reply.model_dump())

    async def events(reply: Any) -> AsyncIterator[str]:
        async for chunk in reply:
            yield f"data: {json.dumps(chunk.model_dump())}\n\n"
        yield "data: [DONE]\n\n"

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def main() -> None:
    """Serve until the process is ended."""
    async with serve(make_app()) as url:
        print(url, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
