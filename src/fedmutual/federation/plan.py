"""The plan of a run: what the round loop is told about the federation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmutual.core import Algorithm, Bench, Message
from fedmutual.evaluation import EvalSpec
from fedmutual.events import Score
from fedmutual.rundir.best import Keep

Judge = Callable[[Message], Score]
"""Scores the complete shared model on the federation's test set: where there is none, nobody judges."""


@dataclass(frozen=True)
class RoundPlan:
    """What a run does, told to no one but the loop."""

    algorithm: Algorithm
    seed: int
    rounds: int
    clients: tuple[str, ...]
    notes: tuple[str, ...]
    participation: float  # the fraction of clients that a round asks
    evaluate_every: int
    exams: Mapping[str, tuple[EvalSpec, ...]]  # what is scored where clients live
    seeds: Mapping[str, int]  # bytes of the public data that each gave to all before, where the algorithm has such
    homes: Mapping[str, Path]  # where a client keeps the scores that it does not share, and its best weights
    bench: Bench | None = None  # what the server trains with, where it does
    keep: Keep | None = None  # by what the best weights are chosen, where they are kept
