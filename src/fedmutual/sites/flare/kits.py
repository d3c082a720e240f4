"""Kits: the keys, certificates and settings of each participant. FLARE's provisioning makes the keys and certificates.

OUT/SERVER, OUT/SITE and OUT/LEAD are the kits; each kit is given only to its owner. OUT/authority holds the root key, which
makes further kits: an owner of the root key can act as any participant, so the root key is kept off line.
"""

import contextlib
import io
import json
import os
import shutil
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedmutual.errors import ConfigError, RunError
from fedmutual.files import read_json, read_json_object, write_bytes, write_json
from fedmutual.rundir.record_files import check_record
from fedmutual.sites.contract import Contract, read_contract
from fedmutual.sites.flare.nvflare_import import import_nvflare
from fedmutual.sites.secure_sum.identity import read_certificate
from fedmutual.sites.state_files import StateRecord

AUTHORITY, FEDERATION, KIT = "authority", "federation.toml", "kit.json"
KIT_KINDS = {"server": "the server", "site": "a site", "lead": "a lead, who may submit"}
_STARTUP_FILES = {  # without FLARE's start scripts, which would start FLARE without access control
    "server": ("fed_server.json", "server.crt", "server.key", "rootCA.pem"),
    "site": ("fed_client.json", "client.crt", "client.key", "rootCA.pem"),
    "lead": ("fed_admin.json", "client.crt", "client.key", "rootCA.pem"),
}

KIT_ADVICE = "use the kit as you received it"
"""The advice of errors about a damaged kit."""

SOON = 30  # days before a certificate expires


class _KitRecord(StateRecord):
    """The keys of KIT that are read."""

    name: str
    kind: Literal["server", "site", "lead"]
    hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    port: int = Field(ge=1, le=65535)


@dataclass(frozen=True)
class Kit:
    """The kit of one participant: the folder with keys, certificate and address of the server, which `provision` writes.

    `name` is the participant's name in the certificate, which is valid until `expires`, and `port` is the server's.
    """

    folder: Path
    name: str
    kind: str  # a key of KIT_KINDS
    expires: datetime
    hosts: tuple[str, ...]  # host names of the server
    port: int

    @property
    def startup(self) -> Path:
        """The folder that FLARE reads."""
        return self.folder / "startup"

    @property
    def days(self) -> int:
        """The number of days until the certificate expires."""
        return (self.expires - datetime.now(UTC)).days

    @property
    def reminder(self) -> str | None:
        """Advice to renew the certificate, if the certificate expires within SOON days; else None."""
        return f"have it renewed: fedmutual provision FEDERATION.toml --renew {self.name}" if self.days < SOON else None

    @property
    def certificate(self) -> Path:
        """The path of the certificate."""
        return self.startup / ("server.crt" if self.kind == "server" else "client.crt")


def provision(file: Path, out: Path, renew: tuple[str, ...] = ()) -> list[Kit]:
    """Make the missing kits of a federation, and return the kits of all participants.

    file: FEDERATION.toml. renew: participants whose certificates are renewed.

    Raises:
        ConfigError: the file is wrong, or FLARE is not installed.
        RunError: the folder cannot be written, holds the kits of another federation, or holds a damaged kit or authority.
    """
    contract = read_contract(file)
    if contract.server.hosts[0] in contract.sites.names:  # certificates identify participants by these names
        raise ConfigError(
            f"{file}: site {contract.server.hosts[0]!r} has the name of the server's host (server.hosts); rename the site"
        )
    names = {
        "server": "server",
        **dict.fromkeys(contract.sites.names, "site"),
        **dict.fromkeys(contract.sites.leads, "lead"),
    }
    unknown = [name for name in renew if name not in names]
    if unknown:
        raise ConfigError(f"--renew {unknown[0]}: there is no such participant; there are {', '.join(names)}")
    _check_out(out, contract.name)
    with tempfile.TemporaryDirectory() as work:
        flare_kits = _run_provisioning(contract, Path(work), out / AUTHORITY, renew)
        for name, kind in names.items():
            source = flare_kits / (contract.server.hosts[0] if kind == "server" else name)
            if name in renew or not (out / name).exists():
                _write_kit(source, out / name, kind, contract, file)
    return [open_kit(out / name) for name in names]


def open_kit(folder: Path) -> Kit:
    """Return the kit in a folder.

    Raises:
        RunError: the folder is not a kit, or a file is missing or damaged.
    """
    if not (folder / KIT).is_file():
        raise RunError(f"{folder}: is not a kit, because it has no {KIT}; name a folder that `fedmutual provision` made")
    about = check_record(folder / KIT, _KitRecord, read_json(folder / KIT, KIT_ADVICE), KIT_ADVICE)
    missing = [file for file in _STARTUP_FILES[about.kind] if not (folder / "startup" / file).is_file()]
    if missing:
        raise RunError(f"{folder}: the kit lacks startup/{missing[0]}; {KIT_ADVICE}")
    certificate = "server.crt" if about.kind == "server" else "client.crt"
    expires = read_certificate(folder / "startup" / certificate).not_valid_after_utc
    return Kit(folder.resolve(), about.name, about.kind, expires, about.hosts, about.port)


def check_valid(kit: Kit) -> None:
    """Check that the key and the certificates of a kit can be used now.

    Raises:
        RunError: the certificate has expired or is not yet valid by this host's clock, or as `make_tls_context`.
    """
    certificate, now = read_certificate(kit.certificate), datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise RunError(
            f"{kit.folder}: the certificate of {kit.name!r} expired on {last:%Y-%m-%d %H:%M} UTC; "
            f"the owner of the authority folder makes a new one: fedmutual provision FEDERATION.toml --renew {kit.name}"
        )
    if now < first:
        raise RunError(
            f"{kit.folder}: the certificate of {kit.name!r} is valid from {first:%Y-%m-%d %H:%M} UTC, "
            f"and this host's clock says {now:%Y-%m-%d %H:%M}; set the clock"
        )
    make_tls_context(kit)


def make_tls_context(kit: Kit) -> ssl.SSLContext:
    """Return a client's TLS context with the keys of this kit, which trusts only the authority of this kit.

    Raises:
        RunError: the key does not belong to the certificate, or the key or the authority's certificate cannot be read.
    """
    root, key = kit.startup / "rootCA.pem", kit.certificate.with_suffix(".key")
    read_certificate(root)  # whose error names the file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(root)  # reads all certificates in the file, `read_certificate` only the first
    except OSError:
        raise RunError(f"{root}: cannot be read, or holds a damaged certificate; {KIT_ADVICE}") from None
    try:
        context.load_cert_chain(kit.certificate, key)
    except OSError:
        raise RunError(f"{key}: cannot be read, or is not the key of the certificate beside it; {KIT_ADVICE}") from None
    context.set_alpn_protocols(["h2"])
    return context


_RESTORE_AUTHORITY = "restore the authority folder from a backup, or make all kits again in another folder with --out"


def _check_out(out: Path, name: str) -> None:
    authority = out / AUTHORITY / "federation.json"
    if authority.is_file():
        other = read_json(authority, _RESTORE_AUTHORITY).get("name")
        if other != name:
            raise RunError(
                f"{out}: holds the kits of federation {other!r}, not of {name!r}; choose another folder with --out"
            )
    elif out.exists() and any(out.iterdir()):
        raise RunError(f"{out}: is not empty and holds no kits; choose an empty folder with --out")


def _run_provisioning(contract: Contract, work: Path, authority: Path, renew: tuple[str, ...]) -> Path:
    """Run FLARE's provisioning in the folder `work`, and return the folder of its kits. authority: of the root key."""
    provision, provisioner = import_nvflare("nvflare.lighter.provision"), import_nvflare("nvflare.lighter.provisioner")
    state = work / contract.name / "state"
    state.mkdir(parents=True)
    if (authority / "cert.json").is_file():
        certificates = read_json_object(authority / "cert.json", _RESTORE_AUTHORITY)
        renewed = [contract.server.hosts[0] if name == "server" else name for name in renew]
        (state / "cert.json").write_text(json.dumps({k: v for k, v in certificates.items() if k not in renewed}))
    project = _describe_project(contract)
    with contextlib.redirect_stdout(io.StringIO()):
        builders = provision.prepare_builders(project)
        result = provisioner.Provisioner(str(work), builders).provision(provision.prepare_project(project))
    authority.mkdir(parents=True, exist_ok=True)
    authority.chmod(0o700)  # before the root key lies in it
    write_json(authority / "federation.json", {"format": 1, "name": contract.name})
    write_bytes(authority / "cert.json", (state / "cert.json").read_bytes())
    (authority / "cert.json").chmod(0o600)
    return Path(result.get_result_location())


def _describe_project(contract: Contract) -> dict[str, Any]:
    """Return the federation as a FLARE project."""
    first, *others = contract.server.hosts
    identity = {"name": first, "type": "server", "org": "fedmutual", "default_host": first, "host_names": others or [first]}
    server: dict[str, Any] = {**identity, "fed_learn_port": contract.server.port, "admin_port": contract.server.port}
    sites = [{"name": name, "type": "client", "org": "fedmutual"} for name in contract.sites.names]
    leads = [{"name": name, "type": "admin", "org": "fedmutual", "role": "lead"} for name in contract.sites.leads]
    impl = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": contract.name,
        "description": "made by fedmutual provision",
        "participants": [server, *sites, *leads],
        "builders": [
            {"path": f"{impl}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{impl}.static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "grpc"}},
            {"path": f"{impl}.cert.CertBuilder", "args": {}},
            {"path": f"{impl}.signature.SignatureBuilder", "args": {}},
        ],
    }


def _write_kit(source: Path, kit: Path, kind: str, contract: Contract, file: Path) -> None:
    """Write a kit: the needed files of FLARE, the federation's file and KIT. Only the owner of the files can read them."""
    prefix, ending = f".{kit.name}.", ".part"
    for unfinished in kit.parent.glob(f"{prefix}*{ending}"):  # left by a killed provisioning, maybe with a key
        shutil.rmtree(unfinished, ignore_errors=True)
    # mkdtemp closes the folder to other users before a key is written.
    part = Path(tempfile.mkdtemp(ending, prefix, kit.parent))
    (part / "startup").mkdir()
    for name in _STARTUP_FILES[kind]:
        shutil.copyfile(source / "startup" / name, part / "startup" / name)
    address: Mapping[str, Any] = {"hosts": list(contract.server.hosts), "port": contract.server.port}
    write_json(part / KIT, {"format": 1, "federation": contract.name, "name": kit.name, "kind": kind, **address})
    write_bytes(part / FEDERATION, file.read_bytes())
    for path in (part, *part.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if kit.exists():
        shutil.rmtree(kit)
    os.replace(part, kit)
