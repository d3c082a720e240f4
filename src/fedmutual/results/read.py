"""The numbers of run folders as pandas tables, for a notebook: `fedmutual.read`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedmutual.results.comparison import group_runs
from fedmutual.results.frame import RunFacts, find_runs, read_runs, tabulate_numbers
from fedmutual.rundir.schema import SEED


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
    named = [
        ({"study": c.name, "method": line.algorithm, "variant": line.variant_text, "seed": run.seed}, run)
        for c in group_runs(read_runs(find_runs(Path(folder))))
        for line in c.methods
        for run in line.runs
    ]

    def join(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
        named_tables = [table.assign(**name)[[*name, *table]] for (name, _), table in zip(named, tables, strict=True)]
        return pd.concat(named_tables, ignore_index=True)

    return Results(
        join(_tabulate_scores(run) for _, run in named),
        join(pd.DataFrame(run.work) for _, run in named),
        pd.DataFrame([name | _describe_run(run) for name, run in named]),
    )


def _tabulate_scores(run: RunFacts) -> pd.DataFrame:
    """Return the scores of a run with the columns of `Results.scores`."""
    scores = tabulate_numbers(run.evaluations)
    scores = scores[scores["metric"] != "examples"]  # they are a column of their own
    clients = [client if isinstance(client, str) else None for client in scores["client"]]  # pandas makes NaN of None
    places = [*zip(scores["round"], clients, strict=True)]
    steps, bests = _count_steps(run), _find_best_rounds(run)
    best_rounds = [bests.get(client, bests.get("" if client else None)) for _, client in places]
    return scores.assign(
        steps=[steps.get(place, float("nan")) for place in places],
        last=scores["round"] == run.reached,
        best=scores["round"] == pd.Series(best_rounds, index=scores.index, dtype=float),
    )[["round", "steps", "model", "client", "data", "metric", "value", "examples", "last", "best"]]


def _count_steps(run: RunFacts) -> dict[tuple[int, str | None], float]:
    """Return (round, client) -> the client's gradient steps since the start; client None: the mean of the clients.

    Empty if steps of a line were not recorded.
    """
    work = pd.DataFrame(run.work[run.work["phase"] != SEED])
    if work.empty or work["steps"].isna().any():
        return {}
    by_client = work.pivot_table("steps", "round", "client", aggfunc="sum", fill_value=0, observed=True)
    sums = by_client.reindex(range(run.reached + 1), fill_value=0).cumsum()
    columns: dict[str | None, Any] = {**{str(i): sums[i] for i in sums}, None: sums.mean(axis=1)}
    return {(round, client): steps for client, column in columns.items() for round, steps in enumerate(column)}


def _find_best_rounds(run: RunFacts) -> dict[str | None, int]:
    """Return the best rounds that the run's rule chose: by node, by "" for all clients, and by None for the test set."""
    summary, bests = run.summary, dict[str | None, int]()
    if summary and summary.global_ and summary.global_.test:
        bests[None] = summary.global_.test.best_round
    if summary and summary.personal and summary.personal.validation and summary.personal.validation.best.best_round:
        bests[""] = summary.personal.validation.best.best_round
    return bests | (summary.transfer.best_rounds if summary and summary.transfer else {})


def _describe_run(run: RunFacts) -> dict[str, Any]:
    summary, privacy = run.summary, run.summary.privacy if run.summary else None
    return {
        "folder": str(run.folder),
        "state": run.state,
        "device": run.environment.device,
        "seconds": summary.seconds if summary else None,
        "epsilon": None if privacy is None else float("inf") if privacy.epsilon is None else privacy.epsilon,
        "environment": run.environment.model_dump(),
    }
