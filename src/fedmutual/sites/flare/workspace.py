"""FLARE's workspace in the state folder: the keys of the kit and hardened settings, written again at each start."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmutual.files import read_json_object, write_json
from fedmutual.sites.flare import leftovers
from fedmutual.sites.flare.kits import KIT_ADVICE, Kit
from fedmutual.sites.schema import WORK_FOLDER

FOLDER = WORK_FOLDER  # below the state folder
POINTER = "fedmutual.json"  # facts on this host for fedmutual's classes in FLARE's processes
LONGEST_MESSAGE = "longest"
_OURS = "fedmutual.sites.flare"
ALLOWED = {
    "server": f"{_OURS}.controller.Rounds",
    "site": f"{_OURS}.executor.SiteExecutor",
}  # the only class that a job may name there
TASK, READY, BODY = "do", "ready", "body"  # names of tasks, and of the content of FLARE's messages
HEARTBEAT, GONE = 5, 60  # seconds between heartbeats; seconds without a heartbeat until a participant is disconnected
LOST = 20  # seconds without a byte until a site repeats a request; FLARE's default is 5 minutes
_IMPL = "nvflare.app_common"


def make_workspace(kit: Kit, state: Path, pointer: Mapping[str, Any]) -> Path:
    """Write FLARE's workspace for the kit of a server or of a site, and return its folder.

    pointer: facts that FLARE's processes read by `read_pointer`; key LONGEST_MESSAGE: bytes of the longest message.

    Raises:
        RunError: a file of FLARE in the kit is damaged, or a file cannot be written.
    """
    work = state / FOLDER
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)  # before any model, ledger or key is written: no other user may read them
    leftovers.remove_folders(work)  # of jobs of an earlier process
    for part in ("startup", "local"):
        shutil.rmtree(work / part, ignore_errors=True)
    shutil.copytree(kit.startup, work / "startup")
    local = work / "local"
    local.mkdir(parents=True)
    write_json(local / "resources.json", make_server_resources(work) if kit.kind == "server" else _make_site_resources(work))
    write_json(local / "authorization.json", _RIGHTS)
    write_json(local / "log_config.json", _LOGS)
    write_json(local / "comm_config.json", _make_communication(pointer.get(LONGEST_MESSAGE, 0)))
    write_json(local / POINTER, {"format": 1, **pointer})
    (work / "transfer").mkdir(exist_ok=True)
    _harden(kit, work / "startup")
    for path in (work, *work.rglob("*")):
        if path.is_dir() or path.parent.name in ("startup", "local"):
            path.chmod(0o700 if path.is_dir() else 0o600)
    return work


def read_pointer(work: Path) -> dict[str, Any]:
    """Return the content of the file that `make_workspace` wrote into FLARE's working folder."""
    pointer: dict[str, Any] = json.loads((work / "local" / POINTER).read_text(encoding="utf-8"))
    return pointer


def _harden(kit: Kit, startup: Path) -> None:
    """Require signed jobs, whatever the kit says. startup: the copy of the kit's folder that FLARE reads."""
    for name in ("fed_server.json", "fed_client.json"):
        if (startup / name).exists():
            settings = read_json_object(kit.startup / name, KIT_ADVICE)
            (startup / name).write_text(json.dumps({**settings, "require_signed_jobs": True}, indent=1))


# Only these rights are granted, and only to leads: no shells, no code in jobs, none of FLARE's other commands.
_RIGHTS: dict[str, Any] = {
    "format": 1,  # of fedmutual
    "format_version": "1.0",
    "permissions": {"lead": {"submit_job": "any", "get_job_meta": "any"}},
}

_PING = 10_000  # ms without a byte until a ping, and ms without an answer to the ping until the connection is closed
_MOST = 2**31 - 2**21  # bytes of the longest gRPC message that FLARE can send
_LEAST = 2**26  # bytes of the longest message of FLARE itself: a job, a command, a piece of a longer message
_OVERHEAD = 2**21  # bytes that FLARE's headers and encryption add to a message


def _make_communication(longest: int) -> dict[str, Any]:
    """Return the settings of connections. longest: bytes of the longest message; a longer message is refused.

    FLARE sends orders and answers in pieces, and refuses them by the length that the first piece states. A message between
    sites is one gRPC message, which the server refuses by its length.
    """
    most = max(longest + _OVERHEAD, _LEAST)
    return {
        "format": 1,
        "streaming_max_blob_size": most,
        "grpc": {  # a broken connection is detected within 20 s, and opened again
            "max_workers": 100,
            "options": [
                ["grpc.max_send_message_length", min(most, _MOST)],
                ["grpc.max_receive_message_length", min(most, _MOST)],
                ["grpc.keepalive_time_ms", _PING],
                ["grpc.keepalive_timeout_ms", _PING],
                ["grpc.http2.ping_timeout_ms", _PING],
                ["grpc.keepalive_permit_without_calls", 1],
                ["grpc.http2.max_pings_without_data", 0],
                [
                    "grpc.http2.min_ping_interval_without_data_ms",
                    _PING // 2,
                ],  # the server would treat more pings as an attack
            ],
        },
    }


_LOGS: dict[str, Any] = {
    "format": 1,
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "plain": {
            "()": "nvflare.fuel.utils.log_utils.BaseFormatter",
            "fmt": "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s",
        }
    },
    "handlers": {
        name: {
            "class": "logging.handlers.RotatingFileHandler",
            "level": level,
            "formatter": "plain",
            "filename": file,
            "mode": "a",
            "maxBytes": 20_971_520,
            "backupCount": 3,
        }
        for name, level, file in (("file", "INFO", "log.txt"), ("errors", "ERROR", "error_log.txt"))
    },
    "loggers": {"root": {"level": "INFO", "handlers": ["file", "errors"]}},
}


def _make_common_resources(kind: str) -> dict[str, Any]:
    return {
        "format": 1,
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [ALLOWED[kind]],
        "allow_log_streaming": False,
    }


def _make_site_resources(work: Path) -> dict[str, Any]:
    """Return the resources of a site: no log is sent, and the site starts only processes of jobs."""
    managers, consumers = f"{_IMPL}.resource_managers", f"{_IMPL}.resource_consumers"
    no_gpus = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}
    return _make_common_resources("site") | {
        "client": {"retry_timeout": 30, "communication_timeout": LOST, "compression": "Gzip"},
        "components": [
            _make_component("resource_manager", f"{managers}.gpu_resource_manager.GPUResourceManager", no_gpus),
            _make_component("resource_consumer", f"{consumers}.gpu_resource_consumer.GPUResourceConsumer"),
            _make_component("process_launcher", f"{_OURS}.components.SiteLauncher"),
            _make_component("connection_notice", f"{_OURS}.components.ConnectionNotice"),
            _make_component("sweeper", f"{_OURS}.components.Sweeper", {"work": str(work)}),
            _make_component("access_control", f"{_OURS}.access_control.AccessControl", {"work": str(work)}),
        ],
    }


def make_server_resources(work: Path) -> dict[str, Any]:
    """Return the resources of the server: jobs are stored in the state folder, and failed jobs are restarted."""
    storage = f"{_IMPL}.storages.filesystem_storage.FilesystemStorage"
    snapshots = {"root_dir": str(work / "snapshots"), "uri_root": "/"}
    # integers: FLARE multiplies the interval by 2 to the power of the tries, and a float overflows after 1,024 tries
    scheduling = {"max_jobs": 1, "min_schedule_interval": 1, "max_schedule_interval": 5, "max_schedule_count": 10**6}
    return _make_common_resources("server") | {
        "servers": [
            {"admin_storage": "transfer", "max_num_clients": 100, "heart_beat_timeout": GONE, "admin_timeout": 10.0}
        ],
        "snapshot_persistor": {
            "path": f"{_IMPL}.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {"uri_root": "/", "storage": {"path": storage, "args": snapshots}},
        },
        "components": [
            _make_component("job_scheduler", f"{_IMPL}.job_schedulers.job_scheduler.DefaultJobScheduler", scheduling),
            _make_component(
                "job_manager",
                "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                {"uri_root": str(work / "jobs"), "job_store_id": "job_store"},
            ),
            _make_component("job_store", storage),
            _make_component("process_launcher", f"{_OURS}.components.ServerLauncher"),
            _make_component("watch", f"{_OURS}.watch.Watch"),
            _make_component("access_control", f"{_OURS}.access_control.AccessControl", {"work": str(work)}),
        ],
    }


def _make_component(id: str, path: str, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"id": id, "path": path, "args": dict(args or {})}
