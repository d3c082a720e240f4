"""Read run folders: a row for each score, a row for each line of the ledger, and the facts of each run. Without torch."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmutual.errors import RunError
from fedmutual.files import Table
from fedmutual.metric import Metric
from fedmutual.role import Role
from fedmutual.rundir.file_names import CONFIG, LEDGER, LOG, METRICS, PARTITION, TUNED
from fedmutual.rundir.record_files import (
    check_record,
    is_finished,
    make_line_error,
    read_environment,
    read_record,
    read_records,
    read_summary,
    read_toml,
)
from fedmutual.rundir.schema import (
    SEED,
    Environment,
    Evaluation,
    LedgerLine,
    MethodAbout,
    RecordedPartition,
    RunSettings,
    ScoreRow,
    Summary,
    TunedRecord,
)

if TYPE_CHECKING:
    import pandas as pd

MODELS = ("personal", "ensemble", "global", "meme")  # that score clients' rows; the first one is what a client would use
EARLIER_METHODS = {  # of the methods of earlier versions, whose folders may lack them
    name: MethodAbout(title=title, shares=shares, preset=(), role=role)
    for name, title, shares, role in (
        ("fml", "FML", True, Role(position=1, colour=1, reference=True)),
        ("fedh2l", "FedH2L", False, Role(position=2, colour=6, reference=True)),
        ("fedmd", "FedMD", False, Role(position=3, colour=7)),
        ("aggregate", "AGG", False, Role(position=4, colour=8)),
        ("fedavg", "FedAvg", True, Role(position=5, colour=2)),
        ("fedprox", "FedProx", True, Role(position=6, colour=3)),
        ("independent", "Local-only", False, Role(colour=4, federates=False)),
        ("centralised", "Centralised", True, Role(colour=5, federates=False)),
    )
}
_DIVERGED = re.compile(r"\S+  stopped in round (?P<round>\d+): Diverged: ")  # the last line of log.txt
_NOTE = re.compile(r"\S+  note(?: (?P<start>at the start)| in round (?P<round>\d+))?: (?P<text>.+)")  # a line of log.txt
_SCORES = ["round", "model", "client", "data", "metric", "value", "examples"]
_WORK = [
    ("round", "i8"),
    ("phase", object),
    ("client", object),
    ("down", "i8"),
    ("up", "i8"),
    ("steps", float),
    ("forwards", float),
]

Rows = npt.NDArray[Any]
"""The lines of a ledger with the fields of `results.read.Results.work`; `pandas.DataFrame` makes a table of them."""


@dataclass(frozen=True, eq=False)
class RunFacts:
    """A run as its folder records it, finished, stopped or still running: its facts, its scores and its work."""

    folder: Path
    settings: RunSettings
    config: Table  # all of config.toml
    environment: Environment
    partition: RecordedPartition
    evaluations: tuple[Evaluation, ...]
    work: Rows
    summary: Summary | None
    of_folds: tuple["RunFacts", ...] = ()  # the folds that were joined (`results.folds`)

    @property
    def folds(self) -> tuple[int, int] | None:
        """Return how many folds were joined, of how many; None of a single run."""
        return (len(self.of_folds), int(self.config["split"]["folds"])) if self.of_folds else None

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
        line = _DIVERGED.match(self._log[-1]) if not self.finished and self._log else None
        return int(line["round"]) if line else None

    @property
    def state(self) -> str:
        """Return "finished", "unfinished: round 2 of 5" or "diverged in round 3 of 5"."""
        if self.finished:
            return "finished"
        if self.folds and self.folds[0] < self.folds[1]:
            return f"unfinished: {self.folds[0]} of {self.folds[1]} folds"
        state = f"unfinished: round {self.reached}" if self.diverged is None else f"diverged in round {self.diverged}"
        return f"{state} of {self.settings.rounds}"

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm."""
        return self.settings.algorithm

    @cached_property
    def method(self) -> MethodAbout:
        """Return how the run's method introduces itself; for a folder of an earlier version, by the algorithm's name."""
        return _describe_method(self.algorithm, self.environment)

    @property
    def role(self) -> Role:
        """Return the role of the run's method in a comparison."""
        return self.method.role or Role()

    @cached_property
    def tuned(self) -> Mapping[str, str]:
        """Return the keys that trials on hold-out rows chose, with values as `--set` takes them; empty without trials.

        Of joined folds the values of all folds, in their order, where they differ.

        Raises:
            RunError: tuned.json is damaged or of another format.
        """
        if self.of_folds:
            values = {key: [run.tuned.get(key, "") for run in self.of_folds] for run in self.of_folds for key in run.tuned}
            return {key: one[0] if len({*one}) == 1 else f"{', '.join(one)} (by fold)" for key, one in values.items()}
        path = self.folder / TUNED
        return read_record(path, TunedRecord).set if path.is_file() else {}

    @property
    def metric(self) -> Metric:
        """Return the main metric, which all clients have in common."""
        return self.environment.main_metric

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.settings.seed

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

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Return the models that clients score on their validation data; none if no client shares its scores."""
        rows = [row for e in self.evaluations for row in e.rows if row.client is not None and row.data == "validation"]
        scored = {row.model for row in rows if row.find_number(self.metric.name) is not None}
        return tuple(m for m in MODELS if m in scored)

    @property
    def last_rows(self) -> tuple[ScoreRow, ...]:
        """Return all scores after the last evaluation; none before the first evaluation."""
        return self.evaluations[-1].rows if self.evaluations else ()

    def get_rows(self, round: int, model: str | None = None, data: str = "validation") -> dict[str | None, ScoreRow]:
        """Return client (None: the common test set) -> the scores of a model after a round; empty without an evaluation.

        Rows without the main metric are left out. model: None is the model that clients would use. data: the kind of rows.
        """
        model = model or next(iter(self.models), None)
        rows = next((e.rows for e in self.evaluations if e.round == round), ())
        of_model = (row for row in rows if (row.model, row.data) == (model, data))
        return {row.client: row for row in of_model if row.find_number(self.metric.name) is not None}

    @cached_property
    def messages(self) -> Rows:
        """Return the lines of `work` without those of the public data that clients sent once."""
        rows: Rows = self.work[(self.work["round"] > 0) | (self.work["phase"] != SEED)]
        return rows

    @cached_property
    def seed_bytes(self) -> int:
        """Return the bytes of the public data that clients sent once."""
        return int(self.work["up"].sum() - self.messages["up"].sum())

    @cached_property
    def totals(self) -> Mapping[str, int | None]:
        """Return the sums of the numbers of `messages` over clients and rounds; None for one that a line does not have."""
        sums = {name: self.messages[name].sum() for name in ("down", "up", "steps", "forwards")}
        return {name: int(total) if len(self.messages) and total == total else None for name, total in sums.items()}


def read_scores(folder: Path) -> "pd.DataFrame":
    """Return all scores of a run's folder, one row for each number, as `Run.history` describes them.

    Raises:
        RunError: metrics.jsonl is damaged.
    """
    return tabulate_numbers(read_records(folder / METRICS, Evaluation)).drop(columns="examples")


def tabulate_numbers(evaluations: Iterable[Evaluation]) -> "pd.DataFrame":
    """Return all scores, a row for each number: the columns of `Run.history`, and examples, how many were scored."""
    import pandas as pd  # takes 0.3 s, and only tables need it

    rows = [
        (evaluation.round, row.model, row.client, row.data, metric, float(value), row.find_number("examples"))
        for evaluation in evaluations
        for row in evaluation.rows
        for metric, value in row.values.items()
        if is_number(value)
    ]
    return pd.DataFrame(rows, columns=_SCORES)


def is_number(value: object) -> bool:
    """Return whether a score is a number, and not a list of numbers, a text or missing."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_setting(value: Any) -> str:
    """Return the value of a setting for a table: text without quotes, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def find_runs(path: Path) -> list[Path]:
    """Return the run folders at a path: the path itself, or the folders in it that `compare` or `demo` wrote, sorted.

    Raises:
        RunError: there are none.
    """
    path = Path(path)
    if (path / CONFIG).is_file():
        return [path]
    candidates = {file.parent for depth in range(1, 4) for file in path.glob("*/" * depth + CONFIG)}
    folders = sorted(
        (folder for folder in candidates if not candidates & set(folder.parents)),
        key=lambda folder: [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in folder.parts],  # seed 10 after seed 2
    )
    if not folders:
        what = "holds no run" if path.is_dir() else "is no folder"
        raise RunError(f"{path}: {what}; name a run's folder, or one that `fedmutual compare` made")
    return folders


def read_runs(folders: Iterable[Path | RunFacts]) -> list[RunFacts]:
    """Return the runs in some folders, each folder once. A run that is read already is returned as it is.

    Raises:
        RunError: a folder is no run folder, or a file in it is missing, damaged or of another format.
    """
    by_path = {(f.folder if isinstance(f, RunFacts) else Path(f)).resolve(): f for f in reversed(list(folders))}
    if not by_path:
        raise RunError("there is no run to report; name a run's folder, or one that `fedmutual compare` made")
    return [run if isinstance(run, RunFacts) else read_run(Path(run)) for run in reversed(by_path.values())]


def read_run(folder: Path) -> RunFacts:
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
    settings = check_record(folder / CONFIG, RunSettings, config)
    partition = read_record(folder / PARTITION, RecordedPartition)
    if settings.participants is not None:  # the others had rows, and took no part
        taking_part = {i: rows for i, rows in partition.clients.items() if i in settings.participants}
        partition = partition.model_copy(update={"clients": taking_part})
    return RunFacts(
        folder=folder,
        settings=settings,
        config=config,
        environment=read_environment(folder),
        partition=partition,
        evaluations=evaluations,
        work=tabulate_work(read_records(folder / LEDGER, LedgerLine)),
        summary=read_summary(folder),
    )


def tabulate_work(lines: Iterable[LedgerLine]) -> Rows:
    """Return the lines of a ledger as `RunFacts.work`."""
    names = dict[str, str]()  # each text is kept once: a run of 10,000 rounds has 80,000 lines
    rows = [
        (
            line.round,
            names.setdefault(line.phase, line.phase),
            names.setdefault(line.client, line.client),
            line.down,
            line.up,
            *(nan if n is None else n for n in (line.steps, line.forwards)),
        )
        for line in lines
    ]
    return np.array(rows, dtype=_WORK)


def read_method(folder: Path) -> MethodAbout:
    """Return how the method of the run in a folder introduces itself.

    Raises:
        RunError: config.toml or environment.json is missing, damaged or of another format.
    """
    settings = check_record(folder / CONFIG, RunSettings, read_toml(folder / CONFIG))
    return _describe_method(settings.algorithm, read_environment(folder))


def _describe_method(algorithm: str, environment: Environment) -> MethodAbout:
    """Return a method as environment.json records it; where the file lacks a fact, the fact of earlier versions."""
    earlier = EARLIER_METHODS.get(algorithm, MethodAbout(title=algorithm, preset=(), role=Role(), shares=True))
    about = environment.algorithm or earlier
    return about if about.role else about.model_copy(update={"role": earlier.role})
