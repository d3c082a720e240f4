"""Stacks of the networks and optimisers of clients with the same architecture: one phase of all clients, step by step.

Clients with a different batch size step in a sub-stack; clients without a batch are unchanged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedmutual.core import At, Batch, Client, Message, Net, Phase, Setting, Spec, Work, find_head
from fedmutual.cpu import compute_on_cpu
from fedmutual.data.stores import ResidentBatches
from fedmutual.engines.base import Reply, release_reply
from fedmutual.engines.stack import Stack, StackRows
from fedmutual.stepping import (
    count_calls,
    differentiate,
    lowered,
    make_call,
    means,
    rate,
    ready,
    take_step,
    with_client_settings,
)

Forward = Callable[[Any, Any, Batch, Message], Message]
"""params, rest (both by net), batch, const, all stacked [k, ...] -> loss terms [k]; buffers in `rest` move in place."""


class PhaseInput(NamedTuple):
    """The input of a client's phase: the message that was sent to the client, and all tensors that may leave."""

    client: Client
    phase: Phase  # with the client's own settings
    inbox: Message
    declared: Spec
    at: At


def list_inputs(
    clients: Mapping[str, Client], phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec
) -> list[PhaseInput]:
    """Return the inputs of a phase of the clients with an inbox."""
    return [
        PhaseInput(clients[i], with_client_settings(phase, clients[i]), inbox, declared, at) for i, inbox in inboxes.items()
    ]


class Group:
    """Clients with one architecture, stacked for the lifetime of the engine."""

    def __init__(self, clients: Sequence[Client], compile: list[str] | None = None) -> None:
        """compile: the list to which remarks of torch.compile are added; None: do not compile."""
        self.clients, self._compile = clients, compile
        self._forwards: dict[Any, tuple[Forward, Work]] = {}
        self._number = {id(client): number for number, client in enumerate(clients)}
        self._stacks = {net: Stack(clients, net) for net in clients[0].nets}

    def begin(self, parts: Sequence[PhaseInput]) -> "Steps | None":
        """Begin a phase for these clients; return its steps. None if the constants of their losses differ in shape."""
        consts, before = [], [{k: v.clone() for k, v in part.client.memory.items()} for part in parts]
        for part in parts:
            ready(part.phase, part.client, part.at)
            consts.append(part.phase.begin(part.client, part.inbox, part.at))
        if len({describe_tensors(const) for const in consts}) > 1:
            for part, memory in zip(parts, before, strict=True):  # the clients begin again, one after the other
                part.client.memory = memory
            return None
        numbers = [self._number[id(part.client)] for part in parts]
        for number in numbers:
            for stack in self._stacks.values():
                stack.collect(number)
        memory = _stack_messages([p.client.memory for p in parts])
        return Steps(self._stacks, self._forward(parts[0]), parts[0], numbers, _stack_messages(consts), memory)

    def _forward(self, like: PhaseInput) -> tuple[Forward, Work]:
        """Return the loss of the phase for clients like this one, and its forward passes per step; compiled once."""
        key = identify_loss(like)
        if key not in self._forwards:
            skeletons, work = {net: stack.skeleton for net, stack in self._stacks.items()}, Work()
            plain = compute_stacked_loss(like.phase, skeletons, like.client, work)
            self._forwards[key] = plain if self._compile is None else CompiledLoss(plain, self._compile), work
        return self._forwards[key]

    def run(self, parts: Sequence[PhaseInput], steps: "Steps") -> Iterator[tuple[Client, Callable[[], Reply]]]:
        """Run the phase that `begin` began; yield (client, function that returns the client's reply).

        The function raises Diverged if a loss or a weight is not finite, and Refused as `release_reply`.
        """
        steps.take(plan_batches(parts))
        for i, part in enumerate(parts):
            if steps.took[i]:
                part.client.memory = steps.memory(i)
            part.client.work = steps.count_work(i)
            for stack in self._stacks.values():
                stack.expose(self._number[id(part.client)])
        for part, curves in zip(parts, steps.read_curves(), strict=True):
            yield part.client, partial(_make_reply, part, curves)


def _make_reply(part: PhaseInput, curves: Message) -> Reply:
    train = means(curves, part.client, part.at)  # first, as `stepping.steps` has it
    message = part.phase.end(part.client, part.at)
    return release_reply(part.client, part.phase, message, train, part.inbox, part.declared)


class Steps:
    """The local steps of a phase for some clients of a group: in each step, clients with equal batch shapes step together.

    `took` has the number of steps of each client so far, in the order of the phase's clients. `numbers` are the positions of
    these clients in the stacks; `const` and `memory` hold tensors [k, ...] with a row for each of the k clients.
    """

    def __init__(
        self,
        stacks: Mapping[str, Stack],
        forward: tuple[Forward, Work],
        like: PhaseInput,
        numbers: Sequence[int],
        const: Message,
        memory: Message,
    ) -> None:
        self._stacks, self._phase, self._numbers = stacks, like.phase, numbers
        self._forward, self._one_step = forward
        self._device = next(iter(stacks.values())).device
        self._const = {k: v.to(self._device) for k, v in const.items()}
        self._memory = memory
        self._log: list[tuple[list[int], Message]] = []  # the clients that stepped, and their loss terms [k]
        self.took = [0] * len(numbers)  # steps of each client
        for stack in stacks.values():
            stack.skeleton.train()
            stack.set_rate(rate(like.phase, like.client, like.at))

    @compute_on_cpu()
    def take(self, plans: "Plans", most: int | None = None) -> None:
        """Take all steps, or at most `most` steps."""
        for batches in islice(plans.draw_steps(), most):
            for members in self._group_alike(batches, plans):
                self._step(members, plans.gather([batches[i] for i in members]))
                for i in members:
                    self.took[i] += 1

    def count_work(self, i: int) -> Work:
        """Return the steps and forward passes of a client."""
        return Work(self.took[i], self.took[i] * (self._one_step.forwards or 0))

    def memory(self, i: int) -> Message:
        """Return the memory of a client after its steps."""
        return {k: v[i] for k, v in self._memory.items()}

    def read_curves(self) -> list[Message]:
        """Return each client's loss terms over its S steps, [S] on the CPU. Only here the CPU waits for the device."""
        clients = torch.tensor([i for members, _ in self._log for i in members])
        names = self._log[0][1] if self._log else ()
        values = {name: torch.cat([terms[name] for _, terms in self._log]).cpu() for name in names}
        return [{k: v[clients == i] for k, v in values.items() if (clients == i).any()} for i in range(len(self._numbers))]

    def _group_alike(self, batches: Mapping[int, Any], plans: "Plans") -> list[list[int]]:
        """Return groups of clients that can step together: equal batch shapes, and equal step counts of their optimisers."""
        groups: dict[Any, list[int]] = {}
        for i, batch in batches.items():
            counts = tuple(stack.count_steps(self._numbers[i]) for stack in self._stacks.values())
            groups.setdefault((plans.shape(batch), counts), []).append(i)
        return list(groups.values())

    def _step(self, positions: list[int], batch: Batch) -> None:
        """Take one step of these clients, given as positions among the clients of the phase."""
        rows = self._rows([self._numbers[i] for i in positions])
        index = self._make_index(positions, len(self._numbers))
        const = {k: _select(v, index) for k, v in self._const.items()}
        memory = {k: _select(v, index) for k, v in self._memory.items()}
        taken = {net: stack.take(rows) for net, stack in self._stacks.items()}
        params, fixed = ({net: tensors[n] for net, tensors in taken.items()} for n in (0, 1))

        def compute_gradients() -> tuple[Message, Message]:
            terms = self._forward(params, fixed, batch, const)
            named = {f"{net}.{k}": p for net, of_net in params.items() for k, p in of_net.items()}
            return differentiate(terms, named, stacked=True), terms

        def update(grads: Message) -> None:
            for net, stack in self._stacks.items():
                net_grads = {k.removeprefix(f"{net}."): g for k, g in grads.items() if k.startswith(f"{net}.")}
                stack.step(rows, params[net], fixed[net], net_grads)

        terms, memory = take_step(self._phase, memory, compute_gradients, update, stacked=True)
        self._remember(memory, index)
        self._log.append((positions, terms))

    def _remember(self, memory: Message, index: Tensor | None) -> None:
        if index is None:
            self._memory = memory
            return
        for name, value in memory.items():
            if name not in self._memory:
                self._memory[name] = value.new_zeros(len(self._numbers), *value.shape[1:])
            self._memory[name] = self._memory[name].index_copy(0, index, value)

    def _rows(self, numbers: list[int]) -> StackRows:
        return StackRows(numbers, self._make_index(numbers, next(iter(self._stacks.values())).count))

    def _make_index(self, positions: list[int], count: int) -> Tensor | None:
        return None if positions == list(range(count)) else torch.tensor(positions, device=self._device)


class Plans(NamedTuple):
    """The batches of a phase, drawn step by step, so that only the batches of one step are in memory."""

    drawn: list[Iterator[Any]]  # of each client: its batches, or their row numbers
    shape: Callable[[Any], Any]
    gather: Callable[[list[Any]], Batch]  # stacks the batches of several clients

    def draw_steps(self) -> Iterator[dict[int, Any]]:
        """Yield the batches of each step by client position; finished clients have none."""
        remaining = dict(enumerate(self.drawn))
        while remaining:
            batches = {i: batch for i, plan in remaining.items() if (batch := next(plan, None)) is not None}
            remaining = {i: remaining[i] for i in batches}
            if batches:
                yield batches


def plan_batches(parts: Sequence[PhaseInput]) -> Plans:
    """Return the batches of all clients. With one resident store they are row numbers, fetched for all clients at once."""
    batches = [part.phase.batches(part.client, part.inbox, part.at) for part in parts]
    resident = [b for b in batches if isinstance(b, ResidentBatches)]
    if len(resident) < len(batches) or any(b.store is not resident[0].store for b in resident):
        return Plans(
            [iter(b) for b in batches], _get_batch_shape, lambda rows: tuple(map(torch.stack, zip(*rows, strict=True)))
        )
    store = resident[0].store
    return Plans([iter(b.list_row_numbers()) for b in resident], len, lambda numbers: store.take(torch.stack(numbers)))


def _get_batch_shape(batch: Batch) -> Any:
    return tuple((t.shape, t.dtype) for t in batch)


def describe_tensors(message: Message) -> Any:
    """Return names, shapes and dtypes of the tensors in a message."""
    return tuple((k, t.shape, t.dtype) for k, t in message.items())


def identify_loss(part: PhaseInput) -> Any:
    """Return a key of a phase's loss: its type and settings, without numbers that are in `const` or only shape batches."""
    types = get_type_hints(type(part.phase))
    of_batches = ("local_epochs", "batch_size")
    settings = [
        (f.name, repr(getattr(part.phase, f.name)))
        for f in fields(part.phase)  # type: ignore[arg-type]
        if f.name not in of_batches and types[f.name] != Setting
    ]
    return type(part.phase), tuple(settings)


def compute_stacked_loss(phase: Phase, skeletons: Mapping[str, nn.Module], like: Client, work: Work) -> Forward:
    """Return the phase's loss as a function for many clients at once.

    skeletons: net name -> module, whose weights the function replaces. like: a client with the settings of all clients.
    work: receives the forward passes of one step of a client, in `work.forwards`.
    """
    heads = {n: find_head(net) for n, net in skeletons.items()}

    def loss(params: Any, rest: Any, batch: Batch, const: Message) -> Message:
        work.forwards = 0  # torch.compile runs this function once, and the count stays
        states = {n: {**params[n], **rest[n]} for n in skeletons}
        calls = {n: count_calls(lowered(make_call(net, states[n]), like), work) for n, net in skeletons.items()}
        nets = {n: Net(calls[n], params[n], heads[n]) for n in skeletons}
        return phase.loss(nets, batch, const)

    return vmap(loss)


class CompiledLoss:
    """A `Forward` compiled by torch.compile; if compiling fails, one remark is added and the plain function is used."""

    def __init__(self, plain: Forward, remarks: list[str]) -> None:
        self._plain, self._remarks = plain, remarks
        self._compiled: Forward | None = torch.compile(plain, dynamic=False)

    def __call__(self, params: Any, fixed: Any, batch: Batch, const: Message) -> Message:
        """Return the loss terms [k] of the clients; see `Forward`."""
        if self._compiled is not None:
            try:
                return self._compiled(params, fixed, batch, const)
            except Exception as problem:  # no C++ compiler, code that dynamo cannot trace, ...
                self._compiled = None
                reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
                self._remarks.append(f"engine.compile has no effect here: torch.compile refuses ({reason[:200]})")
        return self._plain(params, fixed, batch, const)


def _stack_messages(messages: Sequence[Message]) -> Message:
    return {k: torch.stack([m[k] for m in messages]) for k in messages[0]}


def _select(stacked: Tensor, index: Tensor | None) -> Tensor:
    return stacked if index is None else stacked.index_select(0, index)
