"""How the process of a job is started: by FLARE's own command, with a Python that searches no working folder."""

import sys

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher

# -P: `python -m` does not search the working folder, which is FLARE's. -E: nor is PYTHONPATH read, to which FLARE adds
# the folder for a job's own code.
_ISOLATED = "-P -E"


class SiteLauncher(ClientProcessJobLauncher):  # type: ignore[misc]
    """At a site."""

    def get_command(self, job_meta: dict[str, object], fl_ctx: FLContext) -> str:
        """The command line."""
        return isolate(super().get_command(job_meta, fl_ctx))


class ServerLauncher(ServerProcessJobLauncher):  # type: ignore[misc]
    """At the server."""

    def get_command(self, job_meta: dict[str, object], fl_ctx: FLContext) -> str:
        """The command line."""
        return isolate(super().get_command(job_meta, fl_ctx))


def isolate(command: str) -> str:
    """FLARE's command, with Python's options.

    Raises:
        RuntimeError: FLARE starts the process in another way; no job is started then.
    """
    python, module, rest = command.partition(" -m ")
    if python != sys.executable or not module:
        raise RuntimeError("FLARE does not start a job by `python -m`; install the version that fedmutual asks for")
    return f"{python} {_ISOLATED} -m {rest}"
