"""Clients of `toy` whose steps are clipped and noised, and plain loops for comparison."""

import numpy as np
import torch
from torch import nn

from fedmutual.core import Net
from fedmutual.privacy.mechanism import Mechanism
from fedmutual.privacy.sampling import Units
from fedmutual.stepping import trainable
from toy import client as plain

SECRET = bytes(range(32))


def client(id, algorithm, nets, sigma=1.0, clip=1.0, batch_size=8, secret=SECRET, groups=None, most=None, **more):
    """Return a client of `toy` with a mechanism."""
    return protected(plain(id, algorithm, **more), nets, sigma, clip, batch_size, secret, groups, most)


def protected(node, nets, sigma=1.0, clip=1.0, batch_size=8, secret=SECRET, groups=None, most=None):
    """Return the client with a mechanism over its private rows."""
    rows = node.data["private"]
    units = Units(len(rows), batch_size, groups, most)
    node.privacy = Mechanism(node.id, rows, units, frozenset(nets), clip, sigma, secret)
    node.data = {**node.data, "private": node.privacy.rows}
    return node


def job(phase, nets, const=None, clip=1.0, silent=()):
    """Return the arguments of `compute_clipped_sum` before the batch."""
    return phase, nets, silent, const or {}, clip


def row_gradients(phase, nets, batch, const):
    """Return the gradient of each row alone, by a plain loop: "net.name" -> [B, ...]. It uses only fedmutual's loss."""
    results = []
    for i in range(len(batch[0])):
        terms = phase.loss({n: Net(m, trainable(m)) for n, m in nets.items()}, tuple(t[i : i + 1] for t in batch), const)
        params = {f"{n}.{k}": p for n, m in nets.items() for k, p in m.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(sum(terms.values()), list(params.values()), allow_unused=True)
        results.append({k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(params.items(), grads, strict=True)})
    return {k: torch.stack([one[k] for one in results]).double() for k in results[0]}


def looped(rows, clip, units=None):
    """Return the sum of clipped gradients from the gradients of the rows, unit by unit."""
    codes = list(range(len(next(iter(rows.values()))))) if units is None else units.tolist()
    total = {k: torch.zeros_like(g[0]) for k, g in rows.items()}
    for code in dict.fromkeys(codes):
        group_sums = {k: g[[i for i, c in enumerate(codes) if c == code]].sum(0) for k, g in rows.items()}
        norm = torch.sqrt(sum(g.square().sum() for g in group_sums.values())).item()
        for k, g in group_sums.items():
            total[k] += g * min(1.0, clip / norm)
    return total


def distance(one, other):
    """Return the Euclidean distance of two gradients, over all tensors together."""
    assert one.keys() == other.keys()
    return float(np.sqrt(sum((one[k] - other[k]).square().sum().item() for k in one)))


def norm(gradient):
    """Return the Euclidean norm, over all tensors together."""
    return float(np.sqrt(sum(g.square().sum().item() for g in gradient.values())))


class Images(nn.Sequential):
    """Layers in sequence, in a class without known treatment of rows."""


def convolutions(kind=nn.Sequential, seed=3):
    """Return a small convolutional network for images [1, 8, 8], with stride, padding and dilation."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Sequential(nn.Conv2d(4, 6, 2, stride=2, dilation=2, bias=False), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(6, 3),
        )
