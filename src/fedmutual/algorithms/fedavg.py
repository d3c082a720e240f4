"""FedAvg: federated averaging.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017,
https://arxiv.org/abs/1602.05629, Algorithm 1. K clients, n_k examples at client k, E local epochs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedmutual.algorithms.fork import Fork
from fedmutual.core import At, Batch, Client, Message, Net, OnlyIf, Spec, Total, setting

N_K = "n_k"  # the number of a client's examples, which is sent only with weighting = "samples"


@dataclass(frozen=True, kw_only=True)
class FedAvg(Fork):
    """Every client trains a copy of the global model; the server averages the copies.

    weighting: "samples", n_k / n as published, for which each client sends its n_k; or "uniform", 1 / K. Of the rules of
    `[server]` only the mean is weighted; with another rule no client sends its n_k.
    """

    weighting: Literal["samples", "uniform"] = setting(
        "samples",
        "clients are weighted by their number of examples (each client then reports this number), or all equally",
        only_if=(OnlyIf("server.aggregate", ("mean",), remark="server.aggregate = {value!r} takes all clients alike"),),
    )
    scores: ClassVar[tuple[str, ...]] = ("global",)
    terms: ClassVar[tuple[str, ...]] = ("meme",)
    dp_ready: ClassVar[bool] = True  # with weighting = "uniform"
    sum_ready: ClassVar[bool] = True

    @property
    def weighs(self) -> bool:
        """Return whether clients send n_k as the weight of their model."""
        return self.weighting == "samples" and self.aggregate.weighs

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: the shared tensors, and n_k int64 [] if the mean is weighted."""
        count: Spec = {N_K: (torch.int64, ())} if self.weighs else {}
        return {**super().leaves(server), **count}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean loss of the copy, a scalar: with classes the cross-entropy."""
        x, y = batch
        return {"meme": self.task.fit(nets["meme"](x), y)}

    def end(self, client: Client, at: At) -> Message:
        """Return the shared tensors of the trained copy, and n_k (rows) if the mean is weighted."""
        count = {N_K: torch.tensor(len(client.data["private"]))} if self.weighs else {}
        return super().end(client, at) | count

    def weigh_reply(self, reply: Message) -> tuple[Message, float] | None:
        """Return the model and n_k if it was sent, else 1; None as `Fork.weigh_reply`."""
        weighed = super().weigh_reply(reply)
        return weighed and ({k: v for k, v in reply.items() if k != N_K}, float(reply.get(N_K, 1.0)))

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the mean of the received models, or the result of the rule of `[server]`.

        Raises:
            Unusable: a reply cannot be summed in fixed point (server.sum = "fixed").
        """
        if not replies:
            return server
        if isinstance(replies, Total):  # weighted already
            return self.aggregate(replies, base=server)
        models = {i: {k: v for k, v in reply.items() if k != N_K} for i, reply in replies.items()}
        weights = {i: float(reply[N_K]) for i, reply in replies.items()} if self.weighs else None
        return self.aggregate(models, weights, base=server)
