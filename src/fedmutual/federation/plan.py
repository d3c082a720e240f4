"""The plan of a run: everything that the round loop needs to know about the federation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmutual.core import Algorithm, Bench, Message
from fedmutual.events import Score
from fedmutual.federation.evaluation import EvalSpec
from fedmutual.rundir.best import BestRule

Judge = Callable[[Message, int], tuple[Score, tuple[str, ...]]]
"""Return the score of the complete shared model on the federation's test set, and remarks; the round counts from 1.

Raises:
    Diverged: outputs of the shared model are not finite, in a run without noise.
"""


@dataclass(frozen=True)
class RoundPlan:
    """The settings of one run, read only by the round loop."""

    algorithm: Algorithm
    seed: int
    rounds: int
    clients: tuple[str, ...]
    notes: tuple[str, ...]  # as in `Started`
    participation: float  # the fraction of clients that take part in a round
    evaluate_every: int
    evaluations: Mapping[str, tuple[EvalSpec, ...]]  # evaluations that run at each client
    seeds: Mapping[str, int]  # bytes of public data that each client sent before round 1; empty without public data
    homes: Mapping[str, Path]  # each client's folder for its best weights and for scores that are not shared
    bench: Bench | None = None  # for algorithms that train at the server
    choices: tuple[str, ...] = ()  # as in `Started`
    keep: BestRule | None = None  # how the best weights are chosen; None: they are not saved
    is_over: Callable[[], bool] = lambda: False  # whether the recorded scores end the run before its last round
