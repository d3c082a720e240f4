"""Read a `Result` from the folder of a finished run."""

import re
import shlex
import sys
from collections.abc import Mapping
from math import isclose, isfinite
from pathlib import Path
from typing import Any

import fedmutual
from fedmutual import numerics
from fedmutual.core import Diverged
from fedmutual.results.frame import RunFacts, read_run
from fedmutual.rundir.schema import TRANSFER_DATA
from fedmutual.studies.run import RunRequest
from fedmutual.studies.trained_run import open_trained_run
from fedmutual_papers.budget import count_budget
from fedmutual_papers.plan import Job
from fedmutual_papers.result import Budget, ClientResult, Ends, Origin, Result, Traffic
from fedmutual_papers.weights import close_up, score_under_noise

DIGITS = 5  # of an accuracy
_OUT_FOLDER = re.compile(r"(the shared model of ).*[/\\]runs[/\\]")


def make_result(job: Job, request: RunRequest, problem: Diverged | None, together: int = 1) -> Result:
    """Return the result of a run that has ended, from its folder.

    problem: the error of a run in which a client diverged. together: the number of runs that were trained in common stacks
    with this run, itself included.

    Raises:
        RunError: a file of the run's folder is missing or damaged.
        UserError: the data, which the loss under noise and the analysis of a node need, cannot be read.
    """
    run, about = read_run(request.folder), job.cell.about
    facts = _describe_run(job, run, together)
    if problem is not None:
        return Result(**facts, seconds=0.0, failed=str(problem))
    finished = open_trained_run(request.folder, request.config)
    has_global_model = finished.summary["global"]["test_accuracy"] is not None
    noise = score_under_noise(finished, about.noise) if about.noise and has_global_model else {}
    if unbounded := [deviation for deviation, loss in noise.items() if not isfinite(loss)]:
        return Result(**facts, seconds=0.0, failed=f"the loss with noise {unbounded[0]} on the weights is not finite")
    assert run.summary is not None  # it is finished
    serves, rounds = next(iter(run.models), None), [e.round for e in run.evaluations]
    tests = [run.get_rows(round, "global", "test").get(None) for round in rounds]
    curves = {
        "global_test": [row.find_number("accuracy") if row else None for row in tests],
        "own": [_average_accuracy(job, run, round, serves) for round in rounds],
        "copies": [_average_accuracy(job, run, round, "copy") for round in rounds],
    }
    return Result(
        **facts,
        seconds=round(run.summary.seconds or 0.0, 1),
        model=serves,
        curves={
            k: tuple(round(v, DIGITS) for v in values if v is not None)
            for k, values in curves.items()
            if values and None not in values
        },
        clients=_read_clients(job, run),
        noise={k: round(v, DIGITS) for k, v in noise.items()},
        traffic=_read_traffic(run),
        steps=job.config.training.local_steps or 0,
        budget=_read_budget(job, run),
        closeup=close_up(finished, about.node) if about.node else None,
        transfer=_read_transfer(run),
        projected=_read_projected(run),
        epsilon=_read_epsilon(run),
    )


def _read_traffic(run: RunFacts) -> Traffic:
    """Return the bytes of the rounds' messages, and separately the bytes of the public examples, which are sent once."""
    later = run.messages[run.messages["round"] > 0]
    return Traffic(up=int(later["up"].sum()), down=int(later["down"].sum()), seed=run.seed_bytes)


def _read_budget(job: Job, run: RunFacts) -> Budget | None:
    """Return the work of a client as the ledger has it; with the examples if `count_budget` counts as many steps."""
    counts = {i: held.counts for i, held in run.partition.clients.items()}
    public = {i: sum(c["public"]) for i, c in counts.items() if "public" in c}
    counted = count_budget(job.config, {i: sum(c["private"]) for i, c in counts.items()}, public)
    work, clients = run.messages, run.work["client"].nunique()
    if work.empty or work["steps"].isna().any():
        return counted
    steps = float(work["steps"].sum()) / clients
    forwards = None if work["forwards"].isna().any() else float(work["forwards"].sum()) / clients
    examples = counted.examples if counted and isclose(counted.steps, steps) else None
    return Budget(steps=steps, examples=examples, forwards=forwards)


def _read_transfer(run: RunFacts) -> dict[str, Ends]:
    """Return ACC, BWT and FWT of each node; {} if the clients are not domains."""
    transfer = run.summary.transfer if run.summary else None
    measured = {name: getattr(transfer, name) for name in TRANSFER_DATA} if transfer else {}

    def short(values: Mapping[str, float]) -> dict[str, float]:
        return {i: round(v, DIGITS) for i, v in values.items()}

    return {
        name: Ends(last=short(of.last.per_client), best=short(of.best.per_client)) for name, of in measured.items() if of
    }


def _read_projected(run: RunFacts) -> float | None:
    """Return the share of mutual steps with a projected gradient, mean over nodes; None if there is none."""
    projected = run.summary.projected if run.summary else None
    return round(projected.mean, DIGITS) if projected else None


def _read_epsilon(run: RunFacts) -> float | None:
    """Return the largest epsilon of any client; None without noise, or if an epsilon is infinite."""
    stated = run.summary.privacy if run.summary else None
    spent = [client.epsilon for client in stated.clients.values()] if stated else []
    finite = [value for value in spent if value is not None]
    return round(max(finite), DIGITS) if finite and len(finite) == len(spent) else None


def _describe_run(job: Job, run: RunFacts, together: int) -> dict[str, Any]:
    about, config = run.environment, job.config
    machine = about.model_dump(include={"python", "torch", "torchvision", "platform", "cpus", "device", "threads"})
    engine = about.engine.name if about.engine else ""
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
        "made": Origin(command=get_command(), engine=engine, together=together, weights=_list_weights(run), **machine),
    }


def _list_weights(run: RunFacts) -> tuple[str, ...]:
    """Return the sources of the networks' initial weights, each once; () if all initial weights are random.

    Of a source that is a run folder only its place below `--out` is kept: "the shared model of runs/FINGERPRINT-NUMERICS".
    """
    models = run.environment.models
    networks = [*([models.shared] if models.shared else []), *models.personal.values()]
    sources = dict.fromkeys(_OUT_FOLDER.sub(r"\1runs/", n.weights) for n in networks if n.weights)
    return tuple(sources) if set(sources) - {"random weights"} else ()


def get_command() -> str:
    """Return the command line of this process: the program's name without its path, and no `--out`.

    The folder of `--out` affects no number, and its path says how the disk of the measuring machine is arranged.
    """
    program, arguments = Path(sys.argv[0]).name, iter(sys.argv[1:])
    shown = []
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            shown.append(argument)
    return shlex.join(["fedmutual" if program == "__main__.py" else program, *shown])


def _average_accuracy(job: Job, run: RunFacts, round: int, model: str | None) -> float | None:
    """Return the mean accuracy of the counted clients on their validation data, a fraction; None without scores."""
    scores = _read_scores(run, round, model) if model else {}
    counted = job.cell.about.clients or tuple(scores)
    accuracies = [scores[i] for i in counted if i in scores]
    return sum(accuracies) / len(accuracies) if accuracies else None


def _read_scores(run: RunFacts, round: int, model: str | None = None) -> dict[str, float]:
    """Return client -> its main metric on its validation data after a round. model: None is the one that it would use."""
    rows = run.get_rows(round, model)
    return {i: row.find_number(run.metric.name) or 0.0 for i, row in rows.items() if i is not None}


def _read_clients(job: Job, run: RunFacts) -> dict[str, ClientResult]:
    models = run.environment.models
    clients = {}
    curves = [_read_scores(run, e.round) for e in run.evaluations]
    for i in curves[-1] if curves else ():
        network = models.personal.get(i) or models.shared
        curve = [scores[i] for scores in curves if i in scores]
        clients[i] = ClientResult(
            network=network.name if network else "",
            examples=sum(run.partition.clients[i].counts["private"]),
            last=round(curve[-1], DIGITS),
            best=round(max(curve), DIGITS),
            curve=tuple(round(v, DIGITS) for v in curve) if job.cell.about.each else (),
        )
    return clients
