"""FedALA: before it trains, each client mixes the received model and its own last one, with a learned share for each weight.

Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, 2023,
https://arxiv.org/abs/2212.01197, Algorithm 1. W are the shares of the received weights, one for each weight, in [0, 1].
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedmutual.algorithms.apfl import list_trained_parameters
from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.fork import copy_unshared
from fedmutual.calling import call_network
from fedmutual.core import Algorithm, At, Client, Message, above_zero, setting, within

SHARE, LEARNED = "share of the received ", "shares were learned"  # of a client's memory: begins the names of W; bool []
_LOSSES, _SPREAD = 10, 0.1  # W is learned the first time until the last losses have a standard deviation below this,
_PASSES = 100  # or for so many passes


@dataclass(frozen=True, kw_only=True)
class FedALA(FedAvg):
    """FedAvg whose clients begin a round at a mixture of the received model and the model that they sent last.

    The last layers begin as sent + W (received - sent), the others as received. W begins as 1, and takes steps along the
    gradient of the loss in W on a part of the client's rows: the first time until the loss is steady, later for one pass.
    """

    layers: int = setting(1, "the number of last layers that are mixed; 0: all layers")
    rows_share: float = setting(0.8, "the share of a client's rows on which W is learned, above 0 and up to 1")
    share_rate: float = setting(1.0, "the learning rate of W, above 0")
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")
    adopts_reply: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within("layers", self.layers, 0, float("inf"))
        above_zero("rows_share", self.rows_share)
        within("rows_share", self.rows_share, 0, 1)
        above_zero("share_rate", self.share_rate)

    def algorithm(self) -> Algorithm:
        """Return FedAvg's phase; a personal network is what the client sent last, so it has the shared architecture."""
        return replace(super().algorithm(), alike=True)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the received model, and into its last layers the mixture; store W. Return no constants."""
        super().begin(client, inbox, at)
        received = {k: p for k, p in list_trained_parameters(client, "meme").items() if k in client.shared}
        modules = list(dict.fromkeys(k.rpartition(".")[0] for k in received))[-self.layers :]
        received = {k: p for k, p in received.items() if k.rpartition(".")[0] in modules}
        sent = {k: client.nets["personal"].get_parameter(k).detach() for k in received}
        change = {k: p.detach() - sent[k] for k, p in received.items()}
        shares = {k: client.memory.get(SHARE + k, torch.ones_like(v)) for k, v in sent.items()}
        learned = client.memory.get(LEARNED, torch.tensor(False))
        if any(v.any() for v in change.values()):  # not in the first round, in which both models are equal
            shares, learned = self._learn_shares(client, sent, change, shares, bool(learned), at), torch.tensor(True)
            with torch.no_grad():
                for k, p in received.items():
                    p.copy_(sent[k] + change[k] * shares[k])
        client.memory = {**client.memory, **{SHARE + k: v for k, v in shares.items()}, LEARNED: learned}
        return {}

    def end(self, client: Client, at: At) -> Message:
        """Return FedAvg's reply; the personal network, which becomes the reply, gets what stays at the client now."""
        copy_unshared(client)
        return super().end(client, at)

    def _learn_shares(self, client: Client, sent: Message, change: Message, shares: Message, again: bool, at: At) -> Message:
        """Return W after its steps on a run of rows at a random place, in the order of the rows."""
        data, meme, losses = client.data["private"], client.nets["meme"], list[float]()
        count = max(int(self.rows_share * len(data)), 1)
        begin = int(torch.randint(len(data) - count + 1, (), generator=at.rng(client.id, "shares")))
        buffers = {k: v.clone() for k, v in meme.named_buffers()}  # BatchNorm's stay as they are
        while not (
            (again and losses)
            or (len(losses) > _LOSSES and torch.tensor(losses[-_LOSSES:]).std(correction=0) < _SPREAD)
            or len(losses) == _PASSES
        ):
            for x, y, *_ in data.rows(torch.split(torch.arange(begin, begin + count), self.batch_size)):
                with torch.enable_grad():
                    mixture = {k: (v + change[k] * shares[k]).requires_grad_() for k, v in sent.items()}
                    loss = self.task.fit(call_network(meme, x, {**mixture, **buffers}), y)
                    slopes = torch.autograd.grad(loss, list(mixture.values()))
                shares = {
                    k: (v - self.share_rate * slope * change[k]).clamp(0, 1)
                    for (k, v), slope in zip(shares.items(), slopes, strict=True)
                }
            losses.append(loss.item())
        return shares
