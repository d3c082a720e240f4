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
from torch.nn.grad import conv2d_weight

from fedmutual.core import Message, Net
from fedmutual.models.parts import MaxPool

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
        NotOfOutputs: when the network is called with another input, or its weights are read.
    """

    def call(argument: Tensor) -> Tensor:
        if argument is not x:
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
            return slope.new_zeros(len(slope))
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
            weighted = d * scale.view(-1, *(1 for _ in d.shape[1:]))
            for name, value in _sum_gradients(module, a, weighted).items():
                sums[f"{self._names[id(module)]}.{name}"] = value
        return sums


class _HiddenWeights(Mapping[str, Any]):
    """Weights that raise NotOfOutputs when they are read."""

    def __getitem__(self, key: str) -> NoReturn:
        raise NotOfOutputs

    def __iter__(self) -> Iterator[str]:
        raise NotOfOutputs

    def __len__(self) -> int:
        raise NotOfOutputs


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


def _compute_square_norms(module: nn.Module, a: Tensor, d: Tensor) -> Tensor:
    """Return the squared norm [B] of each row's gradient at a layer's trainable weights. a, d: [B, ...]."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    if isinstance(module, nn.Linear) and a.dim() == 2:
        squares = d.square().sum(1)
        return squares * (a.square().sum(1) * ("weight" in trained) + ("bias" in trained))
    if isinstance(module, nn.Linear):
        a, d = a.flatten(1, -2), d.flatten(1, -2)
        weight = torch.einsum("bto,bti->boi", d, a)
        bias = d.sum(1)
    else:
        assert isinstance(module, nn.Conv2d)
        return torch.cat([_compute_square_conv_norms(module, *chunk, trained) for chunk in _split_rows(module, a, d)])
    return weight.square().sum((1, 2)) * ("weight" in trained) + bias.square().sum(1) * ("bias" in trained)


def _compute_square_conv_norms(module: nn.Conv2d, a: Tensor, d: Tensor, trained: set[str]) -> Tensor:
    """Return squared norms [B] for a convolution: patches [B, I, L] and slopes [B, O, L] give gradients [B, O, I]."""
    patches = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
    slopes = d.flatten(2)
    weight = torch.bmm(slopes, patches.transpose(1, 2)).square().sum((1, 2))
    return weight * ("weight" in trained) + slopes.sum(2).square().sum(1) * ("bias" in trained)


def _split_rows(module: nn.Conv2d, a: Tensor, d: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (a, d) for chunks of rows with at most `_MEMORY` bytes of patches each."""
    row = a.shape[1] * module.kernel_size[0] * module.kernel_size[1] * d[0, 0].numel() * a.element_size()
    size = max(1, _MEMORY // row)
    yield from zip(torch.split(a, size), torch.split(d, size), strict=True)


def _sum_gradients(module: nn.Module, a: Tensor, weighted: Tensor) -> Message:
    """Return parameter name -> sum of the rows' gradients. weighted: output gradients times the rows' weights."""
    if isinstance(module, nn.Linear):
        sums = {"weight": weighted.flatten(0, -2).T @ a.flatten(0, -2), "bias": weighted.flatten(0, -2).sum(0)}
    else:
        assert isinstance(module, nn.Conv2d)
        shape, (stride, padding, dilation) = module.weight.shape, (module.stride, module.padding, module.dilation)
        weight = conv2d_weight(a, shape, weighted, stride, padding, dilation)  # type: ignore[no-untyped-call]
        sums = {"weight": weight, "bias": weighted.sum((0, 2, 3))}
    return {name: sums[name] for name, p in module.named_parameters() if p.requires_grad}
