"""Make summary.json from the logs of a run: last and best scores, and the rows by which the best round was chosen."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmutual.config import Config
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.file_names import LEDGER, METRICS, SUMMARY
from fedmutual.rundir.record_files import check_record, read_metric, read_records, write_record
from fedmutual.rundir.schema import SEED, TRANSFER_DATA, Evaluation, LedgerLine, Summary

Lines = Sequence[Evaluation]

_CHOICE = {"holdout": ("holdout",), "validation": ("validation.all", "validation"), "test": ("test",)}


def write_summary(folder: Path, config: Config, no_vote: Collection[str] = (), **more: Any) -> None:
    """Write summary.json of a run from its logs. more: further keys, or other values of keys.

    no_vote: the clients whose scores do not count in the choice of the best round.

    Raises:
        RunError: a log or environment.json is damaged, or the file cannot be written.
    """
    head = {"name": config.name, "algorithm": config.algorithm["name"], "rounds": config.rounds, "seed": config.seed}
    evaluations = tuple(read_records(folder / METRICS, Evaluation))
    scores = summarise(config, evaluations, read_records(folder / LEDGER, LedgerLine), read_metric(folder), no_vote)
    write_record(folder / SUMMARY, check_record(folder / SUMMARY, Summary, {**head, **scores, **more}))


def summarise(
    config: Config, metrics: Lines, ledger: Iterable[LedgerLine], metric: Metric = ACCURACY, no_vote: Collection[str] = ()
) -> dict[str, Any]:
    """Return the scores and bytes of summary.json. Accuracies are fractions in [0, 1]; rounds count from 1.

    metric: the main metric of the run. Another one than accuracy has keys of its own: `test_metric` and `val_metric`.
    """
    return {**summarise_scores(config.records.best_by, metrics, metric, no_vote), "bytes": _sum_bytes(ledger)}


def summarise_scores(best_by: str | None, metrics: Lines, metric: Metric, no_vote: Collection[str] = ()) -> dict[str, Any]:
    """Return the scores of `summarise`. best_by: records.best_by. no_vote: as for `write_summary`."""
    held = any(row.data == "holdout" for line in metrics for row in line.rows)  # those of a partition file too
    chosen_by = best_by or ("holdout" if held else None)
    scored = {row.model for line in metrics for row in line.rows if row.client is not None}
    model = next((m for m in ("personal", "global", "meme") if m in scored), None)  # what a client would use, if scored
    shared, personal = {}, {}
    for key, one in (("accuracy", ACCURACY), *([("metric", metric)] if metric != ACCURACY else [])):
        shared[f"test_{key}"] = _summarise_global(metrics, chosen_by or "test", one, no_vote)
        personal[f"val_{key}"] = _summarise_personal(metrics, model, chosen_by or "validation", one, no_vote)
    return {
        "global": shared,
        "personal": {"model": model, **personal, **_find_other_scores(metrics, model)},
        **({"metric": metric.name} if metric != ACCURACY else {}),
        "transfer": measure_transfer(metrics, model, chosen_by or "validation"),
        "projected": _read_projected(metrics),
    }


def _sum_bytes(ledger: Iterable[LedgerLine]) -> dict[str, int]:
    """Return the bytes of all clients: up and down, and seed, those of the public data, which are in no other sum."""
    sums = {"up": 0, "down": 0, "seed": 0}
    for line in ledger:
        if line.round == 0 and line.phase == SEED:
            sums["seed"] += line.up
        else:
            sums["up"] += line.up
            sums["down"] += line.down
    return sums


def _summarise_global(metrics: Lines, best_by: str, metric: Metric, no_vote: Collection[str]) -> dict[str, Any] | None:
    """Return the metric of the shared model on the test set; None without a complete shared model."""
    test = _average_by_round(metrics, "global", "test", metric)
    if test is None:
        return None
    judged = _average_by_round(metrics, "global", best_by, metric, no_vote)
    best = _find_best_round(judged or test, metric)
    return {"last": test[max(test)], "best": test[best], "best_round": best, "best_by": best_by if judged else "test"}


def _find_other_scores(metrics: Lines, model: str | None) -> dict[str, Any]:
    """Return the last scores, on validation data, of clients whose task has no accuracy metric; empty where all have one."""
    by_client = {
        row.client: row.values
        for row in (metrics[-1].rows if metrics else ())
        if row.client is not None and (row.model, row.data) == (model, "validation") and not row.has_accuracy
    }
    return {"other_tasks": {"last": by_client}} if by_client else {}


def _summarise_personal(
    metrics: Lines, model: str | None, best_by: str, metric: Metric, no_vote: Collection[str]
) -> dict[str, Any] | None:
    """Return the metric of the model that a client would use on validation data; None if no client shares its scores."""
    if model is None:
        return None
    scores = {line.round: line.get_client_scores(model, "validation", metric.name) for line in metrics}
    if not all(scores.values()):  # no client has the metric
        return None
    judged = _average_by_round(metrics, model, best_by, metric, no_vote)
    if judged is None and no_vote:
        judged = _average_by_round(metrics, model, "validation", metric, no_vote)
    best = _find_best_round(judged or {r: _average(s) for r, s in scores.items()}, metric)
    pick = min if metric.is_higher_better else max
    last_values, best_values = (_sum_up(scores[r], pick(scores[r].values())) for r in (max(scores), best))
    return {
        "last": last_values,
        "best": best_values | {"best_round": best, "best_by": best_by if judged else "validation"},
    }


def _average_by_round(
    metrics: Lines, model: str, data: str, metric: Metric, without: Collection[str] = ()
) -> dict[int, float] | None:
    """Return round -> the metric of a model on the common rows, else its mean over clients, but those of `without`.

    None if there is no round, or one without the metric.
    """
    averages = {}
    for line in metrics:
        rows = [row for row in line.rows if (row.model, row.data) == (model, data) and row.client not in without]
        scores = [(row.client, value) for row in rows if (value := row.find_number(metric.name)) is not None]
        if values := [value for client, value in scores if client is None] or [value for _, value in scores]:
            averages[line.round] = sum(values) / len(values)
    return averages if averages and len(averages) == len({line.round for line in metrics}) else None


def measure_transfer(metrics: Lines, model: str | None, best_by: str) -> dict[str, Any] | None:
    """Return ACC, BWT and FWT of the nodes after the last round and after each node's best round; None without domains.

    The result has the keys of `schema.NodeMeasures`, which describes the measures.

    best_by: "holdout", "validation" (rows of all nodes if they are scored, else the node's rows) or "test".
    """
    if model is None or not any(line.get_client_scores(model, TRANSFER_DATA["bwt"]) for line in metrics):
        return None
    wanted = (*_CHOICE[best_by], "validation", "test")
    by = next((data for data in wanted if all(line.get_client_scores(model, data) for line in metrics)), "test")
    judged = {line.round: line.get_client_scores(model, by) for line in metrics}
    rounds = {
        i: _find_best_round({r: scores[i] for r, scores in judged.items() if i in scores}) for i in judged[max(judged)]
    }
    return {
        **{name: _measure_ends(metrics, model, data, rounds) for name, data in TRANSFER_DATA.items()},
        "best_rounds": rounds,
        "best_by": by,
    }


def _measure_ends(metrics: Lines, model: str, data: str, rounds: Mapping[str, int]) -> dict[str, Any] | None:
    """Return one measure after the last and after each node's best round; None without scores (FWT of a single node)."""
    scores = {line.round: line.get_client_scores(model, data) for line in metrics}
    last = scores[max(scores)]
    best = {i: scores[r][i] for i, r in rounds.items() if i in scores[r]}
    return {n: _sum_up(v, min(v.values())) for n, v in (("last", last), ("best", best))} if last and best else None


def _read_projected(metrics: Lines) -> dict[str, Any] | None:
    """Return the last reported share of each node's mutual steps with a projected gradient; None if there is no report."""
    shares = {i: terms["projected"] for line in metrics for i, terms in line.train.items() if "projected" in terms}
    return {"mean": _average(shares), "per_client": shares} if shares else None


def _sum_up(values: Mapping[str, float], worst: float) -> dict[str, Any]:
    return {"mean": _average(values), "worst": worst, "per_client": values}


def _average(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


def _find_best_round(judged: Mapping[int, float], metric: Metric = ACCURACY) -> int:
    """Return the first round with the best value of a metric. judged: round -> value."""
    return max(judged, key=lambda r: (metric.sign * judged[r], -r))
