"""Networks and optimisers of clients alike, stacked: tensors [K, ...] of which each client's own are views.

Because a client's tensors are views, nothing is copied between phases: a fork, a reply, a score and a checkpoint read and
write the stack without knowing of it.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.optim import Optimizer

from fedmutual.core import Client, Message
from fedmutual.stepping import laid_as


class StackRows(NamedTuple):
    """Some clients of a stack, by their numbers in it."""

    numbers: list[int]
    places: Tensor | None  # None for all of them, in their order

    def take(self, stacked: Tensor) -> Tensor:
        """Their part of a stacked tensor: itself for all, else a copy."""
        return stacked if self.places is None else stacked.index_select(0, self.places)

    def put(self, stacked: Tensor, part: Tensor) -> None:
        """Write the copy back."""
        if self.places is not None:
            stacked.index_copy_(0, self.places, part)


class Stack:
    """One net of K clients, and its optimiser."""

    def __init__(self, clients: Sequence[Client], net: str) -> None:
        self._clients, self._net, self.count = clients, net, len(clients)
        nets = [client.nets[net] for client in clients]
        self.skeleton = copy.deepcopy(nets[0])  # not on the meta device: that unties tied parameters
        params, buffers = stack_module_state(nets)
        frozen = {k for k, p in nets[0].named_parameters() if not p.requires_grad}
        self.params: Message = {k: p.detach().requires_grad_() for k, p in params.items() if k not in frozen}
        self.rest: Message = {k: p.detach() for k, p in params.items() if k in frozen} | buffers
        for number, own in enumerate(nets):
            for name, tensor in (*own.named_parameters(), *own.named_buffers()):
                tensor.data = (self.params.get(name, self.rest.get(name))).detach()[number]  # type: ignore[union-attr]
        self._counts = not isinstance(clients[0].optimizers[net], torch.optim.SGD)  # Adam counts each parameter's steps
        self._steps: list[dict[str, int]] = [{} for _ in clients]  # of parameters that were stepped
        self._whole: Optimizer | None = None
        self._held: dict[str, int] = {}  # the steps that the optimiser of all counts itself
        self._slots = {
            slot: {k: torch.zeros_like(p, requires_grad=False) for k, p in self.params.items()}
            for slot in _slots(clients[0].optimizers[net])
        }

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(iter(self.params.values())).device

    def steps(self, number: int) -> tuple[int, ...]:
        """How many steps a client's optimiser counts: only those stepped alike that count alike."""
        return tuple(self._steps[number].get(name, 0) for name in self.params) if self._counts else ()

    def collect(self, number: int) -> None:
        """Take in a client's optimiser state, where it is not a view already: cleared, loaded, or stepped elsewhere."""
        optimizer = self._clients[number].optimizers[self._net]
        self._steps[number] = {}
        for name, own in self._named(number):
            state = optimizer.state.get(own, {})
            if state:
                self._steps[number][name] = int(state.get("step", 0))
            for slot, stacked in self._slots.items():
                view, value = stacked[name][number], state.get(slot)
                if value is None:
                    view.zero_()
                elif value.data_ptr() != view.data_ptr():
                    view.copy_(value)

    def expose(self, number: int) -> None:
        """Give a client views of its optimiser's state, of the parameters that were stepped."""
        optimizer = self._clients[number].optimizers[self._net]
        for name, own in self._named(number):
            if name in self._steps[number] and (self._slots or self._counts):
                state: dict[str, Any] = {slot: stacked[name][number] for slot, stacked in self._slots.items()}
                if self._counts:
                    state["step"] = self._step(own, optimizer, self._steps[number][name])
                optimizer.state[own] = state

    def taken(self, rows: StackRows) -> tuple[Message, Message]:
        """These clients' trainable parameters, leaves to take gradients of, and all else; to be given back by `step`."""
        if rows.places is None:
            return self.params, self.rest
        params = {k: rows.take(p.detach()).requires_grad_() for k, p in self.params.items()}
        return params, {k: rows.take(v) for k, v in self.rest.items()}

    def step(self, rows: StackRows, params: Message, rest: Message, grads: Message, lr: float) -> None:
        """One step of the optimiser for these clients, on what was taken; what is left of it is written back."""
        optimizer, slots = self._optimizer(rows, params)
        held = self._held if optimizer is self._whole else {}
        for name, p in params.items():
            p.grad = laid_as(p, grads[name]) if name in grads else None
            count = self._steps[rows.numbers[0]].get(name, 0)
            if self._counts and held.get(name) != count:
                optimizer.state[p]["step"] = self._step(p, optimizer, count)
            if name in grads:
                held[name] = count + 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        with torch.no_grad():
            for name, p in params.items():
                p.grad = None
                rows.put(self.params[name], p)
                for slot, values in slots.items():
                    rows.put(self._slots[slot][name], values[name])
            for name, value in rest.items():
                rows.put(self.rest[name], value)
        for number in rows.numbers:
            for name in grads:
                self._steps[number][name] = self._steps[number].get(name, 0) + 1

    def _step(self, p: Tensor, optimizer: Optimizer, count: int) -> Tensor:
        """The count as the optimiser holds it: beside the parameter where it is fused."""
        return torch.tensor(float(count), device=p.device if optimizer.defaults.get("fused") else "cpu")

    def _optimizer(self, rows: StackRows, params: Message) -> tuple[Optimizer, dict[str, Message]]:
        """An optimiser of these parameters, with its state: for all clients the same at every step."""
        if rows.places is None and self._whole is not None:
            return self._whole, self._slots
        slots = {slot: {k: rows.take(v) for k, v in stacked.items()} for slot, stacked in self._slots.items()}
        optimizer = _like(self._clients[0].optimizers[self._net], params.values())
        for name, p in params.items():
            optimizer.state[p] = {slot: values[name] for slot, values in slots.items()}
        if rows.places is None:
            self._whole = optimizer
        return optimizer, slots

    def _named(self, number: int) -> Iterator[tuple[str, nn.Parameter]]:
        own = self._clients[number].nets[self._net].named_parameters()
        return ((name, p) for name, p in own if name in self.params)


def group_alike(clients: Sequence[Client]) -> list[list[Client]]:
    """Clients in groups whose nets and optimisers differ in their tensors' values only."""
    groups: dict[Any, list[Client]] = {}
    for client in clients:
        nets = tuple((name, _described(net), _settings(client.optimizers[name])) for name, net in client.nets.items())
        groups.setdefault((client.precision, nets), []).append(client)
    return list(groups.values())


def _described(net: nn.Module) -> Any:
    """All that makes a net compute what it does, but its tensors' values: two unlike ones are never described alike."""
    named = (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False))
    first: dict[int, int] = {}  # where a tensor comes first: tied ones have the same place
    tensors = [
        (k, t.dtype, tuple(t.shape), t.device, t.requires_grad, first.setdefault(id(t), n)) for n, (k, t) in enumerate(named)
    ]
    modules = []
    for name, module in net.named_modules():
        others = {k: v for k, v in vars(module).items() if k not in ("training", "_parameters", "_buffers", "_modules")}
        modules.append((name, type(module), tuple((k, _value(v)) for k, v in sorted(others.items()))))
    return tuple(tensors), tuple(modules)


def _value(thing: Any) -> Any:
    """A plain value as it is; anything else, a tensor or a hook for one, is like itself only."""
    if thing is None or isinstance(thing, bool | int | float | str | torch.dtype | torch.device):
        return type(thing), thing
    if isinstance(thing, list | tuple):
        return type(thing), tuple(map(_value, thing))
    if isinstance(thing, dict | set | frozenset) and not thing:
        return type(thing)
    return id(thing)


def _settings(optimizer: Optimizer) -> Any:
    """The kind of an optimiser and its settings, learning rate apart: it is set before every phase."""
    groups = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups]
    return type(optimizer), repr(groups)


def _slots(optimizer: Optimizer) -> tuple[str, ...]:
    """What the optimiser remembers of each parameter, elementwise."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if optimizer.defaults["amsgrad"] else ()))


def _like(optimizer: Optimizer, params: Iterable[Tensor]) -> Optimizer:
    """One of the same kind and settings for other parameters."""
    kind: Any = type(optimizer)
    settings = {k: v for k, v in optimizer.defaults.items() if k in inspect.signature(kind).parameters}
    made: Optimizer = kind(list(params), **settings)
    return made
