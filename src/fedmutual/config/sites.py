"""Clients that bring data of their own: each one's configuration, as that of a federation of itself alone."""

from fedmutual import tasks
from fedmutual.config.schema import ClientData, Config, DataConfig, PartitionConfig
from fedmutual.core import get_target_kind

ALONE = "0"  # what a client is called there: the one share of a partition into one


def has_own_data(config: Config) -> bool:
    """Whether clients have data of their own, rather than shares of common ones."""
    return any(own.data.model_dump(exclude_none=True) for own in config.clients.values())


def make_client_config(config: Config, client: str) -> Config:
    """The configuration of a client that brings its own data: these, with no one to share them with.

    The common classes are not for a client whose own task learns something else.

    Raises:
        ConfigError: there is no such task.
    """
    own = config.clients[client]
    task = own.training.task or config.training.task
    common = config.data.model_dump()
    if own.training.task and get_target_kind(tasks.make_task(task, f"clients.{client}.training.task")) != "classes":
        common = {k: v for k, v in common.items() if k not in ("classes", "labels")}
    data = {**common, **own.data.model_dump(exclude_none=True)}
    return config.model_copy(
        update={
            "data": DataConfig.model_validate(data),
            "partition": PartitionConfig(clients=1, examples=config.partition.examples),
            "training": config.training.model_copy(update={"task": task}),
            "clients": {ALONE: own.model_copy(update={"data": ClientData()})},
        }
    )
