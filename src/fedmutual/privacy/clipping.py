"""The sum of clipped gradients of one batch: what a step on private rows releases before noise is added.

Each unit's gradient, over all noised networks together, is scaled down to a norm of at most C; a gradient that is not finite
counts as zero. So adding or removing a unit moves the sum by at most C, replacing one by at most 2 C, whatever the networks,
the loss and the received model are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedmutual.core import Batch, Message, Net, Phase
from fedmutual.privacy import layers
from fedmutual.stepping import trainable

MARGIN = 1e-5  # by which a norm in float32 is taken to be larger than it was computed
MEMORY = 2**28  # bytes of gradients of single rows that are held at once


class ClippingJob(NamedTuple):
    """What a batch's gradients are taken of."""

    phase: Phase
    nets: Mapping[str, nn.Module]  # the noised ones
    silent: tuple[str, ...]  # the other networks, which the loss sees as constants
    const: Message
    clip: float  # C


def clipped_sum(job: ClippingJob, batch: Batch, units: Tensor | None) -> tuple[Message, Message]:
    """The sum of the units' clipped gradients, "net.name" -> float64, and the sum of each loss term over the rows.

    batch: of at least one row. units: each row's unit [B]; None: each row is a unit.
    """
    if units is None and all(map(layers.is_plain, job.nets.values())):
        try:
            return _of_layers(job, batch)
        except layers.NotOfOutputs:
            pass  # the loss looks at more than the networks' outputs for the batch
    return _of_rows(job, batch, torch.arange(len(batch[0])) if units is None else units)


def factors(squares: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """What scales gradients of these squared norms [U] to a norm of at most C, and whether the norms are finite [U]."""
    norms = squares.sqrt() * (1 + MARGIN)
    finite = norms.isfinite()
    return torch.where(finite, (clip / norms).clamp(max=1.0), 0.0), finite


def _of_layers(job: ClippingJob, batch: Batch) -> tuple[Message, Message]:
    """From each layer's inputs and the gradients of its outputs, without a gradient of a single row in memory.

    Raises:
        NotOfOutputs: the loss looks at more than the networks' outputs for the batch.
    """
    tapes = {name: layers.Tape(net, batch[0]) for name, net in job.nets.items()}
    outputs = {name: tape.output for name, tape in tapes.items()}
    width = next(iter(outputs.values())).shape[1:]

    def loss(output: Message, *row: Tensor) -> tuple[Tensor, Message]:
        rows = tuple(t.unsqueeze(0) for t in row)
        nets = {name: layers.known(rows[0], z.unsqueeze(0)) for name, z in output.items()}
        return _total(job.phase.loss(nets | _constants(job.silent, width), rows, job.const))

    slopes, terms = vmap(grad(loss, has_aux=True), randomness="different")(
        {name: output.detach() for name, output in outputs.items()}, *batch
    )
    with torch.no_grad():
        squares = torch.zeros(len(batch[0]), device=batch[0].device)
        for name, tape in tapes.items():
            squares = squares + tape.backward(slopes[name])
        scale, finite = factors(squares, job.clip)
        found = {
            f"{name}.{k}": g.double() for name, tape in tapes.items() for k, g in tape.weighted_sum(scale, finite).items()
        }
    return found, {k: v.sum() for k, v in terms.items()}


def _of_rows(job: ClippingJob, batch: Batch, units: Tensor) -> tuple[Message, Message]:
    """From the gradient of every single row, by vmap: for any network and any loss."""
    params = {name: {k: p.detach() for k, p in trainable(net).items()} for name, net in job.nets.items()}
    buffers = {name: {k: b.clone() for k, b in net.named_buffers()} for name, net in job.nets.items()}
    width = _width(next(iter(job.nets.values())), batch) if job.silent else ()

    def call(name: str, own: Message) -> Callable[[Tensor], Tensor]:
        return lambda x: functional_call(job.nets[name], (own, buffers[name]), (x,))

    def loss(given: Mapping[str, Message], *row: Tensor) -> tuple[Tensor, Message]:
        nets = {name: Net(call(name, own), own) for name, own in given.items()}
        return _total(job.phase.loss(nets | _constants(job.silent, width), tuple(t.unsqueeze(0) for t in row), job.const))

    per_row = vmap(grad(loss, has_aux=True), in_dims=(None, *(0 for _ in batch)), randomness="different")
    size = sum(p.numel() * p.element_size() for own in params.values() for p in own.values())
    total = {f"{n}.{k}": torch.zeros_like(p, dtype=torch.float64) for n, own in params.items() for k, p in own.items()}
    sums: Message = {}
    most = max(1, MEMORY // size)
    for rows, codes in _pieces(units, most):
        count = int(codes[-1]) + 1
        whole: Message = {}
        for part in torch.split(torch.arange(len(rows)), most):
            places = rows[part].to(batch[0].device)
            grads, terms = per_row(params, *(t.index_select(0, places) for t in batch))
            for k, g in ((f"{n}.{k}", g) for n, own in grads.items() for k, g in own.items()):
                if count == len(rows) == len(part):  # each row is a unit
                    whole[k] = g
                else:
                    whole[k] = whole.get(k, g.new_zeros(count, *g.shape[1:])).index_add(0, codes[part].to(g.device), g)
            sums = {k: sums.get(k, 0) + v.sum() for k, v in terms.items()}
        with torch.no_grad():
            squares = torch.stack([g.flatten(1).square().sum(1) for g in whole.values()]).sum(0)
            scale, finite = factors(squares, job.clip)
            for k, g in whole.items():
                clean = g if bool(finite.all()) else torch.where(finite.view(-1, *(1 for _ in g.shape[1:])), g, 0.0)
                total[k] += torch.tensordot(scale, clean, 1).double()
    return total, sums


def _pieces(units: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole units, about `most` rows at once -> (the rows' places [R], their units numbered from 0 [R])."""
    order = torch.argsort(units, stable=True)
    codes, sizes = torch.unique_consecutive(units[order], return_inverse=False, return_counts=True)
    taken: list[int] = []
    start = 0
    for number, size in enumerate(sizes.tolist()):
        taken.append(size)
        if number + 1 == len(codes) or sum(taken) + int(sizes[number + 1]) > most:
            yield order[start : start + sum(taken)], torch.repeat_interleave(torch.tensor(taken))
            start += sum(taken)
            taken = []


def _total(terms: Message) -> tuple[Tensor, Message]:
    """The sum of the loss terms, and the terms without gradient."""
    return torch.stack(list(terms.values())).sum(), {k: v.detach() for k, v in terms.items()}


def _constants(names: Sequence[str], width: Sequence[int]) -> dict[str, Net]:
    """Networks that say zero whatever they are asked: so a noised gradient cannot depend on a network without noise."""
    return {name: Net(lambda x: torch.zeros(len(x), *width, device=x.device), {}) for name in names}


def _width(net: nn.Module, batch: Batch) -> tuple[int, ...]:
    """The shape of a network's output for one row."""
    with torch.no_grad():
        output: Tensor = net(batch[0][:1])
    return tuple(output.shape[1:])
