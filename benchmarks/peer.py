"""A contestant of the section peers that trains FedAvg, in any Python with torch: its work, and what it reports.

FOLDER/work.pt, which peers.py writes, is all that the work depends on: the name and first weights of the network, the rows
of each client, the batches of each round, and the test rows. The script peer_NAME.py trains this work with the library NAME.
A turn's answer has its seconds, the gradient steps and training examples, and the test rows with the accuracy on them; the
weights after the turn are saved in FOLDER/NAME-TURN.pt. This file imports nothing of fedmutual.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bare import BATCH, NETS, SGD
from torch import Tensor, nn
from turns import RoundTimer, Stage

CORES = 2
FOREVER = 10**9  # rounds
TEST_BATCH = 512
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """The content of FOLDER/work.pt."""

    model: str
    epochs: int
    start: Sequence[Tensor]  # the first weights, in the order of the network's state_dict
    clients: Sequence[Rows]
    orders: Tensor  # [rounds, clients, epochs, rows]: the rows of a client in the order of its batches
    test: Rows

    def make_net(self) -> nn.Module:
        """Return the shared network with its first weights."""
        net = NETS[self.model]()
        net.load_state_dict(dict(zip(net.state_dict(), self.start, strict=True)))
        return net

    def get_batches(self, round: int, client: int) -> "Batches":
        """Return a client's batches in a round, which counts from 0."""
        return Batches(self.clients[client], self.orders[round, client])


class Batches:
    """A client's batches in a round, an epoch in each iteration; counts those that were taken."""

    def __init__(self, rows: Rows, orders: Iterable[Tensor]) -> None:
        (self._x, self._y), self._orders = rows, iter(orders)
        self.steps = self.examples = 0

    def __len__(self) -> int:
        return len(self._y)

    def count(self) -> dict[str, int]:
        """Return the numbers of taken batches and examples."""
        return {"steps": self.steps, "examples": self.examples}

    def __iter__(self) -> Iterator[Rows]:
        for index in next(self._orders).split(BATCH):
            self.steps += 1
            self.examples += len(index)
            yield self._x[index], self._y[index]


@cache
def load_work(folder: Path) -> Work:
    """Return the work; a process reads the file once."""
    return Work(**torch.load(folder / "work.pt"))


def train(net: nn.Module, batches: Batches, epochs: int) -> None:
    """Train a client's network, for a library whose users write this loop."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), **SGD)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()


@torch.no_grad()
def count_correct(net: nn.Module, test: Rows) -> int:
    """Return how many test rows the network classifies correctly, for a library whose users write this loop."""
    net.eval()
    return sum(int((net(x).argmax(1) == y).sum()) for x, y in zip(*(t.split(TEST_BATCH) for t in test), strict=True))


class Contest:
    """What a contestant uses: the work, and the report of what it has done."""

    def __init__(self, library: str) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        parser.add_argument("rest", nargs="*")
        args = parser.parse_args()
        self.folder, self.rest, self.work = args.folder.resolve(), args.rest, load_work(args.folder.resolve())
        self.round = 0
        self._versions = {"python": platform.python_version(), **{name: version(name) for name in (library, "torch")}}
        self._stage, self._turn = Stage(), 0
        self._timer = RoundTimer(self._stage)
        self._done: dict[str, int] = {}

    def begin(self) -> None:
        """Tell the versions when all is ready for the first round, and wait for it."""
        self._stage.tell(self._versions)
        self._timer.wait()

    def end_round(self, weights: Callable[[], Iterable[Tensor]], **done: int) -> None:
        """Count a round. weights: returns them in the order of the state_dict; done: steps, examples, correct, tested."""
        self.round += 1
        for name, number in done.items():
            self._done[name] = self._done.get(name, 0) + number

        def finish(seconds: float) -> dict[str, Any]:
            torch.save([w.detach().clone() for w in weights()], self.folder / f"{Path(sys.argv[0]).stem}-{self._turn}.pt")
            answer, self._done = {"seconds": seconds, **self._done}, {}
            self._turn += 1
            return answer

        self._timer.end_round(finish)
