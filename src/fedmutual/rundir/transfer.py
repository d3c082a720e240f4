"""Where clients are domains: how well a node's model does on all of them, on its own, and on the others."""

from collections.abc import Mapping, Sequence
from typing import Any

Lines = Sequence[Mapping[str, Any]]
PerClient = Mapping[str, float]

MEASURES = {"acc": "test", "bwt": "test.own", "fwt": "test.others"}
"""A measure -> whose test rows it is an accuracy on: of all nodes pooled, of the node's own domain, of the others pooled."""

_CHOICE = {"holdout": ("holdout",), "validation": ("validation.all", "validation"), "test": ("test",)}


def transfer(metrics: Lines, model: str | None, best_by: str) -> dict[str, Any] | None:
    """ACC, BWT and FWT of the nodes' models, after the last round and after each node's own best one; None without domains.

    best_by: "holdout", "validation" (the validation rows of all nodes where they are scored, else the node's own) or "test".
    """
    if model is None or not any(per_client(line, model, MEASURES["bwt"]) for line in metrics):
        return None
    wanted = (*_CHOICE[best_by], "validation", "test")
    by = next((data for data in wanted if all(per_client(line, model, data) for line in metrics)), "test")
    judged = {line["round"]: per_client(line, model, by) for line in metrics}
    rounds = {i: _best({r: found[i] for r, found in judged.items() if i in found}) for i in judged[max(judged)]}
    return {
        **{name: _measured(metrics, model, data, rounds) for name, data in MEASURES.items()},
        "best_rounds": rounds,
        "best_by": by,
    }


def projected(metrics: Lines) -> dict[str, Any] | None:
    """The share of each node's mutual steps whose gradient was projected, as last told; None where none was told."""
    found = {i: terms["projected"] for line in metrics for i, terms in line["train"].items() if "projected" in terms}
    return {"mean": _mean(found), "per_client": found} if found else None


def per_client(line: Mapping[str, Any], model: str, data: str) -> dict[str, float]:
    """Client -> accuracy of a model on some rows, in one evaluation, of those whose task tells one."""
    found = {s["client"]: s.get("accuracy") for s in line["scores"] if (s["model"], s["data"]) == (model, data)}
    return {i: v for i, v in found.items() if i is not None and isinstance(v, int | float)}


def _measured(metrics: Lines, model: str, data: str, rounds: Mapping[str, int]) -> dict[str, Any] | None:
    """A measure after the last round, and each node's after its best; None where a single node has no others."""
    scores = {line["round"]: per_client(line, model, data) for line in metrics}
    last = scores[max(scores)]
    best = {i: scores[r][i] for i, r in rounds.items() if i in scores[r]}
    return {"last": _summed(last), "best": _summed(best)} if last and best else None


def _summed(found: PerClient) -> dict[str, Any]:
    return {"mean": _mean(found), "worst": min(found.values()), "per_client": found}


def _mean(found: PerClient) -> float:
    return sum(found.values()) / len(found)


def _best(judged: Mapping[int, float]) -> int:
    """The first round of the greatest value."""
    return max(judged, key=lambda r: (judged[r], -r))
