"""A careful hand-written loop for comparison: FML in plain PyTorch, with ordinary networks.

Data in memory, one forward of each network a step, one log-softmax of each, teachers detached, unchanged torch.optim.SGD.
No evaluation, no checkpoint, no privacy boundary. The file imports nothing of fedmutual, and runs as a separate process
with the allocator of a user's process. As a script it is a contestant (turns.py).
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import Stage

SHAPES = {"mlp": (1, 28, 28), "lenet5": (1, 28, 28), "cnn1": (3, 32, 32), "cnn2": (3, 32, 32)}
CLASSES, BATCH = 10, 128
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
ALPHA = BETA = 0.5


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES)
    )


def lenet5() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def cnn1() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 120), nn.ReLU(), nn.Linear(120, CLASSES)),
    )


def cnn2() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, CLASSES)),
    )


NETS = {"mlp": mlp, "lenet5": lenet5, "cnn1": cnn1, "cnn2": cnn2}
Orders = Callable[[int], Iterable[Tensor]]  # a client's batches, as index tensors


class Federation:
    """K clients, each with a network of its own and (x, y) in memory, and the shared network."""

    def __init__(self, make: Callable[[], nn.Module], data: list[tuple[Tensor, Tensor]]) -> None:
        self.data, self.shared = data, make()
        self.personal = [make() for _ in data]
        self.optimizers = [torch.optim.SGD(net.parameters(), **SGD) for net in self.personal]

    def round(self, orders: Orders | None = None) -> None:
        """Run one round: fork, mutual learning at each client, the mean of the forks."""
        memes = [self.train(k, orders) for k in range(len(self.data))]
        states = [meme.state_dict() for meme in memes]
        self.shared.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]})

    def train(self, k: int, orders: Orders | None) -> nn.Module:
        """Train a client on these batches, by default one epoch, and return its fork."""
        (xs, ys), personal, opt_p = self.data[k], self.personal[k], self.optimizers[k]
        meme = copy.deepcopy(self.shared)
        opt_m = torch.optim.SGD(meme.parameters(), **SGD)
        for i in orders(k) if orders else torch.randperm(len(xs)).split(BATCH):
            x, y = xs[i], ys[i]
            log_p, log_m = F.log_softmax(personal(x), 1), F.log_softmax(meme(x), 1)
            loss_p = ALPHA * F.nll_loss(log_p, y) + (1 - ALPHA) * kl(log_m.detach(), log_p)
            loss_m = BETA * F.nll_loss(log_m, y) + (1 - BETA) * kl(log_p.detach(), log_m)
            opt_p.zero_grad()
            opt_m.zero_grad()
            (loss_p + loss_m).backward()
            opt_p.step()
            opt_m.step()
        return meme


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def noise(clients: int, rows: int, shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, *shape), torch.randint(CLASSES, (rows,))) for _ in range(clients)]


def shuffle(rows: int, epochs: int) -> Iterable[Tensor]:
    return chain.from_iterable(torch.randperm(rows).split(BATCH) for _ in range(epochs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=NETS, required=True)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    stage = Stage()
    federation = Federation(NETS[args.model], noise(args.clients, args.rows, SHAPES[args.model]))
    stage.tell("ready")
    while rounds := stage.wait():
        begun = time.perf_counter()
        for _ in range(rounds):
            federation.round(lambda _: shuffle(args.rows, args.epochs))
        stage.tell(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
