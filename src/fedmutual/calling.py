"""The inputs of networks: one tensor, or several by name; and the one way in which a network is called.

A network gets x as its `forward` takes it, and of what it returns the tensor of logits is taken.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

T = TypeVar("T")
Inputs = Tensor | Mapping[str, Tensor]
"""The inputs x of B examples: one tensor [B, ...], or several by name, each [B, ...]."""
MASK = "mask"  # of padded series
MASKS = (MASK, "attention_mask")  # inputs that a network may leave out

_OUTPUTS = ("logits", "out")  # names of the logits: in transformers, in torchvision's segmentation


class Shapes(dict[str, tuple[int, ...]]):
    """The shapes of several inputs by name. Unlike a dictionary, it can be an element of a set."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


Shape = tuple[int, ...] | Shapes
"""The shape of the inputs of one example: of the one tensor, or of several by name."""


def get_shape(x: Inputs) -> Shape:
    """Return the shape of one example of inputs [B, ...]."""
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else Shapes({k: tuple(one.shape[1:]) for k, one in x.items()})


def format_shape(shape: Shape) -> str:
    """Return a shape as text: "[3, 8, 8]", or of several inputs "image [3, 8, 8], table [5]"."""
    if not isinstance(shape, Shapes):
        return str(list(shape))
    return ", ".join(f"{name} {list(one)}" for name, one in shape.items())


def find_image_shape(shape: Shape) -> tuple[int, ...]:
    """Return the shape of the images: of the one input, or of the first of several that has three axes or more."""
    if not isinstance(shape, Shapes):
        return shape
    return next((one for one in shape.values() if len(one) > 2), next(iter(shape.values())))


class NoLogits(TypeError):
    """A network returned something in which no logits can be found."""


def call_network(net: nn.Module, x: Inputs, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the logits [B, ...] of a network for inputs x [B, ...].

    Several inputs are keyword arguments if `forward` takes them by these names, else one dictionary. A mask that `forward`
    does not take is left out. A network whose weights are of another floating type than float32, such as bfloat16, gets its
    inputs in this type, and its logits come back in the type of the inputs; of ids, in torch's default type.

    weights: tensors in place of the network's tensors of these names.

    Raises:
        NoLogits: as `find_logits`.
    """
    weight_type = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
    input_type = next((t.dtype for t in list_tensors(x) if t.is_floating_point()), torch.get_default_dtype())
    is_plain = weight_type == torch.float32
    if not is_plain:
        x = map_inputs(lambda one: one.to(weight_type) if one.is_floating_point() else one, x)
    inputs, named = ((x,), {}) if isinstance(x, Tensor) else _arrange(net, x)
    output = net(*inputs, **named) if weights is None else functional_call(net, dict(weights), inputs, named)
    logits = find_logits(output)
    return logits if is_plain else logits.to(input_type)


def find_logits(output: Any) -> Tensor:
    """Return the logits in what a network returned.

    The tensor itself; of a dictionary "logits", else "out", else its only tensor; of another object its attribute `logits`;
    of a tuple without it the first tensor.

    Raises:
        NoLogits: the output is nothing of these.
    """
    chosen: Any
    if isinstance(output, Mapping):
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        only = next(iter(tensors.values())) if len(tensors) == 1 else None
        chosen = next((tensors[name] for name in _OUTPUTS if name in tensors), only)
    else:
        chosen = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(output, tuple | list) and chosen is None:
            chosen = next((value for value in output if isinstance(value, Tensor)), None)
    if isinstance(chosen, Tensor):
        return chosen
    names = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise NoLogits(
        f"returns {type(output).__name__}{names}, but must return a tensor of logits, a tuple that begins with it, or a "
        "dictionary or an object with `logits`"
    )


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Return the inputs with a function applied to each tensor."""
    return function(x) if isinstance(x, Tensor) else {name: function(one) for name, one in x.items()}


def list_tensors(x: Inputs) -> list[Tensor]:
    """Return the tensors of inputs x."""
    return [x] if isinstance(x, Tensor) else [*x.values()]


def is_transformed(value: Tensor) -> bool:
    """Return whether a tensor is within `vmap` or `grad` of torch.func, where code cannot depend on its numbers."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def has_gradient(value: Tensor) -> bool:
    """Return whether a tensor depends on trained parameters; within `vmap` too, where `requires_grad` may be False."""
    if torch.compiler.is_compiling():  # the first steps were checked without a compiler
        return True
    while not value.requires_grad and is_transformed(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value.requires_grad


def _arrange(net: nn.Module, x: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return the positional and the keyword arguments of `forward` for several inputs."""
    signature, without_mask = inspect.signature(net.forward), {name: one for name, one in x.items() if name not in MASKS}
    for named in (x, without_mask):
        try:
            signature.bind(**named)
        except TypeError:
            continue
        return (), dict(named)
    return (next(iter(without_mask.values())) if len(without_mask) == 1 < len(x) else dict(x),), {}
