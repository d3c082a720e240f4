"""Refuse keys of a configuration that contradict each other or lack another key."""

from fedmutual.config.methods import is_pooled
from fedmutual.config.schema import Config
from fedmutual.config.sites import has_own_data
from fedmutual.config.unused import check_effects
from fedmutual.config.values import FEDERATED
from fedmutual.errors import ConfigError
from fedmutual.settings import MOST_SUMMED

_NEEDS = {"shards": "classes_per_client", "dirichlet": "alpha", "file": "file"}
_SCALING = ("mean", "std")  # keys of [data]


def check_config(config: Config, source: str) -> None:
    """Raise ConfigError, with the reason and the fix, if keys contradict each other or lack another key."""
    _check_partition(config, source)
    _check_own_data(config, source)
    check_model(config, source)
    check_effects(config, source)
    _check_aggregation(config, source)
    _check_holdout(config, source)
    _check_statistics(config, source)
    _check_privacy(config, source)


def _check_partition(config: Config, source: str) -> None:
    """Raise ConfigError if a key of [partition] lacks a key that it needs."""
    partition = config.partition
    for kind, key in _NEEDS.items():
        if kind == partition.kind and getattr(partition, key) is None:
            raise ConfigError(f"{source}: partition.kind = {kind!r} needs the key 'partition.{key}'")
    nets, clients = len(config.model.personal or ()), len(config.clients) if has_own_data(config) else partition.clients
    if partition.kind not in ("domains", "file") and nets not in (0, 1, clients):
        raise ConfigError(
            f"{source}: key 'model.personal' names {nets} networks for {clients} clients; name one for all, or one for each"
        )


def _check_own_data(config: Config, source: str) -> None:
    """Raise ConfigError unless either data are divided among clients, or all clients have data of their own."""
    if not has_own_data(config):
        return
    for client, client_config in config.clients.items():
        if not client_config.data.model_dump(exclude_none=True):
            raise ConfigError(
                f"{source}: client {client!r} has no data of its own, and others have; give it a table "
                f"[clients.{client}.data]"
            )
    if is_pooled(config):
        raise ConfigError(
            f"{source}: algorithm {config.algorithm['name']!r} pools one data set, and clients have data of their own here"
        )


def check_model(config: Config, source: str) -> None:
    """Raise ConfigError if keys contradict `model.part` or `model.weights`."""
    model = config.model
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


def _check_aggregation(config: Config, source: str) -> None:
    """Raise ConfigError if there are more clients than a sum in integers can add."""
    if config.server.sum == "fixed" and config.partition.clients > MOST_SUMMED:
        raise ConfigError(
            f"{source}: server.sum = 'fixed' adds at most {MOST_SUMMED} clients, and partition.clients is "
            f"{config.partition.clients}; remove 'server.sum'"
        )


def _check_holdout(config: Config, source: str) -> None:
    """Raise ConfigError if a key needs hold-out rows and there are none. A partition file is checked when it is read."""
    records = config.records
    only = records.evaluate_on == "holdout"
    for key, is_asked, what in (("best_by", records.best_by == "holdout", "choose by"), ("evaluate_on", only, "score on")):
        if is_asked and not config.split.holdout and config.partition.kind != "file":
            raise ConfigError(
                f"{source}: records.{key} = 'holdout' needs rows to {what}; set 'split.holdout', for example to 0.1, "
                f"or remove 'records.{key}'"
            )
    if only and records.best_by in ("validation", "test"):
        raise ConfigError(
            f"{source}: records.best_by = {records.best_by!r} chooses by rows that records.evaluate_on = 'holdout' leaves "
            "unscored; remove one of the two"
        )


def _check_statistics(config: Config, source: str) -> None:
    """Raise ConfigError unless data.mean and data.std are "federated" for all clients, or for none."""
    values = {key: getattr(config.data, key) for key in _SCALING}
    if FEDERATED in values.values() and set(values.values()) != {FEDERATED}:
        raise ConfigError(f"{source}: 'data.mean' and 'data.std' come from the same sums; set both to 'federated', or none")
    for client, client_config in config.clients.items():
        for key in _SCALING:
            value = getattr(client_config.data, key)
            if value is not None and FEDERATED in (value, config.data.mean):
                raise ConfigError(
                    f"{source}: key 'clients.{client}.data.{key}' has no place here: 'federated' is for all clients at "
                    "once, in [data]; remove the client's key"
                )


def _check_privacy(config: Config, source: str) -> None:
    """Raise ConfigError, with the reason and the fix, if a key voids the guarantee or is missing."""
    privacy = config.privacy
    if privacy.nets == "none":
        return
    if privacy.sigma is None:
        raise ConfigError(
            f"{source}: privacy.nets = {privacy.nets!r} needs the key 'privacy.sigma', the noise multiplier; "
            "`fedmutual privacy FILE.toml --epsilon 4` computes one"
        )
    if config.engine.name == "stacked":
        raise ConfigError(
            f"{source}: engine.name = 'stacked' steps clients as one and cannot clip each example's gradient; with "
            "privacy.nets use 'auto', 'inprocess', 'processes' or 'cluster'"
        )
    if config.engine.precision != "float32":
        raise ConfigError(
            f"{source}: engine.precision = {config.engine.precision!r} rounds gradients after their norm was taken, so that "
            "the clipping bound would not hold; with privacy.nets use 'float32'"
        )
    if config.records.keep_best:
        raise ConfigError(
            f"{source}: records.keep_best = true chooses a model by scores that epsilon does not count; with privacy.nets "
            "remove it, and use the last round's model"
        )
    if config.data.mean == FEDERATED:
        raise ConfigError(
            f"{source}: data.mean = 'federated' is computed from private rows, which epsilon does not count; with "
            "privacy.nets set 'data.mean' and 'data.std' to numbers that are known without these rows"
        )
    for client, client_config in config.clients.items():
        if client_config.data.mean is not None:
            raise ConfigError(
                f"{source}: key 'clients.{client}.data.mean' would come from the client's private rows, which epsilon does "
                "not count; with privacy.nets set 'data.mean' for all, to values that are known without these rows"
            )


def check_scored(config: Config, source: str) -> None:
    """Raise ConfigError if the scores that a comparison needs are not computed."""
    if config.records.evaluate_on != "all":
        raise ConfigError(
            f"{source}: records.evaluate_on = {config.records.evaluate_on!r} leaves out the validation and test scores that "
            "are compared; remove it"
        )
