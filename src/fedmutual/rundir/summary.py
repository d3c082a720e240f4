"""Make summary.json from the logs of a run: last and best scores, and the rows by which the best round was chosen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmutual.config import Config
from fedmutual.rundir.file_names import LEDGER, METRICS, SUMMARY
from fedmutual.rundir.logs import read_lines
from fedmutual.rundir.record_files import write_record
from fedmutual.rundir.schema import Summary
from fedmutual.rundir.transfer import per_client, projected, transfer

SEED = "seed"  # the phase of round 0 in which nodes send their public data; its bytes are counted apart
Lines = Sequence[Mapping[str, Any]]


def write_summary(folder: Path, config: Config, **more: Any) -> None:
    """Write summary.json of a run from its logs. more: further keys, or other values of keys."""
    head = {"format": 1, "name": config.name, "algorithm": config.algorithm["name"], "rounds": config.rounds}
    scores = summarise(config, read_lines(folder / METRICS), read_lines(folder / LEDGER))
    write_record(folder / SUMMARY, Summary, {**head, "seed": config.seed, **scores, **more})


def summarise(config: Config, metrics: Lines, ledger: Lines) -> dict[str, Any]:
    """Return the scores and bytes of summary.json. Accuracies are fractions in [0, 1]; rounds count from 1."""
    held = any(s["data"] == "holdout" for line in metrics for s in line["scores"])  # those of a partition file too
    chosen_by = config.records.best_by or ("holdout" if held else None)
    scored = {s["model"] for line in metrics for s in line["scores"] if s["client"] is not None}
    model = next((m for m in ("personal", "global", "meme") if m in scored), None)  # what a client would use, if scored
    return {
        "global": {"test_accuracy": _global(metrics, chosen_by or "test")},
        "personal": {
            "model": model,
            "val_accuracy": _personal(metrics, model, chosen_by or "validation"),
            **_others(metrics, model),
        },
        "transfer": transfer(metrics, model, chosen_by or "validation"),
        "projected": projected(metrics),
        "bytes": _bytes(ledger),
    }


def _bytes(ledger: Lines) -> dict[str, int]:
    """Return the bytes that clients sent ("up") and received ("down"), and the bytes of their public data ("seed")."""
    seed = [line for line in ledger if (line["round"], line["phase"]) == (0, SEED)]
    ways = {way: sum(line[way] for line in ledger) - sum(line[way] for line in seed) for way in ("up", "down")}
    return ways | {"seed": sum(line["up"] for line in seed)}


def _global(metrics: Lines, best_by: str) -> dict[str, Any] | None:
    """Return the accuracy of the shared model on the test set; None without a complete shared model."""
    test = {line["round"]: _mean(line, "global", "test") for line in metrics}
    if not test or any(v is None for v in test.values()):
        return None
    judged = {line["round"]: _mean(line, "global", best_by) for line in metrics}
    by = best_by if None not in judged.values() else "test"
    best = _best(judged if by == best_by else test)
    return {"last": test[max(test)], "best": test[best], "best_round": best, "best_by": by}


def _others(metrics: Lines, model: str | None) -> dict[str, Any]:
    """Return the last scores, on validation data, of clients whose task has no accuracy metric; empty where all have one."""
    last = metrics[-1]["scores"] if metrics else ()
    named = ("model", "client", "data")
    by_client = {
        s["client"]: {k: v for k, v in s.items() if k not in named}
        for s in last
        if s["model"] == model and s["data"] == "validation" and s["client"] is not None and not _has_accuracy(s)
    }
    return {"other_tasks": {"last": by_client}} if by_client else {}


def _personal(metrics: Lines, model: str | None, best_by: str) -> dict[str, Any] | None:
    """Return the accuracies of the model that a client would use on validation data; None if no client shares its scores."""
    if model is None:
        return None
    scores = {line["round"]: per_client(line, model, "validation") for line in metrics}
    if not all(scores.values()):  # no client has an accuracy
        return None
    judged = {line["round"]: _mean(line, model, best_by) for line in metrics}
    by = best_by if None not in judged.values() else "validation"
    best = _best(judged if by == best_by else {r: _mean_of(s) for r, s in scores.items()})
    at = {"last": max(scores), "best": best}
    accuracies = {
        name: {"mean": _mean_of(scores[r]), "worst": min(scores[r].values()), "per_client": scores[r]}
        for name, r in at.items()
    }
    accuracies["best"] |= {"best_round": best, "best_by": by}
    return accuracies


def _mean(line: Mapping[str, Any], model: str, data: str) -> float | None:
    """Return the accuracy of a model on the common rows, else its mean over clients; None without an accuracy."""
    scores = [s for s in line["scores"] if s["model"] == model and s["data"] == data and _has_accuracy(s)]
    accuracies = [s["accuracy"] for s in scores if s["client"] is None] or [s["accuracy"] for s in scores]
    return sum(accuracies) / len(accuracies) if accuracies else None


def _mean_of(scores: Mapping[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def _best(judged: Mapping[int, float | None]) -> int:
    """Return the first round with the greatest value."""
    return max(judged, key=lambda r: (judged[r] or 0.0, -r))


def _has_accuracy(score: Mapping[str, Any]) -> bool:
    """Return whether the score holds an accuracy."""
    return isinstance(score.get("accuracy"), int | float)
