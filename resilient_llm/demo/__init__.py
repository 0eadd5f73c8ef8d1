"""The demo: fifteen seconds of a service whose provider misbehaves and one of whose tenants is noisy.

Everything in it is real but the provider: sockets, FastAPI, the OpenAI SDK, OpenTelemetry's SDK. It uses
the library's public parts as an application does, and every number it shows is measured while it runs.
"""

from resilient_llm.demo.run import DemoError, Settings, run_demo

__all__ = ["DemoError", "Settings", "run_demo"]
