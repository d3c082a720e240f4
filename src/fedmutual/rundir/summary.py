"""Make summary.json from the logs of a run: last and best scores, and the rows by which the best round was chosen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmutual.config import Config
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.file_names import LEDGER, METRICS, SUMMARY
from fedmutual.rundir.logs import read_lines
from fedmutual.rundir.main_metric import read_metric
from fedmutual.rundir.record_files import write_record
from fedmutual.rundir.schema import Summary
from fedmutual.rundir.transfer import list_client_scores, measure_transfer, read_projected

SEED = "seed"  # the phase of round 0 in which nodes send their public data; its bytes are counted apart
Lines = Sequence[Mapping[str, Any]]


def write_summary(folder: Path, config: Config, **more: Any) -> None:
    """Write summary.json of a run from its logs. more: further keys, or other values of keys."""
    head = {"format": 1, "name": config.name, "algorithm": config.algorithm["name"], "rounds": config.rounds}
    scores = summarise(config, read_lines(folder / METRICS), read_lines(folder / LEDGER), read_metric(folder))
    write_record(folder / SUMMARY, Summary, {**head, "seed": config.seed, **scores, **more})


def summarise(config: Config, metrics: Lines, ledger: Lines, metric: Metric = ACCURACY) -> dict[str, Any]:
    """Return the scores and bytes of summary.json. Accuracies are fractions in [0, 1]; rounds count from 1.

    metric: the main metric of the run. Another one than accuracy has keys of its own: `test_metric` and `val_metric`.
    """
    held = any(s["data"] == "holdout" for line in metrics for s in line["scores"])  # those of a partition file too
    chosen_by = config.records.best_by or ("holdout" if held else None)
    scored = {s["model"] for line in metrics for s in line["scores"] if s["client"] is not None}
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
        "bytes": _sum_bytes(ledger),
    }


def _sum_bytes(ledger: Lines) -> dict[str, int]:
    """Return the bytes that clients sent ("up") and received ("down"), and the bytes of their public data ("seed")."""
    seed = [line for line in ledger if (line["round"], line["phase"]) == (0, SEED)]
    ways = {way: sum(line[way] for line in ledger) - sum(line[way] for line in seed) for way in ("up", "down")}
    return ways | {"seed": sum(line["up"] for line in seed)}


def _summarise_global(metrics: Lines, best_by: str, metric: Metric) -> dict[str, Any] | None:
    """Return the metric of the shared model on the test set; None without a complete shared model."""
    test = {line["round"]: _average_metric(line, "global", "test", metric.name) for line in metrics}
    if not test or any(v is None for v in test.values()):
        return None
    judged = {line["round"]: _average_metric(line, "global", best_by, metric.name) for line in metrics}
    by = best_by if None not in judged.values() else "test"
    best = _find_best(judged if by == best_by else test, metric)
    return {"last": test[max(test)], "best": test[best], "best_round": best, "best_by": by}


def _find_other_scores(metrics: Lines, model: str | None) -> dict[str, Any]:
    """Return the last scores, on validation data, of clients whose task has no accuracy metric; empty where all have one."""
    last = metrics[-1]["scores"] if metrics else ()
    named = ("model", "client", "data")
    by_client = {
        s["client"]: {k: v for k, v in s.items() if k not in named}
        for s in last
        if s["model"] == model and s["data"] == "validation" and s["client"] is not None and not _has(s, ACCURACY.name)
    }
    return {"other_tasks": {"last": by_client}} if by_client else {}


def _summarise_personal(metrics: Lines, model: str | None, best_by: str, metric: Metric) -> dict[str, Any] | None:
    """Return the metric of the model that a client would use on validation data; None if no client shares its scores."""
    if model is None:
        return None
    scores = {line["round"]: list_client_scores(line, model, "validation", metric.name) for line in metrics}
    if not all(scores.values()):  # no client has the metric
        return None
    judged = {line["round"]: _average_metric(line, model, best_by, metric.name) for line in metrics}
    by = best_by if None not in judged.values() else "validation"
    best = _find_best(judged if by == best_by else {r: _average_scores(s) for r, s in scores.items()}, metric)
    at = {"last": max(scores), "best": best}
    worst = min if metric.is_higher_better else max
    values = {
        name: {"mean": _average_scores(scores[r]), "worst": worst(scores[r].values()), "per_client": scores[r]}
        for name, r in at.items()
    }
    values["best"] |= {"best_round": best, "best_by": by}
    return values


def _average_metric(line: Mapping[str, Any], model: str, data: str, metric: str) -> float | None:
    """Return the metric of a model on the common rows, else its mean over clients; None without the metric."""
    scores = [s for s in line["scores"] if s["model"] == model and s["data"] == data and _has(s, metric)]
    values = [s[metric] for s in scores if s["client"] is None] or [s[metric] for s in scores]
    return sum(values) / len(values) if values else None


def _average_scores(scores: Mapping[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def _find_best(judged: Mapping[int, float | None], metric: Metric) -> int:
    """Return the first round with the best value."""
    sign = 1 if metric.is_higher_better else -1
    return max(judged, key=lambda r: (sign * (judged[r] or 0.0), -r))


def _has(score: Mapping[str, Any], name: str) -> bool:
    """Return whether the score holds this metric."""
    return isinstance(score.get(name), int | float)
