"""Write jobs as a lead submits them and as a server deploys them: written, changed, signed with a kit, packed."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.lighter.utils import load_private_key_file, sign_folders

from fedmutual.sites.contract import Contract
from fedmutual.sites.flare.archive import APP, write_job

Change = Callable[[Path], object]


def submission(
    contract: Contract, kit: Path | None, folder: Path, change: Change = lambda made: None, late: Change = lambda made: None
) -> bytes:
    """Return the archive that a lead sends. change: changes the folder before the signature; late: after the signature."""
    made = _made(contract, kit, folder, change, late)
    return zip_directory_to_bytes(str(made.parent), made.name)


def deployment(
    contract: Contract, kit: Path | None, folder: Path, change: Change = lambda made: None, late: Change = lambda made: None
) -> bytes:
    """Return the archive that a server sends on."""
    return zip_directory_to_bytes(str(_made(contract, kit, folder, change, late) / APP), "")


def _made(contract: Contract, kit: Path | None, folder: Path, change: Change, late: Change) -> Path:
    folder.mkdir()
    job_folder = write_job(contract, folder)
    change(job_folder)
    if kit is not None:
        key = next(path for path in (kit / "startup").iterdir() if path.suffix == ".key")
        sign_folders(str(job_folder), load_private_key_file(str(key)), str(key.with_suffix(".crt")))
    late(job_folder)
    return job_folder


Entries = list[tuple[str | zipfile.ZipInfo, bytes]]


def repacked(content: bytes, change: Callable[[str, bytes], Entries], how: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive with each entry changed. how: the kind of compression."""
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(archive, "w", how) as after:
        for entry in before.infolist():
            for name, body in change(entry.filename, before.read(entry)):
                after.writestr(name, body)
    return archive.getvalue()
