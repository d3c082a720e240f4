"""FLARE components outside of jobs: start the process of a job, remove its folder, print that a site is connected."""

import os
import sys
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher

from fedmutual.sites.flare import leftovers
from fedmutual.sites.flare.console import print_line
from fedmutual.sites.flare.nvflare_import import WANTED

# -P: `python -m` does not search the working folder, which is FLARE's folder. -E: Python does not read PYTHONPATH, to which
# FLARE adds a folder for code of the job.
_MAIN = "-P -E -m fedmutual.sites.flare.job_process"


class SiteLauncher(ClientProcessJobLauncher):  # type: ignore[misc]
    """Starts the process of a job at a site."""

    def get_command(self, job_meta: dict[str, object], fl_ctx: FLContext) -> str:
        """Return the command line of the process. Raises RuntimeError as `change_job_command`."""
        return change_job_command(super().get_command(job_meta, fl_ctx))


class ServerLauncher(ServerProcessJobLauncher):  # type: ignore[misc]
    """Starts the process of a job at the server."""

    def get_command(self, job_meta: dict[str, object], fl_ctx: FLContext) -> str:
        """Return the command line of the process. Raises RuntimeError as `change_job_command`."""
        return change_job_command(super().get_command(job_meta, fl_ctx))


def change_job_command(command: str) -> str:
    """Return FLARE's command of a job with options that isolate Python, and with a main module that watches this process.

    Raises:
        RuntimeError: the command has another form; the job is not started.
    """
    python, module, rest = command.partition(" -m ")
    if python != sys.executable or not module:
        raise RuntimeError(f"NVIDIA FLARE starts jobs with an unknown command; install a supported version: {WANTED}")
    return f"{python} {_MAIN} {os.getpid()} {rest}"


class Sweeper(FLComponent):  # type: ignore[misc]
    """Removes the folder of a job after its process has ended."""

    def __init__(self, work: str) -> None:
        """work: FLARE's workspace of this process."""
        super().__init__()
        self._work = Path(work)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remove the folder of the finished job only, because the next job may be deployed already."""
        if event_type == EventType.JOB_COMPLETED:
            leftovers.remove_folder(self._work, str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)))


class ConnectionNotice(FLComponent):  # type: ignore[misc]
    """A component of a site's process that prints when the site is connected."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Print that the site is connected, after its registration."""
        if event_type == EventType.AFTER_CLIENT_REGISTER:
            print_line("connected to the server; waiting for a lead to submit")
