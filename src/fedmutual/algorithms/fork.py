"""The part that FML, FedAvg and FedProx share: clients copy the shared model, train the copy on private data and send it
back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.core import At, Client, Message, Phase
from fedmutual.optimizers import reset_state

SERVER_STEP = "the share of the way to the mean of the clients' weights that the server moves"


@dataclass(frozen=True, kw_only=True)
class Fork(LocalEpochs):
    """One round with copies ("memes") of the shared model. A subclass defines the loss."""

    # Whether a secure sum can replace the mean: a reply holds the shared model and at most n_k, and `receive` uses the
    # replies by `aggregate` only. A subclass that overrides `send`, `leaves` or `receive` must declare this again.
    sum_ready: ClassVar[bool] = True
    aggregate: Aggregation = Aggregation()  # of the forks

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Fork))
        if any(getattr(cls, hook) is not getattr(parent, hook) for hook in ("send", "leaves", "receive")):  # also by a mixin
            cls.sum_ready = vars(cls).get("sum_ready", False)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the server's shared tensors into the meme, with a fresh optimiser state; return no constants."""
        copy_shared(client, "meme", inbox)
        return {}

    def end(self, client: Client, at: At) -> Message:
        """Return the shared tensors of the trained meme."""
        state = client.nets["meme"].state_dict()
        return {k: state[k] for k in client.shared}

    def weigh_reply(self, reply: Message) -> tuple[Message, float] | None:
        """Return the model and its weight 1; None with another rule than the mean, or if `receive` may read the replies."""
        return (reply, 1.0) if is_summable(self) and self.aggregate == Aggregation() else None

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the unweighted mean of the memes, or the result of the rule of `[server]`; row counts are not sent.

        Raises:
            Unusable: a reply cannot be summed in fixed point (server.sum = "fixed").
        """
        return self.aggregate(replies, base=server) if replies else server


def is_summable(phase: Phase) -> bool:
    """Return whether a sum can replace the replies of a phase."""
    return isinstance(phase, Fork) and phase.sum_ready


def copy_shared(client: Client, net: str, inbox: Message) -> None:
    """Load the shared tensors of the inbox into a client's net, and reset its optimiser state."""
    module = client.nets[net]
    module.load_state_dict(module.state_dict() | {k: inbox[k] for k in client.shared})
    reset_optimizer_state(client, net)


def copy_unshared(client: Client) -> None:
    """Load the tensors of the copy that stay at a client, such as those of BatchNorm, into its personal net."""
    personal, copy = (client.nets[net].state_dict() for net in ("personal", "meme"))
    if unshared := {k: v for k, v in copy.items() if k not in client.shared and k in personal}:
        client.nets["personal"].load_state_dict(personal | unshared)


def reset_optimizer_state(client: Client, net: str) -> None:
    """Make the optimiser of a client's net as never stepped; a frozen net has no optimiser."""
    if net in client.optimizers:
        reset_state(client.optimizers[net])
