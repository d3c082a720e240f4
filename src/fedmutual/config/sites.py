"""Clients with data of their own: the configuration of each, as that of a federation with one client."""

from fedmutual import tasks
from fedmutual.config.schema import ClientData, Config, DataConfig, PartitionConfig
from fedmutual.core import get_target_kind

ALONE = "0"  # the id of the client in such a federation


def has_own_data(config: Config) -> bool:
    """Return whether clients have data of their own, instead of shares of common data."""
    return any(client_config.data.model_dump(exclude_none=True) for client_config in config.clients.values())


def make_client_config(config: Config, client: str) -> Config:
    """Return the configuration of a client with data of its own: one client has all rows of these data.

    A client whose task has other targets than classes does not inherit the common classes.

    Raises:
        ConfigError: there is no such task.
    """
    client_config = config.clients[client]
    task = client_config.training.task or config.training.task
    common = config.data.model_dump()
    where = f"clients.{client}.training.task"
    if client_config.training.task and get_target_kind(tasks.make_task(task, where)) != "classes":
        common = {k: v for k, v in common.items() if k not in ("classes", "labels")}
    data = {**common, **client_config.data.model_dump(exclude_none=True)}
    return config.model_copy(
        update={
            "data": DataConfig.model_validate(data),
            "partition": PartitionConfig(clients=1, examples=config.partition.examples),
            "training": config.training.model_copy(update={"task": task}),
            "clients": {ALONE: client_config.model_copy(update={"data": ClientData()})},
        }
    )
