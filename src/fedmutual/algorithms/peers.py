"""Exchange among peers: which peers meet, which rows belong to which peer, and the checks of received messages."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedmutual.batches import draws
from fedmutual.calling import Inputs, call_network
from fedmutual.core import Algorithm, At, Batch, Client, Data, Message, Net, Phase, Spec, Unusable
from fedmutual.optimizers import reset_state

MEMBER = "rows of "  # begins the names of what all know of each member
FORM = "form of "  # begins the names of what all know of a proxy's tensors: their types and shapes
STATE = "state."  # begins the names of an optimiser's second state in a client's memory
PEER = "/"  # between a sender's id, which has none, and the name of a tensor
NO_POSTERIORS = "its posteriors are not finite numbers of at least 0 that sum to 1"
_TOLERANCE = 1e-3  # of the sum of a posterior: float32, and classes by the thousand


class Peering(Phase):
    """A phase among peers: by default it trains nothing and sends nothing, and the relay forwards its replies once."""

    def leaves(self, server: Message) -> Spec:
        """Return {}: nothing leaves the client."""
        return {}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return {}: nothing is sent."""
        return {}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return no batches: the phase trains nothing."""
        return ()

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return no loss terms."""
        return {}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the public facts of the server state, and all replies, to be forwarded in the next phase."""
        return {k: v for k, v in server.items() if PEER not in k} | make_forwarded_message(replies)


def is_peer_to_peer(algorithm: Algorithm) -> bool:
    """Return whether participants send messages to each other, because no phase needs a server that computes."""
    return all(isinstance(phase, Peering) for phase in algorithm.phases)


def make_agreed_state(owners: Mapping[str, range], classes: int) -> Message:
    """Return the public facts about the seed set, for participants and relay: the number of classes, and each member's rows.

    owners: member -> its rows in the seed set, in the order of the rows.
    """
    return {"classes": torch.tensor(classes)} | {f"{MEMBER}{i}": torch.tensor(len(rows)) for i, rows in owners.items()}


def make_proxy_state(ids: Iterable[str], classes: int, first: Message) -> Message:
    """Return the public facts of a federation of proxies: the participants, and the tensors (dtype, shape) of a proxy."""
    return make_agreed_state(dict.fromkeys(ids, range(0)), classes) | {f"{FORM}{k}": v for k, v in first.items()}


def get_proxy_tensors(server: Message) -> Message:
    """Return the tensors of a proxy by name; only their dtypes and shapes matter."""
    return {k.removeprefix(FORM): v for k, v in server.items() if k.startswith(FORM)}


def get_members(server: Message) -> dict[str, int]:
    """Return member -> the number of its rows in the public seed set."""
    return {k.removeprefix(MEMBER): int(v) for k, v in server.items() if k.startswith(MEMBER)}


def get_owned_rows(server: Message) -> dict[str, range]:
    """Return member -> the positions of its rows in the public seed set."""
    owners, start = {}, 0
    for i, rows in get_members(server).items():
        owners[i] = range(start, start := start + rows)
    return owners


def choose_partners(ids: Iterable[str], pairs: float, at: At) -> dict[str, tuple[str, ...]]:
    """Return participant -> its partner in this round, in all phases: a tuple of one participant, or ().

    ids: all members; each member computes the same pairs. pairs: the number of pairs for each node, rounded up.
    """
    member_ids, first_phase = sorted(ids), replace(at, phase=0)
    order = sorted(member_ids, key=lambda i: torch.rand((), generator=first_phase.rng("pairs", i)).item())
    count = min(math.ceil(pairs * len(order) - 1e-9), len(order) // 2)
    drawn = [(order[2 * n], order[2 * n + 1]) for n in range(count)]
    return dict.fromkeys(member_ids, ()) | {i: (j,) for pair in drawn for i, j in (pair, pair[::-1])}


def list_senders(messages: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the senders of forwarded messages, sorted."""
    return tuple(sorted({k.partition(PEER)[0] for k in messages if PEER in k}))


def make_forwarded_message(replies: Mapping[str, Message]) -> Message:
    """Return the messages of all senders as one message, each name with its sender."""
    return {f"{i}{PEER}{k}": v for i, reply in replies.items() for k, v in reply.items()}


def select_peer_messages(server: Message, peers: Collection[str]) -> Message:
    """Return the forwarded messages of these senders, unchanged."""
    return {k: v for k, v in server.items() if k.partition(PEER)[0] in peers}


def find_flaw(reply: Message, owned_rows: range) -> str | None:
    """Return the fault of a peer's message, as one clause; None for a valid message.

    owned_rows: the positions of the sender's rows in the public seed set. A peer may send only its own rows, each once,
    because the accuracy that it reports weights all rows of its message, and a row of another peer would get a wrong weight.
    An accuracy in [0, 1] is accepted: only the sender can compute it.
    """
    index = reply["index"].tolist()
    if not are_posteriors(reply["posterior"]):
        return NO_POSTERIORS
    if not 0 <= reply["accuracy"].item() <= 1:
        return "its accuracy is not between 0 and 1"
    if not all(i in owned_rows for i in index):
        return "it contains an index that is not of one of its own public examples"
    return "it contains an index twice" if len(set(index)) < len(index) else None


def are_posteriors(p: Tensor) -> bool:
    """Return whether the rows of p [B, C] are posteriors: finite numbers of at least 0 that sum to 1."""
    return bool(p.isfinite().all() and (p >= 0).all() and ((p.sum(-1) - 1).abs() <= _TOLERANCE).all())


def require_posteriors(sent: Mapping[str, Tensor]) -> None:
    """Raise Unusable for each sender whose tensor [..., C] does not hold posteriors."""
    if flaws := {i: NO_POSTERIORS for i, p in sent.items() if not are_posteriors(p)}:
        raise Unusable(flaws)


def read_one_batch(data: Data, index: Tensor) -> Batch:
    """Return the batch of one index tensor [B].

    Raises:
        DataError, Refused: as `Data.rows`.
    """
    (batch,) = data.rows([index])
    return batch


def draw_public_batch(client: Client, size: int, at: At) -> Batch:
    """Return the public batch of the round, equal at all participants: inputs [B, ...] and targets [B].

    Raises:
        DataError: a row cannot be read.
    """
    public = client.data["public"]
    return read_one_batch(public, next(draws(len(public), 1, size, replace(at, phase=0).rng("public"))))


def compute_logits(net: nn.Module, x: Inputs) -> Tensor:
    """Return a net's logits [B, C] for x, in eval mode and without gradient; the net returns to its earlier mode."""
    before = net.training
    with torch.no_grad():
        z = call_network(net.eval(), x)
    net.train(before)
    return z


def swap_states(client: Client) -> None:
    """Exchange the optimiser's state with the second state in the client's memory, which starts as never stepped."""
    if "personal" not in client.optimizers:  # it is frozen
        return
    optimizer, params = client.optimizers["personal"], dict(client.nets["personal"].named_parameters())
    active = {
        f"{STATE}{name}.{key}": value.clone()
        for name, p in params.items()
        for key, value in optimizer.state.get(p, {}).items()
    }
    reset_state(optimizer)
    for name, stored in client.memory.items():
        if name.startswith(STATE):
            of, _, key = name.removeprefix(STATE).rpartition(".")
            like = params[of] if stored.shape == params[of].shape else stored  # a fused optimiser needs one layout
            optimizer.state[params[of]].setdefault(key, torch.empty_like(like, dtype=stored.dtype)).copy_(stored)
    client.memory = {k: v for k, v in client.memory.items() if not k.startswith(STATE)} | active
