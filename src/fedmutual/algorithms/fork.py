"""What FML, FedAvg and FedProx have in common: a shared model is forked, trained on private data, and sent back."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.core import At, Client, Message


@dataclass(frozen=True, kw_only=True)
class Fork(LocalEpochs):
    """One round over forks ("memes") of the shared model. A subclass says what a fork learns and how forks merge."""

    sum_ready: ClassVar[bool] = (
        False  # whether a secure sum can replace the mean: the reply is the shared model, n_k at most,
    )
    # and `receive` returns what `aggregate` makes of the replies; a subclass that overrides one of both says so again
    aggregate: Aggregation = Aggregation()  # of the forks

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if {"send", "leaves", "receive"} & vars(cls).keys():
            cls.sum_ready = vars(cls).get("sum_ready", False)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Fork: the shared tensors are the server's, what stays home is the client's; momentum starts afresh."""
        copy_shared(client, "meme", inbox)
        return {}

    def end(self, client: Client, at: At) -> Message:
        """The shared part of the trained fork."""
        state = client.nets["meme"].state_dict()
        return {k: state[k] for k in client.shared}


def copy_shared(client: Client, net: str, inbox: Message) -> None:
    """Give a client's net the shared tensors of the inbox; its optimiser begins as if it had never stepped."""
    module = client.nets[net]
    module.load_state_dict(module.state_dict() | {k: inbox[k] for k in client.shared})
    clear_state(client, net)


def clear_state(client: Client, net: str) -> None:
    """Zero the state of a net's optimiser, of which there is none where the net is frozen."""
    for state in client.optimizers[net].state.values() if net in client.optimizers else ():
        for remembered in state.values():
            remembered.zero_()  # as never stepped; new tensors in every round would leave holes in the memory
