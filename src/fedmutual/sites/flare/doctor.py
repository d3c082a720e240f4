"""The checks of `fedmutual doctor`, each with its fix: kit, connection, contract, data and state. Nothing is changed.

Commands check the connection by the same steps before they start: name, port or proxy, TLS.
"""

import base64
import http.client
import importlib.metadata
import os
import re
import shutil
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from fedmutual.errors import ConfigError, UserError
from fedmutual.rundir.file_names import ENVIRONMENT
from fedmutual.rundir.record_files import read_environment
from fedmutual.sites.consent import check_release
from fedmutual.sites.contract import Contract, read_contract
from fedmutual.sites.flare import kits
from fedmutual.sites.flare.kits import Kit, check_valid
from fedmutual.sites.flare.progress import read_clock
from fedmutual.sites.modules import make_server_rule
from fedmutual.sites.schema import MOST_AHEAD
from fedmutual.sites.secure_sum.identity import read_certificate
from fedmutual.sites.site_journal import ROUNDS_BACK
from fedmutual.sites.site_settings import SiteSettings, read_site_file
from fedmutual.user_code import plugins

OK, KNOW, WRONG = "ok", "note", "wrong"
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC reads the first one that is set; "": no proxy
PROXY_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")  # hosts without a proxy: gRPC reads the first one that is set
UNREAD_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY")  # other programs read these, but gRPC does not
_PROXY_PORT = 443  # gRPC's default
_PATIENCE = 5.0  # seconds for each step
_IDLE = 9.0  # seconds without a byte, which every connection has: participants send a ping after 10
_TOO_EARLY = 9  # X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL


class Check(NamedTuple):
    """The result of one check of a participant's kit or connection: a grade, and a sentence for the operator."""

    grade: str  # OK, KNOW (worth knowing) or WRONG
    text: str
    is_temporary: bool = False  # whether the problem can end without a change to the kit, as when the server is down


def run_checks(
    folder: Path, config: Path | None = None, contract: Path | None = None, modules: Sequence[str] = ()
) -> Iterator[Check]:
    """Yield the result of each check, as soon as the check is done.

    folder: the folder of the kit. config: the file of a site. contract: the federation's file; None: the file in the kit.
    modules: the modules that the operator of a server allows in the contract.
    """
    try:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("fedmutual", "torch"))
        yield Check(OK, f"{versions}, nvflare {kits.check_version()}")
    except ConfigError as problem:
        yield Check(WRONG, str(problem))
    try:
        kit = kits.open_kit(folder)
        yield Check(OK, f"{folder}: a complete kit, of {kit.name!r}, {kits.KINDS[kit.kind].words}")
        yield from _check_keys(kit)
        yield from _check_release(kit.version, f"the host where {folder} was made")
    except UserError as problem:
        yield Check(WRONG, str(problem))
        return
    file, site, agreed = (contract or kit.folder / kits.FEDERATION).resolve(), None, None
    try:
        site = None if config is None else read_site_file(config)
        with plugins.use_rule(site.code if site else make_server_rule(modules, [file])):
            agreed = read_contract(file)
        yield Check(OK, f"federation {agreed.name!r}: {', '.join(agreed.sites.names)}; {agreed.config.algorithm['name']}")
        yield from (Check(KNOW, sentence) for sentence in agreed.sites.describe_roles())
    except UserError as problem:
        yield Check(WRONG, str(problem))
    yield from [_check_port(kit)] if kit.kind == "server" else check_connection(kit, idle=_IDLE)
    if site is not None and agreed is not None:
        yield from _check_site(kit, site, agreed)


def _check_keys(kit: Kit) -> Iterator[Check]:
    """Yield the faults of the certificate and the key of a kit, or the end of their validity. Raises as `check_valid`."""
    check_valid(kit)
    yield Check(KNOW if kit.reminder else OK, f"its certificate is valid until {kit.expires:%Y-%m-%d}{kit.reminder}")
    key, root = kit.certificate.with_suffix(".key"), read_certificate(kit.startup / "rootCA.pem")
    try:
        read_certificate(kit.certificate).verify_directly_issued_by(root)
    except Exception:  # many types of `cryptography`
        yield Check(WRONG, f"{kit.certificate}: was not issued by the authority beside it; {kits.KIT_ADVICE}")
    days = (root.not_valid_after_utc - datetime.now(UTC)).days
    if days < min(kit.days, kits.SOON):
        advice = "make all kits again in an empty folder: fedmutual provision FEDERATION.toml --out OTHER"
        yield Check(WRONG if days < 0 else KNOW, f"the authority's certificate ends in {days} days; {advice}")
    if key.stat().st_mode & 0o077:
        yield Check(KNOW, f"{key}: other users of this host can read it, and act as {kit.name!r}: chmod 600 {key}")


def _check_release(version: str, subject: str) -> Iterator[Check]:
    """Yield a note where another version of fedmutual was used than is here, with which no participant takes part."""
    try:
        check_release(version, subject)
    except ConfigError as problem:
        yield Check(KNOW, str(problem))


def _check_port(kit: Kit) -> Check:
    """Return whether the port of the server is free, or in use by the server itself."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", kit.port))
        except OSError as problem:
            if find_obstacle(kit) is None:
                return Check(OK, f"port {kit.port}: the server of this kit is already running, and answers")
            advice = "end the program that uses the port, or choose another server.port above 1023"
            return Check(WRONG, f"port {kit.port} cannot be used ({problem.strerror}): {advice}")
    return Check(OK, f"port {kit.port} is free")


def check_owner(kit: Kit, site: SiteSettings) -> None:
    """Raise ConfigError where a site.toml belongs to another site than a kit."""
    if site.file.site != kit.name:
        raise ConfigError(
            f"{site.source}: belongs to site {site.file.site!r}, and {kit.folder} is for {kit.name!r}; name the file and "
            "the kit of one site"
        )


def _check_site(kit: Kit, site: SiteSettings, agreed: Contract) -> Iterator[Check]:
    """Yield whether the file, data and model of a site fit the contract, and whether its state can be saved."""
    from fedmutual.sites.site_runtime import SiteRuntime

    try:
        check_owner(kit, site)
        with plugins.use_rule(site.code):
            runtime = SiteRuntime(agreed.list_runs()[0], site, check_only=True)
            experiment, folder = runtime.experiment, runtime.folder
            rows = experiment.load_rows(kit.name)
            networks = experiment.build_client(kit.name).nets.values()
        if (folder / ENVIRONMENT).exists():
            yield from _check_release(read_environment(folder).fedmutual or "", f"{folder}: the last round")
    except UserError as problem:
        yield Check(WRONG, str(problem).replace(f"clients.{kit.name}.", ""))
        return
    counts = ", ".join(f"{len(examples)} {name}" for name, examples in rows.items() if len(examples))
    if (public := experiment.data.public) is not None:
        counts += f"; {sum(map(len, public.owners.values()))} in the public seed set"
    yield Check(OK, f"{site.source}: fits the contract; examples: {counts}")
    state = site.state
    existing = next(path for path in (state, *state.parents) if path.exists())
    if state.is_relative_to(kit.folder):
        yield Check(WRONG, f"{state}: is inside the kit, which may be replaced; name a state.folder outside of the kit")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Check(WRONG, f"{existing}: cannot be written into; name another state.folder, or get the permission")
        return
    size = sum(weights.numel() * weights.element_size() for network in networks for weights in network.parameters())
    # of each saved round the weights and two moments of an optimiser; with `sites.baseline` of another network, too
    wanted, free = 3 * size * (ROUNDS_BACK + 2) * (1 + runtime.trains_alone), shutil.disk_usage(existing).free
    if free < wanted:
        advice = f"and the saved rounds need up to {wanted / 1e6:,.1f} MB; make room, or name another state.folder"
        yield Check(WRONG, f"{state}: {free / 1e6:,.1f} MB are free, {advice}")
    else:
        yield Check(OK, f"{state}: can be written, with {free / 1e6:,.0f} MB free")
    if abs(ahead := read_clock(state) or 0.0) > MOST_AHEAD:
        yield Check(KNOW, f"in the last job the server's clock was {ahead:+.3g} s from this host's; set both by NTP")


def find_obstacle(kit: Kit) -> Check | None:
    """Return why the server cannot be reached; None where it can be reached. Raises RunError as `make_tls_context`."""
    *_, last = check_connection(kit)
    return last if last.grade == WRONG else None


def check_connection(kit: Kit, patience: float = _PATIENCE, idle: float = 0.0) -> Iterator[Check]:
    """Yield the result of each step, up to the first failure. patience: seconds for each step.

    idle: seconds without a byte that the connection must last. Raises RunError as `make_tls_context`.
    """
    host, port = kit.hosts[0], kit.port
    proxy = None if kit.kind == "server" else find_proxy(host, port)
    where, connection = f"{host}:{port}", http.client.HTTPConnection(host, port, timeout=patience)
    if proxy is not None:
        variable, url = proxy
        where = f"the proxy {url.hostname}:{url.port or _PROXY_PORT} of {variable}"
        connection = http.client.HTTPConnection(str(url.hostname), url.port or _PROXY_PORT, timeout=patience)
        user = unquote(url.netloc.rpartition("@")[0]).encode()
        headers = {"Proxy-Authorization": f"Basic {base64.b64encode(user).decode()}"} if user else {}
        connection.set_tunnel(host, port, headers)
        proxy_fix = f"correct {variable} or the proxy, or add {host} to no_proxy to connect without a proxy"
    try:
        if proxy is None:
            addresses = sorted({str(a[4][0]) for a in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
            yield Check(OK, f"the server's name {host!r} is {', '.join(addresses)}")
        connection.connect()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        refusal = re.match(r"Tunnel connection failed: (\d+)", str(error))
        why, fix = f"cannot be reached ({getattr(error, 'strerror', None) or error})", "check the network and the firewall"
        if isinstance(error, socket.gaierror):
            why, fix = "has no address here", "correct server.hosts or the name service, or write /etc/hosts"
            where = f"the server's name {host!r}" if proxy is None else where
        elif isinstance(error, ConnectionRefusedError):
            why, fix = "refuses connections", "the server is not running, or listens on another port"
        elif isinstance(error, TimeoutError):
            why, fix = f"does not answer in {patience:g} s", "a firewall blocks the port, or the host is down"
        elif refusal or isinstance(error, http.client.HTTPException):
            why = f"refuses with status {refusal[1]}" if refusal else "does not answer as an HTTP proxy"
        if proxy is not None:
            is_temporary = refusal is not None and refusal[1].startswith("5")  # the server may not be running yet
            yield Check(WRONG, f"{host}:{port} cannot be reached, because {where} {why}; {proxy_fix}", is_temporary)
            return
        unread = " and ".join(name for name in UNREAD_VARIABLES if os.environ.get(name))
        fix += f"; if only a proxy connects to it, set https_proxy: {unread} is not read" if unread else ""
        yield Check(WRONG, f"{where} {why}: {fix}", is_temporary=True)
        return
    yield Check(OK, f"{where} accepts connections" if proxy is None else f"{where} connects to {host}:{port}")
    check = _check_tls(kit, connection.sock, idle)
    is_fine = proxy is None or check.grade == OK
    yield check if is_fine else check._replace(text=f"through {where}: {check.text}; {proxy_fix}")


def _check_tls(kit: Kit, plain: socket.socket, idle: float) -> Check:
    """Return the result of a mutual TLS handshake, with the settings of the site's process. Closes the connection.

    idle: as for `check_connection`.
    """
    where = f"{kit.hosts[0]}:{kit.port}"
    advice = "if the server of this federation runs there, wait and try again; else end the program that answers there"
    words = "the server closes the connection"
    try:
        with plain, kits.make_tls_context(kit).wrap_socket(plain, server_hostname=kit.hosts[0]) as tls:
            version = tls.version()
            if tls.recv(1):  # after the handshake the server closes a connection with a rejected certificate
                if lasted := _find_close(tls, idle):
                    problem = f"a firewall or proxy closes connections to {where} after {lasted:.0f} s without a byte"
                    return Check(KNOW, f"{problem}, which delays rounds; set its limit to {2 * _IDLE:.0f} s or more")
                return Check(OK, f"mutual TLS with {where}: each accepts the other's certificate ({version})")
    except ssl.SSLCertVerificationError as problem:
        return Check(WRONG, _explain_distrust(kit, problem), is_temporary=problem.verify_code == _TOO_EARLY)
    except ssl.SSLError as problem:
        words = (problem.reason or str(problem)).lower().replace("_", " ")
        if "eof" in words:
            return Check(WRONG, f"{where} ends the TLS handshake ({words}): {advice}", is_temporary=True)
        if "wrong version" in words or "record layer" in words or "http request" in words:
            return Check(WRONG, f"{where} does not use TLS: another program has that port; end it, or change server.port")
    except OSError as problem:  # also TimeoutError
        return Check(WRONG, f"{where} does not answer in TLS ({problem}): {advice}", is_temporary=True)
    return Check(
        WRONG,
        f"the server rejects the certificate of {kit.name!r} ({words}): the kit belongs to another federation or to an "
        "earlier authority, or has expired by the server's clock; ask for a kit of this federation",
    )


def _find_close(tls: ssl.SSLSocket, idle: float) -> float | None:
    """Return the seconds after which another party closes a silent connection; None if it lasts for `idle` seconds."""
    began = time.monotonic()
    end = began + 3 * idle  # also of a server that always sends bytes
    with suppress(TimeoutError):
        while (left := min(began + idle, end) - time.monotonic()) > 0:
            tls.settimeout(left)
            try:
                if tls.recv(2**16):
                    began = time.monotonic()  # a byte of the server
                    continue
            except (ConnectionError, ssl.SSLError):
                pass
            return time.monotonic() - began
    return None


def _explain_distrust(kit: Kit, problem: ssl.SSLCertVerificationError) -> str:
    """Return why the certificate of the server is rejected, and the fix."""
    renewal = "fedmutual provision FEDERATION.toml --renew server"
    names = f"add {kit.hosts[0]!r} to server.hosts, then: {renewal}"
    advice = {  # X509_V_ERR_* of OpenSSL
        _TOO_EARLY: "compare this host's clock with the server's",
        10: f"if this host's clock is right: {renewal}",
        62: names,
        64: names,
    }.get(
        problem.verify_code,
        "it was not issued by this kit's authority: the server or this kit belongs to another federation; compare the kits",
    )
    return f"the certificate of {kit.hosts[0]}:{kit.port} is rejected ({problem.verify_message}): {advice}"


def find_proxy(host: str, port: int) -> tuple[str, SplitResult] | None:
    """Return the proxy through which gRPC connects to a server after `make_grpc_variables`, and the variable that names it.

    None: gRPC connects directly. A variable whose value is not a URL of the form http://HOST:PORT has no effect, as in gRPC.
    """
    variable = _find_first(PROXY_VARIABLES)
    if variable is None or _bypasses_proxy(host, port):
        return None
    try:
        url = urlsplit(os.environ[variable])
        is_usable = url.scheme == "http" and bool(url.hostname) and url.port != 0  # reading a wrong port raises ValueError
    except ValueError:
        return None
    return (variable, url) if is_usable else None


def make_grpc_variables(host: str, port: int) -> dict[str, str]:
    """Return the environment variables that make every version of gRPC match names as `_bypasses_proxy` does."""
    return {"no_grpc_proxy": host if _bypasses_proxy(host, port) else ""}


def _bypasses_proxy(host: str, port: int) -> bool:
    """Return whether the operator wants no proxy for this server: `no_proxy` has its name, domain, address or network."""
    entries = os.environ.get(_find_first(PROXY_EXCEPTIONS) or "", "")
    if urllib.request.proxy_bypass_environment(f"{host}:{port}", {"no": entries}):  # type: ignore[attr-defined]
        return True
    for entry in entries.split(","):
        with suppress(ValueError):  # a name
            if ip_address(host) in ip_network(entry.strip().removesuffix(f":{port}"), strict=False):
                return True
    return False


def _find_first(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in os.environ), None)
