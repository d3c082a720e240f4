"""`data.mean = "federated"`: the checks of this setting, and the configuration with it."""

from fedmutual.config.schema import ClientData, Config
from fedmutual.config.values import FEDERATED
from fedmutual.errors import ConfigError

_KEYS = ("mean", "std")


def check_statistics(config: Config, source: str) -> None:
    """Raise ConfigError unless data.mean and data.std are "federated" for all clients, or for none."""
    values = {key: getattr(config.data, key) for key in _KEYS}
    if FEDERATED in values.values() and set(values.values()) != {FEDERATED}:
        raise ConfigError(f"{source}: 'data.mean' and 'data.std' come from the same sums; set both to 'federated', or none")
    for client, client_config in config.clients.items():
        for key in _KEYS:
            value = getattr(client_config.data, key)
            if value is not None and FEDERATED in (value, config.data.mean):
                raise ConfigError(
                    f"{source}: key 'clients.{client}.data.{key}' has no place here: 'federated' is for all clients at "
                    "once, in [data]; remove the client's key"
                )


def ask_statistics(config: Config) -> Config:
    """Return the configuration with data.mean = data.std = "federated" for all clients, whatever the file sets.

    Raises:
        ConfigError: the configuration has differential privacy, which does not cover the statistics.
    """
    if config.privacy.nets != "none":
        raise ConfigError(
            f"privacy.nets = {config.privacy.nets!r}: the statistics are exact, and epsilon does not count them; add "
            "--set privacy.nets=none where the rows may be summed"
        )
    clients = {
        client: client_config.model_copy(update={"data": _remove_scaling(client_config.data)})
        for client, client_config in config.clients.items()
    }
    return config.model_copy(
        update={"data": config.data.model_copy(update=dict.fromkeys(_KEYS, FEDERATED)), "clients": clients}
    )


def _remove_scaling(data: ClientData) -> ClientData:
    """Return the table of a client without mean and std."""
    table = {key: value for key, value in data.model_dump(exclude_unset=True).items() if key not in _KEYS}
    remaining: ClientData = ClientData.model_validate(table)
    return remaining
