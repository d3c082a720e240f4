"""A phase of clients with one architecture, step by step on stacks of their networks and optimisers.

Clients with a different batch size step in a sub-stack; clients without a batch are unchanged.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedmutual.core import At, Batch, Client, Message, Net, Phase, Setting, Spec, Work, find_head
from fedmutual.cpu import compute_on_cpu
from fedmutual.data.stores import ResidentBatches
from fedmutual.engines.base import Reply, release_reply
from fedmutual.engines.graphs import Graphs
from fedmutual.engines.stack import Stack, StackRows, select_rows
from fedmutual.stepping import (
    count_calls,
    differentiate,
    group_batches,
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

    def __init__(self, clients: Sequence[Client], graphs: Graphs | None = None) -> None:
        """graphs: the CUDA graphs of the steps of all clients; None: steps are not captured."""
        self.clients, self.graphs = clients, graphs
        self._losses: dict[Any, tuple[Forward, Work]] = {}
        self.number = {id(client): number for number, client in enumerate(clients)}
        self.stacks = {net: Stack(clients, net) for net in clients[0].nets}
        self._rows: dict[tuple[int, ...], StackRows] = {}

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
        for part in parts:
            for stack in self.stacks.values():
                stack.collect(self.number[id(part.client)])
        return Steps(self, parts, _stack_messages(consts))

    def select(self, numbers: list[int]) -> StackRows:
        """Return the rows with these numbers, made once: a captured graph reads their tensor at its address."""
        key = tuple(numbers)
        if key not in self._rows:
            self._rows[key] = select_rows(numbers, next(iter(self.stacks.values())).device)
        return self._rows[key]

    def get_loss(self, like: PhaseInput) -> tuple[Forward, Work]:
        """Return the loss of the phase for clients like this one, and its forward passes per step; a loss is made once."""
        key = identify_loss(like)
        if key not in self._losses:
            skeletons, work = {net: stack.skeleton for net, stack in self.stacks.items()}, Work()
            self._losses[key] = compute_stacked_loss(like.phase, skeletons, like.client, work), work
        return self._losses[key]


class Steps:
    """The local steps of a phase for some clients of a group: in each step, clients with equal batch shapes step together.

    parts: the k clients. const: the constants of their losses, tensors [k, ...] with a row for each client.
    """

    def __init__(self, group: Group, parts: Sequence[PhaseInput], const: Message) -> None:
        like, self._stacks = parts[0], group.stacks
        self._parts, self._phase, self._numbers = parts, like.phase, [group.number[id(part.client)] for part in parts]
        self._forward, self._one_step = group.get_loss(like)
        self._select, self._graphs, self._loss = group.select, group.graphs, identify_loss(like)
        device = next(iter(self._stacks.values())).device
        self._const = {k: v.to(device) for k, v in const.items()}
        self._const_of: dict[tuple[int, ...], Message] = {}  # of clients that stepped together in this step or the last ones
        self._memory = _stack_messages([part.client.memory for part in parts])
        self._log: list[tuple[list[int], Message]] = []  # the clients that stepped, and their loss terms [k]
        self._recipe = like.client.recipe
        self._took = [0] * len(parts)  # steps of each client
        self._seen = [0] * len(parts)  # batches of each client
        for stack in self._stacks.values():
            stack.skeleton.train()
            stack.set_rate(rate(like.phase, like.client, like.at))

    def run(self) -> Iterator[tuple[PhaseInput, Callable[[], Reply]]]:
        """Take all steps; yield (part, function that returns the client's reply).

        The function raises Diverged if a loss or a weight is not finite, and Refused as `release_reply`.
        """
        self.take()
        for i, part in enumerate(self._parts):
            steps = self._took[i]
            if steps:
                part.client.memory = {k: v[i] for k, v in self._memory.items()}
            part.client.work = Work(steps, self._seen[i] * (self._one_step.forwards or 0))
            for stack in self._stacks.values():
                stack.expose(self._numbers[i])

        def finish(part: PhaseInput, curves: Message) -> Reply:
            train = means(curves, part.client, part.at)  # first, as `stepping.steps` has it
            result = part.phase.end(part.client, part.at), train
            return release_reply(part.client, part.phase, part.inbox, part.declared, result)

        for part, curves in zip(self._parts, self.read_curves(), strict=True):
            yield part, partial(finish, part, curves)

    @compute_on_cpu()
    def take(self, most: int | None = None) -> None:
        """Take all steps, or at most `most` steps."""
        steps, describe, gather = draw_batches(self._parts)
        counting = [stack for stack in self._stacks.values() if stack.counts]
        for batches in islice(steps, most):
            groups: dict[Any, list[int]] = {}  # equal batch shapes, and equal step counts of their optimisers
            for i, batch in batches.items():
                counts = tuple(stack.count_steps(self._numbers[i]) for stack in counting)
                groups.setdefault((tuple(map(describe, batch)), counts), []).append(i)
            if len(self._const_of) > len(groups):  # each may copy a whole model of each client
                step_together = set(map(tuple, groups.values()))
                self._const_of = {key: const for key, const in self._const_of.items() if key in step_together}
            for members in groups.values():
                self._step(members, [gather(rows) for rows in zip(*(batches[i] for i in members), strict=True)])

    def read_curves(self) -> list[Message]:
        """Return each client's loss terms over its S steps, [S] on the CPU. Only here the CPU waits for the device."""
        curves: list[Message] = [{} for _ in self._parts]
        for name in dict.fromkeys(name for _, terms in self._log for name in terms):
            logged = [(members, terms[name]) for members, terms in self._log if name in terms]
            clients = torch.tensor([i for members, _ in logged for i in members])
            values = torch.cat([v for _, v in logged]).cpu()
            for i in {*clients.tolist()}:
                curves[i][name] = values[clients == i]
        return curves

    def _step(self, positions: list[int], step_batches: Sequence[Batch]) -> None:
        """Take one step of these clients, given as positions among the clients of the phase."""
        numbers = [self._numbers[i] for i in positions]
        rows, here = self._select(numbers), self._select(positions)
        members = tuple(positions)
        if members not in self._const_of:  # once, so that a graph copies it once
            self._const_of[members] = {k: here.take(v) for k, v in self._const.items()}
        const, memory = self._const_of[members], {k: here.take(v) for k, v in self._memory.items()}

        def take(inputs: tuple[Sequence[Batch], Message, Message]) -> tuple[Message, Message, dict[str, list[str]]]:
            """Return the loss terms, the next memory, and the parameters of each net that have moved."""
            step_batches, const, memory = inputs
            taken = {net: stack.take(rows) for net, stack in self._stacks.items()}  # inside, so that a graph holds it too
            params, fixed = ({net: tensors[n] for net, tensors in taken.items()} for n in (0, 1))
            moved: dict[str, list[str]] = {}

            def compute_gradients(batch: Batch) -> tuple[Message, Message]:
                terms = self._forward(params, fixed, batch, const)
                named = {f"{net}.{k}": p for net, of_net in params.items() for k, p in of_net.items()}
                return differentiate(terms, named, stacked=True), terms

            def update(grads: Message) -> None:
                for net, stack in self._stacks.items():
                    net_grads = {k.removeprefix(f"{net}."): g for k, g in grads.items() if k.startswith(f"{net}.")}
                    stack.step(rows, params[net], fixed[net], net_grads)
                    moved[net] = list(net_grads)

            return *take_step(
                self._phase, self._recipe, memory, step_batches, compute_gradients, update, stacked=True
            ), moved

        inputs = step_batches, const, memory
        if self._graphs is not None and all(stack.can_capture(rows) for stack in self._stacks.values()):
            for stack in self._stacks.values():
                stack.set_counts(rows)
            key = self._loss, tuple(numbers), tuple(const), tuple(memory)
            terms, memory, moved = self._graphs.run(key, take, inputs)
        else:
            terms, memory, moved = take(inputs)
        for net, names in moved.items():
            self._stacks[net].add_step(rows, names)
        if len(positions) == len(self._parts):
            self._memory = memory
        else:
            for name, value in memory.items():
                before = self._memory.get(name)
                of_all = value.new_zeros(len(self._parts), *value.shape[1:]) if before is None else before.clone()
                of_all[here.where] = value
                self._memory[name] = of_all
        self._log.append((positions, terms))
        for i in positions:
            self._took[i] += 1
            self._seen[i] += len(step_batches)


def draw_batches(
    parts: Sequence[PhaseInput],
) -> tuple[Iterator[dict[int, list[Any]]], Callable[[Any], Any], Callable[[Sequence[Any]], Batch]]:
    """Return (the batches of each step, by client position; the shape of a batch; a function that stacks batches).

    They are drawn step by step, so that only the batches of one step are in memory; finished clients have none. With one
    resident store a batch is its row numbers, and the rows of all clients are fetched at once.
    """
    batches = [part.phase.batches(part.client, part.inbox, part.at) for part in parts]
    size = parts[0].client.recipe.accumulate
    resident = [b for b in batches if isinstance(b, ResidentBatches)]
    if len(resident) < len(batches) or any(b.store is not resident[0].store for b in resident):
        return _draw_steps(batches, size), _describe_batch, _stack_batches
    store = resident[0].store
    plans = [b.list_row_numbers() for b in resident]
    return _draw_steps(plans, size), len, lambda numbers: store.take(torch.stack(tuple(numbers)))


def _draw_steps(plans: Sequence[Iterable[Any]], size: int) -> Iterator[dict[int, list[Any]]]:
    remaining = {n: group_batches(plan, size) for n, plan in enumerate(plans)}
    while batches := {i: batch for i, plan in remaining.items() if (batch := next(plan, None)) is not None}:
        remaining = {i: remaining[i] for i in batches}
        yield batches


def _describe_batch(batch: Batch) -> Any:
    return tuple((t.shape, t.dtype) for t in tree_leaves(batch))


def _stack_batches(batches: Sequence[Batch]) -> Batch:
    return tree_map(lambda *tensors: torch.stack(tensors), *batches)  # type: ignore[no-any-return]


def describe_tensors(message: Message) -> Any:
    """Return names, shapes and dtypes of the tensors in a message."""
    return tuple((k, t.shape, t.dtype) for k, t in message.items())


def identify_loss(part: PhaseInput) -> Any:
    """Return a key of a phase's loss: its type and settings, without numbers that are in `const` or only shape batches."""
    types = get_type_hints(type(part.phase))
    names = [f.name for f in fields(part.phase) if f.name not in ("local_epochs", "batch_size")]  # type: ignore[arg-type]
    return type(part.phase), tuple((n, repr(getattr(part.phase, n))) for n in names if types[n] != Setting)


def compute_stacked_loss(phase: Phase, skeletons: Mapping[str, nn.Module], like: Client, work: Work) -> Forward:
    """Return the phase's loss as a function for many clients at once.

    skeletons: net name -> module, whose weights the function replaces. like: a client with the settings of all clients.
    work: receives the forward passes of one step of a client, in `work.forwards`.
    """
    heads = {n: find_head(net) for n, net in skeletons.items()}

    def loss(params: Any, rest: Any, batch: Batch, const: Message) -> Message:
        work.forwards = 0
        states = {n: {**params[n], **rest[n]} for n in skeletons}
        calls = {n: count_calls(lowered(make_call(net, states[n]), like), work) for n, net in skeletons.items()}
        nets = {n: Net(calls[n], params[n], heads[n]) for n in skeletons}
        return phase.loss(nets, batch, const)

    return vmap(loss)


def _stack_messages(messages: Sequence[Message]) -> Message:
    return {k: torch.stack([m[k] for m in messages]) for k in messages[0]}
