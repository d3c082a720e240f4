"""Count the gradient steps and training examples of a client from the configuration and the numbers of rows."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np

from fedmutual.algorithms.agree import Agree, Compare
from fedmutual.algorithms.fedh2l import Local, Mutual
from fedmutual.algorithms.fedmd import Announce, Digest, Revisit, Transfer
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.config import Config, is_pooled, make_algorithm
from fedmutual.core import Algorithm, Phase
from fedmutual.federation.networks import POOLED
from fedmutual_papers.result import Budget

Work = np.ndarray[Any, np.dtype[np.float64]]
"""[2]: the number of gradient steps, and the number of examples in these steps."""
NO_WORK: Work = np.zeros(2)


def count_budget(config: Config, private: Mapping[str, int], public: Mapping[str, int]) -> Budget | None:
    """Return the mean over clients of the gradient steps of a client's model and of the examples in these steps.

    private, public: client id -> number of rows. A step that trains two networks, as in FML, counts once. Return None if
    the algorithm has a phase with an unknown number of steps, such as a phase of the user's algorithm.
    """
    algorithm = make_algorithm(config)
    if is_pooled(config):
        private, public = {POOLED: sum(private.values()) + sum(public.values())}, {}
    public_rows = sum(public.values())
    clients = [
        _count_client_work(
            config, algorithm, {"private": n, "own public": public.get(i, 0), "public": public_rows}, len(private)
        )
        for i, n in private.items()
    ]
    known_work = [work for work in clients if work is not None]
    if len(known_work) < len(clients) or not known_work:
        return None
    steps, examples = (fmean(values) for values in zip(*known_work, strict=True))
    return Budget(steps=steps, examples=examples)


def _count_client_work(config: Config, algorithm: Algorithm, rows: Mapping[str, int], clients: int) -> Work | None:
    """Return the work of a client over a run; None if it is unknown.

    rows: the numbers of the client's private rows, of its "own public" rows, and of the "public" rows of all clients.
    """
    parts = {*algorithm.trains_on} - ({"own public"} if "public" in algorithm.trains_on else set())  # public has its own
    trained = sum(rows[part] for part in parts)  # what a phase calls private
    start = [_count_phase_work(phase, trained, rows["public"], clients, True) for phase in algorithm.start]
    rounds = [_count_phase_work(phase, trained, rows["public"], clients, False) for phase in algorithm.phases]
    if any(work is None for work in (*start, *rounds)):
        return None
    taking_part = max(1, round(config.engine.participation * clients)) / clients
    return sum((w for w in start if w is not None), NO_WORK) + sum((w for w in rounds if w is not None), NO_WORK) * (
        config.rounds * taking_part
    )


def _count_phase_work(phase: Phase, private: int, public: int, clients: int, start: bool) -> Work | None:
    """Return the work of a client in one execution of a phase; None if it is unknown."""
    match phase:
        case Agree() | Compare():
            return NO_WORK
        case Local():
            return _count_steps(phase.local_steps, private, phase.batch_size)
        case Mutual():
            if clients < 2:
                return NO_WORK
            pairs = min(math.ceil(phase.pairs * clients - 1e-9), clients // 2)
            partners, share = (clients - 1, 1.0) if phase.peers == "all" else (1, 2 * pairs / clients)
            return np.array([1.0, partners * phase.public_batch]) * share
        case Transfer():
            return _count_passes(phase.transfer_epochs, public, phase.batch_size)
        case Revisit() if start:
            return _count_passes(phase.transfer_epochs, private, phase.batch_size)
        case Digest():
            return np.array([phase.digest_steps, phase.digest_steps * phase.public_batch], dtype=float)
        case Announce():
            return NO_WORK
        case LocalEpochs() if phase.local_steps is not None:
            return _count_steps(phase.local_steps, private, phase.batch_size)
        case LocalEpochs():
            return _count_passes(phase.local_epochs, private, phase.batch_size)
    return None


def _count_steps(steps: int, rows: int, batch: int) -> Work:
    return np.array([steps, steps * min(batch, rows)], dtype=float)


def _count_passes(epochs: int, rows: int, batch: int) -> Work:
    """Return the work of `epochs` passes; a last batch of a single row joins the batch before it."""
    leaves_one_row = rows > batch > 1 and rows % batch == 1
    return np.array([epochs * (math.ceil(rows / batch) - leaves_one_row), epochs * rows], dtype=float)
