"""Losses of mutual learning. Logits z [B, C], targets y [B]; a name that begins with `log_` holds log-probabilities [B, C].

Deep mutual learning: Zhang et al. 2018, https://arxiv.org/abs/1706.00384; in federated learning: Shen et al. 2020,
https://arxiv.org/abs/2006.16765 (FML, eq. 5; temperature: eq. 3). Several labels: one binary divergence for each label, as
the logits distillation of Yang et al. 2023, https://arxiv.org/abs/2308.06453. Segmentation: the divergence of each pixel, as
the pixel-wise distillation of Liu et al. 2019, https://arxiv.org/abs/1903.04197. Survival: the divergence of the
distributions of the time of the event.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmutual import scores
from fedmutual.metric import ACCURACY, SCORES, Metric, TargetKind


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
    missing: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (personal_loss, meme_loss), both losses of deep mutual learning: scalars, means over the batch.

    personal_loss = alpha CE(personal) + (1 - alpha) T^2 KL(meme || personal)
    meme_loss     = beta  CE(meme)     + (1 - beta)  T^2 KL(personal || meme)

    The teacher in each KL is detached: each loss trains its own network only. At temperature T both softmaxes of the KL
    use z / T, and T^2 keeps its gradient's scale. personal_logits, meme_logits [B, C], targets [B] int64. missing: whether
    targets may be -1; CE is then a mean over the known targets, and KL over all examples.

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765, eq. 5; the temperature: eq. 3.
    """
    log_p, log_m = _log_softmax(personal_logits), _log_softmax(meme_logits)  # [C, B]
    soft_p, soft_m = log_p, log_m
    if temperature != 1.0:
        soft_p, soft_m = _log_softmax(personal_logits / temperature), _log_softmax(meme_logits / temperature)
    scale = temperature * temperature / max(len(targets), 1)
    personal = (
        alpha * _average(F.nll_loss, log_p.t(), targets, missing)
        + (1 - alpha) * scale * _kl_terms(soft_m.detach(), soft_p).sum()
    )
    meme = (
        beta * _average(F.nll_loss, log_m.t(), targets, missing)
        + (1 - beta) * scale * _kl_terms(soft_p.detach(), soft_m).sum()
    )
    return personal, meme


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [C, B] of logits [B, C]: with the examples last, a softmax is four times as fast."""
    return logits.t().log_softmax(0)


def _average(loss: Callable[..., Tensor], output: Tensor, target: Tensor, missing: bool) -> Tensor:
    """Return the mean [] of a loss of torch over the known targets, 0 without any.

    missing: whether targets may be -1 (classes) or NaN (numbers); else the loss is called as torch has it.
    """
    if not missing:
        return loss(output, target)
    known = find_known(target)
    return average_known(loss(output, target.where(known, 0), reduction="none"), known)


def find_known(target: Tensor) -> Tensor:
    """Return whether each target [...] is known: a class that is not -1, or a number that is not NaN."""
    return target.isfinite() if target.is_floating_point() else target >= 0


def average_known(values: Tensor, known: Tensor) -> Tensor:
    """Return the mean [] of the losses [...] of known targets; 0 without any."""
    return values.where(known, 0).sum() / known.sum().clamp(min=1)


@dataclass(frozen=True, repr=False)
class BuiltIn:
    """A task of fedmutual. An option that no key sets is not in the text of a task, which noise and engines depend on."""

    missing: bool = field(default=False, repr=False)  # whether some targets are missing (`data.unlabelled`)

    def __repr__(self) -> str:
        shown: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        named = (f"{f.name}={shown[f.name]!r}" for f in fields(self) if f.repr or shown[f.name] != f.default)
        return f"{type(self).__name__}({', '.join(named)})"

    def with_outputs(self, names: Sequence[str]) -> Self:
        """Return the task for outputs of these names, which the data determine."""
        return self


@dataclass(frozen=True, repr=False)
class Classification(BuiltIn):
    """The default task: outputs are logits [B, C], targets class indices int64 [B]."""

    tells: tuple[str, ...] = scores.DECLARED
    outputs: None = None
    targets: TargetKind = "classes"
    metric: Metric = ACCURACY

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy [] over the batch: output [B, C], target [B]."""
        return _average(F.nll_loss, _log_softmax(output).t(), target, self.missing)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []) of `mutual` of this module: personal, meme [B, C], target [B]."""
        return mutual(personal, meme, target, alpha, beta, temperature, self.missing)

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_classification` over a whole data set: output [N, C], target [N]."""
        return scores.score_classification(output, target)


@dataclass(frozen=True, repr=False)
class Segmentation(BuiltIn):
    """A class of each pixel: outputs are logits [B, C, ...], targets int64 [B, ...]; the sides ... are H, W or D, H, W."""

    tells: tuple[str, ...] = scores.OF_MASKS
    outputs: None = None
    targets: TargetKind = "masks"
    metric: Metric = SCORES["dice"]

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy [], a mean over the batch and the pixels: output [B, C, ...], target [B, ...]."""
        return _average(F.cross_entropy, output, target, self.missing)

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []) of `mutual` of this module, in which each pixel is an example.

        personal, meme [B, C, ...], target [B, ...].

        Source of the divergence: Liu et al., 2019, https://arxiv.org/abs/1903.04197.
        """
        personal, meme = (logits.movedim(1, -1).flatten(0, -2) for logits in (personal, meme))
        return mutual(personal, meme, target.flatten(), alpha, beta, temperature, self.missing)

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_segmentation` over a whole data set: output [N, C, ...], target [N, ...]."""
        return scores.score_segmentation(output, target)


class _ByDivergence(BuiltIn):
    """`mutual` by the loss on targets and a divergence from the other network's detached outputs."""

    has_temperature: ClassVar[bool] = True  # else a temperature has no meaning for the outputs, and is not used

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss [] on the targets of a batch."""
        raise NotImplementedError

    def diverge(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the divergence [] of the student from the teacher, a mean over the batch: outputs [B, ...]."""
        raise NotImplementedError

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []): as `mutual` of this module, with `diverge` in place of KL."""
        t = temperature if self.has_temperature else 1.0
        scale, p, m = t * t, personal / t, meme / t
        return (
            alpha * self.fit(personal, target) + (1 - alpha) * scale * self.diverge(m.detach(), p),
            beta * self.fit(meme, target) + (1 - beta) * scale * self.diverge(p.detach(), m),
        )


@dataclass(frozen=True, repr=False)
class Regression(_ByDivergence):
    """Regression: outputs are numbers [B, D], targets numbers [B, D], or [B] for one output."""

    tells: tuple[str, ...] = scores.OF_NUMBERS
    outputs: int = 1
    targets: TargetKind = "numbers"
    metric: Metric = SCORES["mean_absolute_error"]
    has_temperature: ClassVar[bool] = False

    def with_outputs(self, names: Sequence[str]) -> Self:
        """Return the task for one number for each name; several numbers have scores of their own, too."""
        return replace(self, outputs=len(names), tells=self.tells + scores.OF_EACH_NUMBER) if len(names) > 1 else self

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error [] over the batch and the outputs: output [B, D], target [B, D] or [B]."""
        return _average(F.mse_loss, output.reshape(target.shape), target, self.missing)

    def diverge(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the mean squared distance [] of the outputs [B, D]: networks teach each other by their outputs."""
        return F.mse_loss(student, teacher)

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_regression` over a whole data set: output [N, D], target [N, D] or [N]."""
        return scores.score_regression(output.reshape(target.shape), target)


@dataclass(frozen=True, repr=False)
class MultiLabel(_ByDivergence):
    """Several labels of one example, each present or absent: outputs are logits [B, L], targets 0 or 1, float32 [B, L]."""

    tells: tuple[str, ...] = scores.OF_LABELS
    outputs: None = None
    targets: TargetKind = "labels"
    metric: Metric = SCORES["auroc"]

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross-entropy [], a mean over the batch and the labels: output, target [B, L]."""
        return _average(F.binary_cross_entropy_with_logits, output, target, self.missing)

    def diverge(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return `bernoulli_kl` [], a mean over the batch and the labels, as the loss on targets is: logits [B, L].

        Source: Yang et al., 2023, https://arxiv.org/abs/2308.06453.
        """
        return bernoulli_kl(teacher, student).mean()

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_multilabel` over a whole data set: output [N, L], target [N, L]."""
        return scores.score_multilabel(output, target)


def compute_cumulative_logits(z: Tensor) -> Tensor:
    """Return the logits [..., C - 1] of y > 0, ..., y > C - 2, for the logits [..., C] of the classes.

    >>> compute_cumulative_logits(torch.tensor([0.5, 0.25, 0.25]).log())
    tensor([ 0.0000, -1.0986])
    """
    number = torch.arange(z.shape[-1], device=z.device)
    is_above = number > number[:-1, None]
    above, below = (z.unsqueeze(-2).masked_fill(mask, -torch.inf).logsumexp(-1) for mask in (~is_above, is_above))
    return above - below


@dataclass(frozen=True, repr=False)
class Ordinal(_ByDivergence):
    """Classes in an order, such as grades: outputs are logits [B, C], targets class indices int64 [B].

    The losses are those of `MultiLabel` for the C - 1 labels y > k: the binary cross-entropy, and the divergence, of the
    cumulative logits. So a network that is off by two classes has a greater loss than one that is off by one.

    Source of cumulative logits: McCullagh, 1980, https://doi.org/10.1111/j.2517-6161.1980.tb01109.x.
    """

    tells: tuple[str, ...] = scores.OF_RANKS
    outputs: None = None
    targets: TargetKind = "classes"
    metric: Metric = SCORES["quadratic_kappa"]

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross-entropy [], a mean over the batch and the thresholds: output [B, C], target [B]."""
        logits = compute_cumulative_logits(output)
        levels = (target.unsqueeze(-1) > torch.arange(logits.shape[-1], device=target.device)).to(logits.dtype)
        levels = levels.masked_fill((target < 0).unsqueeze(-1), torch.nan) if self.missing else levels
        return _average(F.binary_cross_entropy_with_logits, logits, levels, self.missing)

    def diverge(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return `bernoulli_kl` [] of the cumulative logits, a mean over the batch and the thresholds: logits [B, C]."""
        return bernoulli_kl(compute_cumulative_logits(teacher), compute_cumulative_logits(student)).mean()

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_ordinal` over a whole data set: output [N, C], target [N]."""
        return scores.score_ordinal(output, target)


@dataclass(frozen=True, repr=False)
class Survival(_ByDivergence):
    """The time of an event, by the hazards of K intervals: targets (time, event), float32 [B, 2]; outputs [B, K].

    The hazard of an interval is the probability of the event there, given none before. Its logit is the output minus
    log(K - k), k = 0, ..., K - 1, so that outputs of 0 give all intervals, and the time after the last, one probability.
    Within an interval the rate of events is constant, so that a row without an event that ends there counts by the fraction
    of the interval that it passed.

    Source: Gensheimer & Narasimhan, 2019, https://doi.org/10.7717/peerj.6257.
    """

    times: tuple[float, ...] = ()  # the ends of the intervals, increasing
    tells: tuple[str, ...] = scores.OF_HAZARDS
    outputs: None = None
    targets: TargetKind = "times"
    metric: Metric = SCORES["concordance"]

    def with_outputs(self, names: Sequence[str]) -> Self:
        """Return the task for intervals that end at these times."""
        return replace(self, times=tuple(map(float, names)))

    def _make_logits(self, output: Tensor) -> Tensor:
        count = output.shape[-1]
        return output - torch.arange(count, 0, -1, device=output.device, dtype=output.dtype).log()

    def _measure(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether times [...] lie in each interval, and the fraction of the interval that passed, both [..., K]."""
        ends, time = time.new_tensor(self.times), time.unsqueeze(-1)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        first = torch.arange(len(ends), device=ends.device) == 0
        return (time <= ends) & ((time > starts) | first), ((time - starts) / (ends - starts)).clamp(0, 1)

    def compute_log_survival(self, output: Tensor, time: Tensor) -> Tensor:
        """Return the log-probability [N, M] of no event up to the times [M], for outputs [N, K]."""
        return -F.softplus(self._make_logits(output)) @ self._measure(time)[1].T.to(output.dtype)

    def answer(self, output: Tensor) -> Tensor:
        """Return the probability [B, K] of no event up to the end of each interval: output [B, K]."""
        return (-self._make_logits(output)).sigmoid().log().cumsum(-1).exp()  # ONNX Runtime has no softplus of float64

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean negative log-likelihood [] over the batch: output [B, K], target [B, 2]."""
        logits, event = self._make_logits(output), target[..., 1:]
        is_in, passed = self._measure(target[..., 0])
        ends_here = event * is_in
        survived = F.softplus(logits) * passed * (1 - ends_here)
        return (survived - F.logsigmoid(logits) * ends_here).sum(-1).mean()

    def diverge(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return KL [] between the distributions of the event's interval, a mean over the batch: outputs [B, K].

        By the chain rule, the sum of `bernoulli_kl` of hazards, weighted by the teacher's probability of no event before.
        """
        p, q = self._make_logits(teacher), self._make_logits(student)
        log_before = -F.softplus(p).cumsum(-1) + F.softplus(p)
        return (log_before.exp() * bernoulli_kl(p, q)).sum(-1).mean()

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_survival` over a whole data set, with the loss of `fit`: output [N, K], target [N, 2]."""
        loss = self.fit(output.double(), target).item()
        return scores.score_survival(lambda t: self.compute_log_survival(output.double(), t), target, loss, self.times)


@dataclass(frozen=True, repr=False)
class Cox(_ByDivergence):
    """Proportional hazards: outputs are log hazard ratios [B, 1], targets (time, event), float32 [B, 2].

    The loss compares each event with the rows of its batch that are still observed at that time. So it is no mean over
    examples: the batch should hold many events, and a batch of one row teaches nothing. The loss leaves the hazard of the
    baseline open, so that outputs order rows by risk, without a probability at a time and without calibration.

    Source: Cox, 1975, https://doi.org/10.1093/biomet/62.2.269; ties as Breslow, 1974; in batches: Kvamme et al., 2019,
    https://jmlr.org/papers/v20/18-424.html.
    """

    tells: tuple[str, ...] = scores.OF_RISKS
    outputs: int = 1
    targets: TargetKind = "times"
    metric: Metric = SCORES["concordance"]
    has_temperature: ClassVar[bool] = False
    answers: ClassVar[str] = "the logarithm of the hazard ratio"
    is_mean: ClassVar[bool] = False  # whether the losses are means over the examples of a batch

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the negative log partial likelihood [] for each event of the batch: output [B, 1], target [B, 2]."""
        risk, time, event = output.squeeze(-1), target[..., 0], target[..., 1]
        is_at_risk = time.unsqueeze(-2) >= time.unsqueeze(-1)  # [B, B]: of event i, row j
        total = risk.unsqueeze(-2).masked_fill(~is_at_risk, -torch.inf).logsumexp(-1)
        return (event * (total - risk)).sum() / event.sum().clamp(min=1)

    def diverge(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the mean squared distance [] of the outputs [B, 1] minus their means: a common constant means nothing."""
        return F.mse_loss(student - student.mean(0), teacher - teacher.mean(0))

    def score(self, output: Tensor, target: Tensor) -> scores.Scores:
        """Return `score_survival` over a whole data set, with the loss of `fit`: output [N, 1], target [N, 2]."""
        has_events = bool((target[:, 1] > 0).any())  # else the partial likelihood is empty
        loss = self.fit(output.double(), target).item() if has_events else math.nan
        return scores.score_survival(lambda t: -output.double().expand(-1, len(t)), target, loss)
