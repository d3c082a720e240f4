"""A network of which a part is shared: the part that crosses, and beside it an adaptor that stays home.

Shen et al., Federated Mutual Learning, 2020, https://arxiv.org/abs/2006.16765, section on objective heterogeneity: the
shared part is spliced with an adaptor, a fully connected layer by default, to a client's own classes.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedmutual.config import ModelConfig
from fedmutual.errors import ConfigError, said
from fedmutual.models import Weights, build
from fedmutual.models import own as owns
from fedmutual.models.parts import named

LINEAR, REST = "linear", "rest"
_PART, _ADAPTOR = "model.part", "model.adaptor"


class Spliced(nn.Module):
    """A module of a network under its own name there, and an adaptor after it, or before it."""

    def __init__(self, path: str, part: nn.Module, adaptor: nn.Module, first: bool) -> None:
        """first: whether the part comes first."""
        super().__init__()
        *above, last = path.split(".")
        holder: nn.Module = self
        for name in above:
            holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        holder.add_module(last, part)
        self.add_module("adaptor", adaptor)
        self._path, self._first = path, first

    def forward(self, x: Tensor) -> Tensor:
        """x [B, ...] -> output [B, C]."""
        part, adaptor = self.get_submodule(self._path), self.get_submodule("adaptor")
        found: Tensor = adaptor(part(x)) if self._first else part(adaptor(x))
        return found


def crossing(net: nn.Module, part: Sequence[str], name: str) -> tuple[str, ...]:
    """The names of a network's tensors that are of the part: modules, or single tensors, by their names.

    Raises:
        ConfigError: a name matches nothing, or all tensors match.
    """
    state = list(net.state_dict())
    wanted = [one.removesuffix(".") for one in part]
    for one in wanted:
        if not any(_under(k, one) for k in state):
            there = dict.fromkeys(n for n, _ in net.named_modules() if n and any(_under(k, n) for k in state))
            near = get_close_matches(one, there, 1)
            mend = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, there))}"
            raise ConfigError(f"key {_PART!r}: {one!r} matches nothing in network {name!r}; {mend}")
    found = tuple(k for k in state if any(_under(k, one) for one in wanted))
    if len(found) == len(state):
        raise ConfigError(f"key {_PART!r} names all of network {name!r}; take it out, and the whole network is shared")
    return found


def fork(
    model: ModelConfig,
    shape: tuple[int, ...],
    outputs: int,
    shared: torch.Generator,
    own: torch.Generator,
    weights: Weights | None = None,
) -> nn.Module:
    """A client's meme: the shared network; or the shared part of it, with what stays home beside it.

    shared, own: the streams that weights come from, of what crosses and of what stays home. weights: as `models.build`.

    Raises:
        ConfigError: as `models.build` and `splice`.
    """
    key = "model.shared"
    if model.part is not None and model.adaptor == REST:
        return build(model.shared, shape, outputs, own, key, weights)  # what crosses of it is the server's in every round
    net = build(model.shared, shape, outputs, shared, key, weights)
    return net if model.part is None else splice(net, model.part, model.adaptor, shape, outputs, own, model.shared)


def splice(
    net: nn.Module, part: Sequence[str], adaptor: str, shape: tuple[int, ...], outputs: int, rng: torch.Generator, name: str
) -> nn.Module:
    """A client's meme: the part of `net`, with an adaptor for examples of `shape` and so many outputs.

    net: the shared network; it is used up. adaptor: "linear", one layer after the part, or before it where the part is the
    network's end; or "module:factory", called with those of `features` (what the part gives, or takes: a number, or a
    shape), `shape`, `classes` that it names. rng: where the adaptor's weights come from.

    Raises:
        ConfigError: an adaptor cannot be inferred, or made, or does not fit.
    """
    if len(part) > 1:
        raise ConfigError(
            f"key {_PART!r} names several modules, and an adaptor goes beside one; use model.adaptor = 'rest', which keeps "
            f"the other layers of network {name!r} at home"
        )
    path = part[0].removesuffix(".")
    if path.split(".")[0] == "adaptor":
        raise ConfigError(
            f"key {_PART!r}: a module called 'adaptor' cannot be the part beside an adaptor; rename it, or use "
            "model.adaptor = 'rest'"
        )
    taken, given, first = _place(net, path, shape, name)
    features = given if first else taken
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.initial_seed())
        made = _linear(features, shape, outputs, first) if adaptor == LINEAR else _own(adaptor, features, shape, outputs)
    spliced = Spliced(path, net.get_submodule(path), made, first)
    _check(spliced, adaptor, shape, outputs)
    return spliced.train()


def _under(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _place(net: nn.Module, path: str, shape: tuple[int, ...], name: str) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """What the part takes and gives for one example, and whether it is the network's beginning rather than its end."""
    seen: list[tuple[Any, Any, Any, Any]] = []
    x = torch.zeros(2, *shape)
    try:
        handle = net.get_submodule(path).register_forward_hook(
            lambda _, taken, named, given: seen.append((taken, named, given, getattr(given, "_version", 0))),
            with_kwargs=True,
        )
    except AttributeError:
        raise ConfigError(
            f"key {_PART!r}: {path!r} is no module of network {name!r}, and an adaptor goes beside one"
        ) from None
    with torch.no_grad(), handle:
        output = net.eval()(x)
    mend = "use model.adaptor = 'rest', which keeps the network's other layers at home"
    if odd := _odd(seen):
        raise ConfigError(
            f"key {_ADAPTOR!r}: an adaptor beside {path!r} of network {name!r} cannot be inferred, for {odd}; {mend}"
        )
    (taken,), _, given, version = seen[0]
    last = given is output and given._version == version  # what follows may change it in place
    if taken is not x and not last:
        raise ConfigError(
            f"key {_ADAPTOR!r}: an adaptor beside {path!r} cannot be inferred, for it is neither the beginning nor the end "
            f"of network {name!r}; {mend}"
        )
    return tuple(taken.shape[1:]), tuple(given.shape[1:]), taken is x


def _odd(calls: Sequence[tuple[Any, Any, Any, Any]]) -> str | None:
    """Why no adaptor fits beside a module that was called so: (takes, by name, gives, ...) of each call."""
    if len(calls) != 1:
        return f"the module is called {len(calls)} times, not once" if calls else "the module is never called"
    taken, named, given, _ = calls[0]
    if not taken:
        return "the module is given its input by name"
    tensors = [*taken, *(v for v in named.values() if isinstance(v, Tensor))]  # others are settings, such as a mask of None
    if len(tensors) != 1:
        return f"the module takes {len(tensors)} arguments, not one"
    odd = [(verb, x) for verb, x in (("takes", taken[0]), ("gives", given)) if not isinstance(x, Tensor)]
    return f"the module {odd[0][0]} no tensor but {type(odd[0][1]).__name__}" if odd else None


def _linear(features: tuple[int, ...], shape: tuple[int, ...], outputs: int, first: bool) -> nn.Module:
    if first:
        return named(flatten=nn.Flatten(), fc=nn.Linear(prod(features), outputs))
    return named(flatten=nn.Flatten(), fc=nn.Linear(prod(shape), prod(features)), shape=nn.Unflatten(1, features))


def _own(adaptor: str, features: tuple[int, ...], shape: tuple[int, ...], outputs: int) -> nn.Module:
    if ":" not in adaptor:
        raise ConfigError(
            f"key {_ADAPTOR!r}: there is no adaptor {adaptor!r}; there are 'linear', 'rest' and 'module:factory'"
        )
    try:
        size = features[0] if len(features) == 1 else features
        return owns.make(adaptor, shape, outputs, _ADAPTOR, {"features": size})
    except ValueError as problem:
        raise ConfigError(f"key {_ADAPTOR!r}: {adaptor!r} {problem}") from problem


def _check(net: nn.Module, adaptor: str, shape: tuple[int, ...], outputs: int) -> None:
    try:
        with torch.no_grad():
            output = net.eval()(torch.zeros(2, *shape))
    except Exception as problem:  # whatever a user's adaptor may raise
        raise ConfigError(f"key {_ADAPTOR!r}: {adaptor!r} does not fit the shared part: {said(problem)}") from problem
    if not isinstance(output, Tensor) or output.shape != (2, outputs):
        got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"key {_ADAPTOR!r}: with {adaptor!r} the network gives {got} for 2 examples, not [2, {outputs}]")


def differing(first: nn.Module, other: nn.Module, names: Iterable[str]) -> str | None:
    """The first of these tensors that two networks do not have in the same shape."""
    states = [net.state_dict() for net in (first, other)]
    shapes = [{k: tuple(v.shape) for k, v in state.items()} for state in states]
    return next((k for k in names if shapes[0].get(k) != shapes[1].get(k)), None)
