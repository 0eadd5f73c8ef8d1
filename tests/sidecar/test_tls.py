"""TLS on the sidecar's own listeners: real clients, renewed certificates, and files that cannot work."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from resilient_llm.sidecar import ConfigError
from resilient_llm.sidecar.check import check
from resilient_llm.sidecar.config import parse
from resilient_llm.sidecar.reload import after_restart
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.sidecar.certificates import Authority
from tests.sidecar.process import Gate, started
from tests.sidecar.support import ANSWER, ASK

TLS = """
[server]
port = 0
drain_timeout = 50
tls = { certificate = "server.crt", key = "server.key"@@ }
[admin]
port = 0
[targets.one]
url = "@UPSTREAM@/v1"
"""


PLAIN = '[targets.one]\nurl = "http://one.example/v1"\n'
ADMIN_TLS = (
    PLAIN
    + """
[server]
port = 0
drain_timeout = 50
[admin]
port = 0
tls = { certificate = "admin.crt", key = "admin.key" }
"""
)


def written(directory: Path, more: str = "", upstream: str = "http://one.example") -> Path:
    file = directory / "gateway.toml"
    file.write_text(TLS.replace("@@", more).replace("@UPSTREAM@", upstream))
    return file


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


def shown(url: str, context: ssl.SSLContext) -> tuple[int, str | None]:
    """Give the serial number of the certificate that a server shows, and the TLS version."""
    host, _, port = url.removeprefix("https://").rpartition(":")
    host = host.strip("[]")
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        der = secure.getpeercert(binary_form=True)
        assert der is not None
        return x509.load_der_x509_certificate(der).serial_number, secure.version()


@pytest.mark.realtime
def test_clients_talk_to_it_by_tls_and_a_reload_shows_new_connections_a_renewed_certificate(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    authority.sign("server", serial=11)
    provider = Gate(FakeProvider())
    context = trusting(authority)
    with serve_in_thread(provider) as upstream:
        file = written(tmp_path, upstream=upstream)
        with started(file) as (process, url, admin):
            assert url.startswith("https://127.0.0.1:")
            with httpx.Client(verify=context, base_url=url, timeout=60) as client:
                reply = client.post("/v1/chat/completions", json=ASK)
                assert reply.json()["choices"][0]["message"]["content"] == ANSWER
                with client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as stream:
                    parts = stream.iter_raw()
                    received = next(parts)
                    assert shown(url, context)[0] == 11
                    authority.sign("server", serial=12)
                    process.signal(signal.SIGHUP)
                    process.wait_for("the configuration was reloaded")
                    assert shown(url, context)[0] == 12
                    provider.open()
                    received += b"".join(parts)  # a connection keeps what it began with
                assert received.endswith(b"data: [DONE]\n\n")

                (tmp_path / "server.key").write_text("nothing")
                refused = httpx.post(f"{admin}/admin/reload", timeout=60)
                assert refused.status_code == 422
                assert (
                    f'server.tls.key = "{tmp_path}/server.key": has no private key' in refused.json()["error"]
                )
                assert shown(url, context)[0] == 12

            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(f"{url}/healthz", timeout=60)
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(f"{url.replace('https', 'http')}/healthz", timeout=60)
            old = trusting(authority)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            assert shown(url, old) == (12, "TLSv1.2")
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.set_ciphers("DEFAULT:@SECLEVEL=0")  # or this side would not even ask
            with pytest.raises(ssl.SSLError, match=r"ALERT_PROTOCOL_VERSION|UNEXPECTED_EOF"):
                shown(url, old)
            curl = subprocess.run(
                ["curl", "-sS", "--cacert", str(authority.file), f"{url}/healthz"],
                capture_output=True,
                text=True,
                check=True,
            )
            assert curl.stdout == "ok\n"
            process.signal(signal.SIGTERM)
            code, stderr = process.end()
    assert (code, stderr) == (0, "")


@pytest.mark.realtime
def test_with_client_ca_nobody_connects_without_a_certificate_of_it(tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    authority.sign("server", password="of the key")
    mine, stranger = clients.sign("mine"), authority.sign("stranger")
    file = written(tmp_path, ', key_password_env = "KEY_PASSWORD", client_ca = "clients.pem"')
    with started(file, KEY_PASSWORD="of the key") as (_process, url, _admin):
        context = trusting(authority)
        context.load_cert_chain(*mine)
        assert httpx.get(f"{url}/healthz", verify=context, timeout=60).text == "ok\n"
        wrong = trusting(authority)
        wrong.load_cert_chain(*stranger)
        for refused in (trusting(authority), wrong):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/healthz", verify=refused, timeout=60)


@pytest.mark.realtime
@pytest.mark.parametrize("workers", [1, 2])
def test_whether_clients_need_a_certificate_stays_as_it_was_until_a_new_start(
    workers: int, tmp_path: Path
) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    authority.sign("admin", serial=31)
    mine = clients.sign("mine")
    file = tmp_path / "gateway.toml"
    asks = ADMIN_TLS.replace('"admin.key"', '"admin.key", client_ca = "clients.pem"')
    assert asks != ADMIN_TLS
    file.write_text(asks)
    context = trusting(authority)
    context.load_cert_chain(*mine)
    with started(file, "--workers", str(workers)) as (_process, _url, admin):

        def reload() -> object:
            return httpx.post(f"{admin}/admin/reload", verify=context, timeout=60).json()

        authority.sign("admin", serial=32)
        file.write_text(ADMIN_TLS)
        assert reload() == {"reloaded": True, "after_restart": ["admin.tls"]}
        assert shown(admin, context)[0] == 31
        assert httpx.get(f"{admin}/healthz", verify=context, timeout=60).text == "ok\n"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{admin}/healthz", verify=trusting(authority), timeout=60)
        file.write_text(asks)
        assert reload() == {"reloaded": True, "after_restart": []}
        assert shown(admin, context)[0] == 32


@pytest.mark.realtime
@pytest.mark.parametrize("workers", [1, 2])
def test_operators_talk_to_it_by_tls_and_a_reload_shows_them_a_renewed_certificate(
    workers: int, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    authority.sign("admin", serial=21)
    file = tmp_path / "gateway.toml"
    file.write_text(ADMIN_TLS)
    context = trusting(authority)
    with started(file, "--workers", str(workers)) as (process, url, admin):
        assert (url[:17], admin[:18]) == ("http://127.0.0.1:", "https://127.0.0.1:")
        with httpx.Client(verify=context, base_url=admin, timeout=60) as operator:
            assert httpx.get(f"{url}/healthz", timeout=60).text == operator.get("/healthz").text == "ok\n"
            assert "resilient_llm" in operator.get("/metrics").text
            assert shown(admin, context)[0] == 21
            authority.sign("admin", serial=22)
            assert operator.post("/admin/reload").json() == {"reloaded": True, "after_restart": []}
            assert shown(admin, context)[0] == 22

            (tmp_path / "admin.key").write_text("nothing")
            refused = operator.post("/admin/reload")
            assert refused.status_code == 422
            assert f'admin.tls.key = "{tmp_path}/admin.key": has no private key' in refused.json()["error"]
            assert shown(admin, context)[0] == 22
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{admin}/healthz", timeout=60)
        process.signal(signal.SIGTERM)
        code, stderr = process.end()
    assert (code, stderr) == (0, "")


@pytest.mark.realtime
@pytest.mark.skipif(sys.platform != "linux", reason="several processes take Linux")
@pytest.mark.parametrize("then", ["broken", "gone", "no TLS", "no client_ca"])
def test_a_worker_that_is_started_again_shows_what_the_others_show(then: str, tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    authority.sign("server", serial=41, password="of-the-key")
    context = trusting(authority)
    context.load_cert_chain(*clients.sign("mine"))
    more = ', key_password_env = "KEY_PASSWORD", client_ca = "clients.pem"'
    file = written(tmp_path, more)
    with started(file, "--workers", "2", KEY_PASSWORD="of-the-key") as (process, url, admin):
        assert shown(url, context)[0] == 41
        authority.sign("server", serial=42, password="of-the-key")
        assert httpx.post(f"{admin}/admin/reload", timeout=60).status_code == 200

        if then == "no TLS":
            file.write_text(re.sub("(?m)^tls = .*$", "", file.read_text()))
        elif then == "no client_ca":
            file.write_text(file.read_text().replace(', client_ca = "clients.pem"', ""))
        for name in ("server.crt", "server.key", "clients.pem"):
            if then == "broken":
                (tmp_path / name).write_text("nothing")
            elif then == "gone":
                (tmp_path / name).unlink()
        refused = then in ("broken", "gone")
        assert httpx.post(f"{admin}/admin/reload", timeout=60).status_code == (422 if refused else 200)

        def workers() -> list[dict[str, object]]:
            report = httpx.get(f"{admin}/admin/health", timeout=60).json()
            return [{name: one[name] for name in ("pid", "restarts")} for one in report["workers"]]

        for one in workers():
            assert isinstance(one["pid"], int)
            os.kill(one["pid"], signal.SIGKILL)
        process.wait_for("a worker is back", 2)
        assert [one["restarts"] for one in workers()] == [1, 1]
        assert {shown(url, context)[0] for _ in range(20)} == {42}
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz", verify=trusting(authority), timeout=60)
        log = str(process.lines)
        assert "PRIVATE KEY" not in log
        assert "of-the-key" not in log
        for child in [process.pid, *(one["pid"] for one in workers())]:
            assert "PRIVATE KEY" not in Path(f"/proc/{child}/environ").read_text()
            assert "PRIVATE KEY" not in Path(f"/proc/{child}/cmdline").read_text()


def test_what_of_it_needs_a_new_start_is_told() -> None:
    def seen(before: str, after: str) -> list[str]:
        return after_restart(parse(PLAIN + before), parse(PLAIN + after))

    tls, other = ('tls = { certificate = "@.crt", key = "@.key" }'.replace("@", name) for name in "ab")
    for table in ("server", "admin"):
        assert seen(f"[{table}]\n{tls}", f"[{table}]\n{other}") == []
        assert seen("", f"[{table}]\n{tls}") == [f"{table}.tls"]
        assert seen(f"[{table}]\n{tls}", f"[{table}]\n{tls[:-1]}, client_ca = 'c' }}") == [f"{table}.tls"]
    assert seen(f"[admin]\n{tls}", f"[admin]\nport = 9\n{tls}") == ["admin"]
    assert seen("", "[telemetry]\nprometheus = false") == ["telemetry"]


@pytest.mark.parametrize(
    ("break_it", "environ", "why"),
    [
        ("", {}, ""),
        ("rm server.crt", {}, 'server.tls.certificate = "@/server.crt": cannot be read: No such file'),
        ("rm server.key", {}, 'server.tls.key = "@/server.key": cannot be read: No such file'),
        (
            "cp server.key server.crt",
            {},
            'server.tls.certificate = "@/server.crt": has no certificate in PEM',
        ),
        ("cp server.crt server.key", {}, 'server.tls.key = "@/server.key": has no private key in PEM'),
        ("cp other.key server.key", {}, 'server.tls.key = "@/server.key": is not the key of the certificate'),
        ("sed -i 3d server.key", {}, 'server.tls.key = "@/server.key": cannot be read: it is damaged'),
        ("sed -i 3d server.crt", {}, 'server.tls.certificate = "@/server.crt": has no certificate in PEM'),
        ("cp locked.key server.key", {}, "is encrypted: name the environment variable with its password"),
    ],
)
def test_what_is_wrong_with_its_files_is_said(
    break_it: str, environ: dict[str, str], why: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    for name in ("server", "other"):
        authority.sign(name)
    authority.sign("locked", password="secret")
    subprocess.run(break_it, shell=True, cwd=tmp_path, check=True)
    file = written(tmp_path)
    if not why:
        assert check(file, environ).startswith(f"{file}: OK")
        return
    with pytest.raises(ConfigError) as refused:
        check(file, environ)
    assert str(refused.value).startswith(f"{file}:5: server.tls")
    assert why.replace("@", str(tmp_path)) in str(refused.value)


def test_the_password_of_a_key_is_in_the_environment(tmp_path: Path) -> None:
    Authority(tmp_path).sign("server", password="secret-of-the-key")
    file = written(tmp_path, ', key_password_env = "KEY_PASSWORD"')
    assert "OK" in check(file, {"KEY_PASSWORD": "secret-of-the-key"})
    assert "OK" in check(file, None)
    with pytest.raises(ConfigError, match="the environment variable KEY_PASSWORD is not set"):
        check(file, {})
    with pytest.raises(ConfigError, match="its password is another one") as refused:
        check(file, {"KEY_PASSWORD": "a-wrong-one"})
    assert "a-wrong-one" not in str(refused.value)
    Authority(tmp_path).sign("admin")
    file.write_text(ADMIN_TLS.replace('"admin.key"', '"admin.key", key_password_env = "LOCK"'))
    assert "OK" in check(file, None)
    with pytest.raises(
        ConfigError, match=r"admin\.tls\.key_password_env: the environment variable LOCK is not"
    ):
        check(file, {})
    (tmp_path / "clients.pem").write_text("nothing")
    file = written(tmp_path, ', key_password_env = "KEY_PASSWORD", client_ca = "clients.pem"')
    with pytest.raises(ConfigError, match=r"tls\.client_ca = .*: has no certificate in PEM"):
        check(file, {"KEY_PASSWORD": "secret-of-the-key"})
