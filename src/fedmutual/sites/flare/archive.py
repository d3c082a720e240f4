"""A job's archive: what comes over the wire before a job begins. It is taken only if it is what `job.py` writes and a lead
signed: these files and no other, of these contents, none too large. Looked at before FLARE unpacks any of it.
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
from fedmutual.sites.consent import LONGEST, check_agreed, read_record
from fedmutual.sites.contract import parse_table
from fedmutual.sites.flare import job
from fedmutual.sites.flare.nvflare_import import import_nvflare
from fedmutual.sites.schema import SitesTable

LARGEST = 2 * LONGEST + 2**16  # bytes of a file: in JSON, within JSON, a contract takes up to twice its length
_IN_ALL = 3 * LARGEST  # bytes of an archive, and of what is in it
_END, _LOCATOR = 22, 20  # bytes of the record at an archive's end, and of what stands before it in the form for large ones
_LISTED = 2**14  # bytes of an archive's list of files, of which ours have about a dozen
_SIGNED = (".__nvfl_sig.json", ".__nvfl_submitter.crt")  # FLARE puts them into each folder that it signs
_CONFIG = (f"config/{job.SERVER}", f"config/{job.SITE}")
_APP = (*_CONFIG, *_SIGNED, *(f"config/{name}" for name in _SIGNED))  # below the app's folder


def check_submission(path: Path, name: str, root: Path, agreed: Collection[Table]) -> None:
    """Check at the server what a lead submits. name: of the folder in the archive. root: the authority's certificate.

    agreed: the records of the contracts that the server's operator agreed to.

    Raises:
        RunError: the archive is not what fedmutual writes, or no lead signed it.
        ConfigError: its contract is not one of those.
    """
    try:
        size = path.stat().st_size
    except OSError:
        raise RunError("the job did not arrive; submit it once more") from None
    if size > _IN_ALL:
        raise _refusal("it is too large")
    expected = (job.META, *_SIGNED, *(f"{job.APP}/{file}" for file in _APP))
    files = _read(path.read_bytes(), {f"{name}/{file}": file for file in expected})
    text = _contract({file: files[f"{job.APP}/{file}"] for file in _CONFIG})
    record = check_agreed(text, agreed, "this server")
    sites = parse_table(SitesTable, record["tables"].get("sites"), "the contract", "sites")
    _check_same(job.META, files[job.META], job.meta_file(record["name"], sites.least, sites.names))
    if name != record["name"]:
        raise _refusal("its folder is not called as its federation")
    _check_signed(files, root)


def check_deployment(content: bytes, root: Path) -> None:
    """Check at a site what a server deploys: the app's folder alone. root: the authority's certificate.

    Raises:
        RunError: the archive is not what fedmutual writes, or no lead signed it.
    """
    if not isinstance(content, bytes | bytearray) or len(content) > _IN_ALL:
        raise _refusal("it is too large, or none")
    files = _read(bytes(content), {file: file for file in _APP})
    _contract(files)
    _check_signed(files, root)


def _read(content: bytes, expected: Mapping[str, str]) -> dict[str, bytes]:
    """The files of an archive, which has exactly the expected ones: path in it -> path in what is returned."""
    _check_directory(content)
    folders = {f"{parent.as_posix()}/" for file in expected for parent in Path(file).parents if parent != Path()}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename not in folders]
            names = [entry.filename for entry in entries]
            if sorted(names) != sorted(expected) or len(archive.infolist()) > len(expected) + len(folders):
                raise _refusal("it has other files than these")
            if any(stat.S_ISLNK(entry.external_attr >> 16) or entry.file_size > LARGEST for entry in entries):
                raise _refusal("a file of it is too large, or a link")
            return {expected[entry.filename]: _read_entry(archive, entry) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError):
        raise _refusal("it is damaged") from None


def _check_directory(content: bytes) -> None:
    """Raise RunError where an archive's list of files is larger than one of ours: `zipfile` reads all of the list at once.

    An archive of ours ends with the record of that list, which has no comment, and is not of the form for large archives.
    """
    end, large = content[-_END:], content[-_END - _LOCATOR : -_END]
    if len(end) < _END or not end.startswith(b"PK\5\6") or end[-2:] != b"\0\0" or large.startswith(b"PK\6\7"):
        raise _refusal("it is damaged")
    if int.from_bytes(end[12:16], "little") > _LISTED:
        raise _refusal("it has other files than these")


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise _refusal("a file of it is too large, or a link")
    return content


def _contract(files: Mapping[str, bytes]) -> str:
    """The contract's text out of the two configurations, which hold nothing else."""
    try:
        text = json.loads(files[_CONFIG[0]])["workflows"][0]["args"]["contract"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _refusal(f"{job.SERVER} is another") from None
    read_record(text)
    _check_same(job.SERVER, files[_CONFIG[0]], job.server_file(text))
    _check_same(job.SITE, files[_CONFIG[1]], job.site_file(text))
    return str(text)


def _check_same(name: str, content: bytes, expected: dict[str, Any]) -> None:
    """Raise RunError unless a file is byte for byte what `job.write` makes of it."""
    if content != job.format_json(expected):
        raise _refusal(f"{name} is another")


def _check_signed(files: Mapping[str, bytes], root: Path) -> None:
    """Raise RunError unless every folder and file is signed by one and the same certificate, a lead's."""
    verify = import_nvflare("nvflare.lighter.utils").verify_folder_signature_and_get_signers
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        verified, signers = verify(folder, str(root))
    if not verified or [role for _, _, role in signers] != ["lead"]:
        raise RunError("the job is not signed by a lead of this federation; submit it with a lead's kit")


def _refusal(why: str) -> RunError:
    return RunError(f"the job's archive is not what fedmutual writes ({why}); install the same version everywhere")
