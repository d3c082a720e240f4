"""Stacks of the networks and optimisers of clients with the same architecture: one phase of all clients, step by step.

Clients with a different batch size step in a sub-stack; clients without a batch are unchanged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.func import vmap

from fedmutual.core import At, Batch, Client, Message, Phase, Setting, Spec, Work
from fedmutual.data.rows import ResidentBatches
from fedmutual.denormals import flush_denormals
from fedmutual.engines.base import Reply, release_reply
from fedmutual.engines.forward import CompiledLoss, Forward, compute_gradients, compute_stacked_loss
from fedmutual.engines.stack import Stack, StackRows
from fedmutual.stepping import means, rate, ready, remembered


class PhaseInput(NamedTuple):
    """A client's part in a phase."""

    client: Client
    phase: Phase  # with the client's own settings
    inbox: Message
    declared: Spec
    at: At


class Group:
    """Clients alike, in stacks for as long as the engine lives."""

    def __init__(self, clients: Sequence[Client], compile: list[str] | None = None) -> None:
        """compile: where to say what is wrong with it; None: do not."""
        self.clients, self._compile = clients, compile
        self._forwards: dict[Any, tuple[Forward, Work]] = {}
        self._number = {id(client): number for number, client in enumerate(clients)}
        self._stacks = {net: Stack(clients, net) for net in clients[0].nets}

    def begin(self, parts: Sequence[PhaseInput]) -> "Steps | None":
        """These clients take their inboxes in. None where what they need for their losses differs in shape."""
        consts, before = [], [{k: v.clone() for k, v in part.client.memory.items()} for part in parts]
        for part in parts:
            ready(part.phase, part.client, part.at)
            consts.append(part.phase.begin(part.client, part.inbox, part.at))
        if len({describe_tensors(const) for const in consts}) > 1:
            for part, memory in zip(parts, before, strict=True):  # they begin again, each alone
                part.client.memory = memory
            return None
        numbers = [self._number[id(part.client)] for part in parts]
        for number in numbers:
            for stack in self._stacks.values():
                stack.collect(number)
        memory = _stacked([p.client.memory for p in parts])
        return Steps(self._stacks, self._forward(parts[0]), parts[0], numbers, _stacked(consts), memory)

    def _forward(self, like: PhaseInput) -> tuple[Forward, Work]:
        """The phase's loss for clients like this one, and the forward passes of its last step: made, and compiled, once."""
        key = identify_loss(like)
        if key not in self._forwards:
            skeletons, work = {net: stack.skeleton for net, stack in self._stacks.items()}, Work()
            plain = compute_stacked_loss(like.phase, skeletons, like.client, work)
            self._forwards[key] = plain if self._compile is None else CompiledLoss(plain, self._compile), work
        return self._forwards[key]

    def run(self, parts: Sequence[PhaseInput], steps: "Steps") -> Iterator[tuple[Client, Callable[[], Reply]]]:
        """The rest of a phase that `begin` began -> each one's reply, when called."""
        steps.take(plan_batches(parts))
        for i, part in enumerate(parts):
            if steps.took[i]:
                part.client.memory = steps.memory(i)
            part.client.work = steps.work(i)
            for stack in self._stacks.values():
                stack.expose(self._number[id(part.client)])
        for part, curves in zip(parts, steps.curves(), strict=True):
            yield part.client, partial(_reply, part, curves)


def _reply(part: PhaseInput, curves: Message) -> Reply:
    train = means(curves, part.client, part.at)  # first, as `stepping.steps` has it
    message = part.phase.end(part.client, part.at)
    return release_reply(part.client, part.phase, message, train, part.inbox, part.declared)


class Steps:
    """The steps of one phase, for some clients of a group."""

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
        self._lr = rate(like.phase, like.client, like.at)
        self._device = next(iter(stacks.values())).device
        self._const = {k: v.to(self._device) for k, v in const.items()}
        self._memory = memory
        self._log: list[tuple[list[int], Message]] = []  # who stepped, and the terms [k]
        self.took = [0] * len(numbers)  # steps of each client
        for stack in stacks.values():
            stack.skeleton.train()

    @flush_denormals()
    def take(self, plans: "Plans", most: int | None = None) -> None:
        """All steps, or at most so many."""
        for batches in islice(plans.steps(), most):
            for who in self._alike(batches, plans):
                self._step(who, plans.gather([batches[i] for i in who]))
                for i in who:
                    self.took[i] += 1

    def work(self, i: int) -> Work:
        """A client's steps and forward passes."""
        return Work(self.took[i], self.took[i] * (self._one_step.forwards or 0))

    def memory(self, i: int) -> Message:
        """A client's after its steps."""
        return {k: v[i] for k, v in self._memory.items()}

    def curves(self) -> list[Message]:
        """Each client's loss terms over its steps. The only question to the device."""
        who = torch.tensor([i for members, _ in self._log for i in members])
        names = self._log[0][1] if self._log else ()
        values = {name: torch.cat([terms[name] for _, terms in self._log]).cpu() for name in names}
        return [{k: v[who == i] for k, v in values.items() if (who == i).any()} for i in range(len(self._numbers))]

    def _alike(self, batches: Mapping[int, Any], plans: "Plans") -> list[list[int]]:
        """Those that have a batch, by what makes them step alike: its shape, and the steps that their optimisers count."""
        groups: dict[Any, list[int]] = {}
        for i, batch in batches.items():
            counts = tuple(stack.steps(self._numbers[i]) for stack in self._stacks.values())
            groups.setdefault((plans.shape(batch), counts), []).append(i)
        return list(groups.values())

    def _step(self, who: list[int], batch: Batch) -> None:
        """One step of these, by their places among the phase's clients."""
        rows = self._rows([self._numbers[i] for i in who])
        places = self._index(who, len(self._numbers))
        const = {k: _taken(v, places) for k, v in self._const.items()}
        memory = {k: _taken(v, places) for k, v in self._memory.items()}
        taken = {net: stack.taken(rows) for net, stack in self._stacks.items()}
        params, rest = ({net: both[n] for net, both in taken.items()} for n in (0, 1))
        grads, terms = compute_gradients(self._forward, params, rest, batch, const)
        if type(self._phase).edit is not Phase.edit:
            grads, memory = vmap(self._phase.edit)(grads, memory)
            self._remember(memory, places)
        for net, stack in self._stacks.items():
            mine = {k.removeprefix(f"{net}."): g for k, g in grads.items() if k.startswith(f"{net}.")}
            stack.step(rows, params[net], rest[net], mine, self._lr)
        self._log.append((who, terms | remembered(self._phase, memory)))

    def _remember(self, memory: Message, places: Tensor | None) -> None:
        if places is None:
            self._memory = memory
            return
        for name, value in memory.items():
            if name not in self._memory:
                self._memory[name] = value.new_zeros(len(self._numbers), *value.shape[1:])
            self._memory[name] = self._memory[name].index_copy(0, places, value)

    def _rows(self, numbers: list[int]) -> StackRows:
        return StackRows(numbers, self._index(numbers, next(iter(self._stacks.values())).count))

    def _index(self, places: list[int], count: int) -> Tensor | None:
        return None if places == list(range(count)) else torch.tensor(places, device=self._device)


class Plans(NamedTuple):
    """What clients take in a phase: drawn step by step, so that no more than a step's is held."""

    drawn: list[Iterator[Any]]  # a client's batches, or the numbers of their rows
    shape: Callable[[Any], Any]
    gather: Callable[[list[Any]], Batch]  # of several clients, stacked

    def steps(self) -> Iterator[dict[int, Any]]:
        """Of each step what those take that are not done."""
        left = dict(enumerate(self.drawn))
        while left:
            batches = {i: batch for i, it in left.items() if (batch := next(it, None)) is not None}
            left = {i: left[i] for i in batches}
            if batches:
                yield batches


def plan_batches(parts: Sequence[PhaseInput]) -> Plans:
    """The batches of all: of one resident store by their rows' numbers, which a single gather fetches for all clients."""
    batches = [part.phase.batches(part.client, part.inbox, part.at) for part in parts]
    picked = [b for b in batches if isinstance(b, ResidentBatches)]
    if len(picked) < len(batches) or any(p.store is not picked[0].store for p in picked):
        return Plans([iter(b) for b in batches], _shape, lambda found: tuple(map(torch.stack, zip(*found, strict=True))))
    store = picked[0].store
    return Plans([iter(p.list_row_numbers()) for p in picked], len, lambda found: store.take(torch.stack(found)))


def _shape(batch: Batch) -> Any:
    return tuple((t.shape, t.dtype) for t in batch)


def describe_tensors(message: Message) -> Any:
    """The form of a message."""
    return tuple((k, t.shape, t.dtype) for k, t in message.items())


def identify_loss(part: PhaseInput) -> Any:
    """What a loss is made of: all settings but numbers that it takes from `const`, and those of the batches."""
    types = get_type_hints(type(part.phase))
    apart = ("local_epochs", "batch_size")
    settings = [
        (f.name, repr(getattr(part.phase, f.name)))
        for f in fields(part.phase)  # type: ignore[arg-type]
        if f.name not in apart and types[f.name] != Setting
    ]
    return type(part.phase), tuple(settings)


def _stacked(messages: Sequence[Message]) -> Message:
    return {k: torch.stack([m[k] for m in messages]) for k in messages[0]}


def _taken(stacked: Tensor, places: Tensor | None) -> Tensor:
    return stacked if places is None else stacked.index_select(0, places)
