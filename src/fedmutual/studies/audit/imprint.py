"""The imprint attack: a server chooses a shared model whose first layer's units each react to few rows, and reads these
rows out of the meme that comes back (Fowl et al. 2022, https://arxiv.org/abs/2110.13057)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedmutual.boundary import Refused
from fedmutual.core import At, Client, Data, Diverged, Message, Phase
from fedmutual.engines.base import participate
from fedmutual.report.audit import Imprint

REACH = 3.0  # standard deviations above the mean at which a unit reacts
CLOSE = 0.03  # of the range of the inputs: a row whose every number is read within it counts as read
_STILL = 1e-6  # a bias that moved less belongs to a unit that no row reached


class FirstLayer(NamedTuple):
    """The names of the first layer's tensors in the state of a network: weight [units, F] and bias [units]."""

    weight: str
    bias: str


def find_first_layer(net: nn.Module, features: int) -> FirstLayer | None:
    """Return the first layer with parameters; None if this layer is not a linear layer with bias over a complete row.

    features: the number of values in a row.
    """
    for name, module in net.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        if isinstance(module, nn.Linear) and module.in_features == features and module.bias is not None:
            prefix = f"{name}." if name else ""
            return FirstLayer(f"{prefix}weight", f"{prefix}bias")
        return None
    return None


def attack(client: Client, phase: Phase, at: At, server: Message, net: nn.Module, private: Data, held_out: Data) -> Imprint:
    """Send a crafted model to a client, read training rows out of the reply, and return the number of these rows.

    The attack is that of Fowl et al. 2022 (https://arxiv.org/abs/2110.13057), with random directions as weights.

    client: is changed. server: the state that the client expects. net: the shared network. private: the client's training
    rows. held_out: rows that nobody trains on, in place of data that the server knows; a match with these is a coincidence.

    Raises:
        AlgorithmError: the user's phase raises an error.
        DataError: a row cannot be read.
    """
    training = read_rows(private)

    def make_imprint(records: int = 0, coincidences: int = 0, skipped: str | None = None) -> Imprint:
        return Imprint(client=client.id, rows=len(training), records=records, coincidences=coincidences, skipped=skipped)

    first = find_first_layer(net, training.shape[1])
    if first is None:
        return make_imprint(skipped="the first layer of the shared network is not a linear layer over the whole input")
    if not {*first} <= server.keys():
        return make_imprint(skipped="the first layer of the shared network stays with the client")
    known = read_rows(held_out)
    crafted = craft_state(server, net, first, known)
    try:
        reply = participate(client, phase, dict(crafted), phase.leaves(server), at).message
    except Refused:
        return make_imprint(skipped="the privacy boundary refused the answer")
    except Diverged:
        return make_imprint(skipped="the crafted model made the client's training diverge")
    if not {*first} <= reply.keys():
        return make_imprint(skipped="the first layer of the shared network does not leave the client")
    seen = read_out(reply, crafted, first)
    scale = CLOSE * float(known.max() - known.min())
    return make_imprint(count_matches(training, seen, scale), count_matches(known, seen, scale))


def craft_state(server: Message, net: nn.Module, first: FirstLayer, known: Tensor) -> Message:
    """Return the server's state with a first layer that reacts to few rows, and later layers that pass the signal on.

    known [n, F]: rows like the client's.
    """
    rng = torch.Generator().manual_seed(5)
    crafted = {k: v.detach().cpu().clone() for k, v in server.items()}
    directions = torch.randn(crafted[first.weight].shape, generator=rng)
    projected = known @ directions.double().T
    crafted[first.weight] = directions
    crafted[first.bias] = -(projected.mean(0) + REACH * projected.std(0)).float()
    for name, module in net.named_modules():
        weight, bias = f"{name}.weight", f"{name}.bias"
        if not isinstance(module, nn.Linear) or weight == first.weight or weight not in crafted:
            continue
        outputs, inputs = crafted[weight].shape
        passes = torch.eye(outputs) if outputs == inputs else torch.randn(outputs, inputs, generator=rng) * 0.2
        crafted[weight] = passes
        if bias in crafted:
            crafted[bias] = torch.zeros(outputs)
    return crafted


def read_out(reply: Message, crafted: Message, first: FirstLayer) -> Tensor:
    """Return the row that each unit reconstructs [R, F], float64, for the R units whose bias changed.

    A reconstructed row is the change of the unit's weights divided by the change of the unit's bias.
    """
    weights, biases = (reply[name].detach().cpu().double() for name in first)
    sent_weights, sent_biases = (crafted[name].double() for name in first)
    decay = (weights / sent_weights).flatten().nanmedian()  # weight decay alone moves units that no row reached
    moved_weights, moved_biases = weights - decay * sent_weights, biases - decay * sent_biases
    reacted = moved_biases.abs() > _STILL
    return moved_weights[reacted] / moved_biases[reacted, None]


def count_matches(rows: Tensor, seen: Tensor, scale: float) -> int:
    """Return how many of the rows [n, F] equal a vector of `seen` [m, F], each number within `scale`.

    A vector counts for the nearest row only.
    """
    matched: set[int] = set()
    for vector in seen:
        errors = (rows - vector).abs().amax(1)
        if float(errors.min()) < scale:
            matched.add(int(errors.argmin()))
    return len(matched)


def read_rows(rows: Data) -> Tensor:
    """Return all rows without augmentation [n, F], float64 on the CPU."""
    batches = [batch[0].flatten(1) for batch in rows.rows(torch.split(torch.arange(len(rows)), 1024))]
    return torch.cat(batches).double().cpu()
