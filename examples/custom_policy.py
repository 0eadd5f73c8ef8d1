"""Two policies of your own: one refuses prompts that are too long, one notes how calls end.

Prints:
    200 None
    429 prompt_too_long
    ['success', 'prompt_too_long']
"""

import asyncio

import httpx

from resilient_llm import Call, CallNext, Outcome, RejectedError, Reply
from resilient_llm.httpx import ResilientTransport
from resilient_llm.testing import FakeProvider


class PromptTooLongError(RejectedError):
    """Answered by the client door with a 429, not a 503."""

    reason, callers_fault = "prompt_too_long", True


class MaxPrompt:
    """Refuse requests of over `size` bytes. Any async callable with these two parameters is a policy."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Let a call through, or refuse it."""
        if len(call.request.body or b"") > self.size:
            raise PromptTooLongError(f"the request is over {self.size} bytes", name="max_prompt")
        return await call_next(call)


endings: list[str] = []


async def note_endings(call: Call, call_next: CallNext) -> Reply:
    def note(outcome: Outcome) -> None:
        endings.append(outcome.error_type or outcome.verdict.value)

    call.on_finish(note)  # exactly once: when the reply was read to its end, failed or was abandoned
    return await call_next(call)


async def main() -> None:
    transport = ResilientTransport(FakeProvider().transport(), policies=[note_endings, MaxPrompt(500)])
    async with httpx.AsyncClient(transport=transport, base_url="http://provider.example/v1") as client:
        for prompt in ("Why?", "Why? " * 100):
            body = {"model": "gpt-4o", "messages": [{"role": "user", "content": prompt}]}
            response = await client.post("/chat/completions", json=body)
            print(response.status_code, response.json().get("error", {}).get("code"))
    print(endings)


if __name__ == "__main__":
    asyncio.run(main())
