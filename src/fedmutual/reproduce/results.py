"""What is kept of finished runs: one small JSON file a cell, committed, and read again instead of training anew."""

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import fedmutual
from fedmutual.errors import RunError
from fedmutual.records.files import read_json, write_bytes
from fedmutual.report.lines import Evaluation
from fedmutual.report.runs import Run, read_run
from fedmutual.reproduce.kept import ClientResult, Made, Result
from fedmutual.reproduce.plan import Job

DIGITS = 5  # of an accuracy


class Store:
    """The results in some folders; new ones go to the first."""

    def __init__(self, *folders: Path) -> None:
        self.folder = folders[0]
        self._found: dict[str, list[Result]] = {}
        for root in reversed(folders):
            for file in sorted(root.rglob("*.json")):
                self._take(file.relative_to(root).with_suffix("").as_posix(), _read(file))

    def of(self, cell: str) -> Sequence[Result]:
        """All results of a cell."""
        return self._found.get(cell, ())

    def find(self, job: Job, version: str | None = None) -> Result | None:
        """The result of a run, whichever experiment asked for it; of one version of fedmutual, or of the newest."""
        here = [*self.of(job.cell.id), *(r for cell, found in self._found.items() if cell != job.cell.id for r in found)]
        for result in here:
            if result.fingerprint == job.fingerprint and version in (None, result.version):
                target = _target(job)
                return result.model_copy(update={"arm": job.arm, "seed": job.seed, "target": target})
        return None

    def add(self, job: Job, result: Result) -> None:
        """Keep a result, in its cell's file.

        Raises:
            RunError: the file is damaged, or cannot be written.
        """
        path = self.folder / f"{job.cell.id}.json"
        there = _read(path) if path.exists() else []
        kept = sorted(
            [*(r for r in there if r.fingerprint != result.fingerprint), result],
            key=lambda r: (r.rounds, r.arm, r.seed, json.dumps(r.changed)),
        )
        lines = ",\n".join(f"  {json.dumps(r.model_dump(exclude_defaults=True, exclude={'target'}))}" for r in kept)
        write_bytes(path, f'{{\n "format": 1,\n "runs": [\n{lines}\n ]\n}}\n'.encode())
        self._take(job.cell.id, [result])

    def _take(self, cell: str, new: Iterable[Result]) -> None:
        new = list(new)
        prints = {r.fingerprint for r in new}
        self._found[cell] = [*new, *(r for r in self._found.get(cell, ()) if r.fingerprint not in prints)]


def _read(path: Path) -> list[Result]:
    runs = read_json(path).get("runs")
    try:
        if not isinstance(runs, list):
            raise TypeError("it has no list of runs")
        found = [Result.model_validate(entry) for entry in runs]
        for result in found:
            if any(len(curve) != len(result.evaluated) for curve in result.curves.values()):
                raise ValueError(f"seed {result.seed} of {result.arm!r} has not a value for each evaluated round")
        return found
    except ValidationError as problem:
        first = problem.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except (TypeError, ValueError) as problem:
        why = str(problem)
    raise RunError(f"{path}: is no file of results, or damaged ({why}); restore it, or take it away and run again")


def collect(job: Job, folder: Path, together: int, noise: Mapping[str, float]) -> Result:
    """What is kept of a finished run's folder."""
    run = read_run(folder)
    assert run.summary is not None  # it is finished
    tests = [e.find("global", "test") for e in run.evaluations]
    curves = {
        "global_test": [s.accuracy if s else None for s in tests],
        "own": [_mean(job, run, e, run.serves) for e in run.evaluations],
        "copies": [_mean(job, run, e, "copy") for e in run.evaluations],
    }
    return Result(
        **_about(job, run, together),
        seconds=round(run.summary.seconds or 0.0, 1),
        model=run.serves,
        curves={
            k: tuple(round(v, DIGITS) for v in values if v is not None)
            for k, values in curves.items()
            if values and None not in values
        },
        clients=_clients(job, run),
        noise={k: round(v, DIGITS) for k, v in noise.items()},
    )


def failure(job: Job, folder: Path, together: int, why: str) -> Result:
    """What is kept of a run in which a client diverged."""
    return Result(**_about(job, read_run(folder), together), seconds=0.0, failed=why)


def _about(job: Job, run: Run, together: int) -> dict[str, Any]:
    about, config = run.environment, job.config
    given = {k: about[k] for k in ("python", "torch", "torchvision", "platform", "cpus", "device", "threads")}
    engine = (about.get("engine") or {}).get("name", "")
    return {
        "arm": job.arm,
        "seed": job.seed,
        "fingerprint": job.fingerprint,
        "version": fedmutual.__version__,
        "rounds": config.rounds,
        "every": config.records.evaluate_every,
        "limit": job.scale.rounds,
        "changed": dict(job.scale.changed),
        "target": _target(job),
        "made": Made(command=command(), engine=engine, together=together, **given),
    }


def command() -> str:
    """The command line, with the program's name for its path."""
    program = Path(sys.argv[0]).name
    return shlex.join(["fedmutual" if program == "__main__.py" else program, *sys.argv[1:]])


def _mean(job: Job, run: Run, evaluation: Evaluation, model: str | None) -> float | None:
    """The mean accuracy of the clients that count, on their own validation data."""
    scores = run.own(evaluation, model) if model else {}
    counted = job.cell.about.clients or tuple(scores)
    found = [scores[i].accuracy for i in counted if i in scores]
    return sum(found) / len(found) if found else None


def _clients(job: Job, run: Run) -> dict[str, ClientResult]:
    networks = (run.environment.get("models") or {}).get("personal") or {}
    shared = (run.environment.get("models") or {}).get("shared") or {}
    found = {}
    for i in run.own(run.last):
        curve = [run.own(e)[i].accuracy for e in run.evaluations if i in run.own(e)]
        found[i] = ClientResult(
            network=(networks.get(i) or shared).get("name", ""),
            examples=sum(run.partition.clients[i].counts.private),
            last=round(curve[-1], DIGITS),
            best=round(max(curve), DIGITS),
            curve=tuple(round(v, DIGITS) for v in curve) if job.cell.about.each else (),
        )
    return found


def _target(job: Job) -> float | None:
    """The paper's accuracy of FedAvg in this cell, by which `rounds_to` counts."""
    arm = job.cell.about.arms.get("fedavg")
    return arm.paper / 100 if arm is not None and arm.paper is not None else None
