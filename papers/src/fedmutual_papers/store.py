"""The results of finished runs: one small committed JSON file for each cell, so that no run is trained twice."""

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from fedmutual.errors import RunError
from fedmutual.files import read_json, write_bytes
from fedmutual.rundir.folder import lock_folder
from fedmutual.rundir.record_files import check_record
from fedmutual.rundir.schema import Share

Curve = tuple[Share, ...]  # one value for each evaluated round
LOCK_LIMIT = 60.0  # seconds until another process that writes results is given up
FIX = "choose another folder with --results"


def _check_finite(value: Any) -> Any:
    json.dumps(value, allow_nan=False)  # raises ValueError
    return value


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClientResult(_Stored):
    """The accuracy of one client's model on its validation data."""

    network: str
    examples: int
    last: Share
    best: Share
    curve: Curve = ()  # where the cell keeps every client's


class Cloud(_Stored):
    """The features of test examples on their first two principal axes, with the domain and the class of each."""

    domains: tuple[str, ...]
    classes: tuple[str, ...]
    explained: tuple[Share, Share]  # the share of the variance on each axis
    silhouette: float  # of the classes, over all features: -1 to 1, large where classes lie apart
    points: tuple[tuple[int, int, float, float], ...]  # (domain, class, x, y) of some of them, of one seed


class NodeAnalysis(_Stored):
    """The analysis of one client. Each curve has one value for each evaluated round."""

    client: str
    validation: Curve  # its model on all clients' validation data
    losses: dict[str, tuple[float, ...]]  # loss term -> its mean over the round
    cloud: Cloud


class Origin(_Stored):
    """The origin of a result: command, versions and machine."""

    command: str
    python: str
    torch: str
    torchvision: str
    platform: str
    cpus: int
    device: str
    threads: int
    engine: str
    weights: tuple[str, ...] = ()  # what networks began with, in words, where not all of them are random
    together: int = 1  # so many runs were trained at once, in common stacks; `seconds` are then those of all


class Result(_Stored):
    """One finished run. Accuracies are fractions."""

    arm: str
    seed: int
    fingerprint: str
    version: str  # the version of fedmutual that made the result
    numerics: int = 1  # fedmutual.numerics.VERSION of the run; 1 in older results, which do not have this field
    rounds: int
    every: int
    limit: int | None = None  # as --rounds asked
    changed: Annotated[dict[str, Any], AfterValidator(_check_finite)] = {}  # as --set asked
    seconds: float
    model: str | None = None  # what a client uses: "personal", "global", "meme"
    curves: dict[str, Curve] = {}
    clients: dict[str, ClientResult] = {}
    noise: dict[str, float] = {}  # standard deviation -> loss
    noise_accuracy: dict[str, Share] = {}  # standard deviation -> accuracy; older results have none
    # "acc", "bwt", "fwt" of each client, where clients are domains
    transfer: dict[str, dict[Literal["last", "best"], dict[str, Share]]] = {}
    # Bytes of all clients together: of the rounds, and of the public examples that they gave out once, before round 1.
    traffic: dict[Literal["up", "down", "seed"], int] = {}
    steps: int = 0  # local steps of a round, where they are counted; else a round is passes over the data
    # The work of a client's model over the run, mean over clients; examples count in each step that uses them. A number that
    # was not counted is missing; results of older versions have none of them.
    budget: dict[Literal["steps", "examples", "forwards"], float | None] = {}
    projected: Share | None = None  # the share of mutual steps whose gradient was projected
    closeup: NodeAnalysis | None = None  # of the node that the cell names
    epsilon: float | None = None  # of what leaves, the largest of any client; None without noise, or if it is infinite
    failed: str = ""  # why there are no numbers: a client diverged
    made: Origin

    @model_validator(mode="after")
    def _check(self) -> Self:
        tables: list[tuple[str, Any, set[str]]] = [
            *([("traffic", self.traffic, {"up", "down"})] if self.traffic else []),
            *([("budget", self.budget, {"steps"})] if self.budget else []),
            *((f"transfer.{name}", of, {"last", "best"}) for name, of in self.transfer.items()),
        ]
        run = f"seed {self.seed} of {self.arm!r}"
        for place, table, needed in tables:
            if missing := sorted(key for key in needed if table.get(key) is None):
                raise ValueError(f"{place} of {run} has no {missing[0]!r}")
        curves = [*self.curves.values(), *(client.curve for client in self.clients.values() if client.curve)]
        if any(len(curve) != len(self.evaluated) for curve in (*curves, *self.closeup_curves.values())):
            raise ValueError(f"{run} does not have one value for each evaluated round")
        return self

    @property
    def evaluated(self) -> list[int]:
        """Return the rounds that the curves have values for."""
        return [r for r in range(1, self.rounds + 1) if r % self.every == 0 or r == self.rounds]

    @property
    def closeup_curves(self) -> dict[str, tuple[float, ...]]:
        """Return the curves of the analysed node: "validation" and each loss term; {} without an analysis."""
        return {"validation": self.closeup.validation, **self.closeup.losses} if self.closeup else {}

    def get_curve(self, name: str) -> tuple[float, ...]:
        """Return a curve, () if the run lacks the curve.

        name: as in `curves`; "local" is of the model that a client trained: personal, else the copy before averaging.
        """
        if name == "local":
            name = "copies" if "copies" in self.curves and self.model != "personal" else "own"
        return self.curves.get(name, ())


class _ResultFile(_Stored):
    format: Literal[1]
    runs: tuple[Result, ...]


class ResultStore:
    """The results in some folders; new results are written to the first folder."""

    def __init__(self, *folders: Path) -> None:
        """folders: of two results of one run in a cell, the result in the earlier folder counts.

        Raises:
            RunError: a JSON file in a folder is damaged, or is not a file of results.
        """
        self.folder = folders[0]
        self._found: dict[str, dict[str, Result]] = {}  # cell -> fingerprint -> result
        for root in reversed(folders):
            for file in sorted(root.rglob("*.json")):
                self._take(file.relative_to(root).with_suffix("").as_posix(), _read_results(file))

    def list_results(self, cell: str) -> list[Result]:
        """Return all results of a cell."""
        return list(self._found.get(cell, {}).values())

    def list_all_results(self) -> Iterator[Result]:
        """Return all results."""
        return (result for results in self._found.values() for result in results.values())

    def find(self, fingerprint: str, cell: str, numerics: int | None = None) -> Result | None:
        """Return the result of a run, stored by any experiment, or None.

        cell: its own results come first. numerics: a version; None: any version.
        """
        results = (self._found.get(id, {}).get(fingerprint) for id in (cell, *self._found))
        return next((r for r in results if r is not None and numerics in (None, r.numerics)), None)

    def check(self) -> None:
        """Raise RunError if results cannot be written; called before anything is trained."""
        with self._lock():
            pass

    def read_again(self, cell: str) -> None:
        """Read the results of a cell again, because other processes may have written some; RunError: they are damaged."""
        path = self.folder / f"{cell}.json"
        self._take(cell, _read_results(path) if path.exists() else ())

    def add(self, cell: str, result: Result) -> None:
        """Write a result into the file of a cell.

        Raises:
            RunError: the file is damaged, cannot be written, or stays locked by another process for a minute.
        """
        path = self.folder / f"{cell}.json"
        with self._lock():
            stored = _read_results(path) if path.exists() else ()
            merged = [*(r for r in stored if r.fingerprint != result.fingerprint), result]
            merged.sort(key=lambda r: (r.rounds, r.arm, r.seed, json.dumps(r.changed)))
            lines = ",\n".join(f"  {json.dumps(r.model_dump(exclude_defaults=True), allow_nan=False)}" for r in merged)
            try:
                write_bytes(path, f'{{\n "format": 1,\n "runs": [\n{lines}\n ]\n}}\n'.encode())
            except RunError as problem:
                raise RunError(f"{str(problem).rpartition(';')[0]}; {FIX}") from None
        self._take(cell, [result])

    def _lock(self) -> AbstractContextManager[None]:
        return lock_folder(self.folder, "has been writing results for a minute", FIX, LOCK_LIMIT)

    def _take(self, cell: str, results: Iterable[Result]) -> None:
        new = {r.fingerprint: r for r in results}
        self._found[cell] = new | {k: r for k, r in self._found.get(cell, {}).items() if k not in new}


def _read_results(path: Path) -> tuple[Result, ...]:
    return check_record(path, _ResultFile, read_json(path), "restore it, or take it away and run again").runs
