"""Norms and weighted sums of per-row gradients, from a layer's input a and the gradient d of its output.

A linear layer's gradient for row i is d_i a_i^T, so its norm is |d_i| |a_i|, and a weighted sum over rows is one product of
matrices: no gradient of a single row is formed (Goodfellow, 2015, https://arxiv.org/abs/1510.01799; Bu et al., 2022,
https://arxiv.org/abs/2210.00038). A convolution is a linear layer over the patches of its input. This module supports only
networks that process each row separately: `torch.nn.Sequential` of the layers below.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmutual.core import Message, Net
from fedmutual.models.networks import MaxPool

_MEMORY = 2**26  # bytes of patches in memory at once
_WITHOUT_WEIGHTS = {
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Identity,
    nn.LeakyReLU,
    MaxPool,
    nn.MaxPool2d,
    nn.ReLU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
}


class NotOfOutputs(Exception):
    """A loss uses more than a network's output for the batch: its weights, or its output for another input."""


def is_plain(net: nn.Module) -> bool:
    """Return whether a network is a `Sequential` of supported layers, without shared layers, hooks and in-place layers."""
    modules = [m for _, m in net.named_modules(remove_duplicate=False)]
    weights = [p for _, p in net.named_parameters(remove_duplicate=False)]
    is_unshared = len({id(m) for m in modules}) == len(modules) and len({id(p) for p in weights}) == len(weights)
    return is_unshared and type(net) is nn.Sequential and all(type(m) is nn.Sequential or _is_supported(m) for m in modules)


def make_known_network(x: Tensor, output: Tensor) -> Net:
    """Return a network that knows only its output [B, C] for this x [B, ...].

    Raises:
        NotOfOutputs: when the network is called with another input or weights, or its weights are read.
    """

    def call(argument: Tensor, weights: Message | None = None) -> Tensor:
        if argument is not x or weights is not None:
            raise NotOfOutputs
        return output

    return Net(call, _HiddenWeights())  # type: ignore[arg-type]


class Tape:
    """A network's forward pass over a batch, with the input of each trainable layer.

    `backward` adds the gradients of the layers' outputs; `weighted_sum` is called after `backward`.

    Source: Goodfellow, 2015, https://arxiv.org/abs/1510.01799; Bu et al., 2022, https://arxiv.org/abs/2210.00038.
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self._net = net
        self._names = {id(m): name for name, m in net.named_modules()}
        self._inputs: list[tuple[nn.Module, Tensor]] = []
        self._slopes: list[Tensor] = []
        self._outputs: list[Tensor] = []
        for layer in _list_layers(net):
            output = layer(x)
            if any(p.requires_grad for p in layer.parameters()):
                self._inputs.append((layer, x.detach()))
                self._outputs.append(output)
            x = output
        self.output = x  # [B, ...]

    def backward(self, slope: Tensor) -> Tensor:
        """Return the squared norm of each row's gradient [B]. slope: gradient of each row's loss at the output [B, ...]."""
        if not self._inputs:  # the network is frozen
            return slope.new_zeros(len(slope), dtype=torch.float64)
        self._slopes = list(torch.autograd.grad(self.output, self._outputs, slope))
        return torch.stack(
            [_compute_square_norms(m, a, d) for (m, a), d in zip(self._inputs, self._slopes, strict=True)]
        ).sum(0)

    def weighted_sum(self, scale: Tensor, finite: Tensor) -> Message:
        """Return parameter name -> sum over the rows of `scale` [B] times the gradient, without rows that are not finite."""
        if not bool(finite.all()):
            rows = finite.nonzero()[:, 0]
            scale = scale[rows]
            self._inputs = [(m, a[rows]) for m, a in self._inputs]
            self._slopes = [d[rows] for d in self._slopes]
        sums: Message = {}
        for (module, a), d in zip(self._inputs, self._slopes, strict=True):
            for name, value in _sum_gradients(module, a, d, scale).items():
                sums[f"{self._names[id(module)]}.{name}"] = value
        return sums


class _HiddenWeights(Mapping[str, Any]):
    """Weights that raise NotOfOutputs when they are read."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NotOfOutputs

    __getitem__ = __iter__ = __len__ = _refuse


def _is_supported(module: nn.Module) -> bool:
    """Return whether a layer processes rows separately and this module has a rule for its gradient."""
    if any(getattr(module, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")):
        return False
    if type(module) is nn.Flatten:
        return module.start_dim == 1 and module.end_dim == -1
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear or (type(module) in _WITHOUT_WEIGHTS and not getattr(module, "inplace", False))


def _list_layers(net: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested `Sequential` networks in sequence."""
    for child in net.children():
        if type(child) is nn.Sequential:
            yield from _list_layers(child)
        else:
            yield child


def sum_squares(rows: Tensor) -> Tensor:
    """Return the sum of the squares of each row [B, ...], float64 [B].

    In float32 a server's weights could make a square infinite, or so small that the row counts as zero and is not clipped.
    """
    return rows.double().square().flatten(1).sum(1)


def _compute_square_norms(module: nn.Module, a: Tensor, d: Tensor) -> Tensor:
    """Return the squared norm [B] of each row's gradient at a layer's trainable weights, float64. a, d: [B, ...]."""
    trained = _list_trained(module)
    if _is_one_product(module, a):
        return sum_squares(d) * (sum_squares(a) * ("weight" in trained) + ("bias" in trained))
    parts = (_compute_row_gradients(module, *part) for part in _split_rows(module, a, d))
    return torch.cat([torch.stack([sum_squares(part[name]) for name in trained]).sum(0) for part in parts])


def _sum_gradients(module: nn.Module, a: Tensor, d: Tensor, scale: Tensor) -> Message:
    """Return parameter name -> sum over the rows of `scale` [B] times the row's gradient."""
    trained, scale = _list_trained(module), scale.to(d.dtype)
    if _is_one_product(module, a):
        weighted = d * scale[:, None]
        sums = {"weight": weighted.T @ a, "bias": weighted.sum(0)}
        return {name: sums[name] for name in trained}
    sums = {name: torch.zeros_like(getattr(module, name)) for name in trained}
    for part_a, part_d, part_scale in _split_rows(module, a, d, scale):
        part = _compute_row_gradients(module, part_a, part_d)
        for name in trained:
            sums[name] += torch.tensordot(part_scale, part[name], 1).view_as(sums[name])
    return sums


def _list_trained(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def _is_one_product(module: nn.Module, a: Tensor) -> bool:
    """Return whether the gradient of a row is one product of a vector and a vector. a: the layer's input [B, ...]."""
    return isinstance(module, nn.Linear) and a.dim() == 2


def _compute_row_gradients(module: nn.Module, a: Tensor, d: Tensor) -> Message:
    """Return the gradients of each row: of the weight [B, O, I] and of the bias [B, O]. a, d: [B, ...].

    Norms and sums are of these numbers. Another order of the same additions would round otherwise, and where the positions
    of a row cancel each other, the rounding can be larger than the gradient.
    """
    if isinstance(module, nn.Linear):
        patches, slopes = a.flatten(1, -2).transpose(1, 2), d.flatten(1, -2).transpose(1, 2)  # [B, I, T], [B, O, T]
    else:
        assert isinstance(module, nn.Conv2d)
        patches = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
        slopes = d.flatten(2)
    return {"weight": torch.bmm(slopes, patches.transpose(1, 2)), "bias": slopes.sum(2)}


def _split_rows(module: nn.Module, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of the tensors [B, ...], a and d first, with at most `_MEMORY` bytes of patches and gradients each."""
    a, d = tensors[:2]
    patches = a[0].numel()
    if isinstance(module, nn.Conv2d):
        patches = a.shape[1] * module.kernel_size[0] * module.kernel_size[1] * d[0, 0].numel()
    weight = module.weight
    assert isinstance(weight, Tensor)
    size = max(1, _MEMORY // ((patches + weight.numel()) * a.element_size()))
    yield from zip(*(torch.split(t, size) for t in tensors), strict=True)
