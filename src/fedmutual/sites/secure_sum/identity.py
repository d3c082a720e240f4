"""Who signed: each site signs with its kit's key, and the certificate beside it is checked against the kits' authority."""

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
    """A signature or a certificate that is not of the site named."""


@dataclass(frozen=True)
class Authority:
    """The kits' authority, whose certificate every kit has."""

    certificate: x509.Certificate

    def check(self, site: str, certificate: bytes, signature: bytes, content: bytes) -> None:
        """Check that a site signed a content. certificate: the site's, in DER form.

        Raises:
            Forged: the authority did not give that site this certificate, it is not valid now, or the signature is wrong.
        """
        if len(certificate) > LONGEST_CERTIFICATE:
            raise Forged("its certificate is longer than any of a kit")
        try:
            known = x509.load_der_x509_certificate(certificate)
            known.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature, x509.InvalidVersion):
            raise Forged("its certificate is not of the kits' authority") from None
        names = known.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        now = datetime.datetime.now(datetime.UTC)
        if [name.value for name in names] != [site]:
            raise Forged("its certificate is another participant's")
        if not known.not_valid_before_utc <= now <= known.not_valid_after_utc:
            raise Forged("its certificate is not valid now; have the kit renewed, or set the clock")
        key = known.public_key()
        if not isinstance(key, RSAPublicKey):
            raise Forged("its certificate has no RSA key, as kits have")
        try:
            key.verify(signature, content, _PADDING, SHA256())
        except InvalidSignature:
            raise Forged("its signature is not by the key of its kit") from None


@dataclass(frozen=True)
class Signer:
    """A site's key and certificate."""

    key: RSAPrivateKey
    certificate: bytes  # in DER form

    def sign(self, content: bytes) -> bytes:
        """Sign by RSASSA-PSS with SHA-256 (RFC 8017)."""
        return self.key.sign(content, _PADDING, SHA256())


def read_authority(startup: Path) -> Authority:
    """The authority's certificate in the startup folder of a kit. Raises RunError where it is missing or damaged."""
    return Authority(read_certificate(startup / "rootCA.pem"))


def read_signer(startup: Path) -> Signer:
    """A site's key and certificate in the startup folder of its kit. Raises RunError where one is missing or damaged."""
    try:
        key = load_pem_private_key((startup / "client.key").read_bytes(), None)
    except (OSError, ValueError, TypeError):
        raise RunError(f"{startup / 'client.key'}: is no key; take the kit as it was handed over") from None
    if not isinstance(key, RSAPrivateKey):
        raise RunError(f"{startup / 'client.key'}: is no RSA key; take the kit as it was handed over")
    return Signer(key, read_certificate(startup / "client.crt").public_bytes(Encoding.DER))


def read_certificate(path: Path) -> x509.Certificate:
    """A certificate in PEM form. Raises RunError where it is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise RunError(f"{path}: is no certificate; take the kit as it was handed over") from None
