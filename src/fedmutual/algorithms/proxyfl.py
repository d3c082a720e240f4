"""ProxyFL: peers teach a proxy each, and hand the proxies on along a graph that changes, without a server.

Kalra et al., Decentralized federated learning through proxy model sharing, 2023, https://arxiv.org/abs/2111.11343,
Algorithm 1, without its claim of privacy: noise on the proxy alone is refused while the private model teaches the proxy
(docs/privacy-theory.md). K peers; t the round. What is called server here only forwards.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedmutual.aggregation import Aggregation, mean
from fedmutual.algorithms.fml import FML
from fedmutual.algorithms.fork import reset_optimizer_state
from fedmutual.algorithms.peers import (
    PEER,
    Peering,
    get_members,
    get_proxy_tensors,
    list_senders,
    make_forwarded_message,
    select_peer_messages,
)
from fedmutual.core import Algorithm, At, Client, Message, Spec, Unusable, run_field, setting

MASS = "mass"  # the push-sum weight of a proxy: float32 []
_LEAST = 1e-30  # of it, which halves whenever what was sent is lost


@dataclass(frozen=True, kw_only=True)
class ProxyFL(FML):
    """FML without a server: a proxy in the place of the meme, averaged with one other peer's in every round.

    In round t peer k sends to peer k + 2^(t mod (1 + floor(log2(K - 1)))), modulo K. It keeps the share a of its mass w; the
    proxy becomes (a w theta + (1 - a) w_j theta_j) / (a w + (1 - a) w_j), and the denominator its mass.
    """

    own_share: float = setting(
        0.5, "a, the share of a peer's own proxy in its next proxy, from 0 to below 1; 0: only the received proxy"
    )
    aggregate: Aggregation = run_field(Aggregation())  # unused: a peer mixes two proxies by their masses
    scores: ClassVar[tuple[str, ...]] = ("personal", "proxy")
    dp_ready: ClassVar[bool] = True  # a mass is computed from the rounds and the messages alone

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.own_share < 1:
            raise ValueError(f"own_share must be at least 0 and below 1, not {self.own_share:g}")

    def algorithm(self) -> Algorithm:
        """Return two phases: learn, then mix."""
        settings = dict(vars(self))
        return replace(super().algorithm(), phases=(Learn(**settings), Mix(**settings)))


class Learn(ProxyFL, Peering):
    """Both networks learn from private data and from each other; then the proxy and its mass are sent."""

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: the tensors of a proxy, and its mass []."""
        return {k: (v.dtype, tuple(v.shape)) for k, v in get_proxy_tensors(server).items()} | {MASS: (torch.float32, ())}

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Keep the mixed proxy with a fresh optimiser state; return alpha [] and beta [] of this round."""
        reset_optimizer_state(client, "meme")
        return {"alpha": at.value(self.alpha), "beta": at.value(self.beta)}

    def end(self, client: Client, at: At) -> Message:
        """Return theta and its mass w; keep the mass a w, whether the message arrives or not."""
        mass = get_mass(client)
        client.memory = {**client.memory, MASS: (self.own_share * mass).clamp(min=_LEAST)}
        return super().end(client, at) | {MASS: mass}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the server state together with all replies, to be forwarded.

        Raises:
            Unusable: a mass is negative, or more than K, the mass of all peers.
        """
        most = len(get_members(server))
        wrong = [i for i, reply in replies.items() if not 0 <= reply[MASS].item() <= most]
        if wrong:
            raise Unusable(dict.fromkeys(wrong, f"its mass is not between 0 and {most}, the number of peers"))
        return server | make_forwarded_message(replies)


class Mix(Peering, ProxyFL):
    """Mix the proxy of the preceding peer into the client's proxy."""

    terms: ClassVar[tuple[str, ...]] = ()

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the message of the preceding peer."""
        return select_peer_messages(server, find_sender(get_members(server), to, at.round))

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Set theta and w to the mixture; without a message both stay. Return no constants."""
        for j in list_senders(inbox):
            meme, own_mass = client.nets["meme"], get_mass(client)
            state, received_mass = meme.state_dict(), (1 - self.own_share) * inbox[f"{j}{PEER}{MASS}"].to(own_mass)
            own_proxy = {k: state[k].cpu() for k in client.shared}
            proxies = {client.id: own_proxy, j: {k: inbox[f"{j}{PEER}{k}"] for k in client.shared}}
            meme.load_state_dict(state | mean(proxies, {client.id: own_mass.item(), j: received_mass.item()}))
            client.memory = {**client.memory, MASS: own_mass + received_mass}
        return {}

    def end(self, client: Client, at: At) -> Message:
        """Return {}: nothing leaves the client."""
        return {}


def get_mass(client: Client) -> Tensor:
    """Return the mass w of the client's proxy: a tensor [], 1 at the start."""
    first = next(client.nets["meme"].parameters())
    return client.memory.get(MASS, torch.ones((), dtype=torch.float32, device=first.device))


def find_sender(ids: Iterable[str], peer: str, round: int) -> tuple[str, ...]:
    """Return the peer that sends to `peer` in this round, as a tuple of one id; () if there is no other peer.

    Source: ProxyFL, Kalra et al., 2023, https://arxiv.org/abs/2111.11343, Algorithm 1.
    """
    ordered = sorted(ids)
    if len(ordered) < 2:
        return ()
    hops = int(math.log2(len(ordered) - 1)) + 1
    return (ordered[(ordered.index(peer) - 2 ** (round % hops)) % len(ordered)],)
