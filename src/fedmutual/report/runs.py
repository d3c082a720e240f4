"""Run folders as a report sees them: read, checked, never changed."""

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedmutual.errors import RunError
from fedmutual.report.ledger import Ledger, columns
from fedmutual.report.lines import (
    Environment,
    Evaluation,
    MethodAbout,
    Partition,
    Record,
    Score,
    Settings,
    Summary,
    Transfer,
    Tuned,
)

FORMAT = 1
NAMES = {  # the titles of methods in folders that do not hold them, in the order of their colours
    "fml": "FML",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "independent": "Local-only",
    "centralised": "Centralised",
    "fedh2l": "FedH2L",
    "fedmd": "FedMD",
    "aggregate": "AGG",
}
ALONE = ("independent", "fedh2l", "fedmd", "aggregate")  # of those, the ones without a shared model
Table = dict[str, Any]
_DIVERGED = re.compile(r"\S+  stopped in round (?P<round>\d+): Diverged: ")  # the last line of its log.txt
_NOTE = re.compile(r"\S+  note(?: (?P<start>at the start)| in round (?P<round>\d+))?: (?P<text>.+)")  # a line of log.txt

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, eq=False)
class Run:
    """One run: finished, stopped or still going on."""

    folder: Path
    settings: Settings
    config: Table  # config.toml, whole
    environment: Table
    partition: Partition
    evaluations: tuple[Evaluation, ...]
    ledger: Ledger
    summary: Summary | None

    @cached_property
    def notes(self) -> Mapping[str, set[int]]:
        """What its log.txt notes, each with the rounds that it came up in, 0 for the start; none where it has no log."""
        found = dict[str, set[int]]()
        for line in filter(None, map(_NOTE.match, self._log)):
            rounds = found.setdefault(line["text"], set())
            if line["start"] or line["round"]:
                rounds.add(int(line["round"] or 0))
        return found

    @cached_property
    def _log(self) -> Sequence[str]:
        """The lines of its log.txt; none where it has no log."""
        try:
            return (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ()

    @cached_property
    def diverged(self) -> int | None:
        """The round in which it diverged, if that ended it."""
        found = _DIVERGED.match(self._log[-1]) if self._log and not self.finished else None
        return int(found["round"]) if found else None

    @property
    def state(self) -> str:
        """ "finished", "unfinished: round 2 of 5", or why it cannot be: "diverged in round 3 of 5"."""
        if self.finished:
            return "finished"
        state = f"unfinished: round {self.reached}" if self.diverged is None else f"diverged in round {self.diverged}"
        return f"{state} of {self.settings.rounds}"

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return self.settings.algorithm.name

    @cached_property
    def method(self) -> MethodAbout:
        """How its method introduces itself; of a folder of an earlier version, what its algorithm's name tells."""
        if "algorithm" in self.environment:
            return MethodAbout.model_validate(self.environment["algorithm"])
        return MethodAbout(title=NAMES.get(self.algorithm, self.algorithm), shares=self.algorithm not in ALONE, preset=[])

    @cached_property
    def tuned(self) -> Mapping[str, str]:
        """The keys that trials on hold-out rows chose, with their values as `--set` takes them; empty without trials."""
        path = self.folder / "tuned.json"
        return checked(path, Tuned, json.dumps(read_json(path))).set if path.is_file() else {}

    @property
    def seed(self) -> int:
        """The seed."""
        return self.settings.seed

    @property
    def local_steps(self) -> int | None:
        """Gradient steps of a round's local work; None where that is told in epochs."""
        return self.settings.training.local_steps

    @property
    def reached(self) -> int:
        """The last evaluated round; 0 before the first."""
        return self.evaluations[-1].round if self.evaluations else 0

    @property
    def held_out(self) -> bool:
        """Whether nothing but hold-out rows was scored, as in a sweep."""
        return bool(self.config.get("records", {}).get("evaluate_on") == "holdout")

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and summed up."""
        return self.summary is not None and self.summary.rounds >= self.settings.rounds

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation; None before the first."""
        return self.evaluations[-1] if self.evaluations else None

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The models that clients score on their own validation data; none where no client shares its scores."""
        there = {s.model for e in self.evaluations for s in e.scores if s.client is not None and s.data == "validation"}
        return tuple(m for m in ("personal", "ensemble", "global", "meme") if m in there)

    @property
    def serves(self) -> str | None:
        """The model that a client would use: the first of `models`."""
        return next(iter(self.models), None)

    def at(self, round: int) -> Evaluation | None:
        """The evaluation after a round; None where there was none."""
        return next((e for e in self.evaluations if e.round == round), None)

    def own(self, evaluation: Evaluation | None, model: str | None = None, data: str = "validation") -> dict[str, Score]:
        """Client -> the score of a model on its own rows; without a name, of the one that it would use."""
        model = model or self.serves
        return evaluation.per_client(model, data) if evaluation and model else {}


def find_runs(path: Path) -> list[Path]:
    """The run folders at a path: itself, or those of a folder that `compare` or `demo` made, in their order.

    Raises:
        RunError: there are none.
    """
    path = Path(path)
    if (path / "config.toml").is_file():
        return [path]
    found = {f.parent for depth in range(1, 4) for f in path.glob("*/" * depth + "config.toml")}
    folders = sorted((f for f in found if not found & set(f.parents)), key=_natural)
    if not folders:
        what = "holds no run" if path.is_dir() else "is no folder"
        raise RunError(f"{path}: {what}; name a run's folder, or one that `fedmutual compare` made")
    return folders


def read_runs(folders: Iterable[Path | Run]) -> list[Run]:
    """The runs of some folders, each once; those that are read already are taken as they are.

    Raises:
        RunError: a folder is no run's, or a file of it is missing, damaged or of another format.
    """
    once = {(f.folder if isinstance(f, Run) else Path(f)).resolve(): f for f in reversed(list(folders))}
    if not once:
        raise RunError("there is no run to report; name a run's folder, or one that `fedmutual compare` made")
    return [found if isinstance(found, Run) else read_run(Path(found)) for found in reversed(once.values())]


def read_run(folder: Path) -> Run:
    """One run's folder, read.

    Raises:
        RunError: as `read_runs`.
    """
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder}: is no run folder, it has no config.toml; name a folder that `fedmutual run` made")
    config = _toml(folder / "config.toml")
    evaluations = tuple(_lines(folder / "metrics.jsonl", Evaluation))
    for number, (one, next_) in enumerate(itertools.pairwise(evaluations), 2):
        if next_.round <= one.round:
            raise _damaged(folder / "metrics.jsonl", number, f"round {next_.round} follows round {one.round}")
    summary, about = folder / "summary.json", read_json(folder / "environment.json")
    checked(folder / "environment.json", Environment, json.dumps(about))
    return Run(
        folder=folder,
        settings=checked(folder / "config.toml", Settings, json.dumps(config, default=str)),
        config=config,
        environment=about,
        partition=checked(folder / "partition.json", Partition, json.dumps(read_json(folder / "partition.json"))),
        evaluations=evaluations,
        ledger=columns(_lines(folder / "ledger.jsonl", Transfer)),
        summary=checked(summary, Summary, json.dumps(read_json(summary))) if summary.exists() else None,
    )


def _toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); restore the file, or run again into another folder") from None


def read_json(path: Path) -> Table:
    """A JSON file of our format.

    Raises:
        RunError: it is missing, damaged, or of another format.
    """
    if not path.is_file():
        raise RunError(
            f"{path}: there is no such file, so the folder is no whole run; restore it, or run again into another folder"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{path}: is damaged or no JSON ({problem}); run again into another folder") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise RunError(
            f"{path}: is of format {found!r}, and this version of fedmutual reads format {FORMAT}; "
            "use the version that wrote it"
        )
    return dict(content)


def _lines(path: Path, kind: type[R]) -> Iterator[R]:
    """A log, a record a line; nothing where there is no log yet."""
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{path}: cannot be read ({problem})") from None
    lines = text.splitlines()
    cut = bool(text) and not text.endswith("\n")
    for number, line in enumerate(lines, 1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as problem:
            raise _damaged(path, number, _why(problem), cut and number == len(lines)) from None
    if cut:
        raise _damaged(path, len(lines), "the line has no end", cut)


def _damaged(path: Path, line: int, why: str, cut: bool = False) -> RunError:
    """cut: a kill, or a full disk, left it half-written."""
    if cut:
        mend = "restore it" if (path.parent / "summary.json").exists() else "`--resume` takes a half-written last line back"
        return RunError(f"{path}: line {line} is cut off ({why}); {mend}, or run again into another folder")
    return RunError(f"{path}: line {line} is not fedmutual's ({why}); run again into another folder")


def checked(path: Path, kind: type[R], text: str) -> R:
    """What a file's text says, as a record. Raises RunError where that is not what fedmutual writes."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as problem:
        raise RunError(f"{path}: is not what fedmutual writes ({_why(problem)}); run again into another folder") from None


def _why(problem: ValidationError) -> str:
    """The first thing that is wrong, in a few words."""
    first = problem.errors()[0]
    key = ".".join(str(p) for p in first["loc"])
    said = "it is not valid JSON" if first["type"] == "json_invalid" else first["msg"][:1].lower() + first["msg"][1:]
    return f"{key}: {said}" if key else said


def _natural(folder: Path) -> list[tuple[int, int, str]]:
    """Sorts seed 10 after seed 2."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in folder.parts]
