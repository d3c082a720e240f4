"""FedAPEN: mutual learning of a shared and a personal model, and of their ensemble with a learned weight.

Qin et al., FedAPEN: Personalized Cross-silo Federated Learning with Adaptability to Statistical Heterogeneity, 2023,
https://doi.org/10.1145/3580305.3599344, Algorithm 1. w is the weight of the personal model's logits in the ensemble.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedmutual.algorithms.fork import Fork
from fedmutual.algorithms.peers import compute_logits
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, above_zero, get_target_kind, setting, within
from fedmutual.losses import kl

SHARE = "share of the personal logits"  # of a client's memory: w []


@dataclass(frozen=True, kw_only=True)
class FedAPEN(Fork):
    """FML whose models also learn as an ensemble, in which each client learns the weight w of its personal model.

    L_personal = CE(z_p) + KL(p_m || p_p) + CE(w z_p + (1 - w) z_m), of which z_m gets no gradient; L_meme likewise. In each
    round w takes steps on rows of the client's own that train nothing else; w begins as 1/2. `records.ensemble` scores an
    ensemble.
    """

    adapt_share: float = setting(0.05, "the share of a client's rows on which w is learned, 0 to below 1; 0: w stays 1/2")
    adapt_passes: int = setting(10, "passes over these rows in each round")
    adapt_rate: float = setting(0.001, "the learning rate of w (SGD), above 0")
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")
    terms: ClassVar[tuple[str, ...]] = ("personal", "meme")

    def __post_init__(self) -> None:
        within("adapt_share", self.adapt_share, 0, 0.99)
        within("adapt_passes", self.adapt_passes, 1, float("inf"))
        above_zero("adapt_rate", self.adapt_rate)
        if get_target_kind(self.task) != "classes":
            raise ValueError("fedapen teaches by posteriors over classes, so training.task must be a task with classes")

    def algorithm(self) -> Algorithm:
        """Return one phase."""
        return replace(super().algorithm(), needs_labels=True)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model into the meme; store w after its steps, and return it. In the first round w is 1/2."""
        super().begin(client, inbox, at)
        share = self._learn_share(client, at) if SHARE in client.memory else torch.tensor(0.5)
        client.memory = {**client.memory, SHARE: share}
        return {SHARE: share}

    def _learn_share(self, client: Client, at: At) -> Tensor:
        """Return w in [0, 1] after its steps, by the networks in eval mode."""
        share, (rows, _) = client.memory[SHARE], self._split_rows(client, at)
        for x, y, *_ in client.data["private"].rows([*torch.split(rows, self.batch_size)] * self.adapt_passes):
            personal, meme = (compute_logits(client.nets[net], x) for net in ("personal", "meme"))
            with torch.enable_grad():
                moving = share.to(personal).requires_grad_()
                (slope,) = torch.autograd.grad(self.task.fit(moving * personal + (1 - moving) * meme, y), moving)
            share = (moving.detach() - self.adapt_rate * slope).clamp(0, 1)
        return share.cpu()

    def _split_rows(self, client: Client, at: At) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows for w, and of those that train the models: the same in every round."""
        count = len(client.data["private"])
        order = torch.randperm(count, generator=replace(at, round=0, phase=0).rng(client.id, "adaptability"))
        first = int(self.adapt_share * count)
        return order[:first], order[first:]

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return epochs, or steps, of the rows that do not train w: inputs [B, ...] and targets [B]."""
        return self.over("private", client, at, among=self._split_rows(client, at)[1])

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return L_personal and L_meme, scalars; each trains only its network."""
        x, y = batch
        z_p, z_m, w = nets["personal"](x), nets["meme"](x), const[SHARE]
        terms = {}
        for name, z, teacher, share in (("personal", z_p, z_m.detach(), w), ("meme", z_m, z_p.detach(), 1 - w)):
            taught = kl(teacher.log_softmax(-1), z.log_softmax(-1)).mean()
            terms[name] = self.task.fit(z, y) + taught + self.task.fit(share * z + (1 - share) * teacher, y)
        return terms
