"""Membership inference: does the model show whether a row was among its training rows?

An adversary computes a number for each row, and calls rows with a large number members. Two numbers are used: minus the loss
on the row's label (Yeom et al., 2018, https://arxiv.org/abs/1709.01604), and, for an adversary without labels who sees
posteriors, the largest class probability (Salem et al., 2019, https://arxiv.org/abs/1806.01246).
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from fedmutual.core import Data
from fedmutual.evaluation import forward_in_parts

ROWS = 2000  # the most members, and the most other rows, that an attack reads
_BATCH = 512
CONFIDENCE = 0.95


class Membership(NamedTuple):
    """How well an attack told members from other rows."""

    members: int  # rows of training data
    others: int  # rows that no training used
    auc: float  # the probability that a member has the larger number; 0.5: the attack is no better than a coin
    low: float  # of the 95 % interval of auc, by bootstrap over rows
    high: float
    caught: float  # the share of members that are recognised at a threshold that 1 % of other rows exceed

    @property
    def succeeds(self) -> bool:
        """Whether the interval lies above 0.5."""
        return self.low > 0.5


@torch.no_grad()
def compute_numbers(net: nn.Module, data: Data) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return of each row (at most `ROWS`) minus the loss on its label, and its largest class probability, both [N]."""
    net.eval()
    losses, probabilities = list[Tensor](), list[Tensor]()
    for x, y, *_ in data.rows(torch.split(torch.arange(min(len(data), ROWS)), _BATCH)):
        log_posteriors = forward_in_parts(net, x).log_softmax(-1).double()
        losses.append(-F.nll_loss(log_posteriors, y, reduction="none"))
        probabilities.append(log_posteriors.exp().amax(-1))
    return torch.cat(losses).cpu().numpy(), torch.cat(probabilities).cpu().numpy()


def measure(members: NDArray[np.float64], others: NDArray[np.float64], seed: int = 0) -> Membership:
    """Return how well numbers tell members [N] from other rows [M].

    seed: of the bootstrap.
    """
    auc = _compute_auc(members, others)
    found = stats.bootstrap(
        (members, others),
        _compute_auc,
        n_resamples=500,
        vectorized=False,
        method="percentile",
        confidence_level=CONFIDENCE,
        random_state=np.random.default_rng(seed),
    )
    low, high = (float(bound) for bound in found.confidence_interval)
    threshold = np.quantile(others, 0.99, method="higher")
    return Membership(len(members), len(others), auc, low, high, float((members > threshold).mean()))


def _compute_auc(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    labels = np.r_[np.ones(len(members)), np.zeros(len(others))]
    return float(roc_auc_score(labels, np.r_[members, others]))
