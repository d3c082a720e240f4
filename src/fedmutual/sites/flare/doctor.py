"""What is wrong between a participant and the server: looked at a step at a time, and nothing is changed."""

import importlib.metadata
import os
import shutil
import socket
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fedmutual import plugins
from fedmutual.errors import ConfigError, UserError
from fedmutual.sites import contract as contracts
from fedmutual.sites.contract import Contract
from fedmutual.sites.flare.connectivity import KNOW, OK, WRONG, Finding, check_connection
from fedmutual.sites.flare.kits import FEDERATION, KINDS, SOON, Kit, check_valid, open_kit
from fedmutual.sites.flare.nvflare_import import check_version
from fedmutual.sites.modules import modules_of_server
from fedmutual.sites.secure_sum.identity import read_certificate
from fedmutual.sites.site_runtime import build_site, read_site_file

_TIMES = 16  # a site's state takes so many times its networks: four rounds of them, optimisers too, and what was answered


def run_checks(
    folder: Path, config: Path | None = None, contract: Path | None = None, modules: Sequence[str] = ()
) -> Iterator[Finding]:
    """All that can be looked at from here, as it is found.

    folder: of the kit. config: a site's own file. contract: the federation's file; else the one in the kit. modules: of the
    server's operator, which the contract may name.
    """
    yield from _versions()
    try:
        kit = open_kit(folder)
        yield Finding(OK, f"{folder}: a whole kit, of {kit.name!r}, {KINDS[kit.kind]}")
        yield from _keys(kit)
    except UserError as problem:
        yield Finding(WRONG, str(problem))
        return
    agreed: Contract | None = None
    file = (contract or kit.folder / FEDERATION).resolve()
    try:
        code = read_site_file(config).code if config is not None else modules_of_server(modules, [file])
        with plugins.under(code):
            agreed = contracts.read_contract(file)
        yield Finding(OK, f"federation {agreed.name!r}: {', '.join(agreed.sites.names)}; {agreed.config.algorithm['name']}")
    except UserError as problem:
        yield Finding(WRONG, str(problem))
    yield from _listening(kit) if kit.kind == "server" else check_connection(kit)
    if config is not None and agreed is not None:
        yield from _site(kit, config, agreed)


def _versions() -> Iterator[Finding]:
    """fedmutual, torch and FLARE."""
    ours = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("fedmutual", "torch"))
    try:
        yield Finding(OK, f"{ours}, nvflare {check_version()}")
    except ConfigError as problem:
        yield Finding(WRONG, str(problem))


def _keys(kit: Kit) -> Iterator[Finding]:
    """The kit's certificate and key."""
    check_valid(kit)
    if kit.reminder:
        said = f"the certificate of {kit.name!r} expires in {kit.days} days, on {kit.expires:%Y-%m-%d}; {kit.reminder}"
        yield Finding(KNOW, said)
    else:
        yield Finding(OK, f"its certificate is valid until {kit.expires:%Y-%m-%d}, {kit.days} days")
    key, root = kit.certificate.with_suffix(".key"), read_certificate(kit.startup / "rootCA.pem")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(kit.certificate, key)
        read_certificate(kit.certificate).verify_directly_issued_by(root)
    except ssl.SSLError:
        yield Finding(WRONG, f"{key}: is not the key of the certificate beside it; take the kit as it was handed over")
    except Exception:  # of cryptography's types, which are imported nowhere else here
        yield Finding(WRONG, f"{kit.certificate}: is not by the authority beside it; take the kit as it was handed over")
    left = (root.not_valid_after_utc - datetime.now(UTC)).days
    if left < min(kit.days, SOON):
        new = "make all kits anew in an empty folder: fedmutual provision FEDERATION.toml --out OTHER"
        yield Finding(WRONG if left < 0 else KNOW, f"the authority's certificate ends in {left} days; {new}")
    if key.stat().st_mode & 0o077:
        yield Finding(KNOW, f"{key}: others on this host can read it, and pass as {kit.name!r}: chmod 600 {key}")


def _listening(kit: Kit) -> Iterator[Finding]:
    """Whether the server's port is free, or its server there."""
    for host in kit.hosts:
        try:
            socket.getaddrinfo(host, kit.port)
        except OSError:
            yield Finding(KNOW, f"{host!r} has no address here; sites must be able to find it")
    with socket.socket() as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            there.bind(("", kit.port))
            yield Finding(OK, f"port {kit.port} is free")
        except PermissionError:
            yield Finding(WRONG, f"port {kit.port} is for root alone; choose one above 1023 as server.port")
        except OSError:
            answer = list(check_connection(kit))[-1]
            if answer.grade == OK:
                yield Finding(OK, f"port {kit.port}: this kit's server runs already, and answers")
            else:
                yield Finding(
                    WRONG, f"port {kit.port} is in use: end the program that has it, or choose another server.port"
                )


def _site(kit: Kit, config: Path, agreed: Contract) -> Iterator[Finding]:
    """A site's own file, data and model against the contract, and where its state goes."""
    try:
        mine = read_site_file(config)
        if mine.file.site != kit.name:
            raise ConfigError(f"{config}: is of site {mine.file.site!r}, and {kit.folder} is the kit of {kit.name!r}")
        with plugins.under(mine.code):
            made = build_site(agreed, mine)
            nets, rows = made.networks(kit.name), made.rows(kit.name)
    except UserError as problem:
        yield Finding(WRONG, str(problem).replace(f"clients.{kit.name}.", ""))
        return
    held = ", ".join(f"{len(examples)} {name}" for name, examples in rows.items() if len(examples))
    yield Finding(OK, f"{config}: goes together with the contract; examples: {held}")
    if made.data.public is not None:
        yield Finding(OK, f"public seed set: {sum(map(len, made.data.public.owners.values()))} examples, as agreed")
    size = sum(tensor.nbytes for net in nets.values() for tensor in net.state_dict().values())
    yield from _state(kit, mine.state, _TIMES * size)


def _state(kit: Kit, state: Path, need: int) -> Iterator[Finding]:
    """Whether the state can be kept. need: bytes."""
    there = next(path for path in (state, *state.parents) if path.exists())
    if state.is_relative_to(kit.folder):
        yield Finding(WRONG, f"{state}: is in the kit, which may be replaced; name a state.folder outside of it")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding(WRONG, f"{there}: cannot be written into; name another state.folder, or have the right given")
        return
    free = shutil.disk_usage(there).free
    grade, odd = (OK, "") if free > need else (WRONG, "; make room, or name another state.folder")
    yield Finding(grade, f"{state}: {free / 1e6:,.0f} MB free, up to {need / 1e6:,.1f} MB wanted{odd}")
