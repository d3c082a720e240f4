"""The rows of an audit: those that a model was trained on, those that were held out, and how sure a model is of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmutual.core import Data
from fedmutual.data.draws import Index
from fedmutual.data.federation import Federation
from fedmutual.data.rows import Rows
from fedmutual.federation.evaluation import ROWS, forward_in_parts
from fedmutual.studies.audit.statistics import Scores


@dataclass(frozen=True)
class Pool:
    """All rows of one client for training or evaluation; training rows come first."""

    client: str
    rows: Rows
    members: int  # the first so many rows are training rows

    @property
    def index(self) -> Index:
        """Row numbers in the store [n]."""
        return self.rows.index


def make_pools(federation: Federation) -> list[Pool]:
    """Return the rows of each client; a held-out row that two clients share is in the first client's alone.

    A row that a client of the same store trains on is no held-out row of another client.
    """
    taken: dict[int, set[int]] = {}  # by store
    stores = {i: id(shares.validation.store) for i, shares in federation.clients.items()}
    for i, shares in federation.clients.items():
        taken.setdefault(stores[i], set()).update(shares.private.index.tolist())
    pools = []
    for i, shares in federation.clients.items():
        seen = taken[stores[i]]
        parts = [rows.index for rows in (shares.validation, shares.holdout) if rows is not None]
        held_out = [row for row in np.unique(np.concatenate(parts)).tolist() if row not in seen]
        seen.update(held_out)
        index = np.concatenate([shares.private.index, np.asarray(held_out, dtype=np.int64)])
        pools.append(Pool(i, shares.private.with_index(index), len(shares.private)))
    return pools


def is_member(pools: Sequence[Pool]) -> npt.NDArray[np.bool_]:
    """Return whether the run was trained on each row of these pools [N], one pool after the other."""
    return np.concatenate([np.arange(len(pool.rows)) < pool.members for pool in pools])


@dataclass(frozen=True)
class Confidence:
    """The confidence of a model on n rows: the larger a number, the surer the model is of the row.

    `loss` is the score of Yeom et al. 2018 (https://arxiv.org/abs/1709.01604), and `margin` is the score of Carlini et al.
    2022 (https://arxiv.org/abs/2112.03570).
    """

    loss: Scores  # [n]: minus the cross-entropy of the true class
    answers: Scores  # [n]: the logarithm of the largest probability
    margin: Scores  # [n]: the logarithm of the odds of the true class


@torch.inference_mode()
def compute_confidence(net: nn.Module, pools: Sequence[Pool], device: torch.device) -> Confidence:
    """Return how sure a network is of the rows of these pools, one after the other. The network is in eval mode."""
    parts = [_compute_batch(net, batch) for pool in pools for batch in _read_batches(pool.rows.to(device))]
    return Confidence(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))


def _read_batches(rows: Data) -> list[tuple[Tensor, ...]]:
    return [tuple(batch) for batch in rows.rows(torch.split(torch.arange(len(rows)), ROWS))]


def _compute_batch(net: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    x, y = batch
    log_p = forward_in_parts(net, x).double().log_softmax(1)
    true = log_p.gather(1, y[:, None])[:, 0]
    rest = log_p.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    return true, log_p.amax(1), true - rest
