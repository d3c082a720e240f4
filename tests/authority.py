"""Make a certificate authority and the keys of start-up kits in the test, as FLARE's provisioning makes them."""

import datetime
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from fedmutual.sites.secure_sum import identity
from fedmutual.sites.secure_sum.identity import Authority, Signer

# Reading a key takes 40 ms, because cryptography checks the key; the tests use few keys.
identity.load_pem_private_key = cache(identity.load_pem_private_key)
DAY = datetime.timedelta(days=1)


@cache
def make_private_key(name: str) -> rsa.RSAPrivateKey:
    """Return the key of a name, one for each name and process, because a new key takes a tenth of a second."""
    return rsa.generate_private_key(65537, 2048)


def make_certificate(name: str, issuer: str = "authority", days: tuple[int, int] = (-1, 1)) -> x509.Certificate:
    """Return a certificate of a name, signed with the issuer's key. days: the validity, from and until, in days from now."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(make_private_key(name).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
        .sign(make_private_key(issuer), SHA256())
    )


def make_authority(name: str = "authority") -> Authority:
    return Authority(make_certificate(name, name))


def make_signer(name: str, certified: str | None = None, issuer: str = "authority", days=(-1, 1)) -> Signer:
    """Return a participant's key and a certificate. certified: the name in the certificate, if not the participant's."""
    return Signer(make_private_key(name), make_certificate(certified or name, issuer, days).public_bytes(Encoding.DER))


def write_startup(folder: Path, name: str) -> Path:
    """Write the start-up folder of a participant's kit and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    key = make_private_key(name).private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / "client.key").write_bytes(key)
    (folder / "client.crt").write_bytes(make_certificate(name).public_bytes(Encoding.PEM))
    (folder / "rootCA.pem").write_bytes(make_authority().certificate.public_bytes(Encoding.PEM))
    return folder
