"""The FLARE job of a federation: three JSON files that name classes of fedmutual. A job holds no code."""

import json
from pathlib import Path
from typing import Any

from fedmutual.sites.contract import Contract
from fedmutual.sites.flare.workspace import ALLOWED

APP = "app"
META, SERVER, SITE = "meta.json", "config_fed_server.json", "config_fed_client.json"


def write_job(contract: Contract, folder: Path) -> Path:
    """Write the job below `folder`, and return the folder of the job."""
    job, text = folder / contract.name, json.dumps(contract.record())
    config = job / APP / "config"
    config.mkdir(parents=True)
    meta = make_meta(contract.name, contract.sites.least, contract.sites.names)
    for path, content in (
        (job / META, meta),
        (config / SERVER, make_server_config(text)),
        (config / SITE, make_site_config(text)),
    ):
        path.write_bytes(format_json(content))
    return job


def format_json(content: dict[str, Any]) -> bytes:
    """Return the content of a JSON file of a job, as UTF-8 bytes."""
    return json.dumps(content, indent=1).encode()


def make_meta(name: str, quorum: int, sites: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of META: the receivers of the app, and how many sites must receive it."""
    return {
        "name": name,
        "resource_spec": {},
        "min_clients": quorum,
        "deploy_map": {APP: ["server", *sites]},
    }


def make_server_config(contract: str) -> dict[str, Any]:
    """Return the configuration of the job's process at the server. contract: the record as JSON text."""
    return {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": 0.01},
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "rounds", "path": ALLOWED["server"], "args": {"contract": contract}}],
    }


def make_site_config(contract: str) -> dict[str, Any]:
    """Return the configuration of the job's process at a site. contract: the record as JSON text."""
    executor = {"path": ALLOWED["site"], "args": {"contract": contract}}
    return {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "task_result_filters": [],
        "task_data_filters": [],
        "components": [],
    }
