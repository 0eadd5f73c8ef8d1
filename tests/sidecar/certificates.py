"""Certificates for tests: an authority, and what it signs for 127.0.0.1, ::1 and clients."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority"]

_SINCE = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_UNTIL = _SINCE + dt.timedelta(days=36_500)
_HOSTS = [x509.IPAddress(ipaddress.ip_address(host)) for host in ("127.0.0.1", "::1")]


class Authority:
    """Sign certificates, and write them to files of a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = _builder(self._name, self._name, self._key, 1)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        signed = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, serial: int = 2, password: str | None = None) -> tuple[Path, Path]:
        """Give the files with a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *_HOSTS])
        builder = _builder(_named(name), self._name, key, serial).add_extension(names, critical=False)
        certificate, private = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        certificate.write_bytes(
            builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        locked: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            locked = serialization.BestAvailableEncryption(password.encode())
        private.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
        )
        return certificate, private


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, serial: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(serial)
    return builder.not_valid_before(_SINCE).not_valid_after(_UNTIL)
