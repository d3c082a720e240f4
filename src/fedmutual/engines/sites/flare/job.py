"""A federation as a FLARE job: three JSON files that name our classes, and no code."""

import json
from pathlib import Path

from fedmutual.engines.sites.contract import Contract

APP = "app"


def write(contract: Contract, folder: Path) -> Path:
    """The job's folder, made in `folder`."""
    job, text = folder / contract.name, json.dumps(contract.record())
    config = job / APP / "config"
    config.mkdir(parents=True)
    meta = {
        "name": contract.name,
        "resource_spec": {},
        "min_clients": contract.quorum,
        "deploy_map": {APP: ["server", *contract.sites.names]},
    }
    server = {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": 0.01},
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [
            {"id": "rounds", "path": "fedmutual.engines.sites.flare.controller.Rounds", "args": {"contract": text}}
        ],
    }
    site = {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {"path": "fedmutual.engines.sites.flare.executor.Site", "args": {"contract": text}},
            }
        ],
        "task_result_filters": [],
        "task_data_filters": [],
        "components": [],
    }
    (job / "meta.json").write_text(json.dumps(meta, indent=1))
    (config / "config_fed_server.json").write_text(json.dumps(server, indent=1))
    (config / "config_fed_client.json").write_text(json.dumps(site, indent=1))
    return job
