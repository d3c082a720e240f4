"""ACC, BWT and FWT for clients that are domains: a node's accuracy on all domains, on its own, and on the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.schema import Evaluation

PerClient = Mapping[str, float]

TRANSFER_DATA = {"acc": "test", "bwt": "test.own", "fwt": "test.others"}
"""Measure -> test rows of the accuracy: of all nodes together, of the node's domain, of the other nodes together."""

_CHOICE = {"holdout": ("holdout",), "validation": ("validation.all", "validation"), "test": ("test",)}


def measure_transfer(metrics: Sequence[Evaluation], model: str | None, best_by: str) -> dict[str, Any] | None:
    """Return ACC, BWT and FWT of the nodes after the last round and after each node's best round; None without domains.

    The measures are those of FedH2L (Li et al. 2021, https://arxiv.org/abs/2101.11296, Experiments), as fractions in [0, 1].
    The result has the keys of `schema.NodeMeasures`.

    best_by: "holdout", "validation" (rows of all nodes if they are scored, else the node's rows) or "test".
    """
    if model is None or not any(list_client_scores(line, model, TRANSFER_DATA["bwt"]) for line in metrics):
        return None
    wanted = (*_CHOICE[best_by], "validation", "test")
    by = next((data for data in wanted if all(list_client_scores(line, model, data) for line in metrics)), "test")
    judged = {line.round: list_client_scores(line, model, by) for line in metrics}
    rounds = {i: find_best_round({r: scores[i] for r, scores in judged.items() if i in scores}) for i in judged[max(judged)]}
    return {
        **{name: _measure_ends(metrics, model, data, rounds) for name, data in TRANSFER_DATA.items()},
        "best_rounds": rounds,
        "best_by": by,
    }


def read_projected(metrics: Sequence[Evaluation]) -> dict[str, Any] | None:
    """Return the last reported share of each node's mutual steps with a projected gradient; None if there is no report.

    Shares are fractions in [0, 1]; the result has the keys of `schema.ProjectedShare`.
    """
    shares = {i: terms["projected"] for line in metrics for i, terms in line.train.items() if "projected" in terms}
    return {"mean": average_values(shares), "per_client": shares} if shares else None


def list_client_scores(line: Evaluation, model: str, data: str, metric: str = "accuracy") -> dict[str, float]:
    """Return a score of a model on one kind of rows, by client; clients without this score are left out."""
    scores = {row.client: row.find_number(metric) for row in line.rows if (row.model, row.data) == (model, data)}
    return {i: v for i, v in scores.items() if i is not None and v is not None}


def _measure_ends(metrics: Sequence[Evaluation], model: str, data: str, rounds: Mapping[str, int]) -> dict[str, Any] | None:
    """Return one measure after the last and after each node's best round; None without scores (FWT of a single node)."""
    scores = {line.round: list_client_scores(line, model, data) for line in metrics}
    last = scores[max(scores)]
    best = {i: scores[r][i] for i, r in rounds.items() if i in scores[r]}
    return {"last": _sum_up(last), "best": _sum_up(best)} if last and best else None


def _sum_up(values: PerClient) -> dict[str, Any]:
    return {"mean": average_values(values), "worst": min(values.values()), "per_client": values}


def average_values(values: PerClient) -> float:
    """Return the mean over clients."""
    return sum(values.values()) / len(values)


def find_best_round(judged: Mapping[int, float], metric: Metric = ACCURACY) -> int:
    """Return the first round with the best value of a metric. judged: round -> value."""
    sign = 1 if metric.is_higher_better else -1
    return max(judged, key=lambda r: (sign * judged[r], -r))
