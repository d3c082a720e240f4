"""Checks before training that refuse a configuration without a valid privacy guarantee."""

from collections.abc import Iterable, Mapping

from torch import nn

from fedmutual.algorithms.fedavg import N_K
from fedmutual.calling import Inputs
from fedmutual.config import Config, read_client_settings
from fedmutual.core import Algorithm, At, Data, Message, Setting, Task
from fedmutual.errors import ConfigError, format_error
from fedmutual.privacy.accountant import check_installed
from fedmutual.privacy.clipping import compute_example_gradients
from fedmutual.privacy.mechanism import Mechanism
from fedmutual.privacy.sampling import Units
from fedmutual.privacy.secret import derive_simulation_secret

_SCORES = (
    "privacy: epsilon covers the messages that leave a client. Epsilon does not cover the losses and scores recorded here, "
    "or other runs on the same rows; real sites send no losses or scores"
)
_FIRST_WEIGHTS = (
    "privacy: epsilon covers the training that begins with these first weights. Weights that were trained on the same rows "
    "disclose something about these rows: a noised training adds its own epsilon, and one without noise voids epsilon"
)


def list_noised_nets(config: Config, algorithm: Algorithm, server: Message, pooled: bool) -> frozenset[str]:
    """Return the names of the networks with noised training; none where `privacy.nets` has no effect.

    server: the first state of the server.

    Raises:
        ConfigError: messages of a network without noise would leave.
    """
    nets = config.privacy.nets
    if nets == "none" or pooled:
        return frozenset()
    if nets == "both":
        return frozenset({"personal", "meme"})
    if {"global", "proxy"} & set(algorithm.scores):
        return frozenset({"meme"})
    if any(phase.leaves(server) for phase in algorithm.phases):
        raise ConfigError(
            f"privacy.nets = 'meme': algorithm {config.algorithm['name']!r} has no meme, and outputs of its personal "
            "networks leave; use privacy.nets = 'both', which noises all networks of a client"
        )
    return frozenset()


def check_algorithm(
    config: Config, algorithm: Algorithm, nets: frozenset[str], server: Message, clients: Iterable[str]
) -> None:
    """Raise ConfigError where noise on the gradient steps of these networks does not cover all outgoing messages."""
    name, setting = config.algorithm["name"], f"privacy.nets = {config.privacy.nets!r}"
    check_installed()
    if not algorithm.dp_ready:
        raise ConfigError(
            f"{setting}: algorithm {name!r} does not declare that only its gradient steps read private rows, so noise on "
            "these steps may not cover all that leaves; use fml, fedavg, fedprox, fedopt, scaffold, proxyfl, fedh2l or "
            "fedmd, or see docs/privacy.md on your own algorithm"
        )
    if any(N_K in phase.leaves(server) for phase in algorithm.phases):
        raise ConfigError(
            f"{setting}: with algorithm.weighting = 'samples' each client sends its number of examples, without noise; "
            "use algorithm.weighting = 'uniform'"
        )
    if nets == {"meme"} and "personal" in algorithm.scores:
        for client in clients:
            _check_teacher(config, algorithm, client)


def check_task(client: str, task: Task) -> None:
    """Raise ConfigError where a client's loss of a batch is no mean of the losses of its examples."""
    if not getattr(task, "is_mean", True):
        raise ConfigError(
            f"privacy.nets: the loss of client {client!r} ({type(task).__name__}) compares the examples of a batch, so no "
            "example's share of a gradient is bounded; choose a training.task whose loss is a mean over examples, such as "
            "'survival' in place of 'cox'"
        )


def check_nets(client: str, nets: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError where a layer of a client's networks mixes the examples of a batch or stores their statistics."""
    for name, net in nets.items():
        for path, module in net.named_modules():
            has_statistics = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
            if has_statistics or isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ConfigError(
                    f"privacy.nets: the {name} network of client {client!r} has the layer {path!r} "
                    f"({type(module).__name__}), which mixes the examples of a batch, so that no example's share of a "
                    "gradient is bounded; use a network with GroupNorm, as 'resnet18-gn', or without such layers, as 'mlp', "
                    "'lenet5', 'cnn1' or 'cnn2'"
                )


def check_gradients(client: str, nets: Mapping[str, nn.Module], examples: Inputs) -> None:
    """Raise ConfigError where torch.func cannot compute the gradient of each example. examples: inputs [B, ...]."""
    for name, net in nets.items():
        try:
            compute_example_gradients(net, examples)
        except Exception as problem:  # torch.func refuses networks in many ways
            raise ConfigError(
                f"privacy.nets: the gradient of each example of the {name} network of client {client!r} cannot be computed "
                f"({format_error(problem)[:200]}); use a network of layers that torch.func.vmap takes"
            ) from None


def make_mechanism(config: Config, client: str, nets: frozenset[str], rows: Data) -> Mechanism:
    """Return the mechanism that clips and noises a client's steps, with the secret of a simulation.

    Raises:
        ConfigError: as `make_units`.
    """
    privacy = config.privacy
    assert privacy.sigma is not None  # the configuration is checked
    units = make_units(config, client, rows)
    return Mechanism(client, rows, units, nets, privacy.clip, privacy.sigma, derive_simulation_secret(config.seed, client))


def make_units(config: Config, client: str, rows: Data) -> Units:
    """Return a client's units with their sampling rate.

    Raises:
        ConfigError: the unit is "group", and the client's rows have no groups; or delta is 1 / units or more.
    """
    privacy, groups = config.privacy, None
    if privacy.unit == "group":
        groups = getattr(rows, "groups", None)
        if groups is None:
            raise ConfigError(
                f"privacy.unit = 'group': client {client!r} has no groups; set 'data.group_by', or use 'example'"
            )
    batch_size = config.get_client_config(client).training.batch_size or config.training.batch_size
    units = Units(len(rows), batch_size, groups, privacy.group_rows)
    if privacy.delta * units.count >= 1:
        raise ConfigError(
            f"privacy.delta = {privacy.delta:g} guarantees nothing: client {client!r} has {units.count} "
            f"{privacy.unit}s, and a method that publishes one of these at random meets this delta; set it far below "
            f"{1 / units.count:.2g}"
        )
    return units


def list_remarks(nets: frozenset[str], config: Config) -> tuple[str, ...]:
    """Return the remarks for the user of an experiment; none without noised networks."""
    if not nets:
        return ()
    models = [config.model, *(client.model for client in config.clients.values())]
    begun = any(getattr(model, key, None) is not None for model in models for key in ("weights", "pretrained"))
    return (_SCORES, _FIRST_WEIGHTS) if begun else (_SCORES,)


def _check_teacher(config: Config, algorithm: Algorithm, client: str) -> None:
    """Raise ConfigError unless a client's meme learns only from labels in every round."""
    settings = read_client_settings(config) | read_client_settings(config, client)
    for number, phase in enumerate(algorithm.phases):
        beta: Setting | None = settings.get("beta", getattr(phase, "beta", None))
        if beta is None:
            raise ConfigError(
                f"privacy.nets = 'meme': algorithm {config.algorithm['name']!r} has no setting beta that says that its meme "
                "learns from labels alone; use privacy.nets = 'both'"
            )
        values = [At(config.seed, r, config.rounds, number).number(beta) for r in range(config.rounds)]
        low = next((r for r, value in enumerate(values) if value != 1), None)
        if low is not None:
            owner = "" if config.get_client_config(client).algorithm.get("beta") is None else f" of client {client!r}"
            raise ConfigError(
                f"privacy.nets = 'meme' needs algorithm.beta = 1 in every round, and it is {values[low]:g} in round "
                f"{low + 1}{owner}: with a smaller beta the personal network teaches the meme, and learned the rows without "
                "noise, so that one row changes the gradients of all others; set algorithm.beta = 1, or "
                "privacy.nets = 'both'"
            )
