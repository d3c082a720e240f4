"""Losses of mutual learning. Logits z [B, C], targets y [B]; a name that begins with `log_` holds log-probabilities [B, C].

Deep mutual learning: Zhang et al. 2018, https://arxiv.org/abs/1706.00384; in federated learning: Shen et al. 2020,
https://arxiv.org/abs/2006.16765 (FML, eq. 5; temperature: eq. 3).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmutual import scores


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each example: sum over classes of p (log p - log q). log_p, log_q [B, C] -> [B].

    A p of zero counts as zero, whatever its logarithm; log_p may be -inf there.

    >>> p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> q = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    >>> kl(p.log(), q.log())
    tensor([0.0000, 0.6931])
    """
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)


def mutual(
    personal_logits: Tensor,
    meme_logits: Tensor,
    targets: Tensor,
    alpha: Tensor | float,
    beta: Tensor | float,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Both losses of deep mutual learning, means over the batch -> (personal_loss, meme_loss), scalars.

    personal_loss = alpha CE(personal) + (1 - alpha) T^2 KL(meme || personal)
    meme_loss     = beta  CE(meme)     + (1 - beta)  T^2 KL(personal || meme)

    The teacher in each KL is detached: a loss moves its own network only. At temperature T both softmaxes of the KL
    use z / T, and T^2 keeps its gradient's scale. personal_logits, meme_logits [B, C], targets [B] int64.
    """
    log_p, log_m = personal_logits.log_softmax(-1), meme_logits.log_softmax(-1)
    soft_p, soft_m = log_p, log_m
    if temperature != 1.0:
        soft_p, soft_m = (personal_logits / temperature).log_softmax(-1), (meme_logits / temperature).log_softmax(-1)
    scale = temperature * temperature
    personal = alpha * F.nll_loss(log_p, targets) + (1 - alpha) * scale * kl(soft_m.detach(), soft_p).mean()
    meme = beta * F.nll_loss(log_m, targets) + (1 - beta) * scale * kl(soft_p.detach(), soft_m).mean()
    return personal, meme


@dataclass(frozen=True)
class Classification:
    """The default task: outputs are logits [B, C], targets class indices int64 [B]."""

    tells: tuple[str, ...] = scores.DECLARED
    outputs: None = None

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy over the batch, a scalar."""
        return F.cross_entropy(output, target)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss, meme loss) of `mutual` of this module, scalars."""
        return mutual(personal, meme, target, alpha, beta, temperature)

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_classification` over a whole data set: output [N, C], target [N]."""
        return scores.score_classification(output, target)


@dataclass(frozen=True)
class Regression:
    """Regression: outputs are numbers [B, 1], targets numbers [B]. Networks teach each other by their outputs."""

    tells: tuple[str, ...] = scores.OF_NUMBERS
    outputs: int = 1

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error over the batch, a scalar."""
        return F.mse_loss(output.squeeze(-1), target)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return both losses of `mutual` of this module, with the squared distance to the other's output in place of KL.

        The other's output is detached. The temperature has no meaning here and is not used.
        """
        return (
            alpha * self.fit(personal, target) + (1 - alpha) * F.mse_loss(personal, meme.detach()),
            beta * self.fit(meme, target) + (1 - beta) * F.mse_loss(meme, personal.detach()),
        )

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_regression` over a whole data set: output [N, 1], target [N]."""
        return scores.score_regression(output.squeeze(-1), target)
