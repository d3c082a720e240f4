"""Checks of [privacy] against other keys of the configuration."""

from fedmutual.config.schema import Config
from fedmutual.config.values import FEDERATED
from fedmutual.errors import ConfigError


def check_privacy(config: Config, source: str) -> None:
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
