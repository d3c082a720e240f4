"""Save the weights of the best round so far: the shared model's in `server/`, a personal net's in its client's folder.

The weights of a better round are written to a new file, `best-<round>.safetensors`. When the run's state is saved, this file
becomes `best.safetensors`. If the process is killed before, the number in the name shows that the round was not saved, and
the file is removed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedmutual.config.schema import RecordsConfig
from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, RoundDone, Score
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.file_names import METRICS, list_client_folders, server_folder
from fedmutual.rundir.record_files import check_record, read_records
from fedmutual.rundir.schema import BestHeader, Evaluation
from fedmutual.tensor_files import read_tensors, write_tensors

BEST = "best.safetensors"


class BestRule(NamedTuple):
    """The rule that chooses the best weights of a run, and the run to which the stored weights belong."""

    by: str | None  # records.best_by
    every: int  # records.evaluate_every
    run: str  # the run's identity
    metric: Metric = ACCURACY  # the main metric of the run


class BestWeights:
    """Observer: saves the shared model of its best round. It must receive a round's events before `Checkpoints` does."""

    def __init__(self, folder: Path, keep: BestRule) -> None:
        self._weights_folder, self._keep = server_folder(folder), keep
        self._merit: float | None = None  # of the current round

    def __call__(self, event: Event) -> None:
        """Save the model of a round if its score is the best so far. Raises RunError as `save_if_better`."""
        if isinstance(event, Evaluated):
            self._merit = compute_merit(
                [s for s in event.scores if s.model == "global"], "test", self._keep.by, self._keep.metric
            )
        elif isinstance(event, RoundDone):
            if event.server:
                save_if_better(self._weights_folder, lambda: event.server, self._merit, event.round, self._keep)
            self._merit = None


def compute_merit(scores: Sequence[Score], reported: str, by: str | None, metric: Metric = ACCURACY) -> float | None:
    """Return how good one model is, greater is better: by its main metric, else minus its loss; None without either.

    Several clients' scores give their mean; a score on the pooled rows of all clients ("validation.all") comes first.

    by: the kind of rows to score on. None means hold-out rows.
    reported: the kind of rows that results are reported on; used if there is no score for `by`.
    """
    for data in (by or "holdout", reported):
        for name in (f"{data}.all", data):
            on_rows = [s for s in scores if s.data == name]
            on_rows = [s for s in on_rows if s.client is None] or on_rows
            for term, sign in ((metric.name, metric.sign), ("loss", -1)):
                values = [v for s in on_rows if isinstance(v := s.values.get(term), int | float)]
                if values:
                    return sign * sum(values) / len(values)
    return None


class Patience:
    """The end of a run by `records.patience`: the best of its recorded evaluations is so many evaluations old.

    An evaluation is as good as `compute_merit` of the personal models, or without them of the shared model, or of its forks.
    """

    def __init__(self, folder: Path, records: RecordsConfig, metric: Metric) -> None:
        self._path, self._records, self._metric = folder / METRICS, records, metric
        self._merits, self._size = list[float](), 0  # of the evaluations that were read so far, and their bytes

    def is_over(self) -> bool:
        """Return whether the run ends; only new lines are read. Raises RunError if metrics.jsonl is damaged."""
        records, path = self._records, self._path
        size = path.stat().st_size if records.patience is not None and path.exists() else 0
        if size < self._size:  # the run went back
            self._merits, self._size = [], 0
        for line in read_records(path, Evaluation, self._size) if size else ():
            if line.round % records.evaluate_every == 0:  # not of the last round of a run that has grown since
                models = {r.model for r in line.rows}
                model = next((m for m in ("personal", "global", "proxy", "meme") if m in models), "")
                scores = [Score(r.model, r.client, r.data, r.values) for r in line.rows if r.model == model]
                reported = "test" if model == "global" else "validation"
                merit = compute_merit(scores, reported, records.best_by, self._metric)
                self._merits += [] if merit is None else [merit]
        self._size, merits = size, self._merits
        return bool(merits) and len(merits) - 1 - merits.index(max(merits)) >= (records.patience or 0)


def save_if_better(
    weights_folder: Path, state: Callable[[], Message], merit: float | None, round: int, keep: BestRule
) -> None:
    """Save a state in `weights_folder` (`server/` or a client's folder) if it is better than the best state there.

    Raises:
        RunError: the saved best file is damaged, or the new file cannot be written.
    """
    files = _list_files(weights_folder)
    if merit is None or (files and merit <= read_header(files[max(files)]).merit):
        return
    about = {"format": "1", "run": keep.run, "round": str(round), "merit": repr(merit)}
    write_tensors(weights_folder / _make_name(round), state(), about)
    for file in files.values() if round % keep.every == 0 else ():  # a last round does not count if the run grows
        if file.name != BEST:
            file.unlink()


def settle_best_files(folder: Path, saved: int | None, rounds: int, every: int) -> None:
    """Rename the best file of the saved rounds to best.safetensors in each folder of weights, and remove the others.

    A last round outside the evaluation schedule counts only while it is the last; if the run may grow, the best scheduled
    round stays beside it.

    saved: the last saved round; None removes all files.

    Raises:
        RunError: a best file is damaged.
    """
    for weights_folder in (server_folder(folder), *list_client_folders(folder)):
        _settle(weights_folder, saved, rounds, every)


def check_best_files(folder: Path) -> None:
    """Raise RunError if a best file is damaged. Changes no file."""
    for weights_folder in (server_folder(folder), *list_client_folders(folder)):
        for file in _list_files(weights_folder).values():
            read_header(file)


def _settle(weights_folder: Path, saved: int | None, rounds: int, every: int) -> None:
    counts = {}
    for round, file in _list_files(weights_folder).items():
        if saved is None or round > saved or (round % every and round != rounds):
            file.unlink()
        else:
            counts[round] = file
    if not counts:
        return
    newest, scheduled = max(counts), max((r for r in counts if r % every == 0), default=None)
    for round, file in counts.items():
        if round not in (newest, scheduled):
            file.unlink()
        elif round != newest and file.name == BEST:
            file.rename(weights_folder / _make_name(round))
    counts[newest].rename(weights_folder / BEST)


def read_best_state(weights_folder: Path, saved: int, run: str) -> Message:
    """Return the tensors of the best state in `weights_folder` (`server/` or a client's folder).

    Raises:
        RunError: there is no best file, or the file is damaged or belongs to another run.
    """
    _, file = find_best(weights_folder, saved)
    tensors, about = read_tensors(file)
    if about.get("run") != run:
        raise RunError(f"{file}: belongs to another run")
    return tensors


def find_best(weights_folder: Path, saved: int) -> tuple[int, Path]:
    """Return the best round up to the saved round, and the file of its weights in `weights_folder`.

    Raises:
        RunError: there is no best file, or best.safetensors is damaged.
    """
    files = {round: file for round, file in _list_files(weights_folder).items() if round <= saved}
    if not files:
        raise RunError(f"{weights_folder}: no best weights are kept here; a run keeps them with records.keep_best = true")
    return max(files), files[max(files)]


def _make_name(round: int) -> str:
    return f"best-{round}.safetensors"


def read_header(file: Path) -> BestHeader:
    """Return the header of a file of best weights.

    Raises:
        RunError: as `read_tensors`, or the header does not follow the schema.
    """
    return check_record(file, BestHeader, read_tensors(file, ())[1])


def _list_files(weights_folder: Path) -> dict[int, Path]:
    """Return the best files in `weights_folder` by round."""
    files = {file.stem.removeprefix("best-"): file for file in weights_folder.glob("best-*.safetensors")}
    by_round = {int(number): file for number, file in files.items() if number.isdecimal()}  # other files are not fedmutual's
    best = weights_folder / BEST
    return by_round | ({read_header(best).round: best} if best.exists() else {})
