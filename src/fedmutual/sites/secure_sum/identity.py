"""Signatures of sites: a site signs with the key of its kit, and sends the certificate that the kits' authority issued."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from fedmutual.errors import RunError

_PADDING = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)
LONGEST_CERTIFICATE = 2**13  # bytes of a certificate in DER form


class Forged(ValueError):
    """A signature or a certificate does not belong to the named site."""


@dataclass(frozen=True)
class Authority:
    """The authority of the kits; every kit holds a copy of the authority's certificate."""

    certificate: x509.Certificate

    def check(self, site: str, certificate: bytes, signature: bytes, content: bytes) -> None:
        """Check that a site signed `content`. certificate: the certificate of the site, in DER form.

        Raises Forged where the authority did not issue this certificate for the site, the certificate is not valid now, or
        the signature is wrong.
        """
        if len(certificate) > LONGEST_CERTIFICATE:
            raise Forged("its certificate is longer than the certificate of any kit")
        try:
            parsed = x509.load_der_x509_certificate(certificate)
            parsed.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature, x509.InvalidVersion):
            raise Forged("its certificate was not issued by the kits' authority") from None
        names = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        now = datetime.datetime.now(datetime.UTC)
        if [name.value for name in names] != [site]:
            raise Forged("its certificate is another participant's")
        if not parsed.not_valid_before_utc <= now <= parsed.not_valid_after_utc:
            raise Forged("its certificate is not valid now; have the kit renewed, or set the clock")
        key = parsed.public_key()
        if not isinstance(key, RSAPublicKey):
            raise Forged("its certificate has no RSA key, which every kit has")
        try:
            key.verify(signature, content, _PADDING, SHA256())
        except InvalidSignature:
            raise Forged("its signature was not made with the key of its kit") from None


@dataclass(frozen=True)
class Signer:
    """The private key and the certificate of a site."""

    key: RSAPrivateKey
    certificate: bytes  # in DER form

    def sign(self, content: bytes) -> bytes:
        """Return the signature of `content` by RSASSA-PSS with SHA-256 (RFC 8017)."""
        return self.key.sign(content, _PADDING, SHA256())


def read_authority(startup: Path) -> Authority:
    """Return the authority in the startup folder of a kit. Raises RunError where its certificate is missing or damaged."""
    return Authority(read_certificate(startup / "rootCA.pem"))


def read_signer(startup: Path) -> Signer:
    """Return the private key and the certificate in the startup folder of a site's kit.

    Raises RunError where one of them is missing or damaged.
    """
    try:
        key = load_pem_private_key((startup / "client.key").read_bytes(), None)
        if not isinstance(key, RSAPrivateKey):
            raise TypeError
    except (OSError, ValueError, TypeError):
        raise RunError(f"{startup / 'client.key'}: is not an RSA private key; use the kit as you received it") from None
    return Signer(key, read_certificate(startup / "client.crt").public_bytes(Encoding.DER))


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a file in PEM form. Raises RunError where the file is missing or holds no certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise RunError(f"{path}: is not a certificate; use the kit as you received it") from None
