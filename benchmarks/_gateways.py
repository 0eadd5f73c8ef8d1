"""The gateways that are compared: where each comes from, and how it is started.

Peers are installed once, each into a folder of its own under the user's cache, and never into this project's
environment. No benchmark itself.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks._gateway_process import BEARER, KEY, Command, Gateway, Place, free_port

__all__ = ["GATEWAYS", "OBSERVED"]

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "resilient_llm" / "peers"
_INSTALLING = 600.0


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=_INSTALLING)


# How peers are had


def _python(folder: str, *packages: str) -> Callable[[], object]:
    def get() -> None:
        home = _CACHE / folder
        if (home / "installed").exists():
            return
        home.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "venv", str(home))
        _run(str(home / "bin" / "pip"), "install", "-q", *packages)
        (home / "installed").touch()

    return get


def _npm(folder: str, package: str) -> Callable[[], object]:
    def get() -> None:
        home = _CACHE / folder
        if (home / "installed").exists():
            return
        home.mkdir(parents=True, exist_ok=True)
        _run(
            "npm",
            "install",
            "--prefix",
            ".",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            package,
            cwd=home,
        )
        (home / "installed").touch()

    return get


def _compiled() -> None:
    """Compile our own modules, as installing a package does: none of the others compiles when it starts."""
    compileall.compile_dir(Path(__file__).parent.parent / "resilient_llm", quiet=2)


def _nginx() -> str:
    found = shutil.which("nginx")
    if found is not None:
        return found
    home = _CACHE / "nginx"
    program = home / "usr" / "sbin" / "nginx"
    if not program.exists():  # unpacked, not installed: no service starts, and no root is needed
        home.mkdir(parents=True, exist_ok=True)
        _run("apt-get", "download", "nginx", cwd=home)
        for package in home.glob("nginx_*.deb"):
            _run("dpkg-deb", "-x", str(package), str(home))
    return str(program)


# How they are started


_CONFIG = """
[server]
port = {port}
workers = {workers}
access_log = {log}
[admin]
enabled = false
[tenants.acme]
key_env = "BENCHMARK_KEY"
[targets.main]
url = "http://127.0.0.1:{provider}/v1"
api_key_env = "BENCHMARK_KEY"
{target}
[models.gpt-4o-mini]
targets = ["main"]
[bulkhead]
{bulkhead}
[retry]
{retry}
[telemetry]
{telemetry}
"""
_POLICIES = {
    "log": "false",  # as that of the others
    "target": "concurrency = { initial = 256, max = 512 }\n"
    "circuit = { consecutive_failures = 5, failure_ratio = 0.3 }",
    "bulkhead": "max_concurrent = 256",
    "retry": "max_attempts = 5",
}
_LOGGED = _POLICIES | {"log": "true"}
_NO_POLICIES = {
    "log": "false",
    "target": "concurrency = { enabled = false }\ncircuit = { enabled = false }",
    "bulkhead": "enabled = false",
    "retry": "enabled = false",
}
_SILENT = "prometheus = false"
_TRACED = 'otlp_endpoint = "http://127.0.0.1:{provider}"\nsample_ratio = {ratio}'


def _sidecar(options: Mapping[str, str], telemetry: str = _SILENT, *, ratio: float = 0.0) -> Command:
    def command(place: Place) -> Sequence[str]:
        told = telemetry.format(provider=place.provider, ratio=ratio)
        where = {"port": place.port, "provider": place.provider, "workers": place.workers}
        file = place.folder / "gateway.toml"
        file.write_text(_CONFIG.format(**options, **where, telemetry=told))
        return sys.executable, "-m", "resilient_llm.cli", "serve", "--config", str(file)

    return command


def _litellm(place: Place) -> Sequence[str]:
    config = {
        "model_list": [
            {
                "model_name": "gpt-4o-mini",
                "litellm_params": {
                    "model": "openai/gpt-4o-mini",
                    "api_base": f"http://127.0.0.1:{place.provider}/v1",
                    "api_key": KEY,
                },
            }
        ]
    }
    (place.folder / "config.yaml").write_text(json.dumps(config))  # which is YAML, too
    program = _CACHE / "litellm" / "bin" / "litellm"
    where = ["--host", "127.0.0.1", "--port", str(place.port), "--num_workers", str(place.workers)]
    return str(program), "--config", str(place.folder / "config.yaml"), "--telemetry", "False", *where


def _portkey(place: Place) -> Sequence[str]:
    program = _CACHE / "portkey" / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    return "node", str(program), f"--port={place.port}", "--headless"


def _mlflow(place: Place) -> Sequence[str]:
    model = {
        "provider": "openai",
        "name": "gpt-4o-mini",
        "config": {"openai_api_key": KEY, "openai_api_base": f"http://127.0.0.1:{place.provider}/v1"},
    }
    config = {"endpoints": [{"name": "gpt-4o-mini", "endpoint_type": "llm/v1/chat", "model": model}]}
    file = place.folder / "config.yaml"
    file.write_text(json.dumps(config))  # which is YAML, too
    program = _CACHE / "mlflow" / "bin" / "mlflow"
    where = ["--host", "127.0.0.1", "--port", str(place.port), "--workers", str(place.workers)]
    return str(program), "gateway", "start", "--config-path", str(file), *where


def _router(program: str, *options: str) -> Command:
    def command(place: Place) -> Sequence[str]:
        where = ["--host", "127.0.0.1", "--port", str(place.port), "--prometheus-port", str(free_port())]
        worker = ["--worker-urls", f"http://127.0.0.1:{place.provider}"]
        return str(_CACHE / program / "bin" / program), *options, *where, *worker

    return command


def _nginx_command(place: Place) -> Sequence[str]:
    (place.folder / "logs").mkdir(exist_ok=True)
    temporary = "".join(
        f"{kind}_temp_path {place.folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (place.folder / "nginx.conf").write_text(
        f"""
daemon off;
worker_processes {place.workers};
pid {place.folder}/pid;
error_log stderr;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    {temporary}
    keepalive_requests 100000000;
    upstream provider {{ server 127.0.0.1:{place.provider}; keepalive 256; keepalive_requests 100000000; }}
    server {{
        listen 127.0.0.1:{place.port} reuseport;
        location / {{
            proxy_pass http://provider;
            proxy_http_version 1.1;
            proxy_set_header connection "";
            proxy_buffering off;
        }}
    }}
}}
"""
    )
    return _nginx(), "-p", str(place.folder), "-c", str(place.folder / "nginx.conf"), "-e", "stderr"


GATEWAYS: Mapping[str, Gateway] = {
    "sidecar": Gateway(command=_sidecar(_POLICIES), get=_compiled),
    "bare_proxy": Gateway(command=_sidecar(_NO_POLICIES), get=_compiled),
    "nginx": Gateway(command=_nginx_command, get=_nginx),
    "smg": Gateway(
        command=_router("smg", "launch", "--policy", "round_robin", "--log-level", "warn"),
        get=_python("smg", "smg==1.13.0"),
    ),
    "vllm_router": Gateway(
        command=_router("vllm-router", "--policy", "round_robin", "--log-level", "warning"),
        get=_python("vllm-router", "vllm-router==0.1.17"),
    ),
    "portkey": Gateway(
        command=_portkey,
        get=_npm("portkey", "@portkey-ai/gateway@1.15.2"),
        headers=lambda provider: {
            **BEARER,
            "x-portkey-provider": "openai",
            "x-portkey-custom-host": f"http://127.0.0.1:{provider}/v1",
        },
        most_workers=1,
    ),
    "mlflow": Gateway(command=_mlflow, get=_python("mlflow", "mlflow[genai]==3.17.2")),
    "litellm": Gateway(
        command=_litellm,
        get=_python("litellm", "litellm[proxy]==1.108.0"),
        # It would ask the network for its price list, and wants a key of its own.
        environ={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOG": "ERROR",
            "DISABLE_ADMIN_UI": "True",
        },
    ),
}

OBSERVED: Mapping[str, Gateway] = {"sidecar_logged": Gateway(command=_sidecar(_LOGGED), get=_compiled)} | {
    f"sidecar_traced_{percent}": Gateway(command=_sidecar(_LOGGED, _TRACED, ratio=percent / 100))
    for percent in (10, 100)
}
"""The sidecar with its access log, and with metrics as well and traces of so many percent of the requests, sent to the
provider, which drops them."""
