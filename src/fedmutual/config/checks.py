"""Refuse keys of a configuration that contradict each other, lack another key, or have no effect."""

from fedmutual.config.methods import is_pooled
from fedmutual.config.schema import Config, ModelConfig, OptimizerConfig, PartitionConfig, ServerConfig, SplitConfig
from fedmutual.config.sites import has_own_data
from fedmutual.errors import ConfigError
from fedmutual.settings import MOST_SUMMED

_NEEDS = {"shards": "classes_per_client", "dirichlet": "alpha", "file": "file"}


def check_partition(config: Config, source: str) -> None:
    """Raise ConfigError if a key of [partition] lacks a key that it needs."""
    partition = config.partition
    for kind, key in _NEEDS.items():
        is_set = getattr(partition, key) is not None
        if kind == partition.kind and not is_set:
            raise ConfigError(f"{source}: partition.kind = {kind!r} needs the key 'partition.{key}'")
        if kind != partition.kind and is_set and (kind, partition.kind) != ("dirichlet", "pfllib"):  # both have an alpha
            raise ConfigError(
                f"{source}: key 'partition.{key}' has no effect with partition.kind = {partition.kind!r}; remove it"
            )
    nets, clients = len(config.model.personal or ()), len(config.clients) if has_own_data(config) else partition.clients
    if partition.kind not in ("domains", "file") and nets not in (0, 1, clients):
        raise ConfigError(
            f"{source}: key 'model.personal' names {nets} networks for {clients} clients; name one for all, or one for each"
        )


def check_own_data(config: Config, source: str) -> None:
    """Raise ConfigError unless either data are divided among clients, or all clients have data of their own."""
    if not has_own_data(config):
        return
    for client, client_config in config.clients.items():
        if not client_config.data.model_dump(exclude_none=True):
            raise ConfigError(
                f"{source}: client {client!r} has no data of its own, and others have; give it a table "
                f"[clients.{client}.data]"
            )
    settings, default = config.partition.model_dump(exclude={"examples"}), PartitionConfig().model_dump()
    for key in (k for k, v in settings.items() if v != default[k]):
        raise ConfigError(
            f"{source}: key 'partition.{key}' has no effect, because clients have data of their own; remove it"
        )
    if is_pooled(config):
        raise ConfigError(
            f"{source}: algorithm {config.algorithm['name']!r} pools one data set, and clients have data of their own here"
        )


def check_model(config: Config, source: str) -> None:
    """Raise ConfigError if keys contradict `model.part` or `model.weights`."""
    model = config.model
    if model.part is None and model.adaptor != ModelConfig().adaptor:
        raise ConfigError(
            f"{source}: key 'model.adaptor' has no effect without 'model.part', because the complete network is "
            "shared; remove it"
        )
    if any(not one.strip(".") for one in model.part or ()):
        raise ConfigError(f"{source}: key 'model.part' has an entry that names no module")
    if model.part is not None and model.start == "server":
        raise ConfigError(
            f"{source}: model.start = 'server' needs a complete shared model, and 'model.part' shares a part; remove "
            "one of them"
        )
    if model.pretrained is not None and model.weights is not None:
        raise ConfigError(
            f"{source}: 'model.pretrained' and 'model.weights' both set the first weights of the shared network; remove one "
            "(a client's own network may have 'clients.ID.model.pretrained')"
        )


def check_effect(config: Config, source: str) -> None:
    """Raise ConfigError if a key has no effect with other keys. Defaults are allowed, because a dump has all keys."""
    name, kind = config.optimizer.name, config.partition.kind
    momenta = {"optimizer.momentum": config.optimizer.momentum != OptimizerConfig().momentum}
    momenta |= {f"clients.{i}.optimizer.momentum": c.optimizer.momentum is not None for i, c in config.clients.items()}
    idle = {key: f"optimizer.name = {name!r}" for key, value in momenta.items() if value and name != "sgd"}
    if config.optimizer.amsgrad and name == "sgd":
        idle["optimizer.amsgrad"] = f"optimizer.name = {name!r}"
    if config.partition.min_size != PartitionConfig().min_size and kind != "dirichlet":
        idle["partition.min_size"] = f"partition.kind = {kind!r}"
    if kind == "pfllib":
        split, default_split = config.split, SplitConfig()
        fixed = ("preset", "private", "validation", "test", "shared")
        idle |= {f"split.{k}": f"partition.kind = {kind!r}" for k in fixed if getattr(split, k) != getattr(default_split, k)}
    if config.model.start == "server":
        idle |= {
            f"clients.{i}.model.pretrained": "model.start = 'server'"
            for i, c in config.clients.items()
            if c.model.pretrained is not None
        }
    if config.server.trim != ServerConfig().trim and config.server.aggregate != "trimmed-mean":
        idle["server.trim"] = f"server.aggregate = {config.server.aggregate!r}"
    if config.server.sum != ServerConfig().sum and config.server.aggregate != "mean":
        idle["server.sum"] = f"server.aggregate = {config.server.aggregate!r}, which sums nothing"
    if "pairs" in config.algorithm and config.algorithm.get("peers", "all") == "all":
        idle["algorithm.pairs"] = "algorithm.peers = 'all'"
    if config.algorithm.get("kl") is False and config.algorithm.get("confidence") is False:
        idle["algorithm.confidence"] = "algorithm.kl = false"
    if config.training.local_steps is not None:
        idle |= {
            f"clients.{i}.training.local_epochs": "training.local_steps"
            for i, c in config.clients.items()
            if c.training.local_epochs is not None
        }
    for key, beside in idle.items():
        raise ConfigError(f"{source}: key {key!r} has no effect with {beside}; remove it")
    if config.server.sum == "fixed" and config.partition.clients > MOST_SUMMED:
        raise ConfigError(
            f"{source}: server.sum = 'fixed' adds at most {MOST_SUMMED} clients, and partition.clients is "
            f"{config.partition.clients}; remove 'server.sum'"
        )
    _check_holdout(config, source)


def _check_holdout(config: Config, source: str) -> None:
    """Raise ConfigError if a key needs hold-out rows and there are none. A partition file is checked when it is read."""
    records = config.records
    only = records.evaluate_on == "holdout"
    for key, asked, what in (("best_by", records.best_by == "holdout", "choose by"), ("evaluate_on", only, "score on")):
        if asked and not config.split.holdout and config.partition.kind != "file":
            raise ConfigError(
                f"{source}: records.{key} = 'holdout' needs rows to {what}; set 'split.holdout', for example to 0.1, "
                f"or remove 'records.{key}'"
            )
    if only and records.best_by in ("validation", "test"):
        raise ConfigError(
            f"{source}: records.best_by = {records.best_by!r} chooses by rows that records.evaluate_on = 'holdout' leaves "
            "unscored; remove one of the two"
        )


def check_scored(config: Config, source: str) -> None:
    """Raise ConfigError if the scores that a comparison needs are not computed."""
    if config.records.evaluate_on != "all":
        raise ConfigError(
            f"{source}: records.evaluate_on = {config.records.evaluate_on!r} leaves out the validation and test scores that "
            "are compared; remove it"
        )
