"""Stack the networks and optimisers of K clients with one architecture: tensors [K, ...]; a client's tensors are views.

Because a client's tensors are views of the stack, nothing is copied between phases: a fork, a reply, a score and a
checkpoint read and write the stack directly.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.optim import Optimizer

from fedmutual.core import Client, Message
from fedmutual.models.copying import copy_networks, describe_network, describe_value
from fedmutual.optimizers import make_optimizer_alike
from fedmutual.stepping import set_gradients


class StackRows(NamedTuple):
    """Some clients of a stack of K clients: their positions in the stack, 0 .. K - 1, in order."""

    numbers: list[int]
    where: slice | Tensor  # the numbers as a tensor, if they are not consecutive

    def take(self, stacked: Tensor) -> Tensor:
        """Return the rows [k, ...] of these clients of a stack [K, ...]: a view of consecutive rows, else a copy."""
        return stacked[self.where] if isinstance(self.where, slice) else stacked.index_select(0, self.where)

    def put(self, stacked: Tensor, part: Tensor) -> None:
        """Write the rows `part` [k, ...] back into the stack [K, ...], unless they are a view of it."""
        if not isinstance(self.where, slice):
            stacked.index_copy_(0, self.where, part)


def select_rows(numbers: list[int], device: torch.device) -> StackRows:
    """Return the rows of the clients with these positions, in ascending order, for stacks on this device."""
    first, last = numbers[0], numbers[-1]
    is_consecutive = last - first + 1 == len(numbers)
    return StackRows(numbers, slice(first, last + 1) if is_consecutive else torch.tensor(numbers, device=device))


class Stack:
    """One net of K clients with its optimiser: each parameter, buffer and optimiser state is one tensor [K, ...].

    The tensors of the clients' own nets are views of the stack, so a step on the stack changes the nets. `skeleton` is a
    copy of the net for calls under vmap, `params` are the trained parameters by name, `rest` are the frozen parameters and
    the buffers, `count` is K, and `counts` is whether the optimiser reads how many steps a parameter took.
    """

    def __init__(self, clients: Sequence[Client], net: str) -> None:
        self._clients, self._net, self.count = clients, net, len(clients)
        nets = [client.nets[net] for client in clients]
        self.skeleton = copy_networks(nets[0])  # not on the meta device: that unties tied parameters
        params, buffers = stack_module_state(nets)
        frozen = {k for k, p in nets[0].named_parameters() if not p.requires_grad}
        self.params: Message = {k: p.detach().requires_grad_() for k, p in params.items() if k not in frozen}
        self.rest: Message = {k: p.detach() for k, p in params.items() if k in frozen} | buffers
        for number, net_of_client in enumerate(nets):
            for name, tensor in (*net_of_client.named_parameters(), *net_of_client.named_buffers()):
                tensor.data = (self.params.get(name, self.rest.get(name))).detach()[number]  # type: ignore[union-attr]
        optimizer = clients[0].optimizers[net]
        self.counts = not isinstance(optimizer, torch.optim.SGD)  # Adam counts each parameter's steps
        self._lr = _make_rate(optimizer, self.device)
        self._steps: list[dict[str, int]] = [{} for _ in clients]  # of parameters that were stepped
        self._common: Optimizer | None = None
        self._counted: dict[str, int] = {}  # steps of each parameter that the common optimiser has counted
        self._slots = {
            slot: {k: torch.zeros_like(p, requires_grad=False) for k, p in self.params.items()}
            for slot in _list_slots(optimizer)
        }

    @property
    def rate(self) -> float | None:
        """Return the learning rate if a step has it as a number; None if a step reads it from a tensor."""
        return None if isinstance(self._lr, Tensor) else self._lr

    @property
    def device(self) -> torch.device:
        """Return the device of the stack."""
        return next(iter(self.params.values())).device

    def can_capture(self, rows: StackRows) -> bool:
        """Return whether a CUDA graph can hold a step of these clients: the step reads its rate and counts from tensors."""
        return self.rate is None and (self._are_all(rows) or not self.counts)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of all clients' further steps."""
        if isinstance(self._lr, Tensor):
            self._lr.fill_(lr)
        else:
            self._lr = lr

    def count_steps(self, number: int) -> tuple[int, ...]:
        """Return a client's step count of each parameter; () for SGD. Only clients with equal counts step together."""
        return tuple(self._steps[number].get(name, 0) for name in self.params) if self.counts else ()

    def collect(self, number: int) -> None:
        """Copy a client's optimiser state into the stack, unless the state is a view of the stack already."""
        optimizer = self._clients[number].optimizers[self._net]
        self._steps[number] = {}
        for name, parameter in self._list_named(number):
            state = optimizer.state.get(parameter, {})
            if state:
                self._steps[number][name] = int(state.get("step", 0))
            for slot, stacked in self._slots.items():
                view, value = stacked[name][number], state.get(slot)
                if value is None:
                    view.zero_()
                elif value.data_ptr() != view.data_ptr():
                    view.copy_(value)

    def expose(self, number: int) -> None:
        """Set a client's optimiser state to views of the stack, for the parameters that were stepped."""
        optimizer = self._clients[number].optimizers[self._net]
        for name, parameter in self._list_named(number):
            if name in self._steps[number] and (self._slots or self.counts):
                state: dict[str, Any] = {slot: stacked[name][number] for slot, stacked in self._slots.items()}
                if self.counts:
                    state["step"] = self._make_count(parameter, optimizer, self._steps[number][name])
                optimizer.state[parameter] = state

    def take(self, rows: StackRows) -> tuple[Message, Message]:
        """Return (trainable parameters, other tensors) [k, ...] of these k clients. `step` writes them back."""
        if self._are_all(rows):
            return self.params, self.rest
        params = {k: rows.take(p.detach()).requires_grad_() for k, p in self.params.items()}
        return params, {k: rows.take(v) for k, v in self.rest.items()}

    def step(self, rows: StackRows, params: Message, fixed: Message, grads: Message) -> None:
        """Take one optimiser step for these clients on the tensors that `take` returned, and write the tensors back.

        A CUDA graph may hold the step: then `set_counts` comes before it. `add_step` comes after it.
        """
        optimizer, slots = self._make_optimizer(rows, params)
        self.set_counts(rows, optimizer)
        set_gradients(params, grads)
        for group in optimizer.param_groups:
            group["lr"] = self._lr
        optimizer.step()
        with torch.no_grad():
            for name, p in params.items():
                p.grad = None
                rows.put(self.params[name], p)
                for slot, values in slots.items():
                    rows.put(self._slots[slot][name], values[name])
            for name, value in fixed.items():
                rows.put(self.rest[name], value)

    def set_counts(self, rows: StackRows, optimizer: Optimizer | None = None) -> None:
        """Set the step counts of an optimiser of these clients, unless it has them. None: of the common optimiser."""
        optimizer = optimizer or self._common
        if optimizer is None or not self.counts:
            return
        counted = self._counted if optimizer is self._common else {}
        for name, p in zip(self.params, optimizer.param_groups[0]["params"], strict=True):
            count = self._steps[rows.numbers[0]].get(name, 0)
            if counted.get(name) == count:
                continue
            if "step" in (state := optimizer.state[p]):
                state["step"].fill_(count)
            else:
                state["step"] = self._make_count(p, optimizer, count)
            counted[name] = count

    def add_step(self, rows: StackRows, names: Iterable[str]) -> None:
        """Count a step of these clients for the parameters that have moved."""
        names = set(names)
        for steps in map(self._steps.__getitem__, rows.numbers):
            if self.counts or not names <= steps.keys():
                steps.update({name: steps.get(name, 0) + 1 for name in names})
        if self._are_all(rows):
            self._counted.update({name: self._steps[rows.numbers[0]][name] for name in names})

    def _make_count(self, p: Tensor, optimizer: Optimizer, count: int) -> Tensor:
        """Return a step count as a tensor, on the device on which the optimiser expects it."""
        return torch.tensor(float(count), device=p.device if optimizer.defaults.get("fused") else "cpu")

    def _make_optimizer(self, rows: StackRows, params: Message) -> tuple[Optimizer, dict[str, Message]]:
        """Return an optimiser of these parameters and its state. All clients together always get one common optimiser."""
        if self._are_all(rows) and self._common is not None:
            return self._common, self._slots
        slots = {slot: {k: rows.take(v) for k, v in stacked.items()} for slot, stacked in self._slots.items()}
        optimizer = make_optimizer_alike(self._clients[0].optimizers[self._net], params.values())
        for name, p in params.items():
            optimizer.state[p] = {slot: values[name] for slot, values in slots.items()}
        if self._are_all(rows):
            self._common = optimizer
            for group in optimizer.param_groups:
                if self.rate is None and "capturable" in group:  # unread by fused kernels; torch captures no Adam without it
                    group["capturable"] = True
        return optimizer, slots

    def _are_all(self, rows: StackRows) -> bool:
        """Return whether these rows are all clients of the stack."""
        return len(rows.numbers) == self.count

    def _list_named(self, number: int) -> Iterator[tuple[str, nn.Parameter]]:
        named = self._clients[number].nets[self._net].named_parameters()
        return ((name, p) for name, p in named if name in self.params)


FREE_FIELDS = frozenset({"id", "data", "shared", "proxy", "boundary_exempt", "metrics", "seeds", "work"})
"""The fields of `Client` that may differ in a stack: only what runs for each client alone reads them."""

FIELDS_OF_PHASES = frozenset({"rate", "task", "settings", "memory"})
"""The fields of `Client` that may differ in a stack, but not in one step: `stacked` compares their values in each phase."""


def group_alike(clients: Sequence[Client]) -> list[list[Client]]:
    """Return groups of clients that one stack can hold: they differ in the values of their tensors and in fields that may
    differ. A field of `Client` that no set above names must be equal.
    """
    groups: dict[Any, list[Client]] = {}
    for client in clients:
        compared = (f.name for f in fields(client) if f.name not in FREE_FIELDS | FIELDS_OF_PHASES)
        key = {name: describe_value(getattr(client, name)) for name in compared}
        key["nets"] = tuple((name, describe_network(net)) for name, net in client.nets.items())
        key["optimizers"] = tuple(_describe_optimizer(client.optimizers[name]) for name in client.nets)
        groups.setdefault(tuple(key.items()), []).append(client)
    return list(groups.values())


def _describe_optimizer(optimizer: Optimizer) -> Any:
    """Return the type and settings of an optimiser, without the learning rate, which is set before every phase."""
    groups = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups]
    return type(optimizer), repr(groups)


def _list_slots(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that the optimiser keeps for each parameter, shaped like the parameter."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if optimizer.defaults["amsgrad"] else ()))


def _make_rate(optimizer: Optimizer, device: torch.device) -> Tensor | float:
    """Return a rate of 0: a tensor for a fused optimiser, so that a CUDA graph of a step holds at every rate; else a float.

    On a CPU float64, with which a step has the bits of a step with a float; fused CUDA kernels read float32.
    """
    if not optimizer.defaults.get("fused"):
        return 0.0
    return torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
