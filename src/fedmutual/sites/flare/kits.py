"""Kits: what each participant gets before it can take part. Keys and certificates are by FLARE's provisioning.

OUT/SERVER, OUT/SITE and OUT/LEAD are the kits, each handed to its owner and nobody else. OUT/authority holds the root key,
with which more kits can be made: whoever has it can pass as anybody, so it is kept off line.
"""

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedmutual.errors import ConfigError, RunError
from fedmutual.files import write_bytes, write_json
from fedmutual.sites.contract import Contract, read_contract
from fedmutual.sites.flare.nvflare_import import import_nvflare
from fedmutual.sites.secure_sum.identity import read_certificate

AUTHORITY, FEDERATION, KIT = "authority", "federation.toml", "kit.json"
KINDS = {"server": "the server", "site": "a site", "lead": "who may submit"}
_KEPT = {  # of FLARE's startup folder: no script of its own, which would start it unhardened
    "server": ("fed_server.json", "server.crt", "server.key", "rootCA.pem"),
    "site": ("fed_client.json", "client.crt", "client.key", "rootCA.pem"),
    "lead": ("fed_admin.json", "client.crt", "client.key", "rootCA.pem"),
}


SOON = 30  # days before a certificate ends


@dataclass(frozen=True)
class Kit:
    """One participant's."""

    folder: Path
    name: str
    kind: str  # of KINDS
    expires: datetime
    hosts: tuple[str, ...]  # where the server is
    port: int

    @property
    def startup(self) -> Path:
        """What FLARE reads."""
        return self.folder / "startup"

    @property
    def days(self) -> int:
        """How long its certificate is valid."""
        return (self.expires - datetime.now(UTC)).days

    @property
    def reminder(self) -> str | None:
        """To have it renewed, where its certificate ends soon."""
        return f"have it renewed: fedmutual provision FEDERATION.toml --renew {self.name}" if self.days < SOON else None

    @property
    def certificate(self) -> Path:
        """Its certificate."""
        return self.startup / ("server.crt" if self.kind == "server" else "client.crt")


def provision(file: Path, out: Path, renew: tuple[str, ...] = ()) -> list[Kit]:
    """Make the kits of all that FEDERATION.toml names and that have none yet -> all kits.

    renew: whose certificates are made anew.

    Raises:
        ConfigError: the file is wrong, or FLARE is not installed.
        RunError: the folder cannot be written, or holds another federation's kits.
    """
    contract = read_contract(file)
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
        made = _made(contract, Path(work), out / AUTHORITY, renew)
        for name, kind in names.items():
            source = made / (contract.server.hosts[0] if kind == "server" else name)
            if name in renew or not (out / name).exists():
                _hand_over(source, out / name, kind, contract, file)
    return [open_kit(out / name) for name in names]


def open_kit(folder: Path) -> Kit:
    """A kit that was made.

    Raises:
        RunError: the folder is none, or something of it is missing.
    """
    if not (folder / KIT).is_file():
        raise RunError(f"{folder}: is no kit, it has no {KIT}; name a folder that `fedmutual provision` made")
    try:
        about = json.loads((folder / KIT).read_text(encoding="utf-8"))
        kind, name = about["kind"], about["name"]
        missing = [file for file in _KEPT[kind] if not (folder / "startup" / file).is_file()]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(
            f"{folder / KIT}: is damaged ({type(problem).__name__}); take the kit as it was handed over"
        ) from None
    if missing:
        raise RunError(f"{folder}: the kit lacks startup/{missing[0]}; take it as it was handed over")
    own = "server.crt" if kind == "server" else "client.crt"
    expires = read_certificate(folder / "startup" / own).not_valid_after_utc
    return Kit(folder.resolve(), name, kind, expires, tuple(about["hosts"]), int(about["port"]))


def check_valid(kit: Kit) -> None:
    """Raise RunError, with the mend, where a kit cannot be used now: expired, or not yet valid by this host's clock."""
    found, now = read_certificate(kit.certificate), datetime.now(UTC)
    if now > found.not_valid_after_utc:
        raise RunError(
            f"{kit.folder}: the certificate of {kit.name!r} expired on {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
            f"whoever holds the authority makes a new one: fedmutual provision FEDERATION.toml --renew {kit.name}"
        )
    if now < found.not_valid_before_utc:
        raise RunError(
            f"{kit.folder}: the certificate of {kit.name!r} is valid from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, "
            f"and this host's clock says {now:%Y-%m-%d %H:%M}; set the clock"
        )


def _check_out(out: Path, name: str) -> None:
    authority = out / AUTHORITY / "federation.json"
    if authority.is_file():
        held = json.loads(authority.read_text(encoding="utf-8")).get("name")
        if held != name:
            raise RunError(
                f"{out}: holds the kits of federation {held!r}, not of {name!r}; choose another folder with --out"
            )
    elif out.exists() and any(out.iterdir()):
        raise RunError(f"{out}: is in use, and not by kits; choose an empty folder with --out")


def _made(contract: Contract, work: Path, authority: Path, renew: tuple[str, ...]) -> Path:
    """FLARE's provisioning in a folder of its own -> where its kits are. The root key is taken from, or to, `authority`."""
    provision, provisioner = import_nvflare("nvflare.lighter.provision"), import_nvflare("nvflare.lighter.provisioner")
    state = work / contract.name / "state"
    state.mkdir(parents=True)
    if (authority / "cert.json").is_file():
        known = json.loads((authority / "cert.json").read_text(encoding="utf-8"))
        again = [contract.server.hosts[0] if name == "server" else name for name in renew]
        (state / "cert.json").write_text(json.dumps({k: v for k, v in known.items() if k not in again}))
    project = _project(contract)
    with contextlib.redirect_stdout(io.StringIO()):
        builders = provision.prepare_builders(project)
        found = provisioner.Provisioner(str(work), builders).provision(provision.prepare_project(project))
    authority.mkdir(parents=True, exist_ok=True)
    authority.chmod(0o700)  # before the root key lies in it
    write_json(authority / "federation.json", {"format": 1, "name": contract.name})
    write_bytes(authority / "cert.json", (state / "cert.json").read_bytes())
    (authority / "cert.json").chmod(0o600)
    return Path(found.get_result_location())


def _project(contract: Contract) -> dict[str, Any]:
    """What FLARE calls a project."""
    first, *others = contract.server.hosts
    named = {"name": first, "type": "server", "org": "fedmutual", "default_host": first, "host_names": others or [first]}
    server: dict[str, Any] = {**named, "fed_learn_port": contract.server.port, "admin_port": contract.server.port}
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


def _hand_over(source: Path, kit: Path, kind: str, contract: Contract, file: Path) -> None:
    """Of what FLARE made the files that are needed, the federation's file, and who it is for; readable by its owner only."""
    prefix, ending = f".{kit.name}.", ".part"
    for old in kit.parent.glob(f"{prefix}*{ending}"):  # of a provisioning that was killed: there may be a key in it
        shutil.rmtree(old, ignore_errors=True)
    part = Path(tempfile.mkdtemp(ending, prefix, kit.parent))  # closed to others before a key lies in it
    (part / "startup").mkdir()
    for name in _KEPT[kind]:
        shutil.copyfile(source / "startup" / name, part / "startup" / name)
    about: Mapping[str, Any] = {"hosts": list(contract.server.hosts), "port": contract.server.port}
    write_json(part / KIT, {"format": 1, "federation": contract.name, "name": kit.name, "kind": kind, **about})
    write_bytes(part / FEDERATION, file.read_bytes())
    for path in (part, *part.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if kit.exists():
        shutil.rmtree(kit)
    os.replace(part, kit)
