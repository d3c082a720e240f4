"""What is read out of a finished run's folder, to be kept."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedmutual
from fedmutual import numerics
from fedmutual.reproduce.budget import count_budget
from fedmutual.reproduce.plan import Job
from fedmutual.reproduce.result import Budget, ClientResult, CloseUp, Ends, Made, Result, Traffic
from fedmutual.rundir.recorded_run import RecordedRun, read_run
from fedmutual.rundir.schema import Evaluation
from fedmutual.rundir.transfer import MEASURES

DIGITS = 5  # of an accuracy


def collect(job: Job, folder: Path, together: int, noise: Mapping[str, float], closeup: CloseUp | None = None) -> Result:
    """What is kept of a finished run's folder; `noise` and `closeup` are what was found with its models."""
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
        traffic=_traffic(run),
        steps=job.config.training.local_steps or 0,
        budget=_budget(job, run),
        closeup=closeup,
        transfer=_transfer(run),
        projected=_projected(run),
    )


def _traffic(run: RecordedRun) -> Traffic:
    """What the ledger counted: the rounds' messages, and apart from them the public examples that were given out once."""
    ledger = run.ledger
    return Traffic(
        up=ledger.total("up", start=False), down=ledger.total("down", start=False), seed=sum(ledger.seed.values())
    )


def _budget(job: Job, run: RecordedRun) -> Budget | None:
    counts = {i: held.counts for i, held in run.partition.clients.items()}
    public = {i: sum(c.public) for i, c in counts.items() if c.public is not None}
    return count_budget(job.config, {i: sum(c.private) for i, c in counts.items()}, public)


def _transfer(run: RecordedRun) -> dict[str, Ends]:
    """ACC, BWT and FWT of every node; none where clients are no domains."""
    found = run.summary.transfer if run.summary else None
    measured = {name: getattr(found, name) for name in MEASURES} if found else {}

    def short(values: Mapping[str, float]) -> dict[str, float]:
        return {i: round(v, DIGITS) for i, v in values.items()}

    return {
        name: Ends(last=short(of.last.per_client), best=short(of.best.per_client)) for name, of in measured.items() if of
    }


def _projected(run: RecordedRun) -> float | None:
    """The share of mutual steps whose gradient was projected, mean over nodes."""
    found = run.summary.projected if run.summary else None
    return round(found.mean, DIGITS) if found else None


def failure(job: Job, folder: Path, together: int, why: str) -> Result:
    """What is kept of a run in which a client diverged."""
    return Result(**_about(job, read_run(folder), together), seconds=0.0, failed=why)


def _about(job: Job, run: RecordedRun, together: int) -> dict[str, Any]:
    about, config = run.environment, job.config
    given = {k: about[k] for k in ("python", "torch", "torchvision", "platform", "cpus", "device", "threads")}
    engine = (about.get("engine") or {}).get("name", "")
    return {
        "arm": job.arm,
        "seed": job.seed,
        "fingerprint": job.fingerprint,
        "version": fedmutual.__version__,
        "numerics": numerics.VERSION,
        "rounds": config.rounds,
        "every": config.records.evaluate_every,
        "limit": job.scale.rounds,
        "changed": dict(job.scale.changed),
        "target": job.cell.target,
        "made": Made(command=command(), engine=engine, together=together, weights=_weights(run), **given),
    }


def _weights(run: RecordedRun) -> tuple[str, ...]:
    """What the networks began with, in words, each once; () where all are random."""
    models = run.environment.get("models") or {}
    networks = [models.get("shared") or {}, *(models.get("personal") or {}).values()]
    said = dict.fromkeys(str(n["weights"]) for n in networks if "weights" in n)
    return tuple(said) if set(said) - {"random weights"} else ()


def command() -> str:
    """The command line, with the program's name for its path."""
    program = Path(sys.argv[0]).name
    return shlex.join(["fedmutual" if program == "__main__.py" else program, *sys.argv[1:]])


def _mean(job: Job, run: RecordedRun, evaluation: Evaluation, model: str | None) -> float | None:
    """The mean accuracy of the clients that count, on their own validation data."""
    scores = run.own(evaluation, model) if model else {}
    counted = job.cell.about.clients or tuple(scores)
    found = [scores[i].accuracy for i in counted if i in scores]
    return sum(found) / len(found) if found else None


def _clients(job: Job, run: RecordedRun) -> dict[str, ClientResult]:
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
