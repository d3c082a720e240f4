"""The networks of each client, and their weights before round 1."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedmutual import data, models
from fedmutual.config import Config, is_pooled
from fedmutual.core import At, Message
from fedmutual.data.federation import Space
from fedmutual.errors import ConfigError
from fedmutual.federation.workload import count_flops
from fedmutual.models import Weights
from fedmutual.models.splice import build_meme, list_shared_tensors

POOLED = "pooled"  # the one client of `centralised`

Pretrained = Mapping[tuple[str, str], Weights]
"""Initial weights by (client id, or "" for all clients; network name)."""


@dataclass(frozen=True)
class Networks:
    """The networks of an experiment, made from their own streams: the same whenever and wherever that is done."""

    config: Config
    data: data.Federation
    scores: tuple[str, ...]  # whose models the algorithm trains, as `Algorithm.scores`
    device: torch.device
    begun: Message | None = None  # what another run shared, where the server begins with that (model.weights)
    pretrained: Pretrained = field(default_factory=dict)  # taken along to where clients live: read once, alike everywhere

    @property
    def pooled(self) -> bool:
        """Whether one model is trained on the data of all clients together: `centralised`."""
        return is_pooled(self.config)

    @property
    def clients(self) -> tuple[str, ...]:
        """The ids of the clients that train."""
        return (POOLED,) if self.pooled else tuple(self.data.clients)

    @property
    def forks(self) -> bool:
        """Whether clients have a meme: a fork of the server's model, or a proxy."""
        return "global" in self.scores or "proxy" in self.scores

    @property
    def shares(self) -> bool:
        """Whether the shared network is used at all."""
        return self.forks or self.config.model.start == "server" or self.pooled

    @property
    def complete(self) -> bool:
        """Whether the server holds all tensors of the shared model."""
        return "global" in self.scores and len(self.crossing) == len(self.shared.state_dict())

    @cached_property
    def shared(self) -> nn.Module:
        """The shared architecture with the server's first weights, for the first client's inputs and classes."""
        net = self.whole(self.data.space)
        if self.begun is not None:
            _begin(net, self.begun, self._crossing(net), self.config.model.weights)
        return net

    @cached_property
    def crossing(self) -> tuple[str, ...]:
        """The names of the shared network's tensors that clients and server exchange."""
        return self._crossing(self.shared)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user about the shared network."""
        if not self.forks or self.config.model.batchnorm == "average" or _norms(self.shared):
            return ()
        return (f"network {self.config.model.shared!r} has no BatchNorm layer, so 'model.batchnorm' has no effect",)

    def state(self) -> Message:
        """The exchanged tensors, with the server's values before round 1."""
        state = self.shared.state_dict()
        return {k: state[k].detach().to("cpu", copy=True).contiguous() for k in self.crossing}

    def personal(self, client: str) -> str:
        """Return the name of a client's personal architecture."""
        listed = self.config.model.personal or (self.config.model.shared,)
        if self.pooled:
            return self.config.model.shared
        own = self.config.own(client).model.personal
        return own or listed[list(self.data.clients).index(client) if len(listed) > 1 else 0]

    def named(self, client: str) -> dict[str, tuple[str, str]]:
        """A client's nets: each one's architecture, and the key that names it."""
        shared, found = (self.config.model.shared, "model.shared"), {}
        if self.pooled:
            return {"personal": shared}
        if "personal" in self.scores:
            own = self.config.own(client).model.personal
            listed = "model.personal" if self.config.model.personal else "model.shared"
            found["personal"] = (self.personal(client), f"clients.{client}.model.personal" if own else listed)
        if self.forks:
            found["meme"] = shared
        return found

    def first_weights(self, client: str | None = None) -> str:
        """Return a description of the initial weights of a client's personal network; None: those of the shared network."""
        model = self.config.model
        if client is not None and model.start == "server":
            return "those of the shared network"
        if client is None and self.begun is not None:
            return f"the shared model of {model.weights}"
        found = self._weights(model.shared) if client is None else self._weights(self.personal(client), client)
        return found.said if found else "random weights"

    def whole(self, space: Space) -> nn.Module:
        """Return the complete shared architecture with the weights that all clients share."""
        at, name = At(self.config.seed, -1, self.config.rounds), self.config.model.shared
        return self._net(name, space, at.rng("model", "shared"), "model.shared", self._weights(name))

    def of(self, client: str) -> dict[str, nn.Module]:
        """Return a client's nets as they are before round 1, on its device."""
        nets = self._made(client)
        if self.config.model.start == "server" and "personal" in nets:
            try:
                nets["personal"].load_state_dict(self.shared.state_dict())
            except RuntimeError:
                raise ConfigError(
                    f"model.start = 'server': client {client!r} has the personal network {self.personal(client)!r}, which "
                    f"cannot start from the shared {self.config.model.shared!r}; use model.start = 'own'"
                ) from None
        if "personal" in nets and self.frozen("personal", client):
            nets["personal"].requires_grad_(False)
        return {name: self.placed(net) for name, net in nets.items()}

    def frozen(self, net: str, client: str) -> bool:
        """Return whether a client's net is frozen."""
        return net == "personal" and self.config.own(client).model.frozen

    def placed(self, net: nn.Module) -> nn.Module:
        """On its device; on a CPU with channels last in memory, which makes convolutions there 1.2 to 1.5 times as fast."""
        return net.to(memory_format=torch.channels_last) if self.device.type == "cpu" else net.to(self.device)

    def costs(self) -> dict[str, float]:
        """Return each client's floating-point operations for a forward pass of one example through all its networks."""
        counted, found = dict[tuple[str, Any], float](), {}
        for client in self.clients:
            networks, space = self.named(client).values(), self.space(client)
            about = (space.shape, space.outputs)
            for name, key in networks:
                if (name, about) not in counted:
                    counted[name, about] = count_flops(self._net(name, space, torch.Generator(), key), space.shape)
            found[client] = sum(counted[name, about] for name, _ in networks)
        return found

    def space(self, client: str) -> Space:
        """Return the inputs and outputs of a client's networks."""
        return self.data.space if self.pooled else self.data.spaces[client]

    def begin_with(self, kept: Pretrained) -> "Networks":
        """The same, beginning with what `model.pretrained`, and clients' own, say; unless that was kept.

        Raises:
            ConfigError: it cannot be read.
        """
        model, found = self.config.model, dict[tuple[str, str], Weights]()
        for id in self.clients:
            own = self.config.own(id).model.pretrained
            shared = {"shared": (model.shared, "model.shared")} if self.shares else {}
            for net, (name, _) in (self.named(id) | shared).items():
                mine = net == "personal" and own is not None
                source, who = own if mine else model.pretrained, (id if mine else "", name)
                if source is not None and who not in found:
                    key = f"clients.{id}.model.pretrained" if mine else "model.pretrained"
                    found[who] = kept.get(who) or models.weights(source, name, key)
        return replace(self, pretrained=found)

    def _made(self, id: str) -> dict[str, nn.Module]:
        at, nets = At(self.config.seed, -1, self.config.rounds), dict[str, nn.Module]()
        for net, (name, key) in self.named(id).items():
            if self.pooled:
                nets[net] = copy.deepcopy(self.shared)
            elif net == "meme":
                nets[net] = self._meme(id)
            else:
                nets[net] = self._net(name, self.space(id), at.rng(id, net), key, self._weights(name, id))
        return nets

    def _meme(self, id: str) -> nn.Module:
        """A client's fork: the shared architecture; or the shared part of it, with the client's own adaptor."""
        at, space = At(self.config.seed, -1, self.config.rounds), self.space(id)
        shared, own = at.rng("model", "shared"), at.rng(id, "adaptor")
        net = build_meme(self.config.model, space.shape, space.outputs, shared, own, self._weights(self.config.model.shared))
        if self.begun is not None:
            net.load_state_dict(net.state_dict() | self.state())
        return net

    def _crossing(self, net: nn.Module) -> tuple[str, ...]:
        """Which tensors cross: those of `model.part`; with `model.batchnorm = "local"` not those of BatchNorm layers."""
        model, state = self.config.model, net.state_dict()
        found = tuple(state) if model.part is None else list_shared_tensors(net, model.part, model.shared)
        if model.batchnorm == "average":
            return found
        left = tuple(k for k in found if not any(k.startswith(f"{n}.") for n in _norms(net)))
        if not left:
            raise ConfigError(
                f"nothing of network {model.shared!r} would cross, for model.batchnorm = 'local' keeps BatchNorm layers at "
                "home; share another part (model.part), or average them"
            )
        return left

    def _net(self, name: str, space: Space, rng: torch.Generator, key: str, weights: Weights | None = None) -> nn.Module:
        return models.build(name, space.shape, space.outputs, rng, key, weights)

    def _weights(self, name: str, client: str = "") -> Weights | None:
        """What a network begins with; of a client's own, if it names some."""
        return self.pretrained.get((client, name), self.pretrained.get(("", name)))


def _norms(net: nn.Module) -> list[str]:
    """Return the names of a network's BatchNorm layers."""
    return [n for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def _begin(net: nn.Module, state: Message, names: tuple[str, ...], run: Path | None) -> None:
    """Load the shared tensors of another run into a net.

    Raises:
        ConfigError: the other run shares a different network.
    """
    own = net.state_dict()
    odd = [k for k in names if k not in state or state[k].shape != own[k].shape] + [k for k in state if k not in names]
    if odd:
        shapes = (list(found[odd[0]].shape) if odd[0] in found else "none" for found in (state, own))
        raise ConfigError(
            f"key 'model.weights': {run} shares another network: {odd[0]!r} has the shape {next(shapes)} there and "
            f"{next(shapes)} here; give 'model.shared' and 'model.part' as that run has them, and its classes"
        )
    net.load_state_dict(own | state)
