"""Build an experiment from a configuration: read the data, build each named part once, and check all of them."""

from collections.abc import Mapping

import torch

from fedmutual import data
from fedmutual.config import Config, make_algorithm
from fedmutual.core import Message
from fedmutual.data.federation import Gather
from fedmutual.data.statistics import Moments
from fedmutual.errors import ConfigError
from fedmutual.federation.experiment import Experiment
from fedmutual.federation.networks import Networks, Pretrained
from fedmutual.federation.validate import check_clients, check_experiment
from fedmutual.rundir.checkpoint import read_shared_state


def build(
    config: Config,
    device: str | None = None,
    prepared: Mapping[str, data.Prepared] | None = None,
    begun: Message | None = None,
    pretrained: Pretrained | None = None,
    gathered: Gather | None = None,
    moments: Moments | None = None,
) -> Experiment:
    """Return the experiment of a configuration: read the data, build the networks, and check that the parts fit.

    device: a name that replaces `engine.device`.
    prepared: data that are read already; None: the data are read.
    begun: the first weights that a resumed run began with; None: they are read from `model.weights`, if that key is set.
    pretrained: the pretrained weights that a resumed run began with; missing weights are read from `model.pretrained`.
    gathered: the public seed set, as for `data.load`.
    moments: sums over all clients' training rows, as for `data.load`.

    Raises:
        UserError: the data cannot be read, or a part cannot be built or does not fit.
    """
    federation = data.load(config, prepared, gathered, moments)
    if begun is None and config.model.weights is not None:
        begun = read_shared_state(config.model.weights)
    algorithm, place = make_algorithm(config), pick_device(device or config.engine.device)
    check_clients(config, federation)
    nets = Networks(config, federation, algorithm.scores, place, begun).begin_with(pretrained or {})
    experiment = Experiment(config, federation, algorithm, nets)
    check_experiment(experiment)
    return experiment


def pick_device(name: str) -> torch.device:
    """Return the device by its name; "auto" is a CUDA GPU if there is one, else Apple's GPU, else the CPU.

    Raises:
        ConfigError: this machine lacks the device.
    """
    if name == "auto":
        accelerators = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        return torch.device(next((kind for kind, is_available in accelerators.items() if is_available), "cpu"))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise ConfigError(f"key 'engine.device': {name!r} cannot be used here ({reason}); try 'auto' or 'cpu'") from None
    return device
