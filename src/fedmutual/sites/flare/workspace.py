"""The folder that FLARE works in, in the state folder: the kit's keys and hardened settings, made anew at each start."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmutual.files import write_json
from fedmutual.sites.flare import leftovers
from fedmutual.sites.flare.kits import Kit
from fedmutual.sites.schema import WORK_FOLDER

FOLDER = WORK_FOLDER  # below the state folder
POINTER = "fedmutual.json"  # what our classes, which run in FLARE's processes, are told of this host
LONGEST = "longest"
_OURS = "fedmutual.sites.flare"
ALLOWED = {
    "server": f"{_OURS}.controller.Rounds",
    "site": f"{_OURS}.executor.Site",
}  # the one class that a job may name there
HEARTBEAT, GONE = 5, 60  # seconds between signs of life, and without any until a participant counts as gone
LOST = 20  # seconds without a byte until a site takes a request for lost, and asks again; FLARE's own is 5 minutes
_IMPL = "nvflare.app_common"


def make_workspace(kit: Kit, state: Path, told: Mapping[str, Any]) -> Path:
    """FLARE's workspace of a server's or a site's kit.

    told: what its processes read from `pointer`; LONGEST of it: bytes of the longest message of the federations of this kit.
    """
    work = state / FOLDER
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)  # models, ledgers and keys are nobody else's on this host, from before they lie there
    leftovers.remove_folders(work)  # of jobs that a process which is no more had begun
    for part in ("startup", "local"):
        shutil.rmtree(work / part, ignore_errors=True)
    shutil.copytree(kit.startup, work / "startup")
    local = work / "local"
    local.mkdir(parents=True)
    write_json(local / "resources.json", _server(work) if kit.kind == "server" else _site(work))
    write_json(local / "authorization.json", _RIGHTS)
    write_json(local / "log_config.json", _LOGS)
    write_json(local / "comm_config.json", _communication(told.get(LONGEST, 0)))
    write_json(local / POINTER, {"format": 1, **told})
    (work / "transfer").mkdir(exist_ok=True)
    _harden(work / "startup")
    for path in (work, *work.rglob("*")):
        if path.is_dir() or path.parent.name in ("startup", "local"):
            path.chmod(0o700 if path.is_dir() else 0o600)
    return work


def read_pointer(work: Path) -> dict[str, Any]:
    """What was told."""
    found: dict[str, Any] = json.loads((work / "local" / POINTER).read_text(encoding="utf-8"))
    return found


def _harden(startup: Path) -> None:
    """Only signed jobs, whatever the kit says."""
    for name in ("fed_server.json", "fed_client.json"):
        if (startup / name).exists():
            found = json.loads((startup / name).read_text(encoding="utf-8"))
            (startup / name).write_text(json.dumps({**found, "require_signed_jobs": True}, indent=1))


_RIGHTS: dict[
    str, Any
] = {  # what is not listed is refused: shells, code in jobs, FLARE's own commands; to all other roles, too
    "format": 1,  # ours
    "format_version": "1.0",
    "permissions": {"lead": {"submit_job": "any", "get_job_meta": "any"}},
}

_PING = 10_000  # ms without a byte until an end of a connection asks whether the other is there, and until it is not
_MOST = 2**31 - 2**21  # bytes of a message of gRPC that FLARE can send at all
_LEAST = 2**26  # bytes that FLARE's own messages have at most: a job, a command, a piece of a longer message
_WRAPPED = 2**21  # bytes of FLARE's headers and seal around a message of ours


def _communication(longest: int) -> dict[str, Any]:
    """How processes speak to each other. Nobody takes a message that is longer than any that the federation can have.

    FLARE sends orders and answers in pieces, and refuses by the length that the first one states; a letter is one message of
    gRPC, which the server refuses to its sender.
    """
    most = max(longest + _WRAPPED, _LEAST)
    return {
        "format": 1,
        "streaming_max_blob_size": most,
        "grpc": {  # a connection that died without a word is found dead in 20 s, and opened anew
            "max_workers": 100,
            "options": [
                ["grpc.max_send_message_length", min(most, _MOST)],
                ["grpc.max_receive_message_length", min(most, _MOST)],
                ["grpc.keepalive_time_ms", _PING],
                ["grpc.keepalive_timeout_ms", _PING],
                ["grpc.http2.ping_timeout_ms", _PING],
                ["grpc.keepalive_permit_without_calls", 1],
                ["grpc.http2.max_pings_without_data", 0],
                ["grpc.http2.min_ping_interval_without_data_ms", _PING // 2],  # the server would take more for an attack
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


def _common(kind: str) -> dict[str, Any]:
    return {
        "format": 1,
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [ALLOWED[kind]],
        "allow_log_streaming": False,
    }


def _site(work: Path) -> dict[str, Any]:
    """A site's resources: no log leaves it, and a job's process is the only thing that it starts."""
    managers, consumers = f"{_IMPL}.resource_managers", f"{_IMPL}.resource_consumers"
    none = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}
    return _common("site") | {
        "client": {"retry_timeout": 30, "communication_timeout": LOST, "compression": "Gzip"},
        "components": [
            _component("resource_manager", f"{managers}.gpu_resource_manager.GPUResourceManager", none),
            _component("resource_consumer", f"{consumers}.gpu_resource_consumer.GPUResourceConsumer"),
            _component("process_launcher", f"{_OURS}.launcher.SiteLauncher"),
            _component("lookout", f"{_OURS}.console.Lookout"),
            _component("sweeper", f"{_OURS}.sweeper.Sweeper", {"work": str(work)}),
            _component("door", f"{_OURS}.access_control.Door", {"work": str(work)}),
        ],
    }


def _server(work: Path) -> dict[str, Any]:
    """The server's: its jobs stay in the state folder, and a job that dies is begun again."""
    storage = f"{_IMPL}.storages.filesystem_storage.FilesystemStorage"
    kept = {"root_dir": str(work / "snapshots"), "uri_root": "/"}
    # whole numbers: FLARE takes 2 to the power of the tries times the first, and a float would overflow after 1,024
    scheduling = {"max_jobs": 1, "min_schedule_interval": 1, "max_schedule_interval": 5, "max_schedule_count": 10**6}
    return _common("server") | {
        "servers": [
            {"admin_storage": "transfer", "max_num_clients": 100, "heart_beat_timeout": GONE, "admin_timeout": 10.0}
        ],
        "snapshot_persistor": {
            "path": f"{_IMPL}.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {"uri_root": "/", "storage": {"path": storage, "args": kept}},
        },
        "components": [
            _component("job_scheduler", f"{_IMPL}.job_schedulers.job_scheduler.DefaultJobScheduler", scheduling),
            _component(
                "job_manager",
                "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                {"uri_root": str(work / "jobs"), "job_store_id": "job_store"},
            ),
            _component("job_store", storage),
            _component("process_launcher", f"{_OURS}.launcher.ServerLauncher"),
            _component("watch", f"{_OURS}.watch.Watch"),
            _component("door", f"{_OURS}.access_control.Door", {"work": str(work)}),
        ],
    }


def _component(id: str, path: str, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"id": id, "path": path, "args": dict(args or {})}
