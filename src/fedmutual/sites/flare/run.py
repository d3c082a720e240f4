"""The processes that an operator starts, of the server or of a site. They run in the foreground until they are stopped."""

import argparse
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedmutual.errors import ConfigError
from fedmutual.sites.flare import workspace
from fedmutual.sites.flare.kits import Kit, check_valid
from fedmutual.sites.flare.nvflare_import import check_version
from fedmutual.sites.flare.proxy import make_grpc_variables
from fedmutual.sites.modules import leave_working_folders

_SETTINGS = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",  # instead of 15 minutes for the last answer of a site that died
    "GRPC_VERBOSITY": "NONE",  # lines for developers of gRPC
}
_MAINS = {"server": "nvflare.private.fed.app.server.server_train", "site": "nvflare.private.fed.app.client.client_train"}


def run_process(kit: Kit, state: Path, pointer: Mapping[str, Any], end: Callable[[KeyboardInterrupt], int]) -> int:
    """Run the process of a server or of a site, and return its exit code. If FLARE's threads do not end, exit here.

    pointer: facts on this host for fedmutual's classes in FLARE's processes. end: is called after an interrupt; prints a
    line and returns the exit code.

    Raises:
        ConfigError: FLARE is not installed, or its version is not supported.
        RunError: the certificate or another file of the kit cannot be used, or a file of the workspace cannot be written.
    """
    check_version()
    check_valid(kit)
    work = workspace.make_workspace(kit, state, pointer)
    main = importlib.import_module(_MAINS[kit.kind])
    monitor = importlib.import_module("nvflare.fuel.f3.mpm").MainProcessMonitor
    uid = [f"uid={kit.name}"] if kit.kind == "site" else []
    heartbeat = f"heart_beat_interval={workspace.HEARTBEAT}"
    settings = ["secure_train=true", "org=fedmutual", "config_folder=config", heartbeat, *uid]
    arguments = argparse.Namespace(
        workspace=str(work),
        fed_server="fed_server.json",
        fed_client="fed_client.json",
        local_rank=0,
        set=settings,
    )
    os.environ |= _SETTINGS | make_grpc_variables(kit.hosts[0], kit.port)
    leave_working_folders(state)  # before FLARE makes `work` the working folder
    code: int = monitor.run(main_func=_stop_on_interrupt(main.main, end), run_dir=str(work), args=arguments)
    return code


def _stop_on_interrupt(main: Callable[..., Any], end: Callable[[KeyboardInterrupt], int]) -> Callable[..., Any]:
    """Return FLARE's main function with an end after an interrupt: FLARE alone would leave its threads running."""

    def run_until_interrupt(args: argparse.Namespace) -> Any:
        try:
            return main(args)
        except KeyboardInterrupt as interrupt:
            return end(interrupt)

    return run_until_interrupt


def check_kind(kit: Kit, kind: str) -> Kit:
    """Return the kit, which must be of this kind. kind: a key of `kits.KIT_KINDS`.

    Raises:
        ConfigError: the kit is of another kind.
    """
    if kit.kind != kind:
        raise ConfigError(f"{kit.folder}: is the kit of {kit.name!r}, a {kit.kind}'s; name a {kind}'s kit")
    return kit
