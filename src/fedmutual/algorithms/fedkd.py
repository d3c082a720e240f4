"""FedKD: a large personal model and a small shared model teach each other; better models teach each other more.

Wu et al., Communication-efficient federated learning via knowledge distillation, 2022, https://arxiv.org/abs/2108.13323,
section "Methods". The mentor is the personal model, the mentee the meme; h are the inputs of their last layers. A client
sends the update of the mentee as low-rank factors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmutual.algorithms.class_means import fit_features
from fedmutual.algorithms.fork import Fork
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Setting, Spec, get_target_kind, setting, within
from fedmutual.losses import kl

W = "w."  # begins the names of the received weights in a client's memory, during a round
LEFT, RIGHT = "left.", "right."  # begin the names of an update's factors [m, r] and [r, n]


@dataclass(frozen=True, kw_only=True)
class FedKD(Fork):
    """A large personal model and a small shared model teach each other; updates of the small model are sent compressed.

    Both networks minimise this sum together; CE_t and CE_s are the cross-entropies of mentor and mentee:

    `CE_t + CE_s + (KL(p_s || p_t) + KL(p_t || p_s) + 2 |h_t - h_s|^2) / (CE_t + CE_s)`

    The squared norm is the mean of squares over the mentee's features; the mentor's are averaged into as many. A matrix
    [m, n] of the update is sent as factors of its best approximation of rank r = ceil(rank min(m, n)), if these are smaller.
    The paper sends as many singular values as hold a share T of the sum of squares, from 0.95 to 0.98 over the rounds:
    `energy = { start = 0.95, end = 0.98 }`. Their number depends on private rows, which the shape of a reply may not, so r
    values are declared, and those beyond T are zeros: `energy` changes the update, not its bytes. The paper also compresses
    the mean that the server sends; here it is sent in full.
    """

    rank: float = setting(
        0.25, "the share of an update's singular values that is sent, above 0 and up to 1; 1: updates are not compressed"
    )
    energy: Setting = setting(
        1.0,
        "T, a share of the sum of squares: the largest singular values stay until their squares sum to more; the others "
        "that `rank` sends are zeros; 0 to 1",
    )
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")
    terms: ClassVar[tuple[str, ...]] = ("personal", "meme", "distillation", "hidden")

    def __post_init__(self) -> None:
        if not 0 < self.rank <= 1:
            raise ValueError(f"rank must be above 0 and at most 1, not {self.rank:g}")
        within("energy", self.energy, 0, 1)
        if get_target_kind(self.task) != "classes":
            raise ValueError("fedkd teaches by posteriors over classes, so training.task must be a task with classes")

    def algorithm(self) -> Algorithm:
        """Return Fork's phases with the features of both networks; the server restores the compressed replies."""
        return replace(super().algorithm(), features=("personal", "meme"), restore=restore_model, needs_labels=True)

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: the factors [m, r] and [r, n] of each compressed update; each other tensor in full."""
        declared: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for k, v in server.items():
            r = choose_rank(v, self.rank)
            if r is None:
                declared[k] = (v.dtype, tuple(v.shape))
            else:
                declared |= {LEFT + k: (v.dtype, (len(v), r)), RIGHT + k: (v.dtype, (r, v.numel() // len(v)))}
        return declared

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model and store its weights: the reply is the difference from them. Return no constants."""
        super().begin(client, inbox, at)
        state = client.nets["meme"].state_dict()
        received = {W + k: state[k].clone() for k in client.shared if choose_rank(state[k], self.rank) is not None}
        client.memory = {**client.memory, **received}
        return {}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the loss terms, scalars; one forward pass of each network on one batch, and each term trains both."""
        x, y = batch
        (h_t, z_t), (h_s, z_s) = nets["personal"].features(x), nets["meme"].features(x)
        ce_t, ce_s = self.task.fit(z_t, y), self.task.fit(z_s, y)
        log_t, log_s = z_t.log_softmax(-1), z_s.log_softmax(-1)
        taught = (kl(log_s, log_t) + kl(log_t, log_s)).mean() / (ce_t + ce_s)
        hidden = 2 * F.mse_loss(fit_features(h_t, h_s.shape[1]), h_s) / (ce_t + ce_s)
        return {"personal": ce_t, "meme": ce_s, "distillation": taught, "hidden": hidden}

    def end(self, client: Client, at: At) -> Message:
        """Return the update of the mentee in factors, and delete the stored weights."""
        reply: Message = {}
        for k, v in super().end(client, at).items():
            received = client.memory.get(W + k)
            reply |= {k: v} if received is None else factorize(k, v - received, self.rank, at.number(self.energy))
        client.memory = {k: v for k, v in client.memory.items() if not k.startswith(W)}
        return reply

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the unweighted mean of the restored models, or the result of the rule of `[server]`.

        Raises:
            Unusable: a restored model cannot be summed in fixed point (server.sum = "fixed").
        """
        return super().receive(server, {i: restore_model(server, reply) for i, reply in replies.items()}, at)


def choose_rank(tensor: Tensor, rank: float) -> int | None:
    """Return the rank of an update's factors; None if the factors are not smaller, or the tensor is not a real matrix.

    tensor: [M, ...]; with more than two dimensions it counts as a matrix [M, product of the others].
    rank: the share of the full rank min(M, N) to keep.
    """
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return None
    m, n = len(tensor), tensor.numel() // len(tensor)
    r = math.ceil(rank * min(m, n))
    return r if r * (m + n) < m * n else None


def factorize(name: str, update: Tensor, rank: float, energy: float) -> Message:
    """Return the best approximation of an update with the rank of `choose_rank`, as two factors [m, r] and [r, n].

    Of the r components the fewest stay whose squared singular values sum to more than `energy` of the sum of all squares;
    the others are zeros.

    Source: FedKD, Wu et al., 2022, https://arxiv.org/abs/2108.13323, section "Methods".
    """
    r = choose_rank(update, rank)
    u, s, v = torch.linalg.svd(update.detach().cpu().flatten(1), full_matrices=False)
    sums = s.square().cumsum(0)
    is_large = torch.arange(len(s)) <= (sums <= energy * sums[-1]).sum()
    return {LEFT + name: u[:, :r] * (s * is_large)[:r], RIGHT + name: (v * is_large[:, None])[:r]}


def restore_model(server: Message, reply: Message) -> Message:
    """Return a client's model: the sent tensors, and the server's tensors plus the product of the sent factors."""
    full_tensors = {k: v for k, v in reply.items() if not k.startswith((LEFT, RIGHT))}
    learned = {k: v + (reply[LEFT + k] @ reply[RIGHT + k]).view_as(v) for k, v in server.items() if LEFT + k in reply}
    return {k: (full_tensors | learned)[k] for k in server}
