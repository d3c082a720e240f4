"""The experiment of the server of real sites, from the contract alone: networks, settings, the first state, and no data."""

import torch
from torch import nn

from fedmutual import models, tasks
from fedmutual.algorithms.peers import make_agreed_state
from fedmutual.config.keys import FEDERATED
from fedmutual.core import Message, get_target_kind
from fedmutual.data import Federation
from fedmutual.data.scaling import BYTE, Scaling
from fedmutual.data.space import Space
from fedmutual.data.statistics import Statistics
from fedmutual.federation.experiment import Experiment
from fedmutual.federation.networks import Networks
from fedmutual.sites.contract import Contract
from fedmutual.sites.peers import is_peer_to_peer
from fedmutual.sites.secure_sum.fixed_point import count_words
from fedmutual.sites.sizes import MessageSizes


def build_server_experiment(contract: Contract, statistics: Statistics | None = None) -> Experiment:
    """Return the experiment of the server: networks and settings, without any data.

    statistics: of all sites' training rows, with data.mean = "federated"; None: not yet known.
    """
    config = contract.config
    outputs = tasks.make_task(config.training.task).outputs
    classes = tuple(config.data.classes or ("y",))
    shape, count = tuple(contract.sites.input), outputs or len(classes)
    takes_ids = _takes_ids(contract, count)
    is_image = len(shape) == 3 and not takes_ids  # of a file; a site's own source may scale its values otherwise
    divisor, size = (BYTE, (shape[1], shape[2])) if is_image else (1.0, None)
    mean, std = config.data.mean or (), config.data.std or ()
    if mean == FEDERATED or std == FEDERATED:
        mean, std = ((), ()) if statistics is None or config.data.columns else statistics.moments
    space = Space(
        shape=shape,
        classes=classes,
        outputs=count,
        task=config.training.task,
        scaling=Scaling(divisor, mean, std, size, "int64" if takes_ids else None).record(),
    )
    no_data = Federation({}, {"": space}, None, {"clients": {}, "classes": list(classes)}, ())
    nets = Networks(config, no_data, contract.algorithm.scores, torch.device("cpu"))
    return Experiment(config, no_data, contract.algorithm, nets)


def _takes_ids(contract: Contract, outputs: int) -> bool:
    """Return whether the shared network is the user's own and takes ids of the agreed shape, but no other numbers."""
    name, shape = contract.config.model.shared, tuple(contract.sites.input)
    of_pixels = get_target_kind(tasks.make_task(contract.config.training.task)) == "masks"
    if not models.is_user_network(name):
        return False
    made: dict[tuple[str, tuple[int, ...], int], nn.Module] = {}
    tried = (models.make_example_inputs(shape, dtype) for dtype in (torch.float32, torch.int64))
    numbers, ids = (models.try_network(name, shape, x, outputs, of_pixels, made) for x in tried)
    return numbers is None and ids is not None


def make_first_state(contract: Contract, experiment: Experiment) -> Message:
    """Return the state of the server before the first round: name -> tensor.

    Raises ConfigError where the shared network, or the state that the algorithm begins with, cannot be built.
    """
    if contract.public is None:
        return experiment.make_server_state(contract.sites.names)
    owners = {site: range(rows) for site, rows in contract.public["rows"].items()}  # only their numbers are used
    return make_agreed_state(owners, experiment.data.space.outputs)


def find_longest_message(contract: Contract) -> int:
    """Return the number of bytes of the longest message between the server and the sites of a federation.

    Raises ConfigError as `make_first_state`.
    """
    experiment, names = build_server_experiment(contract), contract.sites.names
    if contract.algorithm.public is None:
        state = experiment.make_server_state()
    else:  # a contract before submission lacks the number of rows of each site; no message size depends on this number
        state = make_agreed_state(dict.fromkeys(names, range(0)), experiment.data.space.outputs)
    words = count_update(contract, state)
    return MessageSizes(contract.algorithm, state, names, is_peer_to_peer(contract.algorithm), words).longest_bytes


def count_update(contract: Contract, state: Message) -> int | None:
    """Return the number of words of an update in a secure sum, or None where the sum is not masked. state: the server's."""
    return count_words(contract.algorithm.phases[0], state) if contract.is_masked else None
