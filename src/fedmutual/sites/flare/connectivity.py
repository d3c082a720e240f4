"""Checks of the connection to the server, one step after the other: name, port or proxy, TLS. An error names the fix."""

import http.client
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedmutual.sites.flare.kits import Kit, make_tls_context
from fedmutual.sites.flare.nvflare_import import import_nvflare
from fedmutual.sites.flare.proxy import Proxy, find_proxy, list_unread_variables

OK, KNOW, WRONG = "ok", "note", "wrong"
_PATIENCE = 5.0  # seconds for each step
_EXPIRED, _TOO_EARLY, _UNKNOWN_ISSUER, _NAMES = 10, 9, (18, 19, 20, 21, 7), (62, 64)  # X509_V_ERR_* of OpenSSL


class Check(NamedTuple):
    """The result of one check of a participant's kit or connection: a grade, and a sentence for the operator."""

    grade: str  # OK, KNOW (worth knowing) or WRONG
    text: str
    is_temporary: bool = False  # whether the problem can end without a change to the kit, as when the server is down


def check_connection(kit: Kit, patience: float = _PATIENCE) -> Iterator[Check]:
    """Yield the result of each step, up to the first failure. patience: seconds for each step.

    Raises:
        RunError: as `make_tls_context`.
    """
    host, port = kit.hosts[0], kit.port
    if (proxy := _find_proxy(kit)) is not None:
        yield from _check_through_proxy(kit, proxy, patience)
        return
    try:
        addresses = sorted({str(a[4][0]) for a in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError:
        yield Check(
            WRONG,
            f"the server's name {host!r} has no address here: correct server.hosts or the name service, or add an entry to "
            f"/etc/hosts{_describe_unread_variables()}",
            is_temporary=True,
        )
        return
    yield Check(OK, f"the server's name {host!r} is {', '.join(addresses)}")
    try:
        plain = socket.create_connection((host, port), patience)
    except ConnectionRefusedError:
        text = f"{host}:{port} refuses connections: the server is not running, or listens on another port"
        yield Check(WRONG, f"{text}{_describe_unread_variables()}", is_temporary=True)
        return
    except TimeoutError:
        yield Check(
            WRONG,
            f"{host}:{port} does not answer in {patience:g} s: a firewall blocks the port, or the host is down; open TCP "
            f"port {port} to the server{_describe_unread_variables()}",
            is_temporary=True,
        )
        return
    except OSError as problem:
        why = f"{problem.strerror or problem}{_describe_unread_variables()}"
        yield Check(WRONG, f"{host}:{port} cannot be reached: {why}", is_temporary=True)
        return
    yield Check(OK, f"{host}:{port} accepts connections")
    with plain:
        yield _check_tls(kit, plain, patience)


def _find_proxy(kit: Kit) -> Proxy | None:
    """Return the proxy to the server; None for the server's own kit."""
    return None if kit.kind == "server" else find_proxy(kit.hosts[0], kit.port)


def _check_through_proxy(kit: Kit, proxy: Proxy, patience: float) -> Iterator[Check]:
    """Yield whether the proxy connects to the server, and the result of the TLS handshake through the proxy."""
    host, port, where = kit.hosts[0], kit.port, f"the proxy {proxy.host}:{proxy.port} of {proxy.variable}"
    advice = f"correct {proxy.variable} or the proxy, or add {host} to no_proxy to connect without a proxy"
    is_temporary = False
    try:
        plain = proxy.connect(host, port, patience)
    except TimeoutError:
        problem = f"does not answer in {patience:g} s"
    except socket.gaierror:
        problem = "has no address here"
    except http.client.HTTPException:
        problem = "does not answer as an HTTP proxy"
    except OSError as error:
        refusal = re.match(r"Tunnel connection failed: (\d+)", str(error))
        problem = f"refuses with status {refusal[1]}" if refusal else f"cannot be reached ({error.strerror or error})"
        is_temporary = refusal is not None and refusal[1].startswith("5")  # 502 to 504: the server may not be running yet
    else:
        yield Check(OK, f"{where} connects to {host}:{port}")
        with plain:
            check = _check_tls(kit, plain, patience)
        yield check if check.grade == OK else check._replace(text=f"through {where}: {check.text}; {advice}")
        return
    yield Check(WRONG, f"{host}:{port} cannot be reached, because {where} {problem}; {advice}", is_temporary)


def _describe_unread_variables() -> str:
    """Return advice if the environment names a proxy that is not used; else ""."""
    names = list_unread_variables()
    verb = "is" if len(names) == 1 else "are"
    return f"; if only a proxy connects to it, set https_proxy: {' and '.join(names)} {verb} not read" if names else ""


def find_obstacle(kit: Kit) -> tuple[str, bool] | None:
    """Return why the server cannot be reached, and whether waiting can help; None where the server can be reached.

    Raises:
        RunError: as `make_tls_context`.
    """
    *_, last = check_connection(kit)
    return (last.text, last.is_temporary) if last.grade == WRONG else None


def _check_tls(kit: Kit, plain: socket.socket, patience: float) -> Check:
    """Return the result of a mutual TLS handshake, with the settings of the site's process."""
    host, port = kit.hosts[0], kit.port
    context = make_tls_context(kit)
    try:
        with context.wrap_socket(plain, server_hostname=host) as tls:
            version = tls.version()
            first_byte = tls.recv(1)  # the server rejects a certificate after the handshake, by hanging up
    except ssl.SSLCertVerificationError as problem:
        return Check(WRONG, _explain_distrust(kit, problem, patience), is_temporary=problem.verify_code == _TOO_EARLY)
    except TimeoutError:
        why = (
            f"{host}:{port} accepts connections and sends nothing: the server is busy, or another program or a proxy answers"
        )
        return Check(WRONG, why, is_temporary=True)
    except ssl.SSLEOFError:
        why = (
            f"{host}:{port} closes the connection in the TLS handshake: another program or a proxy without a server answers"
        )
        return Check(WRONG, why, is_temporary=True)
    except ssl.SSLError as problem:
        return Check(WRONG, _explain_refusal(kit, problem.reason or str(problem)))
    except OSError as problem:
        why = f"{host}:{port} loses the connection in the TLS handshake ({problem.strerror or problem})"
        return Check(WRONG, why, is_temporary=True)
    if not first_byte:
        return Check(
            WRONG,
            f"{host}:{port} closes the connection after the TLS handshake: it rejects the certificate of "
            f"{kit.name!r}, which belongs to another federation or authority, or has expired by the server's clock",
        )
    return Check(OK, f"mutual TLS with {host}:{port}: each accepts the other's certificate ({version})")


def _explain_refusal(kit: Kit, reason: str) -> str:
    """Return the likely cause of a TLS error that the server sent, and the fix."""
    words = reason.lower().replace("_", " ")
    if "wrong version" in words or "record layer" in words or "http request" in words:
        return f"the program at {kit.hosts[0]}:{kit.port} does not use TLS: another program has that port ({words})"
    why = f"the server rejects the certificate of {kit.name!r} ({words})"
    if "expired" in words:
        return f"{why}: by the server's clock it has expired; compare both clocks, or have the certificate renewed"
    return f"{why}: the kit belongs to another federation or to an earlier authority; ask for a kit of this federation"


def _explain_distrust(kit: Kit, problem: ssl.SSLCertVerificationError, patience: float) -> str:
    """Return why the certificate of the server is rejected, and the fix."""
    host, port, certificate = kit.hosts[0], kit.port, _read_server_certificate(kit, patience)
    if problem.verify_code in _NAMES:
        return (
            f"the server's certificate is for {', '.join(_list_hosts(certificate)) or 'no host'}, and this kit calls it "
            f"{host!r}: add {host!r} to server.hosts, then: fedmutual provision FEDERATION.toml --renew server"
        )
    if problem.verify_code == _EXPIRED:
        until = f" on {certificate.not_valid_after_utc:%Y-%m-%d}" if certificate else ""
        return (
            f"the server's certificate expired{until}, by this host's clock; if the clock is right: fedmutual provision "
            "FEDERATION.toml --renew server"
        )
    if problem.verify_code == _TOO_EARLY:
        return "the server's certificate is not valid yet, by this host's clock; set the clock"
    if problem.verify_code in _UNKNOWN_ISSUER:
        return (
            f"the certificate of {host}:{port} was not issued by this kit's authority: the server or this kit belongs to "
            "another federation; compare the kits"
        )
    return f"the server's certificate is rejected: {problem.verify_message}"


def _read_server_certificate(kit: Kit, patience: float) -> Any:
    """Return the certificate that the server sends, without verifying it; None if there is no connection."""
    context = make_tls_context(kit)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            _open_connection(kit, patience) as plain,
            context.wrap_socket(plain, server_hostname=kit.hosts[0]) as tls,
        ):
            return import_nvflare("cryptography.x509").load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _open_connection(kit: Kit, patience: float) -> socket.socket:
    """Return a connection to the server. Raises OSError or HTTPException."""
    host, port, proxy = kit.hosts[0], kit.port, _find_proxy(kit)
    return socket.create_connection((host, port), patience) if proxy is None else proxy.connect(host, port, patience)


def _list_hosts(certificate: Any) -> list[str]:
    """Return the host names in a certificate."""
    x509 = import_nvflare("cryptography.x509")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (AttributeError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names]
