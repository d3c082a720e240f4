"""Make summary.json from the logs of a run: last and best scores, and the rows by which the best round was chosen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmutual.config import Config
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.environment import read_metric
from fedmutual.rundir.file_names import LEDGER, METRICS, SUMMARY
from fedmutual.rundir.ledger_columns import LedgerColumns, make_columns
from fedmutual.rundir.record_files import check_record, read_records, write_record
from fedmutual.rundir.schema import Evaluation, LedgerLine, Summary
from fedmutual.rundir.transfer import average_values, find_best_round, list_client_scores, measure_transfer, read_projected

Lines = Sequence[Evaluation]


def write_summary(folder: Path, config: Config, **more: Any) -> None:
    """Write summary.json of a run from its logs. more: further keys, or other values of keys.

    Raises:
        RunError: a log or environment.json is damaged, or the file cannot be written.
    """
    head = {"name": config.name, "algorithm": config.algorithm["name"], "rounds": config.rounds}
    evaluations = tuple(read_records(folder / METRICS, Evaluation))
    ledger = make_columns(read_records(folder / LEDGER, LedgerLine))
    scores = summarise(config, evaluations, ledger, read_metric(folder))
    summary = check_record(folder / SUMMARY, Summary, {**head, "seed": config.seed, **scores, **more})
    write_record(folder / SUMMARY, summary)


def summarise(config: Config, metrics: Lines, ledger: LedgerColumns, metric: Metric = ACCURACY) -> dict[str, Any]:
    """Return the scores and bytes of summary.json. Accuracies are fractions in [0, 1]; rounds count from 1.

    metric: the main metric of the run. Another one than accuracy has keys of its own: `test_metric` and `val_metric`.
    """
    held = any(row.data == "holdout" for line in metrics for row in line.rows)  # those of a partition file too
    chosen_by = config.records.best_by or ("holdout" if held else None)
    scored = {row.model for line in metrics for row in line.rows if row.client is not None}
    model = next((m for m in ("personal", "global", "meme") if m in scored), None)  # what a client would use, if scored
    other_metric = metric if metric != ACCURACY else None
    return {
        "global": {"test_accuracy": _summarise_global(metrics, chosen_by or "test", ACCURACY)}
        | ({"test_metric": _summarise_global(metrics, chosen_by or "test", other_metric)} if other_metric else {}),
        "personal": {
            "model": model,
            "val_accuracy": _summarise_personal(metrics, model, chosen_by or "validation", ACCURACY),
            **(
                {"val_metric": _summarise_personal(metrics, model, chosen_by or "validation", other_metric)}
                if other_metric
                else {}
            ),
            **_find_other_scores(metrics, model),
        },
        **({"metric": other_metric.name} if other_metric else {}),
        "transfer": measure_transfer(metrics, model, chosen_by or "validation"),
        "projected": read_projected(metrics),
        "bytes": {"up": ledger.sum_bytes("up"), "down": ledger.sum_bytes("down"), "seed": sum(ledger.seed.values())},
    }


def _summarise_global(metrics: Lines, best_by: str, metric: Metric) -> dict[str, Any] | None:
    """Return the metric of the shared model on the test set; None without a complete shared model."""
    test = _average_by_round(metrics, "global", "test", metric)
    if test is None:
        return None
    judged = _average_by_round(metrics, "global", best_by, metric)
    best = find_best_round(judged or test, metric)
    return {"last": test[max(test)], "best": test[best], "best_round": best, "best_by": best_by if judged else "test"}


def _find_other_scores(metrics: Lines, model: str | None) -> dict[str, Any]:
    """Return the last scores, on validation data, of clients whose task has no accuracy metric; empty where all have one."""
    by_client = {
        row.client: row.values
        for row in (metrics[-1].rows if metrics else ())
        if row.client is not None and (row.model, row.data) == (model, "validation") and not row.has_accuracy
    }
    return {"other_tasks": {"last": by_client}} if by_client else {}


def _summarise_personal(metrics: Lines, model: str | None, best_by: str, metric: Metric) -> dict[str, Any] | None:
    """Return the metric of the model that a client would use on validation data; None if no client shares its scores."""
    if model is None:
        return None
    scores = {line.round: list_client_scores(line, model, "validation", metric.name) for line in metrics}
    if not all(scores.values()):  # no client has the metric
        return None
    judged = _average_by_round(metrics, model, best_by, metric)
    best = find_best_round(judged or {r: average_values(s) for r, s in scores.items()}, metric)
    at = {"last": max(scores), "best": best}
    worst = min if metric.is_higher_better else max
    values = {
        name: {"mean": average_values(scores[r]), "worst": worst(scores[r].values()), "per_client": scores[r]}
        for name, r in at.items()
    }
    values["best"] |= {"best_round": best, "best_by": best_by if judged else "validation"}
    return values


def _average_by_round(metrics: Lines, model: str, data: str, metric: Metric) -> dict[int, float] | None:
    """Return round -> the metric of a model, as `_average_metric`; None if there is no round, or one without the metric."""
    by_round = {line.round: _average_metric(line, model, data, metric.name) for line in metrics}
    averages = {round: average for round, average in by_round.items() if average is not None}
    return averages if averages and len(averages) == len(by_round) else None


def _average_metric(line: Evaluation, model: str, data: str, metric: str) -> float | None:
    """Return the metric of a model on the common rows, else its mean over clients; None without the metric."""
    rows = [row for row in line.rows if (row.model, row.data) == (model, data)]
    scores = [(row.client, value) for row in rows if (value := row.find_number(metric)) is not None]
    values = [value for client, value in scores if client is None] or [value for _, value in scores]
    return sum(values) / len(values) if values else None
