"""Kits: the keys, certificates and settings of each participant. FLARE's provisioning makes the keys and certificates.

OUT/SERVER, OUT/SITE and OUT/LEAD are the kits; each kit is given only to its owner. OUT/authority holds the root key, which
makes further kits: an owner of the root key can act as any participant, so the root key is kept off line.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import ssl
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

import fedmutual
from fedmutual.errors import ConfigError, RunError
from fedmutual.files import FORMAT, read_json, read_json_object, write_bytes, write_json
from fedmutual.rundir.record_files import check_record
from fedmutual.sites.contract import Contract, read_contract
from fedmutual.sites.secure_sum.identity import read_certificate

# The first version, and the first version that is too new, as in the extra `sites`; older versions accept unsigned jobs.
FLARE = ((2, 9), (2, 10))
_FIRST, _END = (".".join(map(str, limit)) for limit in FLARE)
WANTED = f"pip install 'nvflare>={_FIRST},<{_END}'"
_MISSING = f"real sites need NVIDIA FLARE, fedmutual's extra 'sites': {WANTED}"

AUTHORITY, FEDERATION, KIT = "authority", "federation.toml", "kit.json"


class Kind(NamedTuple):
    """A kind of participants."""

    words: str  # for people
    settings: str  # file name of FLARE's settings
    keys: str  # file name of its key and its certificate, without the ending
    process: str = ""  # module of FLARE's process

    @property
    def files(self) -> tuple[str, ...]:
        """FLARE's files in a kit, without its start scripts, which would start FLARE without access control."""
        return self.settings, f"{self.keys}.crt", f"{self.keys}.key", "rootCA.pem"


KINDS = {
    "server": Kind("the server", "fed_server.json", "server", "nvflare.private.fed.app.server.server_train"),
    "site": Kind("a site", "fed_client.json", "client", "nvflare.private.fed.app.client.client_train"),
    "lead": Kind("a lead, who may submit", "fed_admin.json", "client"),
}
KIT_ADVICE = "use the kit as you received it"  # of errors about a damaged kit
_RESTORE_AUTHORITY = "restore the authority folder from a backup, or make all kits again in another folder with --out"
SOON = 30  # days before a certificate expires


class Kit(BaseModel):
    """The kit of one participant: the folder with keys, certificate and address of the server, which `provision` writes.

    `name` is the participant's name in the certificate; `hosts` and `port` are the server's.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    folder: Path
    name: str
    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    port: int = Field(ge=1, le=65535)
    version: str = fedmutual.__version__  # of fedmutual where the kit was made; unknown for older kits

    @property
    def startup(self) -> Path:
        """The folder that FLARE reads."""
        return self.folder / "startup"

    @property
    def certificate(self) -> Path:
        """The path of the certificate."""
        return self.startup / f"{KINDS[self.kind].keys}.crt"

    @property
    def expires(self) -> datetime:
        """The end of the certificate's validity. Raises RunError if the certificate cannot be read."""
        return read_certificate(self.certificate).not_valid_after_utc

    @property
    def days(self) -> int:
        """The number of days until the certificate expires."""
        return (self.expires - datetime.now(UTC)).days

    @property
    def reminder(self) -> str:
        """Advice to renew the certificate, if the certificate expires within SOON days; else ""."""
        if self.days >= SOON:
            return ""
        return f", in {self.days} days; have it renewed: fedmutual provision FEDERATION.toml --renew {self.name}"


def import_nvflare(name: str = "nvflare") -> ModuleType:
    """Return an imported module of FLARE. Raises ConfigError where FLARE is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(_MISSING) from None


def check_version() -> str:
    """Return the version of FLARE. Raises ConfigError where FLARE is not installed, or its version is not supported."""
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(_MISSING) from None
    if not FLARE[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < FLARE[1]:
        raise ConfigError(f"nvflare {version} is not supported, install one from {_FIRST} to before {_END}: {WANTED}")
    return version


def provision(file: Path, out: Path, renew: tuple[str, ...] = ()) -> list[Kit]:
    """Make the missing kits of a federation, and return the kits of all participants.

    file: FEDERATION.toml. renew: participants whose certificates are renewed. Raises ConfigError where the file is wrong, or
    FLARE is not installed; RunError where the folder cannot be written, holds the kits of another federation, or holds a
    damaged kit or authority.
    """
    contract = read_contract(file)
    host = contract.server.hosts[0]
    if host in contract.sites.names:  # certificates identify participants by these names
        raise ConfigError(f"{file}: site {host!r} has the name of the server's host (server.hosts); rename the site")
    sites, leads = dict.fromkeys(contract.sites.names, "site"), dict.fromkeys(contract.sites.leads, "lead")
    kinds = {"server": "server", **sites, **leads}
    if unknown := [name for name in renew if name not in kinds]:
        raise ConfigError(f"--renew {unknown[0]}: there is no such participant; there are {', '.join(kinds)}")
    record = out / AUTHORITY / "federation.json"
    if record.is_file():
        if (other := read_json(record, _RESTORE_AUTHORITY).get("name")) != contract.name:
            raise RunError(f"{out}: holds the kits of federation {other!r}, not of {contract.name!r}; choose another --out")
    elif out.exists() and any(out.iterdir()):
        raise RunError(f"{out}: is not empty and holds no kits; choose an empty folder with --out")
    with tempfile.TemporaryDirectory() as work:
        renewed = {host if name == "server" else name for name in renew}
        flare_kits = _run_provisioning(contract, Path(work), out / AUTHORITY, renewed)
        for name, kind in kinds.items():
            if name in renew or not (out / name).exists():
                _write_kit(flare_kits / (host if kind == "server" else name), out / name, kind, contract, file)
    return [open_kit(out / name) for name in kinds]


def open_kit(folder: Path, kind: str | None = None) -> Kit:
    """Return the kit in a folder. kind: a key of KINDS, which the kit must have.

    Raises RunError where the folder is no kit, or a file is missing or damaged; ConfigError for a kit of another kind.
    """
    if not (folder / KIT).is_file():
        raise RunError(f"{folder}: is not a kit, because it has no {KIT}; name a folder that `fedmutual provision` made")
    about = read_json(folder / KIT, KIT_ADVICE) | {"folder": str(folder.resolve())}
    kit = check_record(folder / KIT, Kit, about, KIT_ADVICE)
    for file in KINDS[kit.kind].files:
        if not (kit.startup / file).is_file():
            raise RunError(f"{folder}: the kit lacks startup/{file}; {KIT_ADVICE}")
    read_certificate(kit.certificate)
    if kind not in (None, kit.kind):
        raise ConfigError(f"{kit.folder}: is the kit of {kit.name!r}, a {kit.kind}'s; name a {kind}'s kit")
    return kit


def check_valid(kit: Kit) -> None:
    """Raise RunError where a certificate of a kit is not valid now by this host's clock, or as `make_tls_context`."""
    certificate, now = read_certificate(kit.certificate), datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= now <= last:
        raise RunError(
            f"{kit.folder}: the certificate is valid from {first:%Y-%m-%d %H:%M} UTC to {last:%Y-%m-%d %H:%M}, "
            f"and this host's clock says {now:%Y-%m-%d %H:%M}; set the clock, or have the certificate renewed: "
            f"fedmutual provision FEDERATION.toml --renew {kit.name}"
        )
    make_tls_context(kit)


def make_tls_context(kit: Kit) -> ssl.SSLContext:
    """Return a client's TLS context with the keys of this kit, which trusts only the authority of this kit.

    Raises RunError where the key does not belong to the certificate, or a file cannot be read.
    """
    root, key = kit.startup / "rootCA.pem", kit.certificate.with_suffix(".key")
    read_certificate(root)  # whose error names the file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(root)  # reads all certificates in the file, `read_certificate` only the first
        context.load_cert_chain(kit.certificate, key)
    except OSError:
        raise RunError(f"{key} is not the key of the certificate beside it, or {root} is damaged; {KIT_ADVICE}") from None
    context.set_alpn_protocols(["h2"])
    return context


def _run_provisioning(contract: Contract, work: Path, authority: Path, renewed: set[str]) -> Path:
    """Run FLARE's provisioning in the folder `work`, and return the folder of its kits. authority: of the root key."""
    provision, provisioner = (import_nvflare(f"nvflare.lighter.{name}") for name in ("provision", "provisioner"))
    state = work / contract.name / "state"
    state.mkdir(parents=True)
    if (authority / "cert.json").is_file():
        certificates = read_json_object(authority / "cert.json", _RESTORE_AUTHORITY)
        (state / "cert.json").write_text(json.dumps({k: v for k, v in certificates.items() if k not in renewed}))
    project = _describe_project(contract)
    with contextlib.redirect_stdout(io.StringIO()):
        builders = provision.prepare_builders(project)
        result = provisioner.Provisioner(str(work), builders).provision(provision.prepare_project(project))
    authority.mkdir(parents=True, exist_ok=True)
    authority.chmod(0o700)  # before the root key lies in it
    write_json(authority / "federation.json", {"format": FORMAT, "name": contract.name})
    write_bytes(authority / "cert.json", (state / "cert.json").read_bytes())
    (authority / "cert.json").chmod(0o600)
    return Path(result.get_result_location())


def _describe_project(contract: Contract) -> dict[str, Any]:
    """Return the federation as a FLARE project."""
    (first, *others), port = contract.server.hosts, contract.server.port
    server: dict[str, Any] = {"name": first, "type": "server", "fed_learn_port": port, "admin_port": port}
    server |= {"default_host": first, "host_names": others or [first]}
    sites: list[dict[str, Any]] = [{"name": name, "type": "client"} for name in contract.sites.names]
    leads = [{"name": name, "type": "admin", "role": "lead"} for name in contract.sites.leads]
    builders = {
        "workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
        "static_file.StaticFileBuilder": {"config_folder": "config", "scheme": "grpc"},
        "cert.CertBuilder": {},
        "signature.SignatureBuilder": {},
    }
    return {
        "api_version": 3,
        "name": contract.name,
        "description": "made by fedmutual provision",
        "participants": [{**one, "org": "fedmutual"} for one in (server, *sites, *leads)],
        "builders": [{"path": f"nvflare.lighter.impl.{name}", "args": args} for name, args in builders.items()],
    }


def _write_kit(source: Path, kit: Path, kind: str, contract: Contract, file: Path) -> None:
    """Write a kit: the needed files of FLARE, the federation's file and KIT. Only the owner of the files can read them."""
    prefix, ending = f".{kit.name}.", ".part"
    for unfinished in kit.parent.glob(f"{prefix}*{ending}"):  # left by a killed provisioning, maybe with a key
        shutil.rmtree(unfinished, ignore_errors=True)
    # mkdtemp closes the folder to other users before a key is written.
    part = Path(tempfile.mkdtemp(ending, prefix, kit.parent))
    (part / "startup").mkdir()
    for name in KINDS[kind].files:
        shutil.copyfile(source / "startup" / name, part / "startup" / name)
    address = {"hosts": list(contract.server.hosts), "port": contract.server.port, "version": fedmutual.__version__}
    write_json(part / KIT, {"format": FORMAT, "federation": contract.name, "name": kit.name, "kind": kind, **address})
    write_bytes(part / FEDERATION, file.read_bytes())
    for path in (part, *part.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if kit.exists():
        shutil.rmtree(kit)
    os.replace(part, kit)
