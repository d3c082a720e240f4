"""FedDF: the server distils the clients' models, on public data, into their average.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, 2020, https://arxiv.org/abs/2006.07242,
Algorithm 1, one architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmutual.algorithms.fedavg import N_K, FedAvg
from fedmutual.algorithms.peers import read_one_batch
from fedmutual.batches import draws
from fedmutual.calling import call_network
from fedmutual.core import Algorithm, At, Bench, Message, Public, above_zero, get_target_kind, run_field, setting, within
from fedmutual.losses import kl
from fedmutual.optimizers import descend


@dataclass(frozen=True, kw_only=True)
class FedDF(FedAvg):
    """FedAvg, and then the server trains the average on the clients' joint predictions of public examples.

    Steps of KL(softmax of the mean of the clients' logits || its own), without labels; Adam, its learning rate along half
    a cosine to 0.
    """

    distill_steps: int = setting(100, "gradient steps of the server on public data in a round; 0: federated averaging")
    distill_batch: int = setting(128, "public examples in such a step of the server")
    distill_lr: float = setting(1e-3, "the first learning rate of these steps (Adam), above 0")
    bench: Bench | None = run_field(None)

    def __post_init__(self) -> None:
        within("distill_steps", self.distill_steps, 0, float("inf"))
        within("distill_batch", self.distill_batch, 1, float("inf"))
        above_zero("distill_lr", self.distill_lr)
        if get_target_kind(self.task) != "classes":
            raise ValueError("feddf distils posteriors over classes, so training.task must be a task with classes")

    def algorithm(self) -> Algorithm:
        """Return FedAvg with public data at the server."""
        return replace(super().algorithm(), public=Public(labelled=False, server=True, own_labels=False))

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the mean of the received models after its distillation on public data from all received models.

        Raises:
            Unusable: as `FedAvg.receive`.
            DataError: a public row cannot be read.
        """
        student = super().receive(server, replies, at)
        if not replies or not self.distill_steps:
            return student
        assert self.bench is not None  # `Public.server`
        net, public = self.bench.net, self.bench.public
        place = next(net.parameters()).device
        teachers = [{k: v.to(place) for k, v in replies[i].items() if k != N_K} for i in sorted(replies)]
        net.load_state_dict(student)
        optimizer = torch.optim.Adam(net.parameters(), lr=self.distill_lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.distill_steps)

        def compute_loss(index: Tensor) -> Tensor:
            x, *_ = read_one_batch(public, index)
            with torch.no_grad():
                net.eval()
                logits = torch.stack([call_network(net, x, t) for t in teachers]).mean(0)
            return kl(logits.log_softmax(-1), call_network(net.train(), x).log_softmax(-1)).mean()

        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(at.rng("dropout").initial_seed())
            plan = draws(len(public), self.distill_steps, self.distill_batch, at.rng("distillation"))
            descend(optimizer, map(compute_loss, plan), schedule)
        return {k: v.detach().cpu().clone() for k, v in net.state_dict().items()}
