"""The certificate that callers are shown, from files, and from the same files again once they have been renewed.

What is wrong with them is said in the words of the configuration. Which clients may do what is not decided here.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from resilient_llm.sidecar.problems import ConfigError, Problem

if TYPE_CHECKING:
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.tables import TLS

__all__ = ["Certificates"]

_TABLE = ("server", "tls")


class Certificates:
    """Hold what a listener shows its clients; connections that are there already keep what they have.

    `options.certificate` has the chain in PEM, the listener's own first. Raises `ConfigError` for files that cannot
    work.
    """

    def __init__(self, options: TLS, base: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._latest = _context(options, base, environ)
        self.context = _context(options, base, environ)
        """What the listener is made with."""
        # Called for every handshake, with a name or without: a context cannot be emptied of what it has loaded.
        self.context.sni_callback = self._show_latest

    @classmethod
    def of(cls, config: Config, path: Path, environ: Mapping[str, str] = os.environ) -> Certificates | None:
        """Give those of a configuration, whose files are named as seen from its own; `None` without any."""
        options = config.server.tls
        return None if options is None else cls(options, path.parent, environ)

    def renewed(self, config: Config, path: Path) -> ssl.SSLContext | None:
        """Read the files of a configuration, to be shown with `show`; `None` where it has none."""
        options = config.server.tls
        return None if options is None else _context(options, path.parent, self._environ)

    def show(self, context: ssl.SSLContext) -> None:
        """Show new connections what has been read."""
        self._latest = context

    def _show_latest(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> int | None:
        connection.context = self._latest
        return None


def _context(options: TLS, base: Path, environ: Mapping[str, str]) -> ssl.SSLContext:
    certificate, key = base / options.certificate, base / options.key
    shown = _read("certificate", certificate)
    secret = _read("key", key)
    if not _holds_certificates(shown):
        raise _wrong("certificate", certificate, "has no certificate in PEM")
    if "PRIVATE KEY-----" not in secret:
        raise _wrong("key", key, "has no private key in PEM")
    password = _password(options, environ)
    if "ENCRYPTED" in secret and not password:
        raise _wrong(
            "key", key, "is encrypted: name the environment variable with its password in key_password_env"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(
            certificate, key, password or ""
        )  # without any OpenSSL would ask at a terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _wrong("key", key, "is not the key of the certificate") from None
        why = (
            "its password is another one" if "ENCRYPTED" in secret else "it is damaged, or of an unknown kind"
        )
        raise _wrong("key", key, f"cannot be read: {why}") from None
    if options.client_ca is not None:
        authorities = base / options.client_ca
        if not _holds_certificates(given := _read("client_ca", authorities)):
            raise _wrong("client_ca", authorities, "has no certificate in PEM")
        context.load_verify_locations(cadata=given)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError as error:
        raise _wrong(name, path, f"cannot be read: {error.strerror}") from None


def _holds_certificates(pem: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError):
        return False
    return True


def _password(options: TLS, environ: Mapping[str, str]) -> str | None:
    variable = options.key_password_env
    if variable is None:
        return None
    if not environ.get(variable):
        raise ConfigError(
            [Problem((*_TABLE, "key_password_env"), f"the environment variable {variable} is not set")]
        )
    return environ[variable]


def _wrong(name: str, path: Path, why: str) -> ConfigError:
    return ConfigError([Problem((*_TABLE, name), why, f'"{path}"')])
