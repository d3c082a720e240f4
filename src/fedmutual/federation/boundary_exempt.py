"""Find the meme's shared tensors that may equal a tensor of the personal net; the leak check lets these pass."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedmutual.boundary import is_constant
from fedmutual.calling import Inputs, call_network, list_tensors, map_inputs
from fedmutual.models.copying import copy_networks


def find_exempt_tensors(nets: Mapping[str, nn.Module], shared: tuple[str, ...], examples: Inputs) -> frozenset[str]:
    """Return the names of the meme's shared tensors that may legitimately equal a tensor of the personal net.

    A shared tensor is exempt in three cases. First, all shared tensors start equal to those of the personal net: then
    all are exempt. Second, the tensor alone starts equal and is not constant; a constant tensor (the ones and zeros of
    a BatchNorm) is not exempt alone. Third, both nets normalise the input itself and the tensor is a running statistic
    of that layer: the statistic describes the inputs, not a net.

    examples: inputs [B, ...].
    """
    if not {"personal", "meme"} <= nets.keys():
        return frozenset()
    personal, meme = (nets[n].state_dict() for n in ("personal", "meme"))
    if all(k in personal and _is_equal(personal[k], meme[k]) for k in shared):
        return frozenset(shared)
    same = {k for k in shared if not is_constant(meme[k]) and any(_is_equal(v, meme[k]) for v in personal.values())}
    if _list_input_statistics(nets["personal"], examples):
        same |= _list_input_statistics(nets["meme"], examples) & set(shared)
    return frozenset(same)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@torch.no_grad()
def _list_input_statistics(net: nn.Module, examples: Inputs) -> set[str]:
    """Return the names of the running statistics of layers that normalise the net's input directly."""
    norms = {name: m for name, m in net.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None}
    if not norms:
        return set()
    probe, statistics = copy_networks(net, share_objects=True).eval(), set[str]()
    norms = {name: probe.get_submodule(name) for name in norms}  # type: ignore[misc]
    x = map_inputs(lambda one: one.to(next(probe.buffers()).device), examples)
    # equal numbers, such as zeros, would stay equal through a layer without a bias
    compared = [one for one in list_tensors(x) if not is_constant(one)]

    def compare_input(name: str, layer_input: Tensor) -> None:
        if any(layer_input.numel() == one.numel() and torch.equal(layer_input.flatten(), one.flatten()) for one in compared):
            statistics.update((f"{name}.running_mean", f"{name}.running_var"))

    for name, module in norms.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: compare_input(name, inputs[0]))
    with torch.random.fork_rng():
        call_network(probe, x)
    return statistics
