"""The imprint attack: a server that sends a chosen shared model reads training rows out of the update that comes back.

Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, 2022,
https://arxiv.org/abs/2110.13057. A unit of the first layer that only one row of a batch activates changes by a multiple of
that row, and its bias by the same multiple: their quotient is the row.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedmutual.core import Message

CLOSE = 0.05  # of the range of the training data: a row that is closer in every value counts as read
_RARE = 3.0  # standard deviations above the mean, from which on a unit is active
_LEAST = 1e-4  # change of a bias below which a unit is held to have been inactive


def find_linear_layers(net: nn.Module) -> list[str]:
    """Return the names of the linear layers in the order of their declaration; none unless all weights are in such layers.

    The attack is carried out on such networks alone; others can be attacked by a first layer that is put in front of them.
    """
    weighted = {name: m for name, m in net.named_modules() if list(m.parameters(recurse=False))}
    linear = [name for name, m in weighted.items() if isinstance(m, nn.Linear) and m.bias is not None]
    return linear if len(linear) == len(weighted) and len(linear) > 1 else []


def craft(state: Message, layers: list[str], similar: Tensor, seed: int = 0) -> Message:
    """Return a shared model whose first layer's units are active for few rows, and whose further layers let changes through.

    similar: rows [N, F] that the adversary knows and that are like the training rows.
    """
    rng = torch.Generator().manual_seed(seed)
    crafted = {k: torch.zeros_like(v) for k, v in state.items()}
    first, *inner, last = layers
    weight = torch.randn(state[f"{first}.weight"].shape, generator=rng)
    responses = similar.double() @ weight.double().T
    crafted[f"{first}.weight"] = weight
    crafted[f"{first}.bias"] = -(responses.mean(0) + _RARE * responses.std(0)).float()
    for name in inner:
        crafted[f"{name}.weight"] = torch.eye(*state[f"{name}.weight"].shape)
    crafted[f"{last}.weight"] = 0.2 * torch.randn(state[f"{last}.weight"].shape, generator=rng)
    return crafted


def count_read_rows(sent: Message, reply: Mapping[str, Tensor], layers: list[str], rows: Tensor) -> int:
    """Return how many training rows [N, F] can be read out of a reply: every value within `CLOSE` of the data's range."""
    weight, bias = f"{layers[0]}.weight", f"{layers[0]}.bias"
    decay = (reply[weight] / sent[weight]).double().flatten().median()  # of weights that no row changed
    change = reply[weight].double() - decay * sent[weight].double()
    bias_change = reply[bias].double() - decay * sent[bias].double()
    read, span = set[int](), float(rows.max() - rows.min())
    for unit in torch.nonzero(bias_change.abs() > _LEAST).flatten().tolist():
        errors = (rows.double() - change[unit] / bias_change[unit]).abs().amax(1)
        if float(errors.min()) < CLOSE * span:
            read.add(int(errors.argmin()))
    return len(read)
