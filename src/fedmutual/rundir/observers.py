"""Record the scores and bytes of a run in its logs. Lines hold no times, so that a resumed run writes equal lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, PhaseDone, Score
from fedmutual.rundir.file_names import LEDGER, METRICS
from fedmutual.rundir.record_files import append_records, describe_violation
from fedmutual.rundir.schema import Evaluation, LedgerLine


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
