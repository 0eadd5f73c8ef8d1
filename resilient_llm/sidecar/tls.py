"""The certificates that clients of a listener are shown, from files, and from the same files once they are renewed.

What is wrong with them is said in the words of the configuration. What they held can be kept for processes that begin
later. Which clients may do what is not decided here.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from resilient_llm.sidecar.files import content
from resilient_llm.sidecar.problems import ConfigError, Problem
from resilient_llm.sidecar.tables import TLS

if TYPE_CHECKING:
    from resilient_llm.sidecar.config import Config

__all__ = ["LISTENERS", "Certificates", "Kept", "ListenerName", "keep", "renew"]

ListenerName: TypeAlias = Literal["server", "admin"]
LISTENERS: tuple[ListenerName, ...] = ("server", "admin")
"""The tables that may have a `tls`: of the listener for callers, and of that for operators."""
Kept: TypeAlias = Mapping[str, Any]
"""A table `tls`, and the text in PEM that the files `held` which it names: a key is among it."""


class Certificates:
    """Hold what the listener of a configuration's table shows; connections that are there keep what they have.

    Files are named as seen from `base`, the folder of the configuration, and read unless it is given what they `held`.
    Raises `ConfigError` for those that cannot work.
    """

    def __init__(
        self,
        listener: ListenerName,
        options: TLS,
        base: Path,
        environ: Mapping[str, str] = os.environ,
        *,
        held: Mapping[str, str] | None = None,
    ) -> None:
        self._listener = listener
        self._base = base
        self._environ = environ
        files = _Files(listener, options, base, environ)
        self._latest = files.context(held)
        self.context = files.context(held)
        """What the listener is made with."""
        # Called for every handshake, with a name or without: a context cannot be emptied of what it has loaded.
        self.context.sni_callback = self._show_latest

    @classmethod
    def of(
        cls, listener: ListenerName, config: Config, path: Path, environ: Mapping[str, str] = os.environ
    ) -> Certificates | None:
        """Give those of a listener of the configuration in a file; `None` without any."""
        options: TLS | None = getattr(config, listener).tls
        return None if options is None else cls(listener, options, path.parent, environ)

    @classmethod
    def of_kept(cls, listener: ListenerName, kept: Kept | None, path: Path) -> Certificates | None:
        """Give those that were kept of the configuration in a file, whatever has become of them since; on Linux."""
        return None if kept is None else cls(listener, TLS(**kept["tls"]), path.parent, held=kept["held"])

    def renewed(self, config: Config) -> ssl.SSLContext | None:
        """Read the files of a configuration, to be shown with `show`; `None` where only a new start can show them."""
        options: TLS | None = getattr(config, self._listener).tls
        if options is None:
            return None
        context = _Files(self._listener, options, self._base, self._environ).context()
        # Whether clients are asked for a certificate is settled before the handshake comes to what is shown here, and
        # one that trusts nobody's would turn all of them away.
        return context if context.verify_mode is self.context.verify_mode else None

    def show(self, context: ssl.SSLContext) -> None:
        """Show new connections what has been read."""
        self._latest = context

    def _show_latest(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> int | None:
        connection.context = self._latest
        return None


def keep(listener: ListenerName, config: Config, path: Path) -> Kept | None:
    """Read the files of a listener, and make sure that what they hold works. Raises `ConfigError`."""
    options: TLS | None = getattr(config, listener).tls
    if options is None:
        return None
    files = _Files(listener, options, path.parent, os.environ)
    held = files.read()
    files.context(held)
    return {"tls": options.model_dump(), "held": held}


def renew(shown: Iterable[Certificates | None], config: Config) -> Callable[[], None]:
    """Read all files again, and give what then shows them. Raises `ConfigError`, and nothing has changed."""
    found = [
        (one, context) for one in shown if one is not None and (context := one.renewed(config)) is not None
    ]

    def show() -> None:
        for one, context in found:
            one.show(context)

    return show


class _Files:
    """The files that one table names."""

    def __init__(self, listener: ListenerName, options: TLS, base: Path, environ: Mapping[str, str]) -> None:
        self._table = (listener, "tls")
        self._options = options
        self._base = base
        self._environ = environ

    def read(self) -> dict[str, str]:
        """Read them."""
        named = ((name, getattr(self._options, name)) for name in ("certificate", "key", "client_ca"))
        return {name: self._read(name, self._base / file) for name, file in named if file is not None}

    def context(self, held: Mapping[str, str] | None = None) -> ssl.SSLContext:
        """Make what a listener shows, of what they hold, or `held` when they were read."""
        options = self._options
        certificate, key = self._base / options.certificate, self._base / options.key
        texts = self.read() if held is None else held
        shown, secret = texts["certificate"], texts["key"]
        if not _holds_certificates(shown):
            raise self._wrong("certificate", certificate, "has no certificate in PEM")
        if "PRIVATE KEY-----" not in secret:
            raise self._wrong("key", key, "has no private key in PEM")
        password = self._password()
        if "ENCRYPTED" in secret and not password:
            why = "is encrypted: name the environment variable with its password in key_password_env"
            raise self._wrong("key", key, why)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # OpenSSL 1.1 would let clients ask for it again and again
        context.set_alpn_protocols(["http/1.1"])
        password = password or ""  # without any OpenSSL asks at a terminal
        try:
            if held is None:
                context.load_cert_chain(certificate, key, password)
            else:
                with _in_memory(shown) as chain, _in_memory(secret) as private:
                    context.load_cert_chain(chain, private, password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise self._wrong("key", key, "is not the key of the certificate") from None
            damaged = "it is damaged, or of an unknown kind"
            why = "its password is another one" if "ENCRYPTED" in secret else damaged
            raise self._wrong("key", key, f"cannot be read: {why}") from None
        if options.client_ca is not None:
            if not _holds_certificates(given := texts["client_ca"]):
                raise self._wrong("client_ca", self._base / options.client_ca, "has no certificate in PEM")
            context.load_verify_locations(cadata=given)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _read(self, name: str, path: Path) -> str:
        try:
            return content(path).decode("ascii", "replace")
        except OSError as error:
            raise self._wrong(name, path, f"cannot be read: {error.strerror}") from None

    def _password(self) -> str | None:
        variable = self._options.key_password_env
        if variable is None:
            return None
        if not self._environ.get(variable):
            why = f"the environment variable {variable} is not set"
            raise ConfigError([Problem((*self._table, "key_password_env"), why)])
        return self._environ[variable]

    def _wrong(self, name: str, path: Path, why: str) -> ConfigError:
        return ConfigError([Problem((*self._table, name), why, f'"{path}"')])


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Give a path under which this process can read a text that is in no file; on Linux."""
    with os.fdopen(os.memfd_create("pem"), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _holds_certificates(pem: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError):
        return False
    return True
