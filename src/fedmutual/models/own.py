"""A user's own network: "module:factory" is called with the data's shape and number of classes.

Losses take logits, so a network that ends in probabilities is found.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from fedmutual.calling import Inputs, Shape, call_network
from fedmutual.errors import format_error
from fedmutual.user_code import plugins

_made_networks: WeakSet[nn.Module] = WeakSet()  # the networks that factories returned and that are still in use
_FACTORS, _TOLERANCE = (10.0, -10.0), 1e-4  # factors of all weights; tolerance of a sum of probabilities
_CONSTANT = "or, for a constant such as an attention mask, use register_buffer(..., persistent=False)"
_KEYWORDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def make_user_network(name: str, shape: Shape, classes: int, key: str, more: Mapping[str, Any] | None = None) -> nn.Module:
    """Return the network of a factory, which is called with the arguments that its signature names.

    `shape` or `input_shape`: the shape of one example; `classes` or `num_classes`: the number of outputs; and the entries of
    `more`.

    Raises:
        ConfigError: the factory cannot be imported.
        ValueError: the factory cannot be called, fails, or returns no new torch.nn.Module, or one of torch.jit, or one with
            tensors that are not finite.
    """
    factory = plugins.load(name, key)
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = type(factory).__name__
        raise ValueError(f"is an instance of {kind}; name a function or class that makes a new torch.nn.Module at each call")
    available = {"shape": shape, "input_shape": shape, "classes": classes, "num_classes": classes, **(more or {})}
    try:
        net = factory(**select_arguments(factory, available))
    except Exception as problem:  # a user's factory may fail in any way
        raise ValueError(f"cannot be made: {format_error(problem)}") from problem
    if not isinstance(net, nn.Module):
        raise ValueError(f"returned {type(net).__name__}, but must return a torch.nn.Module")
    if isinstance(net, torch.jit.ScriptModule):
        raise ValueError("is a module of torch.jit, whose weights cannot be copied; give the module that was compiled")
    if net in _made_networks:  # otherwise participants would train one network together
        raise ValueError("is the network of an earlier call of its factory, which must make a new one at each call")
    _made_networks.add(net)
    tensors = {name: t for name, t in net.state_dict().items() if isinstance(t, Tensor) and not is_lazy(t)}
    is_number = {name: t.is_floating_point() or t.is_complex() for name, t in tensors.items()}
    if unbounded := next((name for name, t in tensors.items() if is_number[name] and not t.isfinite().all()), None):
        raise ValueError(f"holds numbers in {unbounded!r} that are not finite; correct them, {_CONSTANT}")
    for name in [name for name, t in tensors.items() if t.is_complex()]:
        path, _, tensor_name = name.rpartition(".")
        parametrize.register_parametrization(net.get_submodule(path), tensor_name, _AsComplex(), unsafe=True)
    return net


class _AsComplex(nn.Module):
    """A complex tensor whose real and imaginary parts are trained, sent and stored in its place."""

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """Return the complex tensor [...] of its parts [...]."""
        return torch.complex(real, imaginary)

    def right_inverse(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a complex tensor."""
        return values.real.clone(), values.imag.clone()


def restore_complex(net: nn.Module) -> nn.Module:
    """Return a network whose complex tensors are its own again, as its author wrote them."""
    for module in [m for m in net.modules() if parametrize.is_parametrized(m)]:
        for name, kinds in list(module.parametrizations.items()):  # type: ignore[union-attr, operator]
            if isinstance(kinds[0], _AsComplex):
                parametrize.remove_parametrizations(module, name)
    return net


def select_arguments(factory: Any, available: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the signature names. ``**kwargs`` gets none: the factory may pass them on to anything."""
    signature = inspect.signature(factory)
    arguments = {
        k: v for k, v in available.items() if k in signature.parameters and signature.parameters[k].kind in _KEYWORDS
    }
    try:
        signature.bind(**arguments)
    except TypeError as problem:
        raise TypeError(f"{problem} (fedmutual gives it {', '.join(available)}; give the others a default)") from None
    return arguments


@torch.no_grad()
def find_ending(net: nn.Module, examples: Inputs) -> Literal["softmax", "sigmoid"] | None:
    """Return the function that a network seems to end in; None: logits.

    Softmax: the outputs [B, C, ...] for these examples sum to 1. Sigmoid: they lie in (0, 1), and stay there if all weights
    are multiplied by 10 or by -10.
    """
    was_training = net.training
    outputs = call_network(net.eval(), examples)
    scaled = ({name: factor * p for name, p in net.named_parameters()} for factor in _FACTORS)
    ending: Literal["softmax", "sigmoid"] | None = None
    if _is_in_range(outputs) and outputs.shape[1] > 1 and ((outputs.sum(1) - 1).abs() < _TOLERANCE).all():
        ending = "softmax"
    elif ((outputs > 0) & (outputs < 1)).all() and all(_is_in_range(call_network(net, examples, w)) for w in scaled):
        ending = "sigmoid"
    net.train(was_training)
    return ending


def _is_in_range(outputs: Tensor) -> bool:
    return bool(((outputs >= 0) & (outputs <= 1)).all())
