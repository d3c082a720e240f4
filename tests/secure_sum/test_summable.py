"""Which algorithms a secure sum takes: their classes declare it."""

from dataclasses import dataclass
from typing import ClassVar

from fedmutual.algorithms import ALGORITHMS
from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.fork import is_summable

SUMMABLE = {
    "apfl",
    "ditto",
    "fedala",
    "fedavg",
    "fedbn",
    "fedopt",
    "fedper",
    "fedprox",
    "fedrep",
    "fml",
    "lg-fedavg",
    "moon",
}
SUMMABLE |= {"fedapen", "pfedme"}


@dataclass(frozen=True, kw_only=True)
class OtherLoss(FedAvg):
    def loss(self, nets, batch, const):
        return super().loss(nets, batch, const)


@dataclass(frozen=True, kw_only=True)
class OtherServer(FedAvg):
    def receive(self, server, replies, at):
        return server


class Mixin:
    def receive(self, server, replies, at):
        return server


@dataclass(frozen=True, kw_only=True)
class MixedServer(Mixin, FedAvg):
    pass


@dataclass(frozen=True, kw_only=True)
class DeclaredServer(OtherServer):
    sum_ready: ClassVar[bool] = True

    def receive(self, server, replies, at):
        return self.aggregate(replies, base=server)


def test_algorithms_that_average_a_shared_model_are_summable() -> None:
    phases = {name: kind().algorithm().phases for name, kind in ALGORITHMS.items()}
    assert {name for name, (phase, *others) in phases.items() if not others and is_summable(phase)} == SUMMABLE


def test_a_subclass_with_another_receive_declares_again_that_it_is_summable() -> None:
    assert [is_summable(kind()) for kind in (OtherLoss, OtherServer, MixedServer, DeclaredServer)] == [
        True,
        False,
        False,
        True,
    ]
