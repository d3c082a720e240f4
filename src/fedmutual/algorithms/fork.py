"""What FML, FedAvg and FedProx have in common: a shared model is forked, trained on private data, and sent back."""

from dataclasses import dataclass

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.core import At, Client, Message


@dataclass(frozen=True, kw_only=True)
class Fork(LocalEpochs):
    """One round over forks ("memes") of the shared model. A subclass says what a fork learns and how forks merge."""

    aggregate: Aggregation = Aggregation()  # of the forks

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Fork: the shared tensors are the server's, what stays home is the client's; momentum starts afresh."""
        meme = client.nets["meme"]
        meme.load_state_dict(meme.state_dict() | {k: inbox[k] for k in client.shared})
        for state in client.optimizers["meme"].state.values():
            for remembered in state.values():
                remembered.zero_()  # as never stepped; new tensors in every round would leave holes in the memory
        return {}

    def end(self, client: Client, at: At) -> Message:
        """The shared part of the trained fork."""
        state = client.nets["meme"].state_dict()
        return {k: state[k] for k in client.shared}
