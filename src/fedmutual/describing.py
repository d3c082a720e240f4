"""What a run's networks are, in the form that its folder has it."""

from collections.abc import Mapping
from typing import Any

from fedmutual.data.federation import Space
from fedmutual.experiment import Experiment


def networks(experiment: Experiment, sizes: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """The networks, as environment.json holds them. sizes: of each client's, in parameters."""
    personal = {i: n["personal"] for i, n in sizes.items() if "personal" in n and not experiment.pooled}
    shared = None  # where no method uses it
    if experiment.shares:
        count = sum(p.numel() for p in experiment.shared_net.parameters())
        shared = {"name": experiment.config.model.shared, "parameters": count, "weights": experiment.first_weights()}
    return {
        "pooled": experiment.pooled,
        "models": {
            "input": list(experiment.data.space.shape),
            "classes": len(experiment.data.space.classes),
            "shared": shared,
            "personal": {
                i: {"name": experiment.personal(i), "parameters": n, "weights": experiment.first_weights(i)}
                for i, n in personal.items()
            },
        },
        "clients": {i: space_of(experiment.data.spaces[i]) for i in experiment.data.clients},
    }


def space_of(space: Space) -> dict[str, Any]:
    """What a client's networks take and give."""
    about = {"input": list(space.shape), "outputs": space.outputs, "classes": list(space.classes), "scaling": space.scaling}
    return about | {"task": space.task} | ({} if space.columns is None else {"columns": list(space.columns)})
