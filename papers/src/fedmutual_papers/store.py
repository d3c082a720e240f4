"""Store the results of finished runs: one small committed JSON file for each cell, so that no run is trained twice."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from pydantic import ValidationError

from fedmutual.errors import RunError
from fedmutual.files import read_json, write_bytes
from fedmutual.rundir.folder import lock_folder
from fedmutual_papers.plan import Job, Scale
from fedmutual_papers.result import Result

LOCK_LIMIT = 60.0  # seconds until another process that writes results is given up
FIX = "choose another folder with --results"


class ResultStore:
    """The results in some folders; new results are written to the first folder."""

    def __init__(self, *folders: Path) -> None:
        """folders: of two results of one run in a cell, the result in the earlier folder counts.

        Raises:
            RunError: a JSON file in a folder is damaged, or is not a file of results.
        """
        self.folder = folders[0]
        self._found: dict[str, list[Result]] = {}
        self._by_fingerprint: dict[str, list[tuple[str, Result]]] = {}  # (cell, result); `find` fills it, `_take` empties it
        for root in reversed(folders):
            for file in sorted(root.rglob("*.json")):
                self._take(file.relative_to(root).with_suffix("").as_posix(), _read_results(file))

    @property
    def cells(self) -> Sequence[str]:
        """Return the ids of the cells that have results, sorted."""
        return sorted(self._found)

    def list_results(self, cell: str) -> Sequence[Result]:
        """Return all results of a cell."""
        return self._found.get(cell, ())

    def list_all_results(self) -> Iterator[Result]:
        """Return all results."""
        return (result for cell_results in self._found.values() for result in cell_results)

    def list_scales(self, cell: str) -> list[Scale]:
        """Return the scales of all stored runs, first those of this cell; cells share runs, so all are candidates."""
        ways: list[Scale] = []
        for result in (*self.list_results(cell), *self.list_all_results()):
            changed = tuple(result.changed.items())
            ways += [w for limit in (result.limit, result.rounds) if (w := Scale(limit, changed)) not in ways]
        return ways

    def find(self, job: Job, numerics: int | None = None) -> Result | None:
        """Return the result of a run, stored by any experiment, or None. numerics: a version; None: any version."""
        if not self._by_fingerprint:
            for cell, cell_results in self._found.items():
                for result in cell_results:
                    self._by_fingerprint.setdefault(result.fingerprint, []).append((cell, result))
        same_runs = self._by_fingerprint.get(job.fingerprint, [])
        for _, result in sorted(same_runs, key=lambda pair: pair[0] != job.cell.id):  # first those of the job's cell
            if numerics in (None, result.numerics):
                return result.model_copy(update={"arm": job.arm, "seed": job.seed, "target": job.cell.target})
        return None

    def check(self) -> None:
        """Raise RunError if results cannot be written; called before anything is trained."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder):
                pass
        except OSError as problem:
            raise RunError(f"{self.folder}: results cannot be kept there ({problem.strerror}); {FIX}") from None

    def read_again(self, cell: str) -> None:
        """Read the results of a cell again, because other processes may have written some.

        Raises:
            RunError: the file is damaged.
        """
        path = self.folder / f"{cell}.json"
        if path.exists():
            self._take(cell, _read_results(path))

    def add(self, job: Job, result: Result) -> None:
        """Write a result into its cell's file.

        Raises:
            RunError: the file is damaged, cannot be written, or stays locked by another process for a minute.
        """
        with lock_folder(self.folder, "has been writing results for a minute", FIX, LOCK_LIMIT):
            self._add(self.folder / f"{job.cell.id}.json", result)
        self._take(job.cell.id, [result])

    def _add(self, path: Path, result: Result) -> None:
        stored = _read_results(path) if path.exists() else []
        merged = sorted(
            [*(r for r in stored if r.fingerprint != result.fingerprint), result],
            key=lambda r: (r.rounds, r.arm, r.seed, json.dumps(r.changed)),
        )
        lines = ",\n".join(
            f"  {json.dumps(r.model_dump(exclude_defaults=True, exclude={'target'}), allow_nan=False)}" for r in merged
        )
        try:
            write_bytes(path, f'{{\n "format": 1,\n "runs": [\n{lines}\n ]\n}}\n'.encode())
        except RunError as problem:
            raise RunError(f"{str(problem).rpartition(';')[0]}; {FIX}") from None

    def _take(self, cell: str, new: Iterable[Result]) -> None:
        new = list(new)
        prints = {r.fingerprint for r in new}
        self._found[cell] = [*new, *(r for r in self._found.get(cell, ()) if r.fingerprint not in prints)]
        self._by_fingerprint.clear()


def _read_results(path: Path) -> list[Result]:
    runs, place = read_json(path).get("runs"), ""
    try:
        if not isinstance(runs, list):
            raise TypeError("it has no list of runs")
        results = []
        for number, entry in enumerate(runs):
            place = f"runs.{number}."
            results.append(Result.model_validate(entry))
        for result in results:
            values = len(result.evaluated)
            if any(len(curve) != values for curve in result.all_curves):
                raise ValueError(f"seed {result.seed} of {result.arm!r} has not a value for each evaluated round")
        return results
    except ValidationError as problem:
        first = problem.errors()[0]
        why = f"{place}{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except (TypeError, ValueError) as problem:
        why = str(problem)
    raise RunError(f"{path}: is no file of results, or damaged ({why}); restore it, or take it away and run again")
