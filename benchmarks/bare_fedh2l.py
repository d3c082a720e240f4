"""A careful hand-written FedH2L for comparison: four nodes, plain PyTorch, one exchange and one projected step a round.

The work of ours_fedh2l.py and nothing else: no records, no boundary, no derived random streams. The file imports nothing of
fedmutual. As a script it is a contestant (turns.py).
"""

import time

import torch
import torch.nn.functional as F
from bare import lenet5, noise
from torch import Tensor, nn
from turns import Stage

NODES, PRIVATE, PUBLIC, BATCH = 4, 650, 100, 32  # of Rotated MNIST, a tenth public
ADAM = {"lr": 1e-3, "weight_decay": 1e-4, "amsgrad": True}


class Node:
    """A network, its optimiser, and its data: its private rows and the public rows of all nodes."""

    def __init__(self, number: int, private: tuple[Tensor, Tensor], public: list[tuple[Tensor, Tensor]]) -> None:
        self.net, self.public, self.number = lenet5(), public, number
        self.optimizer = torch.optim.Adam(self.net.parameters(), **ADAM)
        self.x, self.y = (torch.cat([private[n], *(p[n] for p in public)]) for n in (0, 1))

    def local(self) -> tuple[Tensor, Tensor, Tensor]:
        """Take a local step; return which own public rows were drawn, the posteriors on them, and the accuracy."""
        i = torch.randperm(len(self.x))[:BATCH]
        self.step(F.cross_entropy(self.net(self.x[i]), self.y[i]))
        self.g_loc = [p.grad.clone() for p in self.net.parameters()]
        x, y = self.public[self.number]
        index = torch.randperm(len(x))[:BATCH]
        self.net.eval()
        with torch.no_grad():
            z = self.net(x[index])
        self.net.train()
        return index, z.softmax(1), (z.argmax(1) == y[index]).float().mean()

    def mutual(self, replies: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Take a step towards the peers' posteriors, projected if the step would undo the local step."""
        peers = [j for j in range(len(replies)) if j != self.number]
        x, y = (torch.cat([self.public[j][n][replies[j][0]] for j in peers]) for n in (0, 1))
        p, acc = (
            torch.cat([replies[j][1] for j in peers]),
            torch.stack([replies[j][2] for j in peers]).repeat_interleave(BATCH),
        )
        log_q = self.net(x).log_softmax(1)
        kl = (acc * (p * (p.clamp_min(1e-30).log() - log_q)).sum(1)).mean()
        self.step(kl + F.nll_loss(log_q, y), project=True)

    def step(self, loss: Tensor, project: bool = False) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        if project:
            self.project(list(self.net.parameters()))
        self.optimizer.step()

    def project(self, params: list[nn.Parameter]) -> None:
        dot = sum((p.grad * g).sum() for p, g in zip(params, self.g_loc, strict=True)).item()
        if dot < 0:
            v = dot / sum(g.square().sum() for g in self.g_loc).item()
            for p, g in zip(params, self.g_loc, strict=True):
                p.grad.sub_(g, alpha=v)


def main() -> None:
    torch.set_num_threads(1)
    stage = Stage()
    public = noise(NODES, PUBLIC, (1, 28, 28))
    nodes = [Node(k, private, public) for k, private in enumerate(noise(NODES, PRIVATE, (1, 28, 28)))]
    stage.tell("ready")
    while rounds := stage.wait():
        begun = time.perf_counter()
        for _ in range(rounds):
            replies = [node.local() for node in nodes]
            for node in nodes:
                node.mutual(replies)
        stage.tell(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
