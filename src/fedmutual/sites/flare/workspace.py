"""The process of a server or of a site, and FLARE's workspace in its state folder: keys, hardened settings, jobs."""

import argparse
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedmutual.files import FORMAT, read_json_object, write_json
from fedmutual.sites.flare.doctor import make_grpc_variables
from fedmutual.sites.flare.kits import KINDS, KIT_ADVICE, Kit, check_valid, check_version
from fedmutual.sites.modules import leave_working_folders
from fedmutual.sites.schema import WORK_FOLDER

POINTER = "fedmutual.json"  # facts on this host for fedmutual's classes in FLARE's processes
LONGEST_MESSAGE = "longest"
JOB = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # the id of a job in FLARE
LAST_LOG = "job_log.txt"  # the log of the job that was removed last
_OURS, _IMPL = "fedmutual.sites.flare", "nvflare.app_common"
ALLOWED = {  # the only class that a job may name there
    "server": f"{_OURS}.controller.Rounds",
    "site": f"{_OURS}.executor.SiteExecutor",
}
STOCK = {  # the same in a FLARE network of somebody else's
    "server": f"{_OURS}.stock.StockRounds",
    "site": f"{_OURS}.stock.StockSite",
}
BODY, CLOCK = "body", "time"  # the content of FLARE's messages; the server's clock, seconds since the epoch
HEARTBEAT, GONE = 5, 60  # seconds between heartbeats; seconds without a heartbeat until a participant is disconnected
_LOST = 20  # seconds without a byte until a site repeats a request; FLARE's default is 5 minutes
_ENVIRONMENT = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",  # instead of 15 minutes for the last answer of a site that died
    "GRPC_VERBOSITY": "NONE",  # lines for developers of gRPC
}


def run_process(kit: Kit, state: Path, pointer: Mapping[str, Any], end: Callable[[KeyboardInterrupt], int]) -> int:
    """Run the process of a server or of a site, and return its exit code. If FLARE's threads do not end, exit here.

    pointer: facts on this host for fedmutual's classes in FLARE's processes. end: is called after an interrupt; prints a
    line and returns the exit code. Raises ConfigError as `check_version`; RunError as `check_valid` and `make_workspace`.
    """
    check_version()
    check_valid(kit)
    work = make_workspace(kit, state, pointer)
    main = importlib.import_module(KINDS[kit.kind].process).main
    monitor = importlib.import_module("nvflare.fuel.f3.mpm").MainProcessMonitor
    settings = ["secure_train=true", "org=fedmutual", "config_folder=config", f"heart_beat_interval={HEARTBEAT}"]
    arguments = argparse.Namespace(
        workspace=str(work),
        fed_server="fed_server.json",
        fed_client="fed_client.json",
        local_rank=0,
        set=[*settings, f"uid={kit.name}"] if kit.kind == "site" else settings,
    )
    os.environ |= _ENVIRONMENT | make_grpc_variables(kit.hosts[0], kit.port)
    leave_working_folders(state)  # before FLARE makes `work` the working folder

    def run_until_interrupt(args: argparse.Namespace) -> Any:  # FLARE alone would leave its threads running
        try:
            return main(args)
        except KeyboardInterrupt as interrupt:
            if kit.kind == "site":
                importlib.import_module(f"{_OURS}.executor").sign_out(work)
            return end(interrupt)

    code: int = monitor.run(main_func=run_until_interrupt, run_dir=str(work), args=arguments)
    return code


def make_workspace(kit: Kit, state: Path, pointer: Mapping[str, Any]) -> Path:
    """Write FLARE's workspace for the kit of a server or of a site, and return its folder.

    pointer: facts that FLARE's processes read by `read_pointer`; key LONGEST_MESSAGE: bytes of the longest message. Raises
    RunError where a file of FLARE in the kit is damaged, or a file cannot be written.
    """
    work = state / WORK_FOLDER
    local = work / "local"
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)  # before any model, ledger or key is written: no other user may read them
    remove_job_folders(work)  # of jobs of an earlier process
    for part in ("startup", "local"):
        shutil.rmtree(work / part, ignore_errors=True)
    shutil.copytree(kit.startup, work / "startup")
    for name, content in {
        "resources.json": make_server_resources(work) if kit.kind == "server" else _make_site_resources(work),
        "authorization.json": _RIGHTS,
        "log_config.json": _LOGS,
        "comm_config.json": _make_communication(pointer.get(LONGEST_MESSAGE, 0)),
        POINTER: pointer,
    }.items():
        write_json(local / name, {"format": FORMAT, **content})
    for name in ("fed_server.json", "fed_client.json"):  # require signed jobs, whatever the kit says
        if (work / "startup" / name).exists():
            settings = read_json_object(kit.startup / name, KIT_ADVICE)
            (work / "startup" / name).write_text(json.dumps({**settings, "require_signed_jobs": True}, indent=1))
    (work / "transfer").mkdir(exist_ok=True)
    for path in (work, *work.rglob("*")):
        if path.is_dir() or path.parent.name in ("startup", "local"):
            path.chmod(0o700 if path.is_dir() else 0o600)
    return work


def read_pointer(work: Path) -> dict[str, Any]:
    """Return the content of the file that `make_workspace` wrote into FLARE's working folder."""
    pointer: dict[str, Any] = json.loads((work / "local" / POINTER).read_text(encoding="utf-8"))
    return pointer


def remove_job_folders(work: Path, unfinished: Collection[str] = ()) -> None:
    """Remove the folders of finished jobs in a workspace. unfinished: the ids of the other jobs."""
    for folder in [*work.iterdir()] if work.is_dir() else ():
        if folder.name not in unfinished:
            remove_job_folder(work, folder.name)


def remove_job_folder(work: Path, job: str) -> None:
    """Remove the folder of a job, but its log. job: the id; a name that is not an id of a job is ignored."""
    if JOB.fullmatch(job):
        with suppress(OSError):
            os.replace(work / job / "log.txt", work / LAST_LOG)
        shutil.rmtree(work / job, ignore_errors=True)


# Only these rights are granted, and only to leads: no shells, no code in jobs, none of FLARE's other commands.
_RIGHTS = {"format_version": "1.0", "permissions": {"lead": {"submit_job": "any", "get_job_meta": "any"}}}
_PING = 10_000  # ms without a byte until a ping, and ms without an answer to the ping until the connection is closed
_MOST = 2**31 - 2**21  # bytes of the longest gRPC message that FLARE can send
_LEAST = 2**26  # bytes of the longest message of FLARE itself: a job, a command, a piece of a longer message
_OVERHEAD = 2**21  # bytes that FLARE's headers and encryption add to a message


def _make_communication(longest: int) -> dict[str, Any]:
    """Return the settings of connections. longest: bytes of the longest message; a longer message is refused.

    FLARE sends orders and answers in pieces, and refuses them by the length that the first piece states. A message between
    sites is one gRPC message, which the server refuses by its length. A broken connection is detected within 20 s.
    """
    most = max(longest + _OVERHEAD, _LEAST)
    options = {
        "max_send_message_length": min(most, _MOST),
        "max_receive_message_length": min(most, _MOST),
        "keepalive_time_ms": _PING,
        "keepalive_timeout_ms": _PING,
        "http2.ping_timeout_ms": _PING,
        "keepalive_permit_without_calls": 1,
        "http2.max_pings_without_data": 0,
        "http2.min_ping_interval_without_data_ms": _PING // 2,  # the server would treat more pings as an attack
    }
    grpc = {"max_workers": 100, "options": [[f"grpc.{name}", value] for name, value in options.items()]}
    return {"streaming_max_blob_size": most, "grpc": grpc}


_LINE = "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s"
_ROTATED = {"class": "logging.handlers.RotatingFileHandler", "formatter": "plain", "maxBytes": 20_971_520, "backupCount": 3}
_LOGS = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"()": "nvflare.fuel.utils.log_utils.BaseFormatter", "fmt": _LINE}},
    "handlers": {
        "file": {**_ROTATED, "level": "INFO", "filename": "log.txt"},
        "errors": {**_ROTATED, "level": "ERROR", "filename": "error_log.txt"},
    },
    "loggers": {"root": {"level": "INFO", "handlers": ["file", "errors"]}},
}


def _make_resources(kind: str, components: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the resources of a process. components: id -> (class, arguments)."""
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [ALLOWED[kind]],
        "allow_log_streaming": False,
        "components": [{"id": id, "path": path, "args": args} for id, (path, args) in components.items()],
    }


def _make_site_resources(work: Path) -> dict[str, Any]:
    """Return the resources of a site: no log is sent, and the site starts only processes of jobs."""
    no_gpus = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}
    components: dict[str, tuple[str, dict[str, Any]]] = {
        "resource_manager": (f"{_IMPL}.resource_managers.gpu_resource_manager.GPUResourceManager", no_gpus),
        "resource_consumer": (f"{_IMPL}.resource_consumers.gpu_resource_consumer.GPUResourceConsumer", {}),
        "process_launcher": (f"{_IMPL}.job_launcher.client_process_launcher.ClientProcessJobLauncher", {}),
        "site_events": (f"{_OURS}.executor.SiteEvents", {"work": str(work)}),
        "access_control": (f"{_OURS}.access_control.AccessControl", {"work": str(work)}),
    }
    client = {"retry_timeout": 30, "communication_timeout": _LOST, "compression": "Gzip"}
    return _make_resources("site", components) | {"client": client}


def make_server_resources(work: Path) -> dict[str, Any]:
    """Return the resources of the server: jobs are stored in the state folder, and failed jobs are restarted."""
    storage = f"{_IMPL}.storages.filesystem_storage.FilesystemStorage"
    snapshots = {"path": storage, "args": {"root_dir": str(work / "snapshots"), "uri_root": "/"}}
    # integers: FLARE multiplies the interval by 2 to the power of the tries, and a float overflows after 1,024 tries
    scheduling = {"max_jobs": 1, "min_schedule_interval": 1, "max_schedule_interval": 5, "max_schedule_count": 10**6}
    jobs = {"uri_root": str(work / "jobs"), "job_store_id": "job_store"}
    components: dict[str, tuple[str, dict[str, Any]]] = {
        "job_scheduler": (f"{_IMPL}.job_schedulers.job_scheduler.DefaultJobScheduler", scheduling),
        "job_manager": ("nvflare.apis.impl.job_def_manager.SimpleJobDefManager", jobs),
        "job_store": (storage, {}),
        "process_launcher": (f"{_IMPL}.job_launcher.server_process_launcher.ServerProcessJobLauncher", {}),
        "watch": (f"{_OURS}.watch.Watch", {}),
        "access_control": (f"{_OURS}.access_control.AccessControl", {"work": str(work)}),
    }
    server = {"admin_storage": "transfer", "max_num_clients": 100, "heart_beat_timeout": GONE, "admin_timeout": 10.0}
    persistor = f"{_IMPL}.state_persistors.storage_state_persistor.StorageStatePersistor"
    return _make_resources("server", components) | {
        "servers": [server],
        "snapshot_persistor": {"path": persistor, "args": {"uri_root": "/", "storage": snapshots}},
    }
