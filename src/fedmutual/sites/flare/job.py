"""A federation as a FLARE job: three JSON files that name our classes, and no code."""

import json
from pathlib import Path
from typing import Any

from fedmutual.sites.contract import Contract

APP = "app"
META, SERVER, SITE = "meta.json", "config_fed_server.json", "config_fed_client.json"
_OURS = "fedmutual.sites.flare"


def write_job(contract: Contract, folder: Path) -> Path:
    """The job's folder, made in `folder`."""
    job, text = folder / contract.name, json.dumps(contract.record())
    config = job / APP / "config"
    config.mkdir(parents=True)
    meta = meta_file(contract.name, contract.sites.least, contract.sites.names)
    for path, content in ((job / META, meta), (config / SERVER, server_file(text)), (config / SITE, site_file(text))):
        path.write_bytes(format_json(content))
    return job


def format_json(content: dict[str, Any]) -> bytes:
    """A file of the job."""
    return json.dumps(content, indent=1).encode()


def meta_file(name: str, quorum: int, sites: tuple[str, ...]) -> dict[str, Any]:
    """Where the job's app goes, and how many sites must have it."""
    return {
        "name": name,
        "resource_spec": {},
        "min_clients": quorum,
        "deploy_map": {APP: ["server", *sites]},
    }


def server_file(contract: str) -> dict[str, Any]:
    """What runs in the job's process at the server. contract: its record as JSON text."""
    return {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": 0.01},
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "rounds", "path": f"{_OURS}.controller.Rounds", "args": {"contract": contract}}],
    }


def site_file(contract: str) -> dict[str, Any]:
    """What runs in the job's process at a site."""
    executor = {"path": f"{_OURS}.executor.Site", "args": {"contract": contract}}
    return {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "task_result_filters": [],
        "task_data_filters": [],
        "components": [],
    }
