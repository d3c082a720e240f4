"""Resume a run: check the saved files in its folder, and restore clients and logs to the last saved round."""

import hashlib
from pathlib import Path

from fedmutual.core import Message
from fedmutual.engines.base import Simulation
from fedmutual.engines.client_store import remove_abandoned_files
from fedmutual.federation.experiment import Experiment
from fedmutual.rundir import best as bests
from fedmutual.rundir.checkpoint import load_client, make_file_name, read_checkpoint, restore_server
from fedmutual.rundir.file_names import LEDGER, METRICS, client_folder, server_folder
from fedmutual.rundir.logs import rewind
from fedmutual.rundir.schema import Saved
from fedmutual.tensor_files import read_tensors


def check_saved(folder: Path, experiment: Experiment) -> None:
    """Raise RunError if a file that a resumed run needs is missing or damaged. Remove an incomplete last line of a log."""
    saved, homes = read_checkpoint(folder), [client_folder(folder, i) for i in experiment.clients]
    for log in (folder / LEDGER, folder / METRICS, *(home / METRICS for home in homes)):
        rewind(log, lambda round: True)
    if experiment.config.records.keep_best:
        bests.check_best_files(folder)
    if saved is not None:
        for state_folder in (server_folder(folder), *homes):
            read_tensors(state_folder / make_file_name(saved.round), ())


def restore_run(experiment: Experiment, engine: Simulation, folder: Path, name: str) -> tuple[Message, Saved | None]:
    """Restore clients and logs to the last saved round; return the server's state and the saved round.

    Nothing saved: the server's first state, and None. name: the identity of the run, which its checkpoint must have.

    Raises:
        RunError: the checkpoint belongs to another run, or a file is missing or damaged.
        WorkerLost: a worker died.
    """
    due, rounds = experiment.config.records.evaluate_every, experiment.config.rounds
    server, saved = restore_server(folder, name, experiment.make_server_state(), rounds, due, experiment.clients)
    remove_abandoned_files(folder)
    if experiment.config.records.keep_best:
        bests.settle_best_files(folder, saved.round if saved else None, rounds, due)
    if saved is None:
        return server, None
    file = make_file_name(saved.round)
    places = {i: (client_folder(folder, i) / file, name, saved.round) for i in experiment.clients}
    for _ in engine.visit(load_client, places):
        pass
    return server, saved


def fingerprint_experiment(experiment: Experiment) -> str:
    """Return the fingerprint of the data, and of the model of another run with which the server starts."""
    data: str = experiment.data.partition["fingerprint"]
    if experiment.nets.begun is None:
        return data
    tensors = sorted(experiment.nets.begun.items())
    return data + hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for _, v in tensors)).hexdigest()
