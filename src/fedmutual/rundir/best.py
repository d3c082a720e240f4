"""The weights of the best round so far, kept where they belong: the shared model's at the server, a client's own with it.

A better round's are written beside the last as `best-<round>.safetensors`. When the run's state is saved they become
`best.safetensors`: what a kill leaves of rounds that were not saved can be told from what counts, and is removed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, RoundDone, Score
from fedmutual.files import read_tensors, write_tensors

BEST = "best.safetensors"


class Keep(NamedTuple):
    """What the best are chosen by."""

    by: str | None  # records.best_by
    every: int  # records.evaluate_every
    run: str  # the run's identity


class Best:
    """Observer: keeps the shared model of the best round, by its own score. To be told of a round before it is saved."""

    def __init__(self, folder: Path, keep: Keep) -> None:
        self._half, self._keep = folder / "server", keep
        self._merit: float | None = None  # of the round that is not over yet

    def __call__(self, event: Event) -> None:
        """Keep a round's model if none was better."""
        if isinstance(event, Evaluated):
            self._merit = merit([s for s in event.scores if s.model == "global"], "test", self._keep.by)
        elif isinstance(event, RoundDone):
            if event.server:
                offer(self._half, lambda: event.server, self._merit, event.round, self._keep)
            self._merit = None


def merit(scores: Sequence[Score], reported: str, by: str | None) -> float | None:
    """How good one model is, greater is better: its accuracy, else minus its loss; None where neither is told.

    reported: the data that its results are reported on, which choose where `by` names none, or none that it is scored on.
    Of data that all clients' rows are pooled for ("validation.all"), those; of several clients' scores, the mean.
    """
    for data in (by or "holdout", reported):
        for name in (f"{data}.all", data):
            found = [s for s in scores if s.data == name]
            found = [s for s in found if s.client is None] or found
            for term, sign in (("accuracy", 1), ("loss", -1)):
                values = [v for s in found if isinstance(v := s.values.get(term), int | float)]
                if values:
                    return sign * sum(values) / len(values)
    return None


def offer(half: Path, state: Callable[[], Message], merit: float | None, round: int, keep: Keep) -> None:
    """Keep a state in its half of the run's folder, if it is better than the best there.

    Raises:
        RunError: the best there is damaged, or it cannot be written.
    """
    there = _generations(half)
    if merit is None or (there and merit <= float(_about(there[max(there)])["merit"])):
        return
    about = {"format": "1", "run": keep.run, "round": str(round), "merit": repr(merit)}
    write_tensors(half / _name(round), state(), about)
    for file in there.values() if round % keep.every == 0 else ():  # else it is of the last round, and they may yet grow
        if file.name != BEST:
            file.unlink()


def settle(folder: Path, saved: int | None, rounds: int, every: int) -> None:
    """In each half of a run's folder give the best of the rounds that count its name, and remove the others.

    saved: the last saved round. Of rounds that were evaluated only for being the last, those count that are so still; the
    best before such a one is kept beside it.

    Raises:
        RunError: a best is damaged.
    """
    for half in (folder / "server", *(folder / "clients").glob("*")):
        _settle(half, saved, rounds, every)


def check(folder: Path) -> None:
    """Raise RunError where a best is damaged. Changes nothing."""
    for half in (folder / "server", *(folder / "clients").glob("*")):
        for file in _generations(half).values():
            _about(file)


def _settle(half: Path, saved: int | None, rounds: int, every: int) -> None:
    counts = {}
    for round, file in _generations(half).items():
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
            file.rename(half / _name(round))
    counts[newest].rename(half / BEST)


def load(half: Path, saved: int, run: str) -> Message:
    """The best state in a half of the folder of a run.

    Raises:
        RunError: there is none, or it is damaged or another run's.
    """
    _, file = chosen(half, saved)
    tensors, about = read_tensors(file)
    if about.get("run") != run:
        raise RunError(f"{file}: belongs to another run")
    return tensors


def chosen(half: Path, saved: int) -> tuple[int, Path]:
    """The best round up to the saved one in a half of the folder of a run, and the file of its weights.

    Raises:
        RunError: there is none.
    """
    there = {round: file for round, file in _generations(half).items() if round <= saved}
    if not there:
        raise RunError(f"{half}: no best weights are kept here; a run keeps them with records.keep_best = true")
    return max(there), there[max(there)]


def _name(round: int) -> str:
    return f"best-{round}.safetensors"


def _about(file: Path) -> dict[str, str]:
    return read_tensors(file, ())[1]


def _generations(half: Path) -> dict[int, Path]:
    """The files of best rounds, by their rounds."""
    files = {file.stem.removeprefix("best-"): file for file in half.glob("best-*.safetensors")}
    found = {int(number): file for number, file in files.items() if number.isdecimal()}  # others are not ours
    return found | ({int(_about(half / BEST)["round"]): half / BEST} if (half / BEST).exists() else {})
