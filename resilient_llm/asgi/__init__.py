"""The ASGI door: policies around the requests that come in.

Pure ASGI, so that the app runs in the server's own task and context. Who asks, what a client sees of a
refusal, and what happens when it leaves are decided here; whether a request may run, the policies say.
"""

from resilient_llm.asgi.llm import LLMMiddleware
from resilient_llm.asgi.middleware import ResilienceMiddleware
from resilient_llm.asgi.tenant import ClientAddress, TenantHeader

__all__ = ["ClientAddress", "LLMMiddleware", "ResilienceMiddleware", "TenantHeader"]
