"""APFL: adaptive personalised federated learning, Algorithm 1: a mixture of a global model and a client's own.

Deng et al., Adaptive Personalized Federated Learning, 2020, https://arxiv.org/abs/2003.13461. w is the client's copy of the
global model, v its own weights, a its mixing weight; its personal model is the mixture a v + (1 - a) w.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.peers import read_one_batch
from fedmutual.batches import draws
from fedmutual.calling import call_network
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Setting, setting, within

V, MIX = "v.", "mix"  # of a client's memory: begins the names of v; a


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    """FedAvg, and beside it weights of each client's own; its model is a mixture of these and the shared ones.

    FedAvg trains w. v minimises f(a v + (1 - a) w), in which w is constant. Both take the same batches. mix = 1 is
    independent training beside FedAvg; mix = 0 makes each personal model the client's copy of FedAvg's model.
    """

    mix: Setting = setting(
        0.5,
        "the share of a client's own weights in its personal model, 0 to 1; with `adaptive`, the share in the first round",
    )
    adaptive: bool = setting(False, "each client learns its own mix by a gradient step in every round")
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")
    terms: ClassVar[tuple[str, ...]] = ("meme", "personal", MIX)

    def __post_init__(self) -> None:
        within("mix", self.mix, 0, 1)

    def algorithm(self) -> Algorithm:
        """Return the phases of a round; personal models need the shared model's architecture, so that they can be mixed."""
        return replace(super().algorithm(), alike=True)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model into w and the personal weights into v; return the mixing weight a [] of this round."""
        super().begin(client, inbox, at)
        personal = client.nets["personal"]
        personal_tensors = {k.removeprefix(V): v for k, v in client.memory.items() if k.startswith(V)}
        personal.load_state_dict(personal.state_dict() | personal_tensors)
        first = next(personal.parameters())
        a = client.memory.get(MIX, at.value(self.mix).to(first)) if self.adaptive else at.value(self.mix).to(first)
        client.memory = {**client.memory, MIX: self._adapt_mix(a, client, at) if self.adaptive else a}
        return {MIX: client.memory[MIX]}

    def _adapt_mix(self, a: Tensor, client: Client, at: At) -> Tensor:
        """Return a in [0, 1] after one step on one batch along <v - w, grad f(a v + (1 - a) w)>, which is df/da."""
        data, personal = client.data["private"], client.nets["personal"]
        x, y = read_one_batch(data, next(draws(len(data), 1, self.batch_size, at.rng(client.id, MIX))))
        v, w = (list_trained_parameters(client, net) for net in ("personal", "meme"))
        with torch.enable_grad():
            moving = a.detach().clone().requires_grad_()
            buffers = {k: b.clone() for k, b in personal.named_buffers()}  # BatchNorm's stay as they are
            output = call_network(personal, x, {**mix_weights(v, w, moving), **buffers})
            (slope,) = torch.autograd.grad(self.task.fit(output, y), moving)
        return (a - at.number(client.rate) * slope).clamp(0, 1)

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean losses of w and of the mixture, whose gradient reaches only v; scalars."""
        x, y = batch
        mixture = mix_weights(nets["personal"].params, nets["meme"].params, const[MIX])
        return super().loss(nets, batch, const) | {"personal": self.task.fit(nets["personal"](x, mixture), y)}

    def end(self, client: Client, at: At) -> Message:
        """Return the trained w; at the client, store v and set the personal net to the mixture of v and the trained w."""
        v, w = (list_trained_parameters(client, net) for net in ("personal", "meme"))
        client.memory = {**client.memory, **{V + k: p.detach().clone() for k, p in v.items()}}
        with torch.no_grad():
            for k, mixture in mix_weights(v, w, client.memory[MIX]).items():
                v[k].copy_(mixture)
        return super().end(client, at)


def list_trained_parameters(client: Client, net: str) -> Message:
    """Return name -> parameter of the client's net that is trained; a frozen parameter is equal in v, w and the mixture."""
    return {k: p for k, p in client.nets[net].named_parameters() if p.requires_grad}


def mix_weights(v: Mapping[str, Tensor], w: Mapping[str, Tensor], a: Tensor) -> Message:
    """Return name -> a v + (1 - a) w for each parameter of v, in the parameter's shape. a: []; w receives no gradient.

    Source: APFL, Deng et al., 2020, https://arxiv.org/abs/2003.13461, Algorithm 1.
    """
    return {k: a * p + (1 - a) * w[k].detach() for k, p in v.items()}
