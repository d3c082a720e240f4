"""The logs of a run: scores, bytes, and log.txt, whose lines also describe a run where the output is no terminal.

Lines of scores and bytes hold no times, so that a resumed run writes equal lines.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from fedmutual.errors import AlgorithmError, RunError
from fedmutual.events import Evaluated, Event, Failed, Finished, Noted, PhaseDone, Score, Started
from fedmutual.rundir.file_names import LEDGER, LOG, METRICS
from fedmutual.rundir.record_files import append_lines, append_records, describe_violation
from fedmutual.rundir.schema import SHORT, TRANSFER_DATA, Evaluation, LedgerLine


class Metrics:
    """Observer: writes a line per evaluation to metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, event: Event) -> None:
        """Append the scores of an `Evaluated`. Raises RunError as `append_scores`."""
        if isinstance(event, Evaluated):
            append_scores(self._folder, event.round, event.scores, event.train)


def append_scores(
    folder: Path, round: int, scores: Sequence[Score], train: Mapping[str, Mapping[str, float]] | None = None
) -> None:
    """Append a line to metrics.jsonl in a run's folder, or in the folder of a client that does not share all its scores.

    train: the mean of each loss term, by client; None: the line of a client's own folder, which names no client.

    Raises:
        RunError: the log cannot be written, or an accuracy is no fraction in [0, 1].
    """
    path = folder / METRICS
    about = {} if train is None else {"train": {i: dict(terms) for i, terms in train.items()}}
    clients = [{} if train is None else {"client": s.client} for s in scores]
    rows = [{"model": s.model, **client, "data": s.data, **s.values} for s, client in zip(scores, clients, strict=True)]
    try:
        evaluation = Evaluation.model_validate({"round": round, **about, "scores": tuple(rows)})
    except ValidationError as problem:
        raise RunError(f"{path}: the scores of round {round} cannot be recorded: {describe_violation(problem)}") from None
    append_records(path, [evaluation])


class Ledger:
    """Observer: writes a line per round, phase and client to ledger.jsonl: the bytes that the client received and sent.

    In a simulation the line also holds the client's gradient steps and forward passes.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER

    def __call__(self, event: Event) -> None:
        """Append the bytes of a `PhaseDone`. Raises RunError if the log cannot be written."""
        if isinstance(event, PhaseDone):
            works = {i: {"steps": work.steps, "forwards": work.forwards} for i, work in event.work.items()}
            lines = [
                LedgerLine(round=event.round, phase=event.phase, client=i, down=event.down[i], up=up, **works.get(i, {}))
                for i, up in event.up.items()
            ]
            append_records(self._path, lines)


class TextLog:
    """Observer: appends lines with date and time to log.txt."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG

    def __call__(self, event: Event) -> None:
        """Append the lines of the event, if there are any. Raises RunError if the log cannot be written."""
        lines = describe_event(event)
        if isinstance(event, Failed) and isinstance(event.problem, AlgorithmError):
            lines += event.problem.trace.splitlines()
        if lines:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            append_lines(self._path, (f"{now}  {line}" for line in lines))


class AllRuns:
    """The progress of a command that trains a number of runs, in turn or side by side."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._since: float | None = None  # the first run's start
        self._begun: dict[int, float] = {}  # a run's number, from 1 -> the fraction of its rounds done before this command
        self._done: dict[int, float] = {}  # the fraction done now

    def start(self, number: int, fraction: float) -> None:
        """Record that a run starts, or resumes after this fraction of its rounds. number: of the run, from 1."""
        self._since = time.monotonic() if self._since is None else self._since
        self._begun[number] = self._done[number] = fraction

    def reach(self, number: int, fraction: float) -> None:
        """Record that this fraction of a run's rounds is done. number: of the run, from 1."""
        self._done[number] = fraction

    def format_time_left(self) -> str:
        """Return the time left for all runs, at the speed so far, as text; "" before any work is done.

        Runs start in the order of their numbers, and a run that was finished before this command never starts.
        """
        trained = sum(self._done.values()) - sum(self._begun.values())
        if self._since is None or trained <= 0:
            return ""
        left = self.count - max(self._done) + sum(1 - fraction for fraction in self._done.values())
        seconds = (time.monotonic() - self._since) / trained * left
        return f"{format_duration(seconds)} left{' for all runs' if self.count > 1 else ''}"


def describe_event(event: Event) -> list[str]:
    """Return the lines of an event; events that only report progress have no line."""
    match event:
        case Started():
            next_round = f"round {event.done + 1} of {event.rounds}" if event.done < event.rounds else "the summary"
            start = f"resumed, going on with {next_round}" if event.done else f"started, {event.rounds} rounds"
            return [f"{start}, clients {', '.join(event.clients)}", *(f"note: {n}" for n in (*event.notes, *event.choices))]
        case Noted():
            return [f"note {'at the start' if event.round < 1 else f'in round {event.round}'}: {event.text}"]
        case Evaluated():
            return [f"round {event.round}  {format_scores(event.scores)}"]
        case Failed():
            return [f"stopped in round {event.round}: {type(event.problem).__name__}: {event.problem}"]
        case Finished():
            return [f"finished {event.rounds} rounds"]
    return []


def format_scores(scores: tuple[Score, ...]) -> str:
    """Return the scores of an evaluation as text, such as "shared 91.2 %  personal 98.1 % (worst 97.0 %)".

    The shared model is scored on the test set, personal models on validation rows. For clients that are domains the text is
    "ACC 89.1 %  BWT 93.3 %  FWT 87.7 %", means over clients. If only hold-out rows were scored: as `format_holdout_scores`.
    """
    if nodes := read_transfers(scores):
        return "  ".join(f"{name} {format_percent(sum(of.values()) / len(of))}" for name, of in nodes.items())
    parts = [f"{SHORT['global']} {format_score(s.values)}" for s in scores if s.model == "global" and s.client is None]
    for model in ("personal", "meme"):
        parts += _format_client_scores(scores, model, "validation", worst=True)
    return "  ".join(parts) or format_holdout_scores(scores)


def _format_client_scores(scores: tuple[Score, ...], model: str, data: str, worst: bool = False) -> list[str]:
    """Return the mean and worst accuracy of a model on clients' rows, and the score of each client without an accuracy."""
    of_clients = [s for s in scores if s.model == model and s.data == data and s.client is not None]
    shares = [share for s in of_clients if (share := get_accuracy(s.values)) is not None]
    worst_text = f" (worst {format_percent(min(shares))})" if shares and worst else ""
    mean = [f"{SHORT[model]} {format_percent(sum(shares) / len(shares))}{worst_text}"] if shares else []
    without = [s for s in of_clients if get_accuracy(s.values) is None]
    return mean + [f"{SHORT[model]} of {s.client} {format_score(s.values)}" for s in without]


def format_worst_nodes(scores: tuple[Score, ...]) -> str:
    """Return "worst node: ACC 86.0 % (40)  BWT 92.0 % (0)  FWT 84.0 % (40)"; "" unless clients are domains."""
    worst = {name: min(of.items(), key=lambda item: item[1]) for name, of in read_transfers(scores).items()}
    text = "  ".join(f"{name} {format_percent(share)} ({node})" for name, (node, share) in worst.items())
    return f"worst node: {text}" if text else ""


def read_transfers(scores: tuple[Score, ...]) -> dict[str, dict[str, float]]:
    """Return the accuracy of the model that a node would use, by measure ("ACC", "BWT", "FWT") and node."""
    scored = {s.model for s in scores if s.client is not None and s.data == TRANSFER_DATA["bwt"]}
    model = next((m for m in ("personal", "global", "meme") if m in scored), None)
    by_measure: dict[str, dict[str, float]] = {}
    for name, data in TRANSFER_DATA.items() if model else ():
        for s in scores:
            if (s.model, s.data) == (model, data) and s.client is not None and (share := get_accuracy(s.values)) is not None:
                by_measure.setdefault(name.upper(), {})[s.client] = share
    return by_measure


def format_holdout_scores(scores: tuple[Score, ...]) -> str:
    """Return "personal 98.1 % on hold-out", the scores by which a setting is chosen; no test or validation score."""
    parts = [part for model in ("personal", "global", "meme") for part in _format_client_scores(scores, model, "holdout")]
    return f"{'  '.join(parts)} on hold-out" if parts else "no scores are shared"


def format_score(values: Mapping[str, object]) -> str:
    """Return the accuracy as text; for a task without an accuracy its first score that is not the loss: "dice 0.743"."""
    share = get_accuracy(values)
    if share is not None:
        return format_percent(share)
    numbers = {name: value for name, value in values.items() if isinstance(value, float)}
    name = next((name for name in numbers if name != "loss"), "loss")
    return f"{name} {numbers[name]:.3g}" if name in numbers else "without a score"


def get_accuracy(values: Mapping[str, object]) -> float | None:
    """Return the accuracy of a score; None for a task without an accuracy."""
    share = values.get("accuracy")
    return float(share) if isinstance(share, int | float) else None


def format_percent(fraction: float) -> str:
    """Return a fraction as text: 0.912 -> "91.2 %"."""
    return f"{100 * fraction:.1f} %"


def format_duration(seconds: float) -> str:
    """Return seconds as text: 75 -> "1 min 15 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
