"""Resume a run: check the saved files in its folder, and restore clients and logs to the last saved round."""

import hashlib
from pathlib import Path

from fedmutual.core import Message
from fedmutual.engines.base import Engine
from fedmutual.engines.client_store import remove_abandoned_files
from fedmutual.errors import RunError
from fedmutual.federation.experiment import Experiment
from fedmutual.rundir import best as bests
from fedmutual.rundir.checkpoint import Saved, load_client, make_file_name, read_checkpoint, read_state, remove_other_states
from fedmutual.rundir.file_names import LEDGER, METRICS
from fedmutual.rundir.logs import is_scored_on_resume, rewind
from fedmutual.tensor_files import read_tensors


def check_saved(folder: Path, experiment: Experiment) -> None:
    """Raise RunError if a file that a resumed run needs is missing or damaged. Remove an incomplete last line of a log."""
    saved, homes = read_checkpoint(folder), [folder / "clients" / i for i in experiment.clients]
    for log in (folder / LEDGER, folder / METRICS, *(home / METRICS for home in homes)):
        rewind(log, lambda round: True)
    if experiment.config.records.keep_best:
        bests.check_best_files(folder)
    if saved is not None:
        for weights_folder in (folder / "server", *homes):
            read_tensors(weights_folder / make_file_name(saved.round), ())


def restore_run(experiment: Experiment, engine: Engine, folder: Path, name: str) -> tuple[Message, Saved | None]:
    """Restore clients and logs to the last saved round; return the server's state and the saved round.

    Nothing saved: the server's first state, and None. name: the identity of the run, which its checkpoint must have.

    Raises:
        RunError: the checkpoint belongs to another run.
    """
    saved = read_checkpoint(folder)
    remove_other_states(folder, saved.round if saved else None)
    remove_abandoned_files(folder)
    last, due, rounds = saved.round if saved else None, experiment.config.records.evaluate_every, experiment.config.rounds
    homes = {i: folder / "clients" / i for i in experiment.clients}
    for log in (folder / METRICS, *(home / METRICS for home in homes.values())):
        rewind(log, lambda round: is_scored_on_resume(round, last, due, rounds))
    if experiment.config.records.keep_best:
        bests.settle_best_files(folder, last, rounds, due)
    rewind(folder / LEDGER, lambda round: saved is not None and round <= saved.round)
    server = experiment.make_server_state()
    if saved is None:
        return server, None
    if saved.run != name:
        raise RunError(f"{folder}: its checkpoint belongs to another run; choose another folder with --out")
    file = make_file_name(saved.round)
    for _ in engine.run_each(load_client, {i: (home / file, name, saved.round) for i, home in homes.items()}):
        pass
    return read_state(folder / "server" / file, name, saved.round, server), saved


def fingerprint_experiment(experiment: Experiment) -> str:
    """Return the fingerprint of the data, and of the model of another run with which the server starts."""
    data: str = experiment.data.partition["fingerprint"]
    if experiment.nets.begun is None:
        return data
    tensors = sorted(experiment.nets.begun.items())
    return data + hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for _, v in tensors)).hexdigest()
