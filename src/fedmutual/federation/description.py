"""Describe the networks and clients of a run in the form of environment.json."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedmutual import tasks
from fedmutual.config import describe_method
from fedmutual.core import get_metric
from fedmutual.data.space import Space
from fedmutual.federation.experiment import Experiment
from fedmutual.metric import ACCURACY, Metric


def describe_networks(experiment: Experiment, sizes: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the networks as written to environment.json. sizes: parameters of each client's networks."""
    personal = {i: n["personal"] for i, n in sizes.items() if "personal" in n and not experiment.pooled}
    return {
        "algorithm": describe_run_method(experiment),
        "pooled": experiment.pooled,
        "models": {
            "input": list(experiment.data.space.shape),
            "classes": len(experiment.data.space.classes),
            "shared": describe_shared_network(experiment),
            "personal": {
                i: {
                    "name": experiment.nets.name_personal(i),
                    "parameters": n,
                    "weights": experiment.nets.describe_first_weights(i),
                }
                for i, n in personal.items()
            },
        },
        **describe_metric(experiment),
        "clients": {i: describe_space(experiment.data.spaces[i]) for i in experiment.data.clients},
    }


def find_common_metric(experiment: Experiment) -> Metric:
    """Return the main metric that all clients have in common; accuracy without a common metric."""
    metrics = {get_metric(tasks.make_task(space.task)) for space in experiment.data.spaces.values()}
    return (metrics.pop() if len(metrics) == 1 else None) or ACCURACY


def describe_metric(experiment: Experiment) -> dict[str, Any]:
    """Return the common metric in the form of environment.json; empty for accuracy."""
    metric = find_common_metric(experiment)
    return {} if metric == ACCURACY else {"metric": asdict(metric)}


def describe_run_method(experiment: Experiment) -> dict[str, Any]:
    """Return the description of the method from `config.describe_method`, with `shares`: whether it has a shared model."""
    return describe_method(experiment.config) | {"shares": "global" in experiment.algorithm.scores}


def describe_shared_network(experiment: Experiment) -> dict[str, Any] | None:
    """Return the shared network; None if no method uses a shared network."""
    nets = experiment.nets
    if not nets.shares:
        return None
    count = sum(p.numel() for p in nets.shared.parameters())
    return {"name": experiment.config.model.shared, "parameters": count, "weights": nets.describe_first_weights()}


def describe_space(space: Space) -> dict[str, Any]:
    """Return the inputs and outputs of a client's networks."""
    about = {"input": list(space.shape), "outputs": space.outputs, "classes": list(space.classes), "scaling": space.scaling}
    return about | {"task": space.task} | ({} if space.columns is None else {"columns": list(space.columns)})
