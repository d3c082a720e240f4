"""FedOpt: federated averaging whose server takes the mean update of the clients as a gradient of an adaptive optimiser.

Reddi et al., Adaptive Federated Optimization, 2021, https://arxiv.org/abs/2003.00295, Algorithm 2: FedAdam, FedYogi and
FedAdagrad. x are the server's weights, D the mean update of the clients, m and v its first and second moments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedmutual.aggregation import is_weight
from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.core import At, Message, Spec, above_zero, setting, within

FIRST, SECOND = "first moment ", "second moment "  # begin the names of m and v in the server's state


@dataclass(frozen=True, kw_only=True)
class FedOpt(FedAvg):
    """FedAvg whose server moves its weights by an adaptive optimiser along the clients' mean update.

    m = beta1 m + (1 - beta1) D; v by the kind; x = x + server_rate m / (sqrt(v) + tau). m begins as 0, and v as tau^2.
    There is no correction of the bias of m and v, as published. BatchNorm's statistics are averaged as in FedAvg.
    """

    kind: Literal["adam", "yogi", "adagrad"] = setting(
        "adam",
        "the server's optimiser: v = beta2 v + (1 - beta2) D^2 (adam), v - (1 - beta2) D^2 sign(v - D^2) (yogi), or "
        "v + D^2 (adagrad)",
    )
    server_rate: float = setting(0.01, "the learning rate of the server's optimiser, above 0")
    beta1: float = setting(0.9, "the decay of the mean of updates, 0 to 1; the paper has 0 with `adagrad`")
    beta2: float = setting(0.99, "the decay of the mean of squared updates, 0 to 1; without effect with `adagrad`")
    tau: float = setting(0.001, "the adaptivity: added to the root of the mean of squared updates, above 0")
    dp_ready: ClassVar[bool] = True  # the server computes from the mean of replies alone
    sum_ready: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            within(name, getattr(self, name), 0, 1)
        for name in ("server_rate", "tau"):
            above_zero(name, getattr(self, name))

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: that of FedAvg, without moments."""
        return super().leaves(take_model(server))

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the model; clients do not need the moments."""
        return take_model(server)

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the model and the moments after a step of the server's optimiser.

        Raises:
            Unusable: as `FedAvg.receive`.
        """
        if not replies:
            return server
        model = take_model(server)
        state = super().receive(model, replies, at)
        for k in filter(lambda k: is_weight(k, model[k]), model):
            update = state[k] - model[k]
            square = update.square()
            m = self.beta1 * server.get(FIRST + k, torch.zeros_like(update)) + (1 - self.beta1) * update
            v = server.get(SECOND + k, torch.full_like(update, self.tau**2))
            v = {
                "adam": self.beta2 * v + (1 - self.beta2) * square,
                "yogi": v - (1 - self.beta2) * square * (v - square).sign(),
                "adagrad": v + square,
            }[self.kind]
            state |= {k: model[k] + self.server_rate * m / (v.sqrt() + self.tau), FIRST + k: m, SECOND + k: v}
        return state


def take_model(server: Message) -> Message:
    """Return the server's state without the moments."""
    return {k: v for k, v in server.items() if not k.startswith((FIRST, SECOND))}
