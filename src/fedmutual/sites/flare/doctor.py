"""The checks of `fedmutual doctor`: kit, connection, contract, data and state folder. Nothing is changed."""

import importlib.metadata
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fedmutual.errors import ConfigError, UserError
from fedmutual.sites import contract as contracts
from fedmutual.sites.contract import Contract
from fedmutual.sites.flare.connectivity import KNOW, OK, WRONG, Check, check_connection
from fedmutual.sites.flare.kits import FEDERATION, KIT_ADVICE, KIT_KINDS, SOON, Kit, check_valid, open_kit
from fedmutual.sites.flare.nvflare_import import check_version
from fedmutual.sites.modules import make_server_rule
from fedmutual.sites.secure_sum.identity import read_certificate
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from fedmutual.user_code import plugins

_STATE_FACTOR = 16  # size of a site's state relative to its networks: four rounds, with optimisers and answers


def run_checks(
    folder: Path, config: Path | None = None, contract: Path | None = None, modules: Sequence[str] = ()
) -> Iterator[Check]:
    """Yield the result of each check, as soon as the check is done.

    folder: the folder of the kit. config: the file of a site. contract: the federation's file; None: the file in the kit.
    modules: the modules that the operator of a server allows in the contract.
    """
    yield from _check_versions()
    try:
        kit = open_kit(folder)
        yield Check(OK, f"{folder}: a complete kit, of {kit.name!r}, {KIT_KINDS[kit.kind]}")
        yield from _check_keys(kit)
    except UserError as problem:
        yield Check(WRONG, str(problem))
        return
    agreed: Contract | None = None
    file = (contract or kit.folder / FEDERATION).resolve()
    try:
        code = read_site_file(config).code if config is not None else make_server_rule(modules, [file])
        with plugins.use_rule(code):
            agreed = contracts.read_contract(file)
        yield Check(OK, f"federation {agreed.name!r}: {', '.join(agreed.sites.names)}; {agreed.config.algorithm['name']}")
    except UserError as problem:
        yield Check(WRONG, str(problem))
    yield from _check_port(kit) if kit.kind == "server" else check_connection(kit)
    if config is not None and agreed is not None:
        yield from _check_site(kit, config, agreed)


def _check_versions() -> Iterator[Check]:
    """Yield the versions of fedmutual, torch and FLARE."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("fedmutual", "torch"))
    try:
        yield Check(OK, f"{versions}, nvflare {check_version()}")
    except ConfigError as problem:
        yield Check(WRONG, str(problem))


def _check_keys(kit: Kit) -> Iterator[Check]:
    """Yield the faults of the certificate and the key of a kit, or the end of their validity.

    Raises:
        RunError: as `check_valid`.
    """
    check_valid(kit)
    if kit.reminder:
        text = f"the certificate of {kit.name!r} expires in {kit.days} days, on {kit.expires:%Y-%m-%d}; {kit.reminder}"
        yield Check(KNOW, text)
    else:
        yield Check(OK, f"its certificate is valid until {kit.expires:%Y-%m-%d}, {kit.days} days")
    key, root = kit.certificate.with_suffix(".key"), read_certificate(kit.startup / "rootCA.pem")
    try:
        read_certificate(kit.certificate).verify_directly_issued_by(root)
    except Exception:  # types of `cryptography`, which this module does not import
        yield Check(WRONG, f"{kit.certificate}: was not issued by the authority beside it; {KIT_ADVICE}")
    days = (root.not_valid_after_utc - datetime.now(UTC)).days
    if days < min(kit.days, SOON):
        advice = "make all kits again in an empty folder: fedmutual provision FEDERATION.toml --out OTHER"
        yield Check(WRONG if days < 0 else KNOW, f"the authority's certificate ends in {days} days; {advice}")
    if key.stat().st_mode & 0o077:
        yield Check(KNOW, f"{key}: other users of this host can read it, and act as {kit.name!r}: chmod 600 {key}")


def _check_port(kit: Kit) -> Iterator[Check]:
    """Yield whether the port of the server is free, or in use by the server itself."""
    for host in kit.hosts:
        try:
            socket.getaddrinfo(host, kit.port)
        except OSError:
            yield Check(KNOW, f"{host!r} has no address here; sites must be able to find it")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", kit.port))
            yield Check(OK, f"port {kit.port} is free")
        except PermissionError:
            yield Check(WRONG, f"port {kit.port} is reserved for root; choose one above 1023 as server.port")
        except OSError:
            answer = list(check_connection(kit))[-1]
            if answer.grade == OK:
                yield Check(OK, f"port {kit.port}: the server of this kit is already running, and answers")
            else:
                yield Check(WRONG, f"port {kit.port} is in use: end the program that uses it, or choose another server.port")


def _check_site(kit: Kit, config: Path, agreed: Contract) -> Iterator[Check]:
    """Yield whether the file, data and model of a site fit the contract, and whether its state can be saved."""
    try:
        site_config = read_site_file(config)
        if site_config.file.site != kit.name:
            raise ConfigError(
                f"{config}: belongs to site {site_config.file.site!r}, and {kit.folder} is the kit of {kit.name!r}"
            )
        with plugins.use_rule(site_config.code):
            experiment = SiteRuntime(agreed, site_config, check_only=True).experiment
            nets, rows = experiment.build_networks(kit.name), experiment.load_rows(kit.name)
    except UserError as problem:
        yield Check(WRONG, str(problem).replace(f"clients.{kit.name}.", ""))
        return
    counts = ", ".join(f"{len(examples)} {name}" for name, examples in rows.items() if len(examples))
    yield Check(OK, f"{config}: fits the contract; examples: {counts}")
    if experiment.data.public is not None:
        yield Check(OK, f"public seed set: {sum(map(len, experiment.data.public.owners.values()))} examples, as agreed")
    size = sum(tensor.nbytes for net in nets.values() for tensor in net.state_dict().values())
    yield from _check_state(kit, site_config.state, _STATE_FACTOR * size)


def _check_state(kit: Kit, state: Path, need: int) -> Iterator[Check]:
    """Yield whether the state can be saved. need: in bytes."""
    existing = next(path for path in (state, *state.parents) if path.exists())
    if state.is_relative_to(kit.folder):
        yield Check(WRONG, f"{state}: is inside the kit, which may be replaced; name a state.folder outside of the kit")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Check(WRONG, f"{existing}: cannot be written into; name another state.folder, or get the permission")
        return
    free = shutil.disk_usage(existing).free
    grade, advice = (OK, "") if free > need else (WRONG, "; make room, or name another state.folder")
    yield Check(grade, f"{state}: {free / 1e6:,.0f} MB free, up to {need / 1e6:,.1f} MB needed{advice}")
