"""The one file of this folder that imports what DESIGN.md does not promise to outside checks.

A module that is renamed changes a line here, and no other file of tests/outside.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import typer

LEAKING_ALGORITHM = """
from fedmutual.algorithms import FML


class Leaking(FML):
    def end(self, client, at):
        return super().end(client, at) | {"secret": next(client.nets["personal"].parameters()).detach()}
"""
"""A user's own algorithm (docs/own-algorithm.md) whose reply holds a tensor that was not declared."""


def command_line() -> Any:
    """The command `fedmutual`, in click's form."""
    from fedmutual.cli.app import app, load_reproduce

    command = typer.main.get_command(app)
    command.commands["reproduce"] = typer.main.get_command(load_reproduce())  # of the distribution fedmutual-papers
    return command


def run_sites(file: Path, sites: Mapping[str, Path], server: Path) -> dict[str, Path]:
    """Run a federation of real sites to its end in this process, without a network -> the state folder of each site.

    file: FEDERATION.toml. sites: the site.toml of each. server: the server's folder of this federation.
    """
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.coordinator import Coordinator
    from fedmutual.sites.site_runtime import SiteRuntime
    from fedmutual.sites.site_settings import read_site_file
    from wards import InMemoryTransport

    contract = contracts.read_submitted_contract(file)
    halves = {name: SiteRuntime(contract, read_site_file(path)) for name, path in sites.items()}
    Coordinator(contract, server).run(InMemoryTransport(halves))
    return {name: half.folder for name, half in halves.items()}


def planned_jobs(cell: str, seeds: Iterable[int], rounds: int | None, changed: Mapping[str, Any]) -> Iterator[Any]:
    """What `fedmutual reproduce` plans for a cell of the committed experiments: a job for each run.

    cell: the path of its file under papers/experiments/, without the suffix. rounds: `--rounds`. changed: `--set`.
    """
    from fedmutual_papers.plan import Scale, list_jobs

    for cell_job in _cells()[cell]:
        yield from list_jobs(cell_job, seeds, Scale(rounds, tuple(changed.items())))


def list_lost_results(cell: str, jobs: Mapping[str, Any]) -> list[str]:
    """Return the fingerprints of the committed results of a cell that the store does not find for their job."""
    store = _committed_results()
    return [r.fingerprint for r in store.list_results(cell) if not jobs[r.fingerprint].find_result(store, r.numerics)]


@cache
def _committed_results() -> Any:
    from fedmutual_papers.store import ResultStore

    return ResultStore(experiments_folder() / "results")


@cache
def _cells() -> dict[str, list[Any]]:
    """Path of a cell's file -> the cell as each experiment has it: one may look at the cells of another, with more arms."""
    from committed import read_committed_experiments

    cells: dict[str, list[Any]] = {}
    for experiment in read_committed_experiments().values():
        for cell in experiment.cells:
            cells.setdefault(cell.id, []).append(cell)
    return cells


def experiments_folder() -> Path:
    """The folder of the committed experiments."""
    from fedmutual_papers.experiment_files import find_home

    return find_home()
