"""Losses of mutual learning. Logits z [B, C], targets y [B]; a name that begins with `log_` holds log-probabilities [B, C].

Deep mutual learning: Zhang et al. 2018, https://arxiv.org/abs/1706.00384; in federated learning: Shen et al. 2020,
https://arxiv.org/abs/2006.16765 (FML, eq. 5; temperature: eq. 3). Several labels: one binary divergence for each label, as
the logits distillation of Yang et al. 2023, https://arxiv.org/abs/2308.06453. Segmentation: the divergence of each pixel, as
the pixel-wise distillation of Liu et al. 2019, https://arxiv.org/abs/1903.04197.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedmutual import scores
from fedmutual.metric import ACCURACY, Metric, TargetKind


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) of each example [B]: the sum over classes of p (log p - log q). log_p, log_q [B, C].

    A p of zero counts as zero, whatever its logarithm; log_p may be -inf there.

    >>> import torch
    >>> p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> q = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    >>> kl(p.log(), q.log())
    tensor([0.0000, 0.6931])
    """
    return _kl_terms(log_p, log_q).sum(-1)


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return p (log p - log q) of each element, 0 where p is 0."""
    p = log_p.exp()
    return (p * (log_p - log_q)).masked_fill(p == 0, 0.0)


def bernoulli_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return KL(p || q) of each label, between Bernoulli distributions with these logits of any shape, in that shape.

    >>> import torch
    >>> bernoulli_kl(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
    tensor([0.0000, 0.1109])
    """
    p = p_logits.sigmoid()
    present = p * (F.logsigmoid(p_logits) - F.logsigmoid(q_logits))
    return present + (1 - p) * (F.logsigmoid(-p_logits) - F.logsigmoid(-q_logits))


def mutual(
    personal_logits: Tensor,
    meme_logits: Tensor,
    targets: Tensor,
    alpha: Tensor | float,
    beta: Tensor | float,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (personal_loss, meme_loss), both losses of deep mutual learning: scalars, means over the batch.

    personal_loss = alpha CE(personal) + (1 - alpha) T^2 KL(meme || personal)
    meme_loss     = beta  CE(meme)     + (1 - beta)  T^2 KL(personal || meme)

    The teacher in each KL is detached: each loss trains its own network only. At temperature T both softmaxes of the KL
    use z / T, and T^2 keeps its gradient's scale. personal_logits, meme_logits [B, C], targets [B] int64.

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765, eq. 5; the temperature: eq. 3.
    """
    log_p, log_m = _log_softmax(personal_logits), _log_softmax(meme_logits)  # [C, B]
    soft_p, soft_m = log_p, log_m
    if temperature != 1.0:
        soft_p, soft_m = _log_softmax(personal_logits / temperature), _log_softmax(meme_logits / temperature)
    scale = temperature * temperature / max(len(targets), 1)
    personal = alpha * F.nll_loss(log_p.t(), targets) + (1 - alpha) * scale * _kl_terms(soft_m.detach(), soft_p).sum()
    meme = beta * F.nll_loss(log_m.t(), targets) + (1 - beta) * scale * _kl_terms(soft_p.detach(), soft_m).sum()
    return personal, meme


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [C, B] of logits [B, C]: with the examples last, a softmax is four times as fast."""
    return logits.t().log_softmax(0)


MEAN_ABSOLUTE_ERROR = Metric("mean_absolute_error", "mean absolute error", is_fraction=False, is_higher_better=False)
MACRO_AUROC = Metric("auroc", "macro AUROC")
MEAN_DICE = Metric("dice", "Dice")


@dataclass(frozen=True)
class Classification:
    """The default task: outputs are logits [B, C], targets class indices int64 [B]."""

    tells: tuple[str, ...] = scores.DECLARED
    outputs: None = None
    targets: TargetKind = "classes"
    metric: Metric = ACCURACY

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy [] over the batch: output [B, C], target [B]."""
        return F.nll_loss(_log_softmax(output).t(), target)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []) of `mutual` of this module: personal, meme [B, C], target [B]."""
        return mutual(personal, meme, target, alpha, beta, temperature)

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_classification` over a whole data set: output [N, C], target [N]."""
        return scores.score_classification(output, target)


@dataclass(frozen=True)
class Regression:
    """Regression: outputs are numbers [B, 1], targets numbers [B]. Networks teach each other by their outputs."""

    tells: tuple[str, ...] = scores.OF_NUMBERS
    outputs: int = 1
    targets: TargetKind = "numbers"
    metric: Metric = MEAN_ABSOLUTE_ERROR

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error [] over the batch: output [B, 1], target [B]."""
        return F.mse_loss(output.squeeze(-1), target)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []): personal, meme [B, 1], target [B].

        As `mutual` of this module, with the squared distance to the other network's detached output in place of KL. The
        temperature has no meaning here and is not used.
        """
        return (
            alpha * self.fit(personal, target) + (1 - alpha) * F.mse_loss(personal, meme.detach()),
            beta * self.fit(meme, target) + (1 - beta) * F.mse_loss(meme, personal.detach()),
        )

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_regression` over a whole data set: output [N, 1], target [N]."""
        return scores.score_regression(output.squeeze(-1), target)


@dataclass(frozen=True)
class MultiLabel:
    """Several labels of one example, each present or absent: outputs are logits [B, L], targets 0 or 1, float32 [B, L]."""

    tells: tuple[str, ...] = scores.OF_LABELS
    outputs: None = None
    targets: TargetKind = "labels"
    metric: Metric = MACRO_AUROC

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross-entropy [], a mean over the batch and the labels: output, target [B, L]."""
        return F.binary_cross_entropy_with_logits(output, target)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []): personal, meme, target [B, L].

        As `mutual` of this module, with `bernoulli_kl` in place of KL. The divergence is a mean over the batch and the
        labels, as the loss on targets is. The teacher is detached.

        Source of the divergence: Yang et al., 2023, https://arxiv.org/abs/2308.06453.
        """
        scale, p, m = temperature * temperature, personal / temperature, meme / temperature
        return (
            alpha * self.fit(personal, target) + (1 - alpha) * scale * bernoulli_kl(m.detach(), p).mean(),
            beta * self.fit(meme, target) + (1 - beta) * scale * bernoulli_kl(p.detach(), m).mean(),
        )

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_multilabel` over a whole data set: output [N, L], target [N, L]."""
        return scores.score_multilabel(output, target)


@dataclass(frozen=True)
class Segmentation:
    """A class of each pixel: outputs are logits [B, C, H, W], targets classes int64 [B, H, W]."""

    tells: tuple[str, ...] = scores.OF_MASKS
    outputs: None = None
    targets: TargetKind = "masks"
    metric: Metric = MEAN_DICE

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy [], a mean over the batch and the pixels: output [B, C, H, W], target [B, H, W]."""
        return F.cross_entropy(output, target)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []) of `mutual` of this module, in which each pixel is an example.

        personal, meme [B, C, H, W], target [B, H, W].

        Source of the divergence: Liu et al., 2019, https://arxiv.org/abs/1903.04197.
        """
        personal, meme = (logits.movedim(1, -1).flatten(0, -2) for logits in (personal, meme))
        return mutual(personal, meme, target.flatten(), alpha, beta, temperature)

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_segmentation` over a whole data set: output [N, C, H, W], target [N, H, W]."""
        return scores.score_segmentation(output, target)
