"""What a model's probabilities are worth after training: a temperature, thresholds, and the distance from frequencies.

Rows that trained nothing and are no test rows fit temperature and thresholds; other rows show what these are worth.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmutual.errors import ConfigError, DataError
from fedmutual.metric import TargetKind
from fedmutual.results.estimate import compute_bootstrap_interval, compute_wilson_interval
from fedmutual.rundir.file_names import CALIBRATION
from fedmutual.rundir.record_files import read_calibrations, write_record
from fedmutual.rundir.schema import Calibration, Calibrations, Measured, Reliability
from fedmutual.studies.answering_model import AnsweringModel, OwnRows

BINS = 15  # of a reliability curve: Guo et al., On calibration of modern neural networks, 2017, arXiv 1706.04599
_FITTING = ("holdout", "validation")  # the first of these that has rows, none of which is a test row, fits
_WIDEST = 100.0  # the largest temperature, and the inverse of the smallest

Array = npt.NDArray[Any]


def calibrate(answering: AnsweringModel, sensitivity: float | None = None) -> Calibration:
    """Fit a temperature to a model's probabilities, and with `sensitivity` thresholds; write both into the run's folder.

    The rows are those of the model's client, or of all clients of a shared model: hold-out rows, or validation rows that are
    no test rows. `predict`, `score` and `export` of these weights use the result.

    Raises:
        UserError: the model states no probabilities, differential privacy covers it, or no row can fit.
    """
    _check_kind(answering, sensitivity)
    prepared, federation = answering.read_run_data()
    kinds = answering.list_own_rows(federation, prepared)
    fitting = next((k for k in _FITTING if k in kinds and not _overlap(kinds[k], kinds["test"])), None)
    if fitting is None:
        raise DataError(
            f"{answering.folder}: the run has no hold-out rows, and its validation rows are test rows, which must show "
            "the effect of a temperature; train with split.holdout = 0.1"
        )
    outputs, targets = answering.compute_own_outputs(kinds[fitting], prepared)
    temperature, loss = fit_temperature(answering.kind, outputs, targets)
    if temperature is None:
        raise DataError(
            f"{answering.folder}: no temperature is best for the {len(targets)} {fitting} rows, because the model is right "
            "about all of them, or knows nothing; train with more of them (split.holdout = 0.3)"
        )
    fitted = Calibration(
        client=answering.client,
        role=answering.role,
        round=answering.round,
        fitted_on=fitting,
        examples=len(targets),
        temperature=temperature,
        loss=loss,
        sensitivity=sensitivity,
    )
    if sensitivity is not None:
        decided = list_decisions(answering._replace(calibration=fitted), outputs, targets)
        thresholds = {name: _find_threshold(values, truths, sensitivity) for name, values, truths in decided}
        fitted = fitted.model_copy(update={"thresholds": thresholds})
    calibrated = answering._replace(calibration=fitted)
    shown = [kind for kind in ("test", "validation") if kind in kinds and kind != fitting]
    seen = [measure_reliability(calibrated, *answering.compute_own_outputs(kinds[kind], prepared), kind) for kind in shown]
    fitted = fitted.model_copy(update={"seen": tuple(one for one in seen if one is not None)})
    others = [c for c in read_calibrations(answering.folder) if c.identity != fitted.identity]
    write_record(answering.folder / CALIBRATION, Calibrations(models=(*others, fitted)))
    return fitted


def _check_kind(answering: AnsweringModel, sensitivity: float | None) -> None:
    """Raise ConfigError unless a temperature may be fitted to the model, and thresholds, if they are asked for."""
    if not answering.states_probabilities:
        raise ConfigError(
            f"{answering.folder}: a model of the task {answering.takes.task!r} states no probability of a class or "
            "label that a temperature could change; leave out --calibrate"
        )
    if answering.is_guaranteed:
        raise ConfigError(
            f"{answering.folder}: epsilon does not cover the rows that fit a temperature, but covers this model "
            f"(privacy.nets = {answering.config.privacy.nets!r}); leave out --calibrate"
        )
    if sensitivity is not None and (answering.kind == "masks" or not 0 < sensitivity <= 1):
        fix = "leave it out for masks, whose pixels are no independent examples"
        fix = fix if answering.kind == "masks" else "give a share of the rows of a class, above 0 and at most 1"
        raise ConfigError(f"--sensitivity {sensitivity:g}: {fix}")


def _overlap(first: OwnRows, second: OwnRows) -> bool:
    return any(len(np.intersect1d(rows.index, second[key].index)) for key, rows in first.items() if key in second)


def fit_temperature(kind: TargetKind, outputs: Tensor, targets: Tensor) -> tuple[float | None, tuple[float, float]]:
    """Return the temperature T with the smallest cross-entropy of outputs / T, and the cross-entropy before and after.

    outputs [N, C, ...]; targets [N, ...]; unknown targets are left out. The cross-entropy is convex in 1 / T: its slope is 0
    where it is smallest. None: nowhere between 1/100 and 100.
    """
    from scipy.optimize import brentq

    is_labels, logits = kind == "labels", outputs.double().clamp(min=-1e6)  # -inf rules a class out
    known = targets.isfinite() if is_labels else targets >= 0
    logits, y = (logits if is_labels else logits.movedim(1, -1))[known], targets[known]
    y, entropy = (y.double(), F.binary_cross_entropy_with_logits) if is_labels else (y, F.cross_entropy)

    def find_slope(inverse: float) -> float:
        factor = torch.tensor(inverse, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(entropy(factor * logits, y), factor)[0].item()

    before = entropy(logits, y).item()
    if not len(y) or find_slope(1 / _WIDEST) >= 0 or find_slope(_WIDEST) <= 0:
        return None, (before, before)
    inverse = float(brentq(find_slope, 1 / _WIDEST, _WIDEST, xtol=1e-14))
    return 1 / inverse, (before, entropy(inverse * logits, y).item())


def measure_reliability(answering: AnsweringModel, outputs: Tensor, targets: Tensor, rows: str) -> Reliability | None:
    """Return how far the probabilities of a model are from frequencies on some rows, and what its thresholds are worth.

    outputs [N, C, ...]: of the network, without the temperature. rows: their name. None: no target is known.
    """
    before, sums = (
        _sum_bins(answering.kind, model.compute_answers(outputs), targets)
        for model in (answering._replace(calibration=None), answering)
    )
    if not sums.any():
        return None
    interval = compute_bootstrap_interval(lambda chosen: compute_error(sums[chosen]), [np.arange(len(sums))], "basic")
    error, (low, high) = compute_error(sums), interval or (0.0, 1.0)  # resamples lie above it, at times all of them
    thresholds = answering.calibration.thresholds if answering.calibration else {}
    decided = list_decisions(answering, outputs, targets) if thresholds else ()
    return Reliability(
        rows=rows,
        examples=len(targets),
        error=(error, max(low, 0.0), min(max(high, error), 1.0)),
        uncalibrated=compute_error(before),
        bins=tuple((p / n, hits / n, int(n)) for n, p, hits in sums.sum(0).tolist() if n),
        decisions={name: _judge(thresholds[name], values, truths) for name, values, truths in decided},
    )


def _sum_bins(kind: TargetKind, answers: Tensor, targets: Tensor) -> Array:
    """Return of each row and bin how many probabilities are in it, their sum, and how many came true [N, BINS, 3].

    The probabilities are those of the predicted class of each row or pixel, or of each label. answers [N, C, ...].
    """
    known = targets.isfinite() if kind == "labels" else targets >= 0
    values, predicted = (answers, 1.0) if kind == "labels" else answers.max(1)
    p, right = values[known].numpy(), (targets == predicted)[known].numpy()
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], p)  # as sklearn.calibration.calibration_curve
    place = known.nonzero()[:, 0].numpy() * BINS + bins
    sums = [np.bincount(place, weights, len(targets) * BINS) for weights in (None, p, right)]
    return np.stack(sums, -1).reshape(len(targets), BINS, 3)


def compute_error(sums: Array) -> float:
    """Return the expected calibration error: the mean over probabilities of the gap of their bin.

    A gap is the distance of the mean probability from the frequency. sums [N, BINS, 3]: of some rows, how many probabilities
    are in each bin, their sum, and how many came true; NaN where no row has one. Source: Naeini et al., 2015,
    https://doi.org/10.1609/aaai.v29i1.9602.
    """
    count, values, hits = sums.sum(0).T
    return float(np.abs(values - hits).sum() / count.sum()) if count.sum() else float("nan")


def list_decisions(answering: AnsweringModel, outputs: Tensor, targets: Tensor) -> Iterator[tuple[str, Array, Array]]:
    """Yield (name, probabilities [M], truths [M]) of each class or label; of classes in an order "3 or above".

    Unknown targets are left out.
    """
    is_labels, names = answering.kind == "labels", answering.takes.classes
    values, known = answering.compute_answers(outputs), targets.isfinite() if is_labels else targets >= 0
    truths = targets if is_labels else F.one_hot(targets.clamp(min=0), len(names))
    if answering.takes.task == "ordinal":
        values, truths = (each.flip(1).cumsum(1).flip(1)[:, 1:] for each in (values, truths))
        names = tuple(f"{name} or above" for name in names[1:])
    for number, name in enumerate(names):
        rows = known[:, number] if is_labels else known
        yield name, values[rows, number].numpy(), truths[rows, number].numpy() > 0.5


def _find_threshold(values: Array, truths: Array, sensitivity: float) -> float | None:
    """Return the largest threshold that this share of the true rows reaches; None where all rows are true, or none is."""
    from sklearn.metrics import roc_curve

    if truths.all() or not truths.any():
        return None
    _, shares, thresholds = roc_curve(truths, values, drop_intermediate=False)
    return float(thresholds[np.argmax(shares >= sensitivity - 1e-12)])


def _judge(threshold: float | None, values: Array, truths: Array) -> tuple[Measured | None, Measured | None]:
    """Return the sensitivity and the specificity of a threshold; None where there is no row to decide."""

    def count(right: Array) -> Measured | None:
        return (right.mean(), *compute_wilson_interval(right.mean(), len(right))) if len(right) else None

    return (None, None) if threshold is None else (count(values[truths] >= threshold), count(values[~truths] < threshold))
