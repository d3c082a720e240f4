"""The folders of jobs that are over: nothing that came with a job stays where a process works, but the job's log."""

import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

JOB = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a job's number, as FLARE writes it
LAST_LOG = "job_log.txt"  # of the job whose folder was removed last


def remove_folders(work: Path, but: Collection[str] = ()) -> None:
    """Remove the folders of all jobs in a workspace. but: the numbers of jobs that are not over."""
    for folder in [*work.iterdir()] if work.is_dir() else ():
        if folder.name not in but:
            remove_folder(work, folder.name)


def remove_folder(work: Path, job: str) -> None:
    """Remove the folder of a job, by its number; no other folder."""
    if JOB.fullmatch(job):
        with suppress(OSError):
            os.replace(work / job / "log.txt", work / LAST_LOG)
        shutil.rmtree(work / job, ignore_errors=True)
