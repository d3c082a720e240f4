"""Sums of model updates in fixed point: integers modulo 2^64, so that the order of the summands changes no bit.

An update is a reply minus the message that the server had sent, each number clipped to +-LIMIT. A number u becomes the
integer round(u * 2^40), in a weighted sum round(u * n_k * 2^20) with the sum of n_k beside it: MOST_SUMMED updates at most
stay below 2^63, so no sum overflows. Real sites mask these integers (`sites.secure_sum`): a masked sum has the same bits.

Integer and boolean tensors (BatchNorm's counter of batches) are no updates: they stay as the server sent them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmutual.core import Message, Spec, Total, Unusable
from fedmutual.errors import RunError
from fedmutual.settings import MOST_SUMMED

FRACTION_BITS = 40  # of a number in a plain sum
WEIGHT_BITS = 20  # a weight n_k counts as the fraction n_k / 2^20
LIMIT = 2.0**10  # a larger change of one number in one round is clipped
HEAVIEST = 2**WEIGHT_BITS  # the largest n_k
LARGEST = int(LIMIT) << FRACTION_BITS  # the largest integer of one update, weighted or not


@dataclass(frozen=True)
class EncodedSum:
    """The sum of the encoded updates of one client or of several, in fixed point.

    `weighted`: whether each update was multiplied by the client's number of training rows n_k.
    """

    tensors: Message  # name -> int64, the update of each floating tensor
    weight: int  # the number of clients, or where updates are weighted the sum of their n_k
    weighted: bool


def encode_update(reply: Message, base: Message, weight: float | None = None) -> EncodedSum:
    """Return one client's update (reply - base) in fixed point, as int64 tensors in the shapes of the reply.

    base: what the server had sent, by name; a tensor that is not in it counts from zero. weight: n_k of a weighted sum, a
    whole number from 1 to HEAVIEST.

    Raises:
        ValueError: the weight is out of its range, a number is not finite, or a tensor is complex.
    """
    if weight is not None and not (1 <= weight <= HEAVIEST and float(weight).is_integer()):
        raise ValueError(
            f"its weight n_k is not a whole number from 1 to {HEAVIEST:,}, which a fixed-point sum needs; "
            'algorithm.weighting = "uniform" needs no n_k'
        )
    scale = 2.0**FRACTION_BITS if weight is None else weight * 2.0 ** (FRACTION_BITS - WEIGHT_BITS)
    if complex_name := next((k for k, t in reply.items() if t.is_complex()), None):
        raise ValueError(f"its tensor {complex_name!r} is complex, which a fixed-point sum cannot add")
    tensors = {k: _encode_tensor(k, t, base.get(k), scale) for k, t in reply.items() if t.is_floating_point()}
    return EncodedSum(tensors, 1 if weight is None else int(weight), weight is not None)


def _encode_tensor(name: str, tensor: Tensor, base: Tensor | None, scale: float) -> Tensor:
    update = tensor.double() if base is None else tensor.double() - base.double()
    if not torch.isfinite(update).all():
        raise ValueError(f"its update of {name!r} holds numbers that are not finite")
    return update.clamp(-LIMIT, LIMIT).mul(scale).round().to(torch.int64)


def add_updates(updates: Iterable[EncodedSum]) -> EncodedSum:
    """Return the sum of encoded updates with equal names and shapes.

    Raises:
        ValueError: there are none, or more than MOST_SUMMED.
    """
    total: EncodedSum | None = None
    for number, update in enumerate(updates, 1):
        if number > MOST_SUMMED:
            raise ValueError(f"a fixed-point sum takes at most {MOST_SUMMED} clients in a round")
        if total is None:
            total = EncodedSum({k: t.clone() for k, t in update.tensors.items()}, update.weight, update.weighted)
            continue
        for name, tensor in total.tensors.items():
            tensor.add_(update.tensors[name])
        total = EncodedSum(total.tensors, total.weight + update.weight, total.weighted)
    if total is None:
        raise ValueError("a sum needs at least one update")
    return total


def apply_mean(total: EncodedSum, base: Message, declared: Spec) -> Message:
    """Return the server's message plus the mean of the updates, in the declared dtypes and shapes.

    An integer tensor is that of `base`.
    """
    bits = FRACTION_BITS - WEIGHT_BITS if total.weighted else FRACTION_BITS
    unit = 2.0**-bits
    moved: Message = {}
    for name, (dtype, _) in declared.items():
        if name not in total.tensors:
            moved[name] = base[name]
            continue
        mean = total.tensors[name].double().mul(unit).div(total.weight)
        moved[name] = (mean if name not in base else base[name].double() + mean).to(dtype)
    return moved


def pack_words(update: EncodedSum) -> Tensor:
    """Return an encoded update as int64 [N]: its numbers, in the order of the tensors' names, and n_k if it is weighted."""
    weight = [torch.tensor([update.weight])] if update.weighted else []
    return torch.cat([*(update.tensors[name].flatten() for name in sorted(update.tensors)), *weight])


def average_total(total: Total, base: Message) -> Message:
    """Return the server's next message from the sum of all updates. base: the message that the clients were sent.

    Raises:
        RunError: no updates of this number of clients have this sum, so a client sent wrong words.
    """
    weight = int(total.words[-1]) if total.weighted else len(total)
    updates = total.words[:-1] if total.weighted else total.words
    most = len(total) * LARGEST  # compared on both sides, because abs() of the smallest integer is negative
    if bool(((updates > most) | (updates < -most)).any()) or not len(total) <= weight <= len(total) * HEAVIEST:
        raise RunError(
            "the sum of the updates is impossible, so a site sent wrong words, and it is not known which of "
            f"{', '.join(total)} it was; begin a federation of another name with other sites, or without masks"
        )
    names = sorted(name for name, tensor in base.items() if tensor.is_floating_point())
    parts = torch.split(updates, [base[name].numel() for name in names])
    tensors = {name: part.reshape(base[name].shape) for name, part in zip(names, parts, strict=True)}
    declared = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in base.items()}
    return apply_mean(EncodedSum(tensors, weight, total.weighted), base, declared)


def average_updates(replies: Mapping[str, Message], weights: Mapping[str, float] | None, base: Message) -> Message:
    """Return the server's next message, from the mean of all replies' updates, weighted by n_k if `weights` are given.

    Raises:
        Unusable: the senders with an update or weight that cannot be encoded, with the reason.
        ValueError: there are no replies, or more than MOST_SUMMED.
    """
    updates, flaws = list[EncodedSum](), dict[str, str]()
    for sender, reply in replies.items():
        try:
            updates.append(encode_update(reply, base, None if weights is None else weights[sender]))
        except ValueError as problem:
            flaws[sender] = str(problem)
    if flaws:
        raise Unusable(flaws)
    declared = {k: (t.dtype, tuple(t.shape)) for k, t in next(iter(replies.values()), {}).items()}
    return apply_mean(add_updates(updates), base, declared)
