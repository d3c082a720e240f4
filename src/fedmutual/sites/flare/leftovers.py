"""Remove the folders of finished jobs from FLARE's workspace. Of a finished job, only its log is kept."""

import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

JOB = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # the id of a job in FLARE
LAST_LOG = "job_log.txt"  # the log of the job that was removed last


def remove_folders(work: Path, unfinished: Collection[str] = ()) -> None:
    """Remove the folders of finished jobs in a workspace. unfinished: the ids of the other jobs."""
    for folder in [*work.iterdir()] if work.is_dir() else ():
        if folder.name not in unfinished:
            remove_folder(work, folder.name)


def remove_folder(work: Path, job: str) -> None:
    """Remove the folder of a job. job: the id; a name that is not an id of a job is ignored."""
    if JOB.fullmatch(job):
        with suppress(OSError):
            os.replace(work / job / "log.txt", work / LAST_LOG)
        shutil.rmtree(work / job, ignore_errors=True)
