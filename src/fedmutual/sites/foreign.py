"""A federation on the network of another framework, which only carries orders and answers: what both adapters share.

Server and sites are those of `fedmutual server` and `fedmutual site`, with their journals, ledgers and contracts. What these
protect against participants is as strong as the network: whoever may start programs in it can run code on every host.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w
import torch

from fedmutual.algorithms.peers import is_peer_to_peer
from fedmutual.errors import ConfigError, RunError
from fedmutual.files import write_bytes
from fedmutual.rundir.checkpoint import read_checkpoint
from fedmutual.sites.contract import Contract, accept_contract, check_rounds, read_contract, read_submitted_contract
from fedmutual.sites.coordinator import Coordinator, find_longest_message
from fedmutual.sites.flare.kits import FEDERATION
from fedmutual.sites.modules import ListedModules
from fedmutual.sites.private_values import Say
from fedmutual.sites.protocol import TooFew, Transport
from fedmutual.sites.site_settings import SiteSettings, read_site_file
from fedmutual.user_code import plugins

FOLDER = "FEDMUTUAL_SITES"  # an environment variable, so that the operator of a host sets it, and not the lead
FLOWER = "fedmutual.sites.flower"  # the module of the ServerApp and the ClientApp


def read_foreign_contracts(file: Path) -> list[Contract]:
    """Read FEDERATION.toml and return the contracts of its runs, in sequence.

    Raises ConfigError as `read_submitted_contract`, or where such a network cannot carry out the federation.
    """
    with plugins.use_rule(_make_rule(file.parent)):
        contract = read_submitted_contract(file)
        find_longest_message(contract)  # builds the shared network, which may be of a user's module
    method, fix = f"algorithm {contract.config.algorithm['name']!r}", "use `fedmutual server` and `fedmutual site`"
    if contract.is_masked:
        raise ConfigError(
            f"{file}: server.sum = 'masked' needs the keys of fedmutual's kits, which no other network has; {fix}"
        )
    if is_peer_to_peer(contract.algorithm):
        raise ConfigError(f"{file}: {method} sends messages between sites, which other networks do not carry; {fix}")
    return contract.list_runs()


def write_flower_app(contract: Contract, folder: Path) -> Path:
    """Write the app that `flwr run` starts below `folder`, and return its folder: one pyproject.toml, and no code.

    Raises RunError where the file cannot be written.
    """
    app = {
        "publisher": "fedmutual",
        "components": {"serverapp": f"{FLOWER}:server", "clientapp": f"{FLOWER}:client"},
        "config": {"contract": json.dumps(contract.record())},
    }
    about = {"name": contract.name, "version": contract.version, "license": "Apache-2.0", "dependencies": []}
    tables = {"project": {**about, "description": "A federation of fedmutual"}, "tool": {"flwr": {"app": app}}}
    write_bytes(folder / contract.name / "pyproject.toml", tomli_w.dumps(tables).encode())
    return folder / contract.name


def _make_rule(folder: Path) -> ListedModules:
    """Return the rule of a server in such a network: no module of a user, because nothing checks who changed it."""
    fix = "run the federation with `fedmutual server`, which asks its operator for each module"
    return ListedModules((), (folder,), lambda name: fix)


def find_folder() -> Path:
    """Return the folder of this host with the agreed FEDERATION.toml. Raises ConfigError where it is not set."""
    folder = os.environ.get(FOLDER)
    if not folder:
        raise ConfigError(
            f"set the environment variable {FOLDER} of this host's process to the folder with {FEDERATION}, the contract "
            "that its operator agreed to, and at a site SITE.toml, the site's file"
        )
    return Path(folder).resolve()


def open_site(name: str, text: object) -> tuple[SiteSettings, Contract]:
    """Return the settings of a site and the contract of a job, to which the operator of this host agreed.

    text: the contract as JSON. Raises UserError where a file is missing or wrong, or the contract is another one.
    """
    settings = read_site_file(find_folder() / f"{name}.toml")
    if settings.file.site != name:
        raise ConfigError(f"{settings.source}: it is the file of {settings.file.site!r}, and this site is {name!r}")
    plugins.set_rule(settings.code)
    agreed = read_contract(settings.source.parent / FEDERATION)
    contract = accept_contract(text, [agreed.record()])
    check_rounds(contract.config.rounds, agreed.config.rounds, settings.file.limits)
    torch.set_num_threads(settings.file.engine.threads)
    return settings, contract


def run_server(text: object, transport: Transport, say: Say, pause: Callable[[], None] = lambda: None) -> Path:
    """Run the remaining rounds, and return the run folder, `server/NAME` in the folder of this host.

    text: the contract as JSON. say: takes lines for the operator. pause: as for `Coordinator.run`. Raises UserError where
    the contract is not the agreed one or as `Coordinator.run`; RunError where too few sites answer, again and again.
    """
    folder = find_folder()
    plugins.set_rule(_make_rule(folder))
    contract = accept_contract(text, [read_contract(folder / FEDERATION).record()], "this server")
    run, sites = folder / "server" / contract.name, contract.sites
    torch.set_num_threads(1)
    for _ in range(sites.retries + 1):
        saved, until = read_checkpoint(run), time.monotonic() + sites.wait
        awaited = {i for i in sites.names if sites.takes_part(i, saved.round if saved else 0)}
        while (missing := awaited - set(transport.list_connected())) and time.monotonic() < until:
            time.sleep(0.5)
        if missing:
            say(f"begins without {', '.join(sorted(missing))}, which may join later")
        try:
            Coordinator(contract, run).run(transport, [], pause)
            return run
        except TooFew as problem:
            say(f"{problem}; the round begins again")
    raise RunError(f"{run}: too few sites answered {sites.retries + 1} times; start the job again, and it continues")
