"""Start the process of a job with FLARE's command, and with a Python that imports nothing from the working folder."""

import sys

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher

# -P: `python -m` does not search the working folder, which is FLARE's folder. -E: Python does not read PYTHONPATH, to which
# FLARE adds a folder for code of the job.
_ISOLATED = "-P -E"


class SiteLauncher(ClientProcessJobLauncher):  # type: ignore[misc]
    """Starts the process of a job at a site."""

    def get_command(self, job_meta: dict[str, object], fl_ctx: FLContext) -> str:
        """Return the command line of the process."""
        return isolate(super().get_command(job_meta, fl_ctx))


class ServerLauncher(ServerProcessJobLauncher):  # type: ignore[misc]
    """Starts the process of a job at the server."""

    def get_command(self, job_meta: dict[str, object], fl_ctx: FLContext) -> str:
        """Return the command line of the process."""
        return isolate(super().get_command(job_meta, fl_ctx))


def isolate(command: str) -> str:
    """Return FLARE's command with options for Python.

    Raises:
        RuntimeError: the command has another form; the job is not started.
    """
    python, module, rest = command.partition(" -m ")
    if python != sys.executable or not module:
        raise RuntimeError("FLARE does not start a job by `python -m`; install the version that fedmutual asks for")
    return f"{python} {_ISOLATED} -m {rest}"
