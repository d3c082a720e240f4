"""The processes that an operator starts: the server's and a site's. In the foreground, until they are told to end."""

import argparse
import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedmutual.errors import ConfigError
from fedmutual.sites.flare import workspace
from fedmutual.sites.flare.kits import Kit, check_valid
from fedmutual.sites.flare.nvflare_import import check_version
from fedmutual.sites.modules import leave_working_folders

_SETTINGS = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",  # not 15 minutes for the last word of a site that died
    "GRPC_VERBOSITY": "NONE",  # its lines are for its developers
}
_GRACE = 3.0  # seconds that a job's process has to end by itself, when its parent is told to
_MAINS = {"server": "nvflare.private.fed.app.server.server_train", "site": "nvflare.private.fed.app.client.client_train"}


def run_process(kit: Kit, state: Path, told: Mapping[str, Any], ended: Callable[[KeyboardInterrupt], int]) -> int:
    """Run a server's or a site's process -> its exit code. Where FLARE's threads do not end, the process ends here.

    told: what our classes in FLARE's processes are to know of this host. ended: is called when it was told to end, says so,
    and gives the exit code.

    Raises:
        ConfigError: FLARE is not installed, or of another version.
        RunError: its certificate cannot be used.
    """
    check_version()
    check_valid(kit)
    work = workspace.make_workspace(kit, state, told)
    main = importlib.import_module(_MAINS[kit.kind])
    monitor = importlib.import_module("nvflare.fuel.f3.mpm").MainProcessMonitor
    uid = [f"uid={kit.name}"] if kit.kind == "site" else []
    beat = f"heart_beat_interval={workspace.HEARTBEAT}"
    settings = ["secure_train=true", "org=fedmutual", "config_folder=config", beat, *uid]
    arguments = argparse.Namespace(
        workspace=str(work),
        fed_server="fed_server.json",
        fed_client="fed_client.json",
        local_rank=0,
        set=settings,
    )
    os.environ |= _SETTINGS
    leave_working_folders(state)  # before FLARE makes `work` the working folder
    code: int = monitor.run(main_func=_until_told(main.main, ended), run_dir=str(work), args=arguments)
    return code


def _until_told(main: Callable[..., Any], ended: Callable[[KeyboardInterrupt], int]) -> Callable[..., Any]:
    """FLARE's main function, that ends in order when it is interrupted: FLARE itself would leave its threads at work."""

    def until(args: argparse.Namespace) -> Any:
        try:
            return main(args)
        except KeyboardInterrupt as interrupt:
            try:
                return ended(interrupt)
            finally:
                _end_jobs()

    return until


def _end_jobs() -> None:
    """The processes of jobs: what they saved is kept, and would be after a kill."""
    psutil = importlib.import_module("psutil")  # comes with FLARE
    jobs = psutil.Process().children(recursive=True)
    for how in (psutil.Process.terminate, psutil.Process.kill):
        for job in jobs:
            with suppress(psutil.NoSuchProcess):
                how(job)
        _, jobs = psutil.wait_procs(jobs, _GRACE)


def check_kind(kit: Kit, kind: str) -> Kit:
    """The kit, if it is of a kind. Raises ConfigError."""
    if kit.kind != kind:
        raise ConfigError(f"{kit.folder}: is the kit of {kit.name!r}, a {kit.kind}'s; name a {kind}'s kit")
    return kit
