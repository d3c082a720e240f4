"""Shadow runs: the audited run's configuration, trained on other splits of each client's rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedmutual import data
from fedmutual.core import Client, Diverged, Message
from fedmutual.data.draws import Index
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.loop import federate
from fedmutual.errors import RunError
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.studies.audit.rows import Pool

SEED_STEP = 1_000_003  # between the seeds of shadow runs: not a seed that other runs of the user have


@dataclass(frozen=True)
class Shadow:
    """A trained shadow run: the audited run's configuration, trained on other splits of each client's rows.

    `clients` are its clients after the last round, by id, and `server` is the server's state after the last round.
    """

    experiment: Experiment
    clients: Mapping[str, Client]
    server: Message
    trained: Mapping[str, npt.NDArray[np.bool_]]  # client -> whether the shadow run was trained on each row of its pool


def draw_splits(pools: Sequence[Pool], number: int, rng: np.random.Generator) -> list[dict[str, Index]]:
    """Return, for each shadow run, client -> the sorted positions [members], in the client's pool, of rows to train on.

    The left-out rows are consecutive blocks of one random order. The numbers of times that two rows are left out differ by
    at most one.
    """
    orders = {pool.client: rng.permutation(len(pool.rows)) for pool in pools}
    splits = []
    for k in range(number):
        split = {}
        for pool in pools:
            left_out = len(pool.rows) - pool.members
            split[pool.client] = np.sort(np.roll(orders[pool.client], -k * left_out)[left_out:])
        splits.append(split)
    return splits


def train_shadows(
    experiment: Experiment,
    pools: Sequence[Pool],
    splits: Sequence[Mapping[str, Index]],
    prepared: Mapping[str, data.Prepared],
    report: Callable[[str], None],
) -> Iterator[Shadow]:
    """Yield the trained shadow runs, one after the other, each with a seed of its own.

    Raises:
        RunError: a shadow run diverges.
    """
    for number, split in enumerate(splits, 1):
        report(f"shadow run {number} of {len(splits)}")
        seeded = experiment.config.model_copy(update={"seed": experiment.config.seed + SEED_STEP * number})
        shadow_experiment = build.build(
            seeded, str(experiment.device), prepared, experiment.nets.begun, experiment.nets.pretrained or None
        )
        shares = {
            pool.client: replace(
                experiment.data.clients[pool.client], private=pool.rows.with_index(pool.index[split[pool.client]])
            )
            for pool in pools
        }
        shadow = replace(shadow_experiment, data=replace(experiment.data, clients=shares))
        try:
            clients, server = _train(shadow)
        except Diverged as problem:
            raise RunError(f"shadow run {number}: {problem}; audit without --shadows") from None
        trained = {pool.client: np.isin(np.arange(len(pool.rows)), split[pool.client]) for pool in pools}
        yield Shadow(shadow, clients, server, trained)


def _train(experiment: Experiment) -> tuple[dict[str, Client], Message]:
    """Return the clients and the server's state after all rounds; nothing is scored."""
    clients = {i: experiment.build_client(i) for i in experiment.clients}
    plan = replace(experiment.make_plan({}), evaluations={}, evaluate_every=experiment.config.rounds)
    with torch.random.fork_rng(devices=[]), closing(InProcess(clients.__getitem__, tuple(clients))) as engine:
        server = federate(plan, engine, experiment.make_server_state(), None, [], None)
    return clients, server
