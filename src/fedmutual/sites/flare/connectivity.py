"""The way from a kit to the server, a step at a time: name, port, TLS. A step that fails says why, and the mend."""

import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedmutual.sites.flare.kits import Kit
from fedmutual.sites.flare.nvflare_import import import_nvflare

OK, KNOW, WRONG = "ok", "note", "wrong"
_PATIENCE = 5.0  # seconds for each step
_EXPIRED, _TOO_EARLY, _STRANGERS, _NAMES = 10, 9, (18, 19, 20, 21, 7), (62, 64)  # X509_V_ERR_* of OpenSSL


class Finding(NamedTuple):
    """One thing that was looked at."""

    grade: str  # OK, KNOW: worth knowing, or WRONG
    said: str
    passes: bool = False  # what is wrong may pass by itself: a server that is down or busy, a clock before it is set


def check_connection(kit: Kit, patience: float = _PATIENCE) -> Iterator[Finding]:
    """The steps up to the first that fails. patience: seconds for each."""
    host, port = kit.hosts[0], kit.port
    try:
        found = sorted({str(a[4][0]) for a in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError:
        yield Finding(
            WRONG,
            f"the server's name {host!r} has no address here: a wrong name in server.hosts, or no name service; an entry in "
            "/etc/hosts would do",
            passes=True,
        )
        return
    yield Finding(OK, f"the server's name {host!r} is {', '.join(found)}")
    try:
        plain = socket.create_connection((host, port), patience)
    except ConnectionRefusedError:
        said = f"{host}:{port} refuses connections: the server is not running, or listens on another port"
        yield Finding(WRONG, said, passes=True)
        return
    except TimeoutError:
        yield Finding(
            WRONG,
            f"{host}:{port} does not answer in {patience:g} s: a firewall between, or the host is down; open TCP port "
            f"{port} to the server",
            passes=True,
        )
        return
    except OSError as problem:
        yield Finding(WRONG, f"{host}:{port} cannot be reached: {problem.strerror or problem}", passes=True)
        return
    yield Finding(OK, f"{host}:{port} takes connections")
    with plain:
        yield _handshake(kit, plain, patience)


def find_obstacle(kit: Kit) -> tuple[str, bool] | None:
    """Why the server cannot be reached now, in one sentence, and whether waiting may mend it: trust it does not; or None."""
    *_, last = check_connection(kit)
    return (last.said, last.passes) if last.grade == WRONG else None


def _handshake(kit: Kit, plain: socket.socket, patience: float) -> Finding:
    """Mutual TLS, as the site's process does it."""
    host, port = kit.hosts[0], kit.port
    context = _context(kit)
    try:
        with context.wrap_socket(plain, server_hostname=host) as tls:
            version, said = (
                tls.version(),
                tls.recv(1),
            )  # what the server thinks of our certificate comes with the first bytes
    except ssl.SSLCertVerificationError as problem:
        return Finding(WRONG, _distrust(kit, problem, patience), passes=problem.verify_code == _TOO_EARLY)
    except TimeoutError:
        why = f"{host}:{port} takes connections and says nothing: a busy server, another program, or a proxy between"
        return Finding(WRONG, why, passes=True)
    except ssl.SSLEOFError:
        why = f"{host}:{port} hangs up in the TLS handshake: another program, or a proxy before a server that is down"
        return Finding(WRONG, why, passes=True)
    except ssl.SSLError as problem:
        return Finding(WRONG, _refusal(kit, problem.reason or str(problem)))
    except OSError as problem:
        why = f"{host}:{port} breaks off in the TLS handshake ({problem.strerror or problem})"
        return Finding(WRONG, why, passes=True)
    if not said:
        return Finding(
            WRONG,
            f"{host}:{port} hangs up after the TLS handshake: it does not take the certificate of {kit.name!r}, "
            "which is of another federation or authority, or expired by the server's clock",
        )
    return Finding(OK, f"mutual TLS with {host}:{port}: each takes the other's certificate ({version})")


def _refusal(kit: Kit, reason: str) -> str:
    """What the server's refusal means."""
    words = reason.lower().replace("_", " ")
    if "wrong version" in words or "record layer" in words or "http request" in words:
        return f"what answers at {kit.hosts[0]}:{kit.port} speaks no TLS: another program has that port ({words})"
    why = f"the server does not take the certificate of {kit.name!r} ({words})"
    if "expired" in words:
        return f"{why}: by the server's clock it has expired; look at both clocks, or have it renewed"
    return f"{why}: the kit is of another federation or of an earlier authority; ask for a kit of this one"


def _distrust(kit: Kit, problem: ssl.SSLCertVerificationError, patience: float) -> str:
    """Why the server's certificate is not taken."""
    host, port, shown = kit.hosts[0], kit.port, _shown(kit, patience)
    if problem.verify_code in _NAMES:
        return (
            f"the server's certificate is for {', '.join(_names(shown)) or 'no host'}, and this kit calls it {host!r}: add "
            f"{host!r} to server.hosts, then: fedmutual provision FEDERATION.toml --renew server"
        )
    if problem.verify_code == _EXPIRED:
        until = f" on {shown.not_valid_after_utc:%Y-%m-%d}" if shown else ""
        return (
            f"the server's certificate expired{until}, by this host's clock; if the clock is right: fedmutual provision "
            "FEDERATION.toml --renew server"
        )
    if problem.verify_code == _TOO_EARLY:
        return "the server's certificate is not valid yet, by this host's clock; set the clock"
    if problem.verify_code in _STRANGERS:
        return (
            f"the certificate of {host}:{port} is not by this kit's authority: another federation's server, or this kit is "
            "another federation's; compare the kits"
        )
    return f"the server's certificate is not taken: {problem.verify_message}"


def _shown(kit: Kit, patience: float) -> Any:
    """The certificate that the server shows, looked at without trust; None where it cannot be had."""
    context = _context(kit)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((kit.hosts[0], kit.port), patience) as plain,
            context.wrap_socket(plain, server_hostname=kit.hosts[0]) as tls,
        ):
            return import_nvflare("cryptography.x509").load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None


def _names(certificate: Any) -> list[str]:
    """The hosts that a certificate is for."""
    x509 = import_nvflare("cryptography.x509")
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (AttributeError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in found]


def _context(kit: Kit) -> ssl.SSLContext:
    """A client's, with this kit's keys and no other authority than its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kit.startup / "rootCA.pem")
    context.load_cert_chain(kit.certificate, kit.certificate.with_suffix(".key"))
    context.set_alpn_protocols(["h2"])
    return context
