"""SCAFFOLD: federated averaging whose clients correct their gradients by the difference of two control variates.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020,
https://arxiv.org/abs/1910.06378, Algorithm 1, option II. x are the server's weights, y a client's copy; c is the control
variate of the server, c_i that of a client. S clients of N take part in a round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedmutual.aggregation import is_weight
from fedmutual.algorithms.fork import SERVER_STEP, Fork
from fedmutual.core import At, Batch, Client, Message, Net, Spec, above_zero, run_field, setting

CONTROL = "control "  # begins the names of c in messages
# Of a client's memory: -c_i, c - c_i, -(sum of g), K. With this sign, because a first reply of a client is its c_i, and the
# boundary refuses a reply with the bytes of a tensor that stays: c_i is declared to leave, as the change from 0.
OWN, CORRECTION, SUM, STEPS = "own ", "correction ", "sum ", "steps"


@dataclass(frozen=True, kw_only=True)
class SCAFFOLD(Fork):
    """Unweighted FedAvg whose clients step along g - c_i + c, so that they do not drift towards their own optima.

    g is a gradient. The next c_i is the mean of g over the K local steps; with plain SGD of the rate r it is
    c_i - c + (x - y) / (K r), as published. Then x = x + server_step (mean of y - x) and c = c + S / N (mean change of c_i).
    """

    server_step: float = setting(1.0, SERVER_STEP)
    clients: int | None = run_field(None)  # N
    scores: ClassVar[tuple[str, ...]] = ("global",)
    terms: ClassVar[tuple[str, ...]] = ("meme",)
    dp_ready: ClassVar[bool] = True  # c_i is computed from the gradients of the steps, after their noise

    def __post_init__(self) -> None:
        above_zero("server_step", self.server_step)

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: the shared tensors, and c plus the change of c_i, in the shapes of the weights."""
        model = {k: v for k, v in server.items() if not k.startswith(CONTROL)}
        controls = {CONTROL + k: (v.dtype, tuple(v.shape)) for k, v in model.items() if is_weight(k, v)}
        return {**super().leaves(model), **controls}

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model; store c - c_i, and begin the sum of the gradients. Return no constants."""
        super().begin(client, inbox, at)
        state = client.nets["meme"].state_dict()
        memory = {STEPS: torch.zeros((), dtype=torch.int64)}
        for k, zero in ((k, torch.zeros_like(state[k])) for k in client.shared if is_weight(k, state[k])):
            negated = client.memory.get(OWN + k, zero)
            correction = inbox.get(CONTROL + k, zero).to(zero) + negated
            memory |= {OWN + k: negated, SUM + k: zero, CORRECTION + k: correction}
        client.memory = {**client.memory, **memory}
        return {}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean loss of the copy, a scalar."""
        x, y = batch
        return {"meme": self.task.fit(nets["meme"](x), y)}

    def edit(self, grads: Message, memory: Message) -> tuple[Message, Message]:
        """Return g - c_i + c for each gradient g of a shared weight, and the memory with g in the sum."""
        names = {k: k.removeprefix("meme.") for k in grads if CORRECTION + k.removeprefix("meme.") in memory}
        corrected = {k: grads[k] + memory[CORRECTION + name] for k, name in names.items()}
        sums = {SUM + name: memory[SUM + name] - grads[k] for k, name in names.items()}
        return {**grads, **corrected}, {**memory, **sums, STEPS: memory[STEPS] + 1}

    def end(self, client: Client, at: At) -> Message:
        """Return the shared tensors of the copy, and c plus the change of c_i; store the new c_i."""
        kept, controls = {k: v for k, v in client.memory.items() if not k.startswith((CORRECTION, SUM))}, Message()
        for k in (k.removeprefix(CORRECTION) for k in client.memory if k.startswith(CORRECTION)):
            negated = client.memory[SUM + k] / client.memory[STEPS] if client.memory[STEPS] else client.memory[OWN + k]
            kept[OWN + k], controls[CONTROL + k] = negated, client.memory[CORRECTION + k] - negated
        client.memory = kept
        return super().end(client, at) | controls

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the moved weights x and the new c.

        Raises:
            Unusable: as `FedAvg.receive`.
        """
        if not replies:
            return server
        state, share = self.aggregate(replies, base=server), len(replies) / (self.clients or len(replies))
        for k, v in state.items():
            if is_weight(k, v):
                old = server.get(k, torch.zeros_like(v))
                state[k] = old + (share if k.startswith(CONTROL) else self.server_step) * (v - old)
        return state
