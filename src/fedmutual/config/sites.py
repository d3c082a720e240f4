"""Clients that bring data of their own: each one's configuration, as that of a federation of itself alone."""

from fedmutual.config.schema import ClientData, Config, DataConfig, PartitionConfig

ALONE = "0"  # what a client is called there: the one share of a partition into one


def brings_data(config: Config) -> bool:
    """Whether clients have data of their own, rather than shares of common ones."""
    return any(own.data.model_dump(exclude_none=True) for own in config.clients.values())


def alone(config: Config, client: str) -> Config:
    """The configuration of a client that brings its own data: these, with no one to share them with."""
    own = config.clients[client]
    data = {**config.data.model_dump(), **own.data.model_dump(exclude_none=True)}
    task = own.training.task or config.training.task
    return config.model_copy(
        update={
            "data": DataConfig.model_validate(data),
            "partition": PartitionConfig(clients=1, examples=config.partition.examples),
            "training": config.training.model_copy(update={"task": task}),
            "clients": {ALONE: own.model_copy(update={"data": ClientData()})},
        }
    )
