"""FedH2L: mutual learning among peers, without a server, Algorithm 1.

Li et al., FedH2L: Federated Learning with Model and Statistical Heterogeneity, 2021, https://arxiv.org/abs/2101.11296.
N nodes, node i with its own network theta_i; E local steps an exchange; B public samples of C classes in a message. What is
called server here only forwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmutual.algorithms.agree import PUBLIC_BATCH, PUBLIC_LABELS, Agree, Compare, read_agreed_facts
from fedmutual.algorithms.peers import (
    PEER,
    Peering,
    choose_partners,
    compute_logits,
    find_flaw,
    get_members,
    get_owned_rows,
    list_senders,
    read_one_batch,
    select_peer_messages,
    swap_states,
)
from fedmutual.batches import draws
from fedmutual.core import (
    Algorithm,
    At,
    Batch,
    Client,
    Message,
    Net,
    OnlyIf,
    Public,
    Setting,
    Spec,
    Task,
    Unusable,
    from_training,
    get_target_kind,
    match_inputs,
    setting,
    within,
)
from fedmutual.gradients import conflict, pcgrad, project
from fedmutual.losses import Classification, kl

G_LOC = "g_loc."  # begins the names of the local gradients in a node's memory
LOCAL_DATA = {
    "private+all-public": ("private", "public"),
    "private+own-public": ("private", "own public"),
    "private": ("private",),
}


@dataclass(frozen=True, kw_only=True)
class FedH2L:
    """Peers teach each other by posteriors on a public seed set, without undoing what each learned by itself."""

    local_steps: int = from_training(1)  # E
    batch_size: int = from_training(128)  # of a local step
    public_batch: int = setting(32, PUBLIC_BATCH)  # B
    local_data: Literal["private+all-public", "private+own-public", "private"] | None = setting(
        None,
        "data of a local step; unset, private and all public data if labels are public, else private and own public data",
    )
    labels: bool = setting(True, PUBLIC_LABELS)
    kl: bool = setting(True, "nodes learn from the posteriors of their peers")
    confidence: bool = setting(
        True,
        "posteriors are weighted by the accuracy that the peer reports on the same examples",
        only_if=(OnlyIf("algorithm.kl", (True,), of=(False,)),),
    )
    projection: Literal["qp", "none", "pcgrad"] = setting(
        "qp", "how conflicting peer gradients are projected: the paper's method, none, or PCGrad"
    )
    peers: Literal["all", "pairs"] = setting(
        "all", "all nodes learn from all, or pairs are drawn in every round and the other nodes train alone"
    )
    pairs: float = setting(
        0.25,
        "the number of pairs divided by the number of nodes; 0.25 gives one pair among four nodes. The number of pairs is "
        "rounded up",
        only_if=(OnlyIf("algorithm.peers", ("pairs",)),),
    )
    optimizers: Literal[1, 2] = setting(1, "one optimiser for local and mutual steps, or one for each")
    eta: Setting | None = setting(None, "the learning rate of mutual steps; unset, the optimiser's")
    task: Task = from_training(Classification())

    def __post_init__(self) -> None:
        within("public_batch", self.public_batch, 1, float("inf"))
        if not 0 < self.pairs <= 0.5:
            raise ValueError(f"pairs must be above 0 and at most 0.5, a pair of every two nodes, not {self.pairs:g}")
        if self.eta is not None:
            within("eta", self.eta, 0, float("inf"))
        if not self.labels and self.local_data == "private+all-public":
            raise ValueError("local_data cannot be 'private+all-public' with labels = false: others' labels stay with them")
        if get_target_kind(self.task) != "classes":
            raise ValueError("fedh2l exchanges posteriors over classes, so training.task must be a task with classes")
        if not self.labels and not self.kl:
            raise ValueError("kl cannot be false with labels = false: nothing would be learned from peers")

    def algorithm(self) -> Algorithm:
        """Return the two phases of Algorithm 1; before round 1 all participants compare their public seed sets."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        data = self.local_data or ("private+all-public" if self.labels else "private+own-public")
        halves = (Local(**settings), Mutual(**settings))
        start = (Agree(self.labels), Compare())
        own_labels = self.confidence or data != "private"
        public = Public(self.labels, self.public_batch, True, self.peers == "pairs", own_labels=own_labels)
        return Algorithm("fedh2l", halves, start, public=public, trains_on=LOCAL_DATA[data], dp_ready=True)


class Local(FedH2L, Peering):
    """Lines 3 to 8: E local steps, then the node's posteriors on a batch of its own public data."""

    terms: ClassVar[tuple[str, ...]] = ("local", "projected")  # the share so far, also from a client that is in no exchange

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: positions int32 [B], posteriors float32 [B, C], accuracy float32 [].

        The reply has 4B + 4BC + 4 bytes.
        """
        b, c = self.public_batch, int(server["classes"])
        return {"index": (torch.int32, (b,)), "posterior": (torch.float32, (b, c)), "accuracy": (torch.float32, ())}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return E batches of the local data, inputs [B, ...] and targets [B]."""
        data = client.data["private"]
        plan = draws(len(data), self.local_steps, self.batch_size, at.rng(client.id, "batches"))
        return data.rows(plan, at.rng(client.id, "augment"))

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean cross-entropy (eq. 1), a scalar."""
        x, y = batch
        return {"local": self.task.fit(nets["personal"](x), y)}

    def edit(self, grads: Message, memory: Message) -> tuple[Message, Message]:
        """Return the gradients unchanged, and the memory with them added to g_loc, the sum since the last exchange."""
        if self.projection == "none":
            return grads, memory
        return grads, {**memory, **{G_LOC + k: memory.get(G_LOC + k, 0) + g for k, g in grads.items()}}

    def end(self, client: Client, at: At) -> Message:
        """Return positions [B], p_i [B, C] and Acc_i [] (a fraction) of a public batch; {} if no node receives it."""
        seeds = read_agreed_facts(client)
        receivers = (
            len(seeds.owners) > 1 if self.peers == "all" else choose_partners(seeds.owners, self.pairs, at)[client.id]
        )
        if not receivers:
            return {}
        own_rows = seeds.owners[client.id]
        index = own_rows.start + next(draws(len(own_rows), 1, self.public_batch, at.rng(client.id, "public")))
        x, y = read_one_batch(client.data["public"], index)
        z = compute_logits(client.nets["personal"], x)
        right = (z.argmax(-1) == y).float().mean() if self.confidence else torch.ones(())
        return {"index": index.int(), "posterior": z.softmax(-1).float(), "accuracy": right.float()}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """As `Peering.receive`.

        Raises:
            Unusable: a reply is not valid; see `find_flaw`.
        """
        owners = get_owned_rows(server)
        flaws = {i: why for i, reply in replies.items() if (why := find_flaw(reply, owners[i])) is not None}
        if flaws:
            raise Unusable(flaws)
        return super().receive(server, replies, at)


class Mutual(FedH2L, Peering):
    """Lines 9 to 15: one step towards the peers' posteriors, projected if the step would undo the local steps."""

    terms: ClassVar[tuple[str, ...]] = ("kl", "ce", "projected")

    @property
    def rate(self) -> Setting | None:
        """Return eta, the learning rate of mutual steps; None: the client's learning rate."""
        return self.eta

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the messages of the peers unchanged."""
        ids = get_members(server)
        return select_peer_messages(
            server, ids.keys() - {to} if self.peers == "all" else choose_partners(ids, self.pairs, at)[to]
        )

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Activate the second optimiser's state if mutual steps have their own; return no constants."""
        if self.optimizers == 2:
            swap_states(client)
        return {}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Yield one batch of all peers' samples, none without peers: x [M, ...], y [M], p_j [M, C] and Acc_j [M]."""
        peers = list_senders(inbox)
        if not peers:
            return
        index, p = (torch.cat([inbox[f"{j}{PEER}{k}"] for j in peers]) for k in ("index", "posterior"))
        weights = torch.cat([inbox[f"{j}{PEER}accuracy"].expand(len(inbox[f"{j}{PEER}index"])) for j in peers])
        x, y = read_one_batch(client.data["public"], index.long())
        yield x, y, match_inputs(p, x), match_inputs(weights, x)

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return KL_i and CE_i (eqs. 3 to 5), scalars.

        They are means over all samples, because all N - 1 peers send equally many samples.
        """
        x, y, p, acc = batch
        log_p = nets["personal"](x).log_softmax(-1)
        terms: dict[str, Tensor] = {}
        if self.kl:
            terms["kl"] = (acc * kl(p.clamp_min(torch.finfo(p.dtype).tiny).log(), log_p)).mean()
        if self.labels:
            terms["ce"] = self.task.fit(log_p, y)  # log-probabilities are logits too
        return terms

    def edit(self, grads: Message, memory: Message) -> tuple[Message, Message]:
        """Return g~ from g_pub and g_loc (eqs. 8 and 15), and the memory with g_loc = 0 and the share of projected steps."""
        if self.projection == "none":
            return grads, memory
        g_loc = {k.removeprefix(G_LOC): g for k, g in memory.items() if k.startswith(G_LOC)}
        reset_memory = {k: torch.zeros_like(v) if k.startswith(G_LOC) else v for k, v in memory.items()}
        is_conflict = conflict(grads, g_loc)
        done, hits = memory.get("exchanges", 0) + torch.ones_like(is_conflict), memory.get("conflicts", 0) + is_conflict
        edited = (project if self.projection == "qp" else pcgrad)(grads, g_loc)
        return edited, reset_memory | {"exchanges": done, "conflicts": hits, "projected": hits / done}

    def end(self, client: Client, at: At) -> Message:
        """Activate the first optimiser's state again; return {}."""
        if self.optimizers == 2:
            swap_states(client)
        return {}
