"""The sum of the clipped gradients of one batch, before noise is added.

Each unit's gradient, over all noised networks together, is scaled down to a norm of at most C; a gradient that is not finite
counts as zero. So adding or removing a unit changes the sum by at most C, and replacing a unit by at most 2 C, for any
networks, any loss and any received model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from fedmutual.calling import Inputs, call_network, list_tensors, map_inputs
from fedmutual.core import Batch, Message, Net, Phase
from fedmutual.privacy import layers
from fedmutual.stepping import trainable

MARGIN = 1e-5  # relative increase of each computed norm, which covers rounding in float32
MEMORY = 2**28  # bytes of per-row gradients in memory at once


def compute_clipped_sum(
    phase: Phase,
    nets: Mapping[str, nn.Module],
    silent: Sequence[str],
    const: Message,
    clip: float,
    batch: Batch,
    units: Tensor | None,
) -> tuple[Message, Message]:
    """Return ("net.name" -> float64 sum of the units' clipped gradients, loss term -> sum over the rows).

    nets: the noised networks. silent: names of the other networks, which are constants for the loss. const: the constants of
    the loss, as `Phase.begin` returned them. clip: C, the largest norm of a unit's gradient. batch: at least one row. units:
    each row's unit [B]; None: each row is a unit.

    Source: Abadi et al., 2016, https://arxiv.org/abs/1607.00133, Algorithm 1.
    """
    if units is None and isinstance(batch[0], Tensor) and all(map(layers.is_plain, nets.values())):
        try:
            return _clip_by_layers(phase, nets, silent, const, clip, batch)
        except layers.NotOfOutputs:
            pass  # the loss uses more than the networks' outputs for the batch
    return _clip_by_rows(phase, nets, silent, const, clip, batch, units)


def compute_factors(squares: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return (factors [U] that scale the gradients to a norm of at most C, whether the norms are finite [U]).

    squares: squared norm of each unit's gradient [U], float64. The factor of a norm that is not finite is 0.
    """
    norms = squares.sqrt() * (1 + MARGIN)
    finite = norms.isfinite()
    return torch.where(finite, (clip / norms).clamp(max=1.0), 0.0), finite


def _clip_by_layers(
    phase: Phase, nets: Mapping[str, nn.Module], silent: Sequence[str], const: Message, clip: float, batch: Batch
) -> tuple[Message, Message]:
    """Return the sums from each layer's inputs and output gradients, without a gradient of a single row in memory.

    Raises:
        NotOfOutputs: the loss uses more than the networks' outputs for the batch.
    """
    tapes = {name: layers.Tape(net, batch[0]) for name, net in nets.items()}
    outputs = {name: tape.output for name, tape in tapes.items()}
    width = next(iter(outputs.values())).shape[1:]

    def loss(output: Message, *row: Tensor) -> tuple[Tensor, Message]:
        rows = tuple(t.unsqueeze(0) for t in row)
        known = {name: layers.make_known_network(rows[0], z.unsqueeze(0)) for name, z in output.items()}
        return _sum_terms(phase.loss(known | _make_constants(silent, width), rows, const))

    slopes, terms = vmap(grad(loss, has_aux=True), randomness="different")(
        {name: output.detach() for name, output in outputs.items()}, *batch
    )
    with torch.no_grad():
        squares = torch.zeros(len(batch[0]), device=batch[0].device, dtype=torch.float64)
        for name, tape in tapes.items():
            squares = squares + tape.backward(slopes[name])
        scale, finite = compute_factors(squares, clip)
        sums = {
            f"{name}.{k}": g.double() for name, tape in tapes.items() for k, g in tape.weighted_sum(scale, finite).items()
        }
    return sums, {k: v.sum() for k, v in terms.items()}


def compute_example_gradients(net: nn.Module, examples: Inputs) -> Message:
    """Return the gradient of the sum of the outputs for each example: by parameter, [B, ...]. No random stream advances.

    Raises:
        Exception: vmap does not support a layer.
    """

    def total(weights: Message, x: Inputs) -> Tensor:
        return call_network(net, map_inputs(lambda one: one.unsqueeze(0), x), weights).sum()

    params = {k: p.detach() for k, p in trainable(net).items()}
    with torch.random.fork_rng():
        gradients: Message = vmap(grad(total), in_dims=(None, 0), randomness="different")(params, examples)
    return gradients


def _clip_by_rows(
    phase: Phase,
    nets: Mapping[str, nn.Module],
    silent: Sequence[str],
    const: Message,
    clip: float,
    batch: Batch,
    units: Tensor | None,
) -> tuple[Message, Message]:
    """Return the sums from the gradient of each single row, by vmap: for any network and any loss."""
    params = {name: {k: p.detach() for k, p in trainable(net).items()} for name, net in nets.items()}
    buffers = {name: {k: b.clone() for k, b in net.named_buffers()} for name, net in nets.items()}
    width = _find_output_shape(next(iter(nets.values())), batch) if silent else ()

    def make_forward(name: str, weights: Message) -> Callable[..., Tensor]:
        return lambda x, more=None: call_network(nets[name], x, {**buffers[name], **weights, **(more or {})})

    def loss(weights: Mapping[str, Message], *row: Inputs) -> tuple[Tensor, Message]:
        known = {name: Net(make_forward(name, w), w) for name, w in weights.items()}
        rows = tree_map(lambda t: t.unsqueeze(0), row)
        return _sum_terms(phase.loss(known | _make_constants(silent, width), rows, const))

    per_row = vmap(grad(loss, has_aux=True), in_dims=(None, *(0 for _ in batch)), randomness="different")
    size = sum(p.numel() * p.element_size() for weights in params.values() for p in weights.values())
    total = {
        f"{n}.{k}": torch.zeros_like(p, dtype=torch.float64) for n, weights in params.items() for k, p in weights.items()
    }
    sums: Message = {}
    max_rows = max(1, MEMORY // size)
    one = list_tensors(batch[0])[0]
    units = torch.arange(len(one)) if units is None else units
    for rows, codes in _split_units(units, max_rows):
        count = int(codes[-1]) + 1
        unit_grads: Message = {}
        for chunk in torch.split(torch.arange(len(rows)), max_rows):
            places = rows[chunk].to(one.device)
            grads, terms = per_row(params, *tree_map(partial(torch.index_select, dim=0, index=places), batch))
            for k, g in ((f"{n}.{k}", g) for n, by_name in grads.items() for k, g in by_name.items()):
                if count == len(rows) == len(chunk):  # each row is a unit
                    unit_grads[k] = g
                else:
                    unit_grads[k] = unit_grads.get(k, g.new_zeros(count, *g.shape[1:])).index_add(
                        0, codes[chunk].to(g.device), g
                    )
            sums = {k: sums.get(k, 0) + v.sum() for k, v in terms.items()}
        with torch.no_grad():
            squares = torch.stack([layers.sum_squares(g) for g in unit_grads.values()]).sum(0)
            scale, finite = compute_factors(squares, clip)
            for k, g in unit_grads.items():
                clean = g if bool(finite.all()) else torch.where(finite.view(-1, *(1 for _ in g.shape[1:])), g, 0.0)
                total[k] += torch.tensordot(scale.to(clean.dtype), clean, 1).double()
    return total, sums


def _split_units(units: Tensor, max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (row numbers [R], each row's unit counted from 0 [R]), at most `max_rows` rows unless one unit has more."""
    order = torch.argsort(units, stable=True)
    codes, sizes = torch.unique_consecutive(units[order], return_inverse=False, return_counts=True)
    chunk_sizes: list[int] = []
    start = 0
    for number, size in enumerate(sizes.tolist()):
        chunk_sizes.append(size)
        if number + 1 == len(codes) or sum(chunk_sizes) + int(sizes[number + 1]) > max_rows:
            yield order[start : start + sum(chunk_sizes)], torch.repeat_interleave(torch.tensor(chunk_sizes))
            start += sum(chunk_sizes)
            chunk_sizes = []


def _sum_terms(terms: Message) -> tuple[Tensor, Message]:
    """Return (sum of the loss terms, the terms without gradient)."""
    return torch.stack(list(terms.values())).sum(), {k: v.detach() for k, v in terms.items()}


def _make_constants(names: Sequence[str], width: Sequence[int]) -> dict[str, Net]:
    """Return networks with zero outputs, so that a noised gradient cannot depend on a network without noise."""

    def compute_zeros(x: Inputs, weights: Message | None = None) -> Tensor:
        one = list_tensors(x)[0]
        return torch.zeros(len(one), *width, device=one.device)

    return {name: Net(compute_zeros, {}) for name in names}


def _find_output_shape(net: nn.Module, batch: Batch) -> tuple[int, ...]:
    """Return the shape of a network's output for one row."""
    with torch.no_grad():
        return tuple(call_network(net, map_inputs(lambda one: one[:1], batch[0])).shape[1:])
