"""A run as its folder records it, for reports: read and checked, never changed, and without torch."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedmutual.errors import RunError
from fedmutual.files import Table
from fedmutual.metric import Metric
from fedmutual.role import Role
from fedmutual.rundir.environment import read_environment
from fedmutual.rundir.file_names import CONFIG, LEDGER, LOG, METRICS, PARTITION, TUNED
from fedmutual.rundir.frames import tabulate_scores
from fedmutual.rundir.ledger_columns import LedgerColumns, make_columns
from fedmutual.rundir.record_files import (
    check_record,
    is_finished,
    make_line_error,
    read_record,
    read_records,
    read_summary,
    read_toml,
)
from fedmutual.rundir.schema import (
    Environment,
    Evaluation,
    LedgerLine,
    MetricScore,
    RecordedPartition,
    RunSettings,
    Summary,
    TunedRecord,
)

if TYPE_CHECKING:
    import pandas as pd

EARLIER_METHODS = {  # (title, has a shared model, role) of the methods of earlier versions, whose folders may lack them
    "fml": ("FML", True, Role(position=1, colour=1, reference=True)),
    "fedh2l": ("FedH2L", False, Role(position=2, colour=6, reference=True)),
    "fedmd": ("FedMD", False, Role(position=3, colour=7)),
    "aggregate": ("AGG", False, Role(position=4, colour=8)),
    "fedavg": ("FedAvg", True, Role(position=5, colour=2)),
    "fedprox": ("FedProx", True, Role(position=6, colour=3)),
    "independent": ("Local-only", False, Role(colour=4, federates=False)),
    "centralised": ("Centralised", True, Role(colour=5, federates=False)),
}
_DIVERGED = re.compile(r"\S+  stopped in round (?P<round>\d+): Diverged: ")  # the last line of log.txt
_NOTE = re.compile(r"\S+  note(?: (?P<start>at the start)| in round (?P<round>\d+))?: (?P<text>.+)")  # a line of log.txt


class RecordedMethod(NamedTuple):
    """The description of a run's method, as the run folder has it: title, role, and the keys that its preset sets."""

    title: str  # the name in tables
    shares: bool  # whether the method has a shared model
    preset: tuple[str, ...]  # the keys that the name of a preset method sets
    role: Role
    pooled: bool  # whether one network learns from all data in one place


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run: finished, stopped, or still running."""

    folder: Path
    settings: RunSettings
    config: Table  # all of config.toml
    environment: Environment
    partition: RecordedPartition
    evaluations: tuple[Evaluation, ...]
    ledger: LedgerColumns
    summary: Summary | None

    @cached_property
    def notes(self) -> Mapping[str, set[int]]:
        """Return the notes in log.txt, each with the rounds in which it was written (0: the start); empty without a log."""
        rounds_by_note = dict[str, set[int]]()
        for line in filter(None, map(_NOTE.match, self._log)):
            rounds = rounds_by_note.setdefault(line["text"], set())
            if line["start"] or line["round"]:
                rounds.add(int(line["round"] or 0))
        return rounds_by_note

    @cached_property
    def _log(self) -> Sequence[str]:
        """Return the lines of log.txt; none without a log."""
        try:
            return (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ()

    @cached_property
    def diverged(self) -> int | None:
        """Return the round in which the run diverged; None if divergence did not end the run."""
        line = _DIVERGED.match(self._log[-1]) if self._log and not self.finished else None
        return int(line["round"]) if line else None

    @property
    def state(self) -> str:
        """Return "finished", "unfinished: round 2 of 5" or "diverged in round 3 of 5"."""
        if self.finished:
            return "finished"
        state = f"unfinished: round {self.reached}" if self.diverged is None else f"diverged in round {self.diverged}"
        return f"{state} of {self.settings.rounds}"

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm."""
        return self.settings.algorithm.name

    @cached_property
    def method(self) -> RecordedMethod:
        """Return how the run's method introduces itself; for a folder of an earlier version, by the algorithm's name."""
        return _make_method(self.algorithm, self.environment)

    @cached_property
    def tuned(self) -> Mapping[str, str]:
        """Return the keys that trials on hold-out rows chose, with values as `--set` takes them; empty without trials.

        Raises:
            RunError: tuned.json is damaged or of another format.
        """
        path = self.folder / TUNED
        return read_record(path, TunedRecord).set if path.is_file() else {}

    @cached_property
    def metric(self) -> Metric:
        """Return the main metric, which all clients have in common."""
        return self.environment.main_metric

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.settings.seed

    @property
    def local_steps(self) -> int | None:
        """Return the gradient steps of a client in a round; None if the configuration counts epochs."""
        return self.settings.training.local_steps

    @property
    def reached(self) -> int:
        """Return the last evaluated round; 0 before the first evaluation."""
        return self.evaluations[-1].round if self.evaluations else 0

    @property
    def held_out(self) -> bool:
        """Return whether only hold-out rows were scored, as in a sweep."""
        return bool(self.config.get("records", {}).get("evaluate_on") == "holdout")

    @property
    def finished(self) -> bool:
        """Return whether all rounds are done and summary.json is written."""
        return is_finished(self.summary, self.settings.rounds)

    @property
    def last(self) -> Evaluation | None:
        """Return the last evaluation; None before the first evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @cached_property
    def scores(self) -> "pd.DataFrame":
        """Return the scores with the main metric after each evaluation, as `tabulate_scores` describes them."""
        return tabulate_scores(self.evaluations, self.seed)

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Return the models that clients score on their validation data; none if no client shares its scores."""
        scored = {s.model for e in self.evaluations for s in e.scores if s.client is not None and s.data == "validation"}
        return tuple(m for m in ("personal", "ensemble", "global", "meme") if m in scored)

    @property
    def serves(self) -> str | None:
        """Return the model that a client would use: the first of `models`."""
        return next(iter(self.models), None)

    def find_evaluation(self, round: int) -> Evaluation | None:
        """Return the evaluation after a round; None if the round was not evaluated."""
        return next((e for e in self.evaluations if e.round == round), None)

    def get_scores(
        self, evaluation: Evaluation | None, model: str | None = None, data: str = "validation"
    ) -> dict[str, MetricScore]:
        """Return client -> score of a model on the client's own rows; empty without an evaluation.

        model: None is the model that clients would use. data: the kind of rows, as in `MetricScore`.
        """
        model = model or self.serves
        return evaluation.get_client_scores(model, data) if evaluation and model else {}


def find_runs(path: Path) -> list[Path]:
    """Return the run folders at a path: the path itself, or the folders in it that `compare` or `demo` wrote, sorted.

    Raises:
        RunError: there are none.
    """
    path = Path(path)
    if (path / CONFIG).is_file():
        return [path]
    candidates = {file.parent for depth in range(1, 4) for file in path.glob("*/" * depth + CONFIG)}
    folders = sorted((folder for folder in candidates if not candidates & set(folder.parents)), key=_make_sort_key)
    if not folders:
        what = "holds no run" if path.is_dir() else "is no folder"
        raise RunError(f"{path}: {what}; name a run's folder, or one that `fedmutual compare` made")
    return folders


def read_runs(folders: Iterable[Path | RecordedRun]) -> list[RecordedRun]:
    """Return the runs in some folders, each folder once. A run that is read already is returned as it is.

    Raises:
        RunError: a folder is no run folder, or a file in it is missing, damaged or of another format.
    """
    by_path = {(f.folder if isinstance(f, RecordedRun) else Path(f)).resolve(): f for f in reversed(list(folders))}
    if not by_path:
        raise RunError("there is no run to report; name a run's folder, or one that `fedmutual compare` made")
    return [run if isinstance(run, RecordedRun) else read_run(Path(run)) for run in reversed(by_path.values())]


def read_method(folder: Path) -> RecordedMethod:
    """Return how the method of the run in a folder introduces itself.

    Raises:
        RunError: config.toml or environment.json is missing, damaged or of another format.
    """
    settings = check_record(folder / CONFIG, RunSettings, read_toml(folder / CONFIG))
    return _make_method(settings.algorithm.name, read_environment(folder))


def _make_method(algorithm: str, environment: Environment) -> RecordedMethod:
    """Return a method as environment.json records it; where the file lacks a fact, the fact of earlier versions."""
    title, is_shared, role = EARLIER_METHODS.get(algorithm, (algorithm, True, Role()))
    if about := environment.algorithm:
        return RecordedMethod(about.title, about.shares, about.preset, about.role or role, environment.pooled)
    return RecordedMethod(title, is_shared, (), role, environment.pooled)


def read_run(folder: Path) -> RecordedRun:
    """Return the run in a folder.

    Raises:
        RunError: as `read_runs`.
    """
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder}: is no run folder, it has no {CONFIG}; name a folder that `fedmutual run` made")
    config = read_toml(folder / CONFIG)
    evaluations = tuple(read_records(folder / METRICS, Evaluation))
    for number, (earlier, later) in enumerate(itertools.pairwise(evaluations), 2):
        if later.round <= earlier.round:
            raise make_line_error(folder / METRICS, number, f"round {later.round} follows round {earlier.round}")
    environment = read_environment(folder)
    metric = environment.main_metric.name
    evaluations = tuple(e.model_copy(update={"metric": metric}) for e in evaluations)
    return RecordedRun(
        folder=folder,
        settings=check_record(folder / CONFIG, RunSettings, config),
        config=config,
        environment=environment,
        partition=read_record(folder / PARTITION, RecordedPartition),
        evaluations=evaluations,
        ledger=make_columns(read_records(folder / LEDGER, LedgerLine)),
        summary=read_summary(folder),
    )


def _make_sort_key(folder: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts seed 10 after seed 2."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in folder.parts]
