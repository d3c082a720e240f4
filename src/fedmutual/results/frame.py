"""The numbers of run folders as pandas tables: a row for each score, for each line of the ledger, and for each run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedmutual.results.comparison import Method, RunComparison, group_runs
from fedmutual.rundir.file_names import LEDGER
from fedmutual.rundir.frames import tabulate_numbers
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.recorded_run import RecordedRun, find_runs, read_runs
from fedmutual.rundir.schema import SEED, LedgerLine

_WORK = ("round", "phase", "client", "down", "up", "steps", "forwards")


class Results(NamedTuple):
    """The numbers of some runs, as `fedmutual.read` returns them.

    Each table begins with the columns study (runs with the same data and split), method, variant (the settings in which runs
    of the method differ) and seed, which name the run. A missing number is NaN or None.

    scores: a row for each number; a score that a client does not share is absent. Columns: round (from 1), steps (those of
        the client since the start; on the common test set the mean of the clients), model, client, data, metric and value
        as in `Run.history`, examples (how many were scored), last (whether the round is the run's last), best (whether the
        run's rule chose the round).
    work: a row for each line of the ledger. Columns: round (0: before the first), phase, client, down, up (bytes), steps,
        forwards.
    runs: a row for each run. Columns: folder, state, device, seconds, epsilon (the largest of a client), environment (the
        content of environment.json).
    """

    scores: pd.DataFrame
    work: pd.DataFrame
    runs: pd.DataFrame


def read(folder: str | Path) -> Results:
    """Return the numbers of a run folder, of the run folders that a command made, or of results of real sites.

    Raises:
        RunError: the folder holds no run, or a file is damaged.
    """
    named = list(_name_runs(read_runs(find_runs(Path(folder)))))
    works = [_read_work(run) for _, run in named]
    scores = [_tabulate_scores(run, work) for (_, run), work in zip(named, works, strict=True)]
    names = [name for name, _ in named]
    return Results(
        _join(names, scores),
        _join(names, works),
        pd.DataFrame([name | _describe_run(run) for name, run in named]),
    )


def _name_runs(runs: list[RecordedRun]) -> Iterator[tuple[dict[str, Any], RecordedRun]]:
    """Return the runs in the order of a report, each with the columns that name it."""
    for comparison in group_runs(runs):
        for method in comparison.methods:
            for run in method.runs:
                yield _name_run(comparison, method, run), run


def _name_run(comparison: RunComparison, method: Method, run: RecordedRun) -> dict[str, Any]:
    variant = ", ".join(f"{key} = {value}" for key, value in method.variant)
    return {"study": comparison.name, "method": method.algorithm, "variant": variant, "seed": run.seed}


def _join(names: list[dict[str, Any]], tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all tables; the first columns name the run of a row."""
    named = [table.assign(**name)[[*name, *table]] for name, table in zip(names, tables, strict=True)]
    return pd.concat(named, ignore_index=True)


def _read_work(run: RecordedRun) -> pd.DataFrame:
    lines = read_records(run.folder / LEDGER, LedgerLine)
    table = pd.DataFrame([[getattr(line, name) for name in _WORK] for line in lines], columns=list(_WORK))
    return table.astype({"steps": float, "forwards": float})


def _tabulate_scores(run: RecordedRun, work: pd.DataFrame) -> pd.DataFrame:
    scores = tabulate_numbers(run.evaluations)
    scores = scores[scores["metric"] != "examples"]  # they are a column of their own
    clients = [client if isinstance(client, str) else None for client in scores["client"]]  # pandas makes NaN of None
    places = [*zip(scores["round"], clients, strict=True)]
    steps, bests = _count_steps(work, run.reached), _find_best_rounds(run)
    best_rounds = [bests.get(client, bests.get("" if client else None)) for _, client in places]
    examples = scores["examples"]
    return scores.drop(columns="examples").assign(
        steps=[steps.get(place, float("nan")) for place in places],
        examples=examples,
        last=scores["round"] == run.reached,
        best=scores["round"] == pd.Series(best_rounds, index=scores.index, dtype=float),
    )[["round", "steps", "model", "client", "data", "metric", "value", "examples", "last", "best"]]


def _count_steps(work: pd.DataFrame, rounds: int) -> dict[tuple[int, str | None], float]:
    """Return (round, client) -> the client's gradient steps since the start; client None: the mean of the clients.

    Empty if steps of a line were not recorded.
    """
    work = work[work["phase"] != SEED]
    if work.empty or work["steps"].isna().any():
        return {}
    by_client = work.pivot_table("steps", "round", "client", aggfunc="sum", fill_value=0)
    sums = by_client.reindex(range(rounds + 1), fill_value=0).cumsum()
    columns: dict[str | None, pd.Series] = {**{str(i): sums[i] for i in sums}, None: sums.mean(axis=1)}
    return {(round, client): steps for client, column in columns.items() for round, steps in enumerate(column)}


def _find_best_rounds(run: RecordedRun) -> dict[str | None, int]:
    """Return the best rounds that the run's rule chose: by node, by "" for all clients, and by None for the test set."""
    summary, bests = run.summary, dict[str | None, int]()
    if summary and summary.global_ and summary.global_.test:
        bests[None] = summary.global_.test.best_round
    if summary and summary.personal and summary.personal.validation and summary.personal.validation.best.best_round:
        bests[""] = summary.personal.validation.best.best_round
    return bests | (summary.transfer.best_rounds if summary and summary.transfer else {})


def _describe_run(run: RecordedRun) -> dict[str, Any]:
    summary, privacy = run.summary, run.summary.privacy if run.summary else None
    epsilons = [client.epsilon for client in privacy.clients.values()] if privacy else []
    return {
        "folder": str(run.folder),
        "state": run.state,
        "device": run.environment.device,
        "seconds": summary.seconds if summary else None,
        "epsilon": max((float("inf") if e is None else e for e in epsilons), default=None),
        "environment": run.environment.model_dump(),
    }
