"""`data.mean = "federated"` between real sites: the phase that sums training rows, and the scaling that results.

The phase is the start of a federation, round -1: each site sends the words of its sums, masked with `server.sum = "masked"`.
Afterwards every order to train or to score holds the mean and the divisor of each input, so that a site that missed the
start has them too. A site keeps the first that it is sent, and declines orders with others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedmutual.algorithms.fedavg import N_K
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Phase, Spec
from fedmutual.data.statistics import Layout, Moments, Statistics, Words, read_sums

SUMS, SCALING = "statistics", "scaling"  # names of tensors: words int64 [layout.count]; mean and divisor float64 [2, inputs]
_MOST_MEAN, _LEAST_DIVISOR = 1e15, 1e-20  # else a server could choose a scaling that is infinite in float32 for some rows
Gathered = tuple[Statistics, dict[str, int], dict[str, int]]
"""The statistics at the server; the bytes that each site in the sums sent; and those that it was sent."""


@dataclass(frozen=True)
class SumStatistics(Phase):
    """The phase in which each site sends the sums of its training rows. Nothing is trained."""

    dp_ready: ClassVar[bool] = False  # the sums are exact
    layout: Layout
    compute: Callable[[], Words] | None = None  # at a site: returns the words of its training rows

    def leaves(self, server: Message) -> Spec:
        """Return the one declared tensor of a reply: int64 [layout.count]."""
        return {SUMS: (torch.int64, (self.layout.count,))}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return no batches."""
        return ()

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return no losses."""
        return {}

    def end(self, client: Client, at: At) -> Message:
        """Return the words of the site's training rows: one tensor, int64 [layout.count].

        Raises DataError where a row cannot be read, or the values are too large.
        """
        assert self.compute is not None  # the server asks sites only
        return {SUMS: torch.from_numpy(self.compute())}


def find_sums(algorithm: Algorithm) -> SumStatistics | None:
    """Return the phase of an algorithm that sums training rows, or None."""
    return next((phase for phase in algorithm.start if isinstance(phase, SumStatistics)), None)


def find_sums_fault(phase: Phase, message: Message) -> str | None:
    """Return in one clause why a site's unmasked sums cannot be right, or None."""
    if isinstance(phase, SumStatistics):
        try:
            read_sums(phase.layout, message[SUMS].numpy())
        except ValueError as problem:
            return f"its statistics are impossible: {problem}"
    return None


def get_screened(message: Message) -> Message:
    """Return the part of a reply that `screening` judges: of sums, the number of rows as n_k; else the complete reply."""
    return {N_K: message[SUMS][0]} if SUMS in message else message


def declare_scaling(layout: Layout) -> Spec:
    """Return the declared tensor with the scaling in an order: float64 [2, inputs], a row of means and a row of divisors."""
    return {SCALING: (torch.float64, (2, len(layout.inputs)))}


def pack_scaling(moments: Moments) -> Message:
    """Return the message with the scaling that the server adds to orders; its tensor is as in `declare_scaling`."""
    return {SCALING: torch.tensor(moments, dtype=torch.float64)}


def read_scaling(layout: Layout, message: Message) -> Moments:
    """Return the scaling in an order. Raises ValueError where there is none, or a mean or a divisor is out of range."""
    tensor = message.get(SCALING)
    dtype, shape = declare_scaling(layout)[SCALING]
    if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError("the order has no mean and divisor for each input, which data.mean = 'federated' needs")
    if not (tensor[0].abs() <= _MOST_MEAN).all() or not (tensor[1].isfinite() & (tensor[1] >= _LEAST_DIVISOR)).all():
        raise ValueError(
            f"the order has a mean that is not between -{_MOST_MEAN:g} and {_MOST_MEAN:g}, or a divisor that is not a "
            f"number of at least {_LEAST_DIVISOR:g}; let all sites use another unit for the input"
        )
    mean, std = tensor.tolist()
    return Moments(tuple(mean), tuple(std))
