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

_SIGNS = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=False,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Sign certificates, and write them to files of a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        # With all that Python insists on from 3.13 on.
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = self._builder(self._name, self._key, 1).add_extension(self._identifier, critical=False)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = builder.add_extension(constraints, critical=True).add_extension(_SIGNS, critical=True)
        signed = builder.sign(self._key, hashes.SHA256())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, serial: int = 2, password: str | None = None) -> tuple[Path, Path]:
        """Give the files with a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *_HOSTS])
        builder = self._builder(_named(name), key, serial).add_extension(names, critical=False)
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

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, serial: int
    ) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(serial)
        builder = builder.not_valid_before(_SINCE).not_valid_after(_UNTIL)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        return builder.add_extension(issuer, critical=False)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
