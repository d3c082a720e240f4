"""A network with a shared part, which is exchanged, and an adaptor, which stays at the client.

Shen et al., Federated Mutual Learning, 2020, https://arxiv.org/abs/2006.16765, section on objective heterogeneity: the
shared part is spliced with an adaptor, a fully connected layer by default, to a client's own classes.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedmutual.calling import Inputs, Shape, call_network, find_image_shape, map_inputs
from fedmutual.config import ModelConfig
from fedmutual.errors import ConfigError, format_error, suggest_name
from fedmutual.models import Weights, build, make_example_inputs
from fedmutual.models.networks import make_sequential
from fedmutual.models.own import make_user_network

_REST = "model.adaptor = 'rest', which keeps the other layers of the network at the client"


class Spliced(nn.Module):
    """A module of a network under its name in the network, with an adaptor after or before the module."""

    def __init__(self, path: str, part: nn.Module, adaptor: nn.Module, first: bool) -> None:
        """Join a part and an adaptor. path: the part's name in its network. first: whether the part comes first."""
        super().__init__()
        *above, last = path.split(".")
        holder: nn.Module = self
        for name in above:
            holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        holder.add_module(last, part)
        self.add_module("adaptor", adaptor)
        self._path, self._first = path, first

    def forward(self, x: Inputs) -> Tensor:
        """Return the output [B, C] for x [B, ...]."""
        part, adaptor = self.get_submodule(self._path), self.get_submodule("adaptor")
        output: Tensor = adaptor(call_network(part, x)) if self._first else call_network(part, adaptor(x))
        return output


def list_shared_tensors(net: nn.Module, part: Sequence[str], name: str, tied: bool = False) -> tuple[str, ...]:
    """Return the names of a network's tensors that are shared; `part` names modules or single tensors.

    tied: whether another name of a shared tensor is shared, too: a client with both would load the old values last.

    Raises:
        ConfigError: a name matches nothing, or all tensors match.
    """
    state, paths = net.state_dict(keep_vars=True), [path.removesuffix(".") for path in part]
    for path in paths:
        if not any(_is_under(k, path) for k in state):
            all_names = dict.fromkeys(n for n, _ in net.named_modules() if n and any(_is_under(k, n) for k in state))
            fix = suggest_name(path, all_names, f"it has {', '.join(map(repr, all_names))}")
            raise ConfigError(f"key 'model.part': {path!r} matches nothing in network {name!r}; {fix}")
    named = {k for k in state if any(_is_under(k, path) for path in paths)}
    tensors = {id(state[k]) for k in named if tied}
    shared = tuple(k for k in state if k in named or id(state[k]) in tensors)
    if len(shared) == len(state):
        raise ConfigError(
            f"key 'model.part' names all tensors of network {name!r}; remove the key to share the whole network"
        )
    return shared


def build_meme(
    model: ModelConfig,
    shape: Shape,
    outputs: int,
    shared_rng: torch.Generator,
    adaptor_rng: torch.Generator,
    weights: Weights | None = None,
    of_pixels: bool | None = False,
    examples: Inputs | None = None,
    check: bool = True,
) -> nn.Module:
    """Return a client's meme: the shared network, or its shared part with an adaptor that stays at the client.

    shared_rng, adaptor_rng: the streams for the initial weights of the shared and of the client's tensors.
    weights, of_pixels, examples, check: as in `models.build`.

    Raises:
        ConfigError: the network or the adaptor cannot be made; see `models.build` and `splice`.
    """
    is_rest = model.part is not None and model.adaptor == "rest"  # every round replaces its shared tensors by the server's
    rng = adaptor_rng if is_rest else shared_rng
    net = build(model.shared, shape, outputs, rng, "model.shared", weights, of_pixels, examples, check)
    if model.part is None or is_rest:
        return net
    if of_pixels:
        raise ConfigError(
            f"key 'model.adaptor': an adaptor {model.adaptor!r} has one answer for an example, and a segmentation has one "
            f"for each pixel; use {_REST}"
        )
    return splice(net, model.part, model.adaptor, shape, outputs, adaptor_rng, model.shared, examples)


def splice(
    net: nn.Module,
    part: Sequence[str],
    adaptor: str,
    shape: Shape,
    outputs: int,
    rng: torch.Generator,
    name: str,
    examples: Inputs | None = None,
) -> nn.Module:
    """Return a client's meme: the part of `net`, with an adaptor for examples of `shape` and `outputs` outputs.

    Args:
        net: the shared network; it must not be used afterwards.
        adaptor: "linear", one layer after the part, or before the part if this is the network's end; or "module:factory",
            called with the arguments that it names out of `features` (the part's output or input: a number, or a shape),
            `shape` and `classes`.
        rng: the stream for the adaptor's initial weights.
        examples: as in `models.build`.

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765, section on objective heterogeneity.

    Raises:
        ConfigError: an adaptor cannot be inferred, cannot be made, or does not fit.
    """
    path = part[0].removesuffix(".")
    if len(part) > 1:
        raise ConfigError(f"key 'model.part' names several modules, but an adaptor needs exactly one; use {_REST}")
    if path.split(".")[0] == "adaptor":
        raise ConfigError(
            f"key 'model.part': the part beside an adaptor cannot be called 'adaptor'; rename it, or use {_REST}"
        )
    examples = make_example_inputs(find_image_shape(shape)) if examples is None else examples
    features, is_first = _locate_part(net, path, examples, name)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rng.initial_seed())
            layers = _make_adaptor(adaptor, features, shape, outputs, is_first)
        spliced = Spliced(path, net.get_submodule(path), layers, is_first)
        try:
            with torch.no_grad():
                output = call_network(spliced.eval(), map_inputs(torch.clone, examples))
        except Exception as problem:  # a user's adaptor may raise any error
            raise ValueError(f"does not fit the shared part: {format_error(problem)}") from problem
        if output.shape != (2, outputs):
            raise ValueError(f"makes a network that gives {list(output.shape)} for 2 examples, not [2, {outputs}]")
    except ValueError as problem:
        raise ConfigError(f"key 'model.adaptor': {adaptor!r} {problem}") from problem
    return spliced.train()


def _is_under(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _locate_part(net: nn.Module, path: str, examples: Inputs, name: str) -> tuple[tuple[int, ...], bool]:
    """Return the shape of what joins the part and its adaptor, for one example, and whether the part begins the network."""
    calls: list[tuple[Any, Any, Any, Any]] = []  # inputs, inputs by name, output, number of changes in place of the output
    x = map_inputs(torch.clone, examples)
    try:
        handle = net.get_submodule(path).register_forward_hook(
            lambda _, inputs, named, output: calls.append((inputs, named, output, getattr(output, "_version", 0))),
            with_kwargs=True,
        )
    except AttributeError:
        raise ConfigError(
            f"key 'model.part': {path!r} is no module of network {name!r}, but an adaptor needs a module; name one"
        ) from None
    with torch.no_grad(), handle:
        output = call_network(net.eval(), x)
    if len(calls) == 1:
        inputs, named, part_output, version = calls[0]
        # values by name that are no tensors are settings, such as a mask of None
        arguments = (*inputs, *(v for v in named.values() if isinstance(v, Tensor)))
        if len(inputs) == len(arguments) == 1 and isinstance(inputs[0], Tensor) and isinstance(part_output, Tensor):
            if inputs[0] is x:
                return tuple(part_output.shape[1:]), True
            if part_output is output and part_output._version == version:  # later layers may change it in place
                return tuple(inputs[0].shape[1:]), False
    raise ConfigError(
        f"key 'model.adaptor': an adaptor beside {path!r} of network {name!r} cannot be inferred: the module must be the "
        f"first or the last of the network, be called once with one tensor by position, and return one tensor; use {_REST}"
    )


def _make_adaptor(adaptor: str, features: tuple[int, ...], shape: Shape, outputs: int, is_first: bool) -> nn.Module:
    if adaptor != "linear" and ":" not in adaptor:
        raise ValueError("is no adaptor; there are 'linear', 'rest' and 'module:factory'")
    if adaptor != "linear":
        size = features[0] if len(features) == 1 else features
        return make_user_network(adaptor, shape, outputs, "model.adaptor", {"features": size})
    if is_first:
        return make_sequential(flatten=nn.Flatten(), fc=nn.Linear(prod(features), outputs))
    return make_sequential(
        flatten=nn.Flatten(), fc=nn.Linear(prod(find_image_shape(shape)), prod(features)), shape=nn.Unflatten(1, features)
    )


def find_shape_difference(first: nn.Module, other: nn.Module, names: Iterable[str]) -> str | None:
    """Return the first of `names` whose tensors differ in shape between two networks; None if all agree."""
    states = [net.state_dict() for net in (first, other)]
    shapes = [{k: tuple(v.shape) for k, v in state.items()} for state in states]
    return next((k for k in names if shapes[0].get(k) != shapes[1].get(k)), None)
