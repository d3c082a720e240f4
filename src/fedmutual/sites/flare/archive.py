"""Checks of a job's archive before FLARE unpacks it.

An archive is accepted only if it holds exactly the files that `job.py` writes, with their exact contents, and if a lead
signed it.
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

from fedmutual.config.keys import Table
from fedmutual.errors import RunError
from fedmutual.sites.consent import LONGEST_CONTRACT, check_agreed, parse_contract_record
from fedmutual.sites.contract import parse_table
from fedmutual.sites.flare import job
from fedmutual.sites.flare.nvflare_import import import_nvflare
from fedmutual.sites.schema import SitesTable

LARGEST = 2 * LONGEST_CONTRACT + 2**16  # bytes of a file: escaped twice in JSON, a contract takes up to twice its length
_LARGEST_ARCHIVE = 3 * LARGEST  # bytes of an archive, and of its contents
_END, _LOCATOR = 22, 20  # bytes of the record at the end of an archive, and of the record before it in a ZIP64 archive
_LONGEST_LIST = 2**14  # bytes of an archive's list of files; a job has about a dozen files
_SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")  # FLARE writes them into each folder that it signs
_CONFIG = (f"config/{job.SERVER}", f"config/{job.SITE}")
_APP = (*_CONFIG, *_SIGNATURES, *(f"config/{name}" for name in _SIGNATURES))  # paths below the folder of the app


def check_submission(path: Path, name: str, root: Path, agreed: Collection[Table]) -> None:
    """Check a job that a lead submits to this server.

    name: the name of the folder in the archive. agreed: the records of the contracts that the operator of the server agreed
    to. root: the certificate of the authority.

    Raises:
        RunError: the archive is not what fedmutual writes, or no lead signed it.
        ConfigError: the contract of the job is damaged, or is not one of the agreed contracts.
    """
    try:
        size = path.stat().st_size
    except OSError:
        raise RunError("the job did not arrive; submit the job again") from None
    if size > _LARGEST_ARCHIVE:
        raise _make_error("it is too large")
    expected = (job.META, *_SIGNATURES, *(f"{job.APP}/{file}" for file in _APP))
    files = _read_files(path.read_bytes(), {f"{name}/{file}": file for file in expected})
    text = _read_contract({file: files[f"{job.APP}/{file}"] for file in _CONFIG})
    record = check_agreed(text, agreed, "this server")
    sites = parse_table(SitesTable, record["tables"].get("sites"), "the contract", "sites")
    _check_same(job.META, files[job.META], job.make_meta(record["name"], sites.least, sites.names))
    if name != record["name"]:
        raise _make_error("its folder does not have the name of its federation")
    _check_signed(files, root)


def check_deployment(content: bytes, root: Path) -> None:
    """Check the app that a server deploys to this site. root: the certificate of the authority.

    Raises:
        RunError: the archive is not what fedmutual writes, or no lead signed it.
        ConfigError: the contract in the app is not a contract that fedmutual writes.
    """
    if not isinstance(content, bytes | bytearray) or len(content) > _LARGEST_ARCHIVE:
        raise _make_error("it is missing or too large")
    files = _read_files(bytes(content), {file: file for file in _APP})
    _read_contract(files)
    _check_signed(files, root)


def _read_files(content: bytes, expected: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files of an archive: name -> content. expected: path in the archive -> name, of all files."""
    _check_directory(content)
    folders = {f"{parent.as_posix()}/" for file in expected for parent in Path(file).parents if parent != Path()}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename not in folders]
            names = [entry.filename for entry in entries]
            if sorted(names) != sorted(expected) or len(archive.infolist()) > len(expected) + len(folders):
                raise _make_error("it has unexpected files")
            if any(stat.S_ISLNK(entry.external_attr >> 16) or entry.file_size > LARGEST for entry in entries):
                raise _make_error("one of its files is a link or is too large")
            return {expected[entry.filename]: _read_entry(archive, entry) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError):
        raise _make_error("it is damaged") from None


def _check_directory(content: bytes) -> None:
    """Raise RunError for a too long list of files, because `zipfile` reads the whole list at once.

    The archive of a job ends with the record of its list, without a comment, and is not a ZIP64 archive.
    """
    end, locator = content[-_END:], content[-_END - _LOCATOR : -_END]
    if len(end) < _END or not end.startswith(b"PK\5\6") or end[-2:] != b"\0\0" or locator.startswith(b"PK\6\7"):
        raise _make_error("it is damaged")
    if int.from_bytes(end[12:16], "little") > _LONGEST_LIST:
        raise _make_error("it has unexpected files")


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise _make_error("one of its files is a link or is too large")
    return content


def _read_contract(files: Mapping[str, bytes]) -> str:
    """Return the text of the contract in the two configuration files, which may hold nothing else."""
    try:
        text = json.loads(files[_CONFIG[0]])["workflows"][0]["args"]["contract"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _make_error(f"{job.SERVER} has another content") from None
    parse_contract_record(text)
    _check_same(job.SERVER, files[_CONFIG[0]], job.make_server_config(text))
    _check_same(job.SITE, files[_CONFIG[1]], job.make_site_config(text))
    return str(text)


def _check_same(name: str, content: bytes, expected: dict[str, Any]) -> None:
    """Raise RunError unless the bytes of a file are exactly those that `job.write_job` writes."""
    if content != job.format_json(expected):
        raise _make_error(f"{name} has another content")


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
