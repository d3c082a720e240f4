"""pFedMe: each client's model solves a proximal problem around its copy of the shared model, which moves towards it.

Dinh et al., Personalized Federated Learning with Moreau Envelopes, 2020, https://arxiv.org/abs/2006.08848, Algorithm 1.
w is a client's copy of the shared model, theta its personal model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import ClassVar

from fedmutual.aggregation import is_weight
from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.fedprox import compute_proximal
from fedmutual.algorithms.fork import SERVER_STEP, copy_shared
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Setting, above_zero, setting, within


@dataclass(frozen=True, kw_only=True)
class PFedMe(FedAvg):
    """FedAvg of copies that move towards each client's personal model, which fits its data near the copy.

    For each batch, K steps of theta along the gradient of f(theta) plus moreau_lam / 2 times the squared distance of theta
    to w, and then one of w. With plain SGD (optimizer.momentum = 0), as published, that is
    w = w - outer_rate moreau_lam (w - theta); momentum makes it longer, and Adam ignores both factors. Both models begin a
    round as received. The server moves its model by
    `server_step` of the way to the mean of the copies.
    """

    moreau_lam: Setting = setting(
        15.0, "lambda, the weight of the distance of a personal model to the client's copy, at least 0"
    )
    inner_steps: int = setting(5, "K, the steps of a personal model for each batch")
    outer_rate: float = setting(0.005, "eta, the learning rate of the copies of the shared model, above 0")
    server_step: float = setting(1.0, SERVER_STEP)  # beta
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")
    terms: ClassVar[tuple[str, ...]] = ("personal", "proximal", "meme", "pull")
    sum_ready: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within("moreau_lam", self.moreau_lam, 0, float("inf"))
        within("inner_steps", self.inner_steps, 1, float("inf"))
        for name in ("outer_rate", "server_step"):
            above_zero(name, getattr(self, name))

    def algorithm(self) -> Algorithm:
        """Return FedAvg's phase; personal models have the shared architecture: the loss takes their distance."""
        return replace(super().algorithm(), alike=True)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the received model into both networks; return lambda [], and eta over the learning rate of the steps []."""
        super().begin(client, inbox, at)
        copy_shared(client, "personal", inbox)
        rate = at.number(client.rate)
        return {"lam": at.value(self.moreau_lam), "outer": at.value(self.outer_rate / rate if rate else 0.0)}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Yield the batches of each step of FedAvg K times, and once more with a third tensor, which marks the step of w.

        With training.accumulate a step has several batches; if too few are left, they count again.
        """
        remaining, size = iter(super().batches(client, inbox, at)), client.recipe.accumulate
        while left := list(islice(remaining, size)):
            together = list(islice(cycle(left), size))
            yield from together * self.inner_steps
            yield from ((*batch, batch[1].new_ones(())) for batch in together)

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the loss of theta and its proximal term; or at a step of w the proximal term of w, and the loss of w.

        The loss of w is shown, and has no gradient: the statistics of BatchNorm layers follow the batches.
        """
        x, y, *outer = batch
        moving, fixed = ("meme", "personal") if outer else ("personal", "meme")
        loss = {moving: self.task.fit(nets[moving](x), y)}
        distance = compute_proximal(
            nets[moving], const | {f"w.{k}": p.detach() for k, p in nets[fixed].params.items()}, "lam"
        )
        if outer:
            return {"meme": loss["meme"].detach(), "pull": const["outer"] * distance}
        return loss | {"proximal": distance}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the moved model.

        Raises:
            Unusable: as `FedAvg.receive`.
        """
        state = super().receive(server, replies, at)
        return {k: v + self.server_step * (state[k] - v) if is_weight(k, v) else state[k] for k, v in server.items()}
