"""Describe the networks and clients of a run in the form of environment.json."""

from collections.abc import Mapping
from typing import Any

from fedmutual import tasks
from fedmutual.config import describe_method
from fedmutual.core import get_metric
from fedmutual.data.space import Space
from fedmutual.federation.experiment import Experiment
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.schema import (
    Environment,
    MethodAbout,
    Participant,
    RecordedNetwork,
    RecordedNetworks,
)


def describe_run(environment: Environment, experiment: Experiment, sizes: Mapping[str, Mapping[str, int]]) -> Environment:
    """Return an environment with the method, networks and clients of a run.

    sizes: client -> network name -> number of parameters.
    """
    personal = {i: n["personal"] for i, n in sizes.items() if "personal" in n and not experiment.pooled}
    networks = {
        i: RecordedNetwork(
            name=experiment.nets.name_personal(i), parameters=n, weights=experiment.nets.describe_first_weights(i)
        )
        for i, n in personal.items()
    }
    clients = {i: describe_space(experiment.data.spaces[i]) for i in experiment.data.clients}
    return describe_federation(environment, experiment, networks, clients)


def describe_federation(
    environment: Environment,
    experiment: Experiment,
    personal: dict[str, RecordedNetwork],
    clients: dict[str, Participant],
) -> Environment:
    """Return an environment with the method, the shared network, the main metric, and these networks and clients."""
    space, metric = experiment.data.space, find_common_metric(experiment)
    nets, method, shared = experiment.nets, describe_method(experiment.config), None
    if nets.shares:
        count = sum(p.numel() for p in nets.shared.parameters())
        name, weights = experiment.config.model.shared, nets.describe_first_weights()
        shared = RecordedNetwork(name=name, parameters=count, weights=weights)
    about: dict[str, Any] = {
        "algorithm": MethodAbout(**method, shares="global" in experiment.algorithm.scores),
        "pooled": experiment.pooled,
        "models": RecordedNetworks(input=space.shape, classes=len(space.classes), shared=shared, personal=personal),
        "clients": clients,
    }
    if metric != ACCURACY:
        about["metric"] = metric
    return environment.model_copy(update=about)


def find_common_metric(experiment: Experiment) -> Metric:
    """Return the main metric that all clients have in common; accuracy without a common metric."""
    metrics = {get_metric(tasks.make_task(space.task)) for space in experiment.data.spaces.values()}
    return (metrics.pop() if len(metrics) == 1 else None) or ACCURACY


def describe_space(space: Space) -> Participant:
    """Return the inputs and outputs of a client's networks."""
    columns = {} if space.columns is None else {"columns": space.columns}
    return Participant(
        input=space.shape,
        outputs=space.outputs,
        classes=space.classes,
        scaling=space.scaling,
        task=space.task,
        **columns,
    )
