"""FedAvg: federated averaging.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017,
https://arxiv.org/abs/1602.05629, Algorithm 1. K clients, n_k examples at client k, E local epochs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedmutual.algorithms.fork import Fork
from fedmutual.core import At, Batch, Client, Message, Net, Spec, setting

N_K = "n_k"  # how many examples a client has: leaves only here, and only with weighting = "samples"


@dataclass(frozen=True, kw_only=True)
class FedAvg(Fork):
    """Every client trains a copy of the global model; the server averages the copies.

    weighting: "samples", n_k / n as published, which tells the server every n_k; or "uniform", 1 / K, which does not. Of the
    rules of `[server]` only the mean weighs; beside the others no client tells its n_k.
    """

    weighting: Literal["samples", "uniform"] = setting(
        "samples", "clients are weighted by their number of examples, which each then reports, or all equally"
    )
    scores: ClassVar[tuple[str, ...]] = ("global",)
    terms: ClassVar[tuple[str, ...]] = ("meme",)
    dp_ready: ClassVar[bool] = True  # with weighting = "uniform"
    sum_ready: ClassVar[bool] = True

    @property
    def weighs(self) -> bool:
        """Whether clients tell n_k, and weigh by it."""
        return self.weighting == "samples" and self.aggregate.weighs

    def leaves(self, server: Message) -> Spec:
        """The model; n_k where it weighs."""
        count: Spec = {N_K: (torch.int64, ())} if self.weighs else {}
        return {**super().leaves(server), **count}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Cross-entropy of the copy."""
        x, y = batch
        return {"meme": self.task.fit(nets["meme"](x), y)}

    def end(self, client: Client, at: At) -> Message:
        """The trained copy, and n_k where it weighs."""
        count = {N_K: torch.tensor(len(client.data["private"]))} if self.weighs else {}
        return super().end(client, at) | count

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """The mean over those who answered, or the rule of `[server]`."""
        if not replies:
            return server
        models = {i: {k: v for k, v in reply.items() if k != N_K} for i, reply in replies.items()}
        weights = {i: float(reply[N_K]) for i, reply in replies.items()} if self.weighs else None
        return self.aggregate(models, weights, base=server)
