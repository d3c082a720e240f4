"""The FLARE job of a federation: three JSON files that name classes of fedmutual, and no code. The check of its archive.

An archive is accepted only if it holds exactly the files that `write_job` writes, with their exact contents, and if a lead
signed it. All this is checked before FLARE unpacks it.
"""

import io
import json
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedmutual.config.checks import parse_table
from fedmutual.config.keys import Table
from fedmutual.errors import RunError
from fedmutual.files import write_bytes
from fedmutual.sites.consent import LONGEST_CONTRACT, check_agreed, parse_contract_record
from fedmutual.sites.contract import Contract
from fedmutual.sites.flare.kits import import_nvflare
from fedmutual.sites.flare.workspace import ALLOWED
from fedmutual.sites.schema import SitesTable

APP = "app"
META, SERVER, SITE = "meta.json", "config_fed_server.json", "config_fed_client.json"
LARGEST = 2 * LONGEST_CONTRACT + 2**16  # bytes of a file: escaped twice in JSON, a contract takes up to twice its length
_LARGEST_ARCHIVE = 3 * LARGEST  # bytes of an archive, and of its contents
_MOST_ENTRIES = 50  # files and folders of an archive; a job has about a dozen
_SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")  # FLARE writes them into each folder that it signs
_CONFIG = (f"config/{SERVER}", f"config/{SITE}")
_APP = (*_CONFIG, *_SIGNATURES, *(f"config/{name}" for name in _SIGNATURES))  # paths below the folder of the app


def write_job(contract: Contract, folder: Path, classes: Mapping[str, str] = ALLOWED) -> Path:
    """Write the job below `folder`, and return the folder of the job. classes: of the server and of the sites."""
    job = folder / contract.name
    write_bytes(job / META, make_meta(contract.name, contract.sites))
    for name, content in make_configs(json.dumps(contract.record()), classes).items():
        write_bytes(job / APP / name, content)
    return job


def make_meta(name: str, sites: SitesTable) -> bytes:
    """Return the content of META: the receivers of the app, and how many sites must receive it."""
    receivers = ["server", *sites.names]
    return _dump({"name": name, "resource_spec": {}, "min_clients": sites.least, "deploy_map": {APP: receivers}})


def make_configs(contract: str, classes: Mapping[str, str] = ALLOWED) -> dict[str, bytes]:
    """Return the two files that configure the job's processes: path below the app -> content. contract: as JSON text."""
    arguments: Table = {"contract": contract}
    nothing: Table = {"task_data_filters": [], "task_result_filters": [], "components": []}
    times = {"heart_beat_timeout": 600, "task_request_interval": 0.01}
    workflows = [{"id": "rounds", "path": classes["server"], "args": arguments}]
    executors = [{"tasks": ["*"], "executor": {"path": classes["site"], "args": arguments}}]
    server = {"format_version": 2, "server": times, "workflows": workflows, **nothing}
    return {_CONFIG[0]: _dump(server), _CONFIG[1]: _dump({"format_version": 2, "executors": executors, **nothing})}


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def check_submission(path: Path, name: str, root: Path, agreed: Collection[Table]) -> None:
    """Check a job that a lead submits to this server.

    name: of the folder in the archive. agreed: the records of the contracts that the operator of the server agreed to. root:
    the certificate of the authority. Raises RunError where the archive is not what fedmutual writes, or no lead signed it;
    ConfigError where its contract is damaged, or is not one of the agreed contracts.
    """
    if not path.is_file():
        raise RunError("the job did not arrive; submit the job again")
    if path.stat().st_size > _LARGEST_ARCHIVE:
        raise _make_error("it is too large")
    expected = (META, *_SIGNATURES, *(f"{APP}/{file}" for file in _APP))
    files = _read_files(path.read_bytes(), {f"{name}/{file}": file for file in expected})
    text = _read_contract({file: files[f"{APP}/{file}"] for file in _CONFIG})
    record = check_agreed(text, agreed, "this server")
    sites = parse_table(SitesTable, record["tables"].get("sites"), "the contract", "sites")
    if files[META] != make_meta(record["name"], sites):
        raise _make_error(f"{META} has another content")
    if name != record["name"]:
        raise _make_error("its folder does not have the name of its federation")
    _check_signed(files, root)


def check_deployment(content: bytes, root: Path) -> None:
    """Check the app that a server deploys to this site. root: the certificate of the authority.

    Raises RunError where the archive is not what fedmutual writes, or no lead signed it; ConfigError where its contract is
    not a contract that fedmutual writes.
    """
    if not isinstance(content, bytes | bytearray) or len(content) > _LARGEST_ARCHIVE:
        raise _make_error("it is missing or too large")
    files = _read_files(bytes(content), {file: file for file in _APP})
    _read_contract(files)
    _check_signed(files, root)


def _read_files(content: bytes, expected: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files of an archive: name -> content. expected: path in the archive -> name, of all files."""
    if content.count(b"PK\1\2") > _MOST_ENTRIES:  # each entry begins so; `zipfile` reads the whole list of files at once
        raise _make_error("it has unexpected files")
    folders = {f"{parent.as_posix()}/" for file in expected for parent in Path(file).parents if parent != Path()}
    files = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename not in folders]
            names = [entry.filename for entry in entries]
            if sorted(names) != sorted(expected) or len(archive.infolist()) > len(expected) + len(folders):
                raise _make_error("it has unexpected files")
            for entry in entries:
                with archive.open(entry) as file:  # the stated size may be wrong
                    body = file.read(LARGEST + 1)
                if stat.S_ISLNK(entry.external_attr >> 16) or len(body) > LARGEST:
                    raise _make_error("one of its files is a link or is too large")
                files[expected[entry.filename]] = body
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError):
        raise _make_error("it is damaged") from None
    return files


def _read_contract(files: Mapping[str, bytes]) -> str:
    """Return the text of the contract in the two configuration files, which may hold nothing else."""
    try:
        text = json.loads(files[_CONFIG[0]])["workflows"][0]["args"]["contract"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _make_error(f"{SERVER} has another content") from None
    parse_contract_record(text)
    for name, content in make_configs(text).items():
        if files[name] != content:
            raise _make_error(f"{Path(name).name} has another content")
    return str(text)


def _check_signed(files: Mapping[str, bytes], root: Path) -> None:
    """Raise RunError unless all folders and files are signed with the certificate of one lead."""
    verify = import_nvflare("nvflare.lighter.utils").verify_folder_signature_and_get_signers
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        verified, signers = verify(folder, str(root))
    if not verified or [role for _, _, role in signers] != ["lead"]:
        raise RunError("the job is not signed by a lead of this federation; submit it with a lead's kit")


def _make_error(reason: str) -> RunError:
    return RunError(f"the job's archive is not what fedmutual writes ({reason}); install the same version everywhere")
