"""Scores of a network: of classes accuracy and more, of numbers the errors, of labels AUROC and F1, of masks Dice, of times
the concordance. Missing targets, -1 or NaN, are left out.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

FloatArray = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.integer]

Scores = dict[str, float | int | list[float | None] | None]
"""A score's name -> its value; None where it is undefined."""

# The names of all scores that a client may send, of classification and of other targets; `share.metrics` says which are sent
DECLARED = ("examples", "accuracy", "loss", "balanced_accuracy", "auroc", "majority", "recall")
OF_NUMBERS = ("examples", "loss", "mean_absolute_error", "r2")
OF_LABELS = ("examples", "loss", "auroc", "f1", "label_auroc")
OF_MASKS = ("examples", "loss", "dice", "pixel_accuracy", "class_dice")
OF_EACH_NUMBER = ("output_mean_absolute_error", "output_r2")
OF_RANKS = ("examples", "accuracy", "loss", "quadratic_kappa", "mean_absolute_error")
OF_RISKS = ("examples", "loss", "concordance")
OF_HAZARDS = (*OF_RISKS, "calibration")

LEAST_ROWS, DECIMALS = 50, 2
"""With `share.metrics = "accuracy"`: the fewest rows of an accuracy that is sent, and the decimals of its rounding."""
_EVENTS_AT_ONCE = 256  # whose pairs with all rows are in memory


def coarsen_accuracy(values: Scores, rows: int) -> Scores | None:
    """Return only the accuracy, a fraction in [0, 1] rounded to `DECIMALS`; None if it must not be sent.

    rows: the number of scored rows. Nothing is sent for fewer than `LEAST_ROWS` rows, nor for a task without accuracy,
    because an error in a target's units has no scale for rounding.
    """
    accuracy = values.get("accuracy")
    if not is_disclosed("accuracy", rows) or not isinstance(accuracy, int | float):
        return None
    return {"accuracy": round(float(accuracy), DECIMALS)}


def is_disclosed(metrics: str, rows: int) -> bool:
    """Return whether a client with this `share.metrics` sends an accuracy over this number of rows."""
    return metrics == "all" or (metrics == "accuracy" and rows >= LEAST_ROWS)


def find_finite_answers(output: Tensor) -> Tensor:
    """Return where a network's answers [N, ...] are finite: where the greatest of the outputs [N, C, ...] is finite.

    -inf beside finite outputs belongs to a finite answer: it rules out a class. NaN and +inf do not.
    """
    return output.amax(1).isfinite()


def drop_values(values: Scores) -> Scores:
    """Return the scores with None in place of each value but the number of examples."""
    return {name: value if name == "examples" else None for name, value in values.items()}


def score_classification(logits: Tensor, targets: Tensor) -> Scores:
    """Return the scores of logits [N, C] against targets [N]; fractions in [0, 1].

    accuracy (a row without a finite answer is wrong); loss (cross-entropy; None where logits overflow); balanced_accuracy
    (mean recall of the classes present); auroc (mean over the classes present of one against the rest; None where that is
    undefined); majority (the accuracy of always predicting the most frequent class); recall (one for each class, None for an
    absent class).
    """
    classes = logits.shape[1]
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    if not len(targets):
        return {name: 0 if name == "examples" else [None] * classes if name == "recall" else None for name in DECLARED}
    counts = torch.bincount(targets, minlength=classes).cpu().numpy()
    right = (logits.argmax(1) == targets) & find_finite_answers(logits)
    hits = torch.bincount(targets[right], minlength=classes).cpu().numpy()
    present = counts.nonzero()[0]
    recall = hits / np.maximum(counts, 1)
    loss = F.cross_entropy(logits, targets).item()
    return {
        "examples": len(targets),
        "accuracy": float(hits.sum() / len(targets)),
        "loss": loss if math.isfinite(loss) else None,
        "balanced_accuracy": float(recall[present].mean()),
        "auroc": _compute_auroc(logits.cpu().double().softmax(1).numpy(), targets.cpu().numpy(), counts),
        "majority": float(counts.max() / len(targets)),
        "recall": [float(recall[c]) if counts[c] else None for c in range(classes)],
    }


def _compute_auroc(p: FloatArray, y: IntArray, counts: IntArray) -> float | None:
    """Return the mean over the classes present of the area under the one-against-rest curve, from ranks (Mann-Whitney).

    p [N, C], y [N], counts [C]. `scipy.stats.rankdata` has the same ranks, and takes a second to import.
    """
    present = counts.nonzero()[0]
    if len(present) < 2 or not np.isfinite(p).all():
        return None
    areas = []
    for c, ordered in zip(present, np.sort(p[:, present], axis=0).T, strict=True):
        of_class, positive = p[y == c, c], counts[c]
        # twice the ranks of the class's rows from 1; rows with equal values share the mean of their ranks
        doubled = np.searchsorted(ordered, of_class) + np.searchsorted(ordered, of_class, side="right") + 1
        areas.append((doubled.sum() / 2 - positive * (positive + 1) / 2) / (positive * (len(y) - positive)))
    return float(np.mean(areas))


def score_ordinal(logits: Tensor, targets: Tensor) -> Scores:
    """Return the scores of logits [N, C] against targets [N] of classes in an order.

    accuracy (a fraction in [0, 1]; a row without a finite answer is wrong, because whether an accuracy is sent must not
    depend on one row); loss (cross-entropy; None where logits overflow); quadratic_kappa (the agreement with the targets
    beyond chance, weighted by the squared distance of classes, 1 at best; None where it is undefined); mean_absolute_error
    (of the most probable class, in classes). Where a row has no finite answer, the last three are None.

    Source: Cohen, 1968, https://doi.org/10.1037/h0026256.
    """
    from sklearn.metrics import cohen_kappa_score

    logits, targets = logits[targets >= 0], targets[targets >= 0]
    predicted, answered = logits.argmax(1), find_finite_answers(logits)
    accuracy = ((predicted == targets) & answered).double().mean().item() if len(targets) else None
    if not len(targets) or not answered.all():
        return {**dict.fromkeys(OF_RANKS), "examples": len(targets), "accuracy": accuracy}
    loss = F.cross_entropy(logits, targets).item()
    varies = bool((torch.cat([predicted, targets]) != targets[0]).any())
    kappa = cohen_kappa_score(targets.cpu().numpy(), predicted.cpu().numpy(), weights="quadratic") if varies else None
    return {
        "examples": len(targets),
        "accuracy": accuracy,
        "loss": loss if math.isfinite(loss) else None,
        "quadratic_kappa": None if kappa is None else round(float(kappa), 12),  # of 0 only the noise of rounding is left
        "mean_absolute_error": (predicted - targets).abs().double().mean().item(),
    }


def score_regression(output: Tensor, target: Tensor) -> Scores:
    """Return the scores of numbers [N] or [N, D] against targets of this shape, in the targets' units.

    loss (mean squared error); mean_absolute_error; r2 (the share of the targets' variance that is explained, 1 at best,
    below 0 if worse than always predicting their mean; None where all targets are equal). For several numbers the means over
    the numbers that have a score, and both scores of each number (output_mean_absolute_error, output_r2). None where outputs
    are not finite.
    """
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    y, out = (t.cpu().double().reshape(len(t), -1).numpy() for t in (target, output))
    by_number: dict[str, list[float | None]] = {"loss": [], "mean_absolute_error": [], "r2": []}
    for known, a, b in zip(np.isfinite(y).T, y.T, out.T, strict=True):
        a, b = a[known], b[known]
        is_scored = len(a) and np.isfinite(b).all()
        by_number["loss"].append(float(mean_squared_error(a, b)) if is_scored else None)
        by_number["mean_absolute_error"].append(float(mean_absolute_error(a, b)) if is_scored else None)
        by_number["r2"].append(float(r2_score(a, b)) if is_scored and len(np.unique(a)) > 1 else None)
    each = {f"output_{name}": [*by_number[name]] for name in ("mean_absolute_error", "r2")} if y.shape[1] > 1 else {}
    return {"examples": len(y), **{name: _average_known(values) for name, values in by_number.items()}, **each}


def _average_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def score_multilabel(logits: Tensor, targets: Tensor) -> Scores:
    """Return the scores of logits [N, L] against targets [N, L] of 0 and 1; fractions in [0, 1].

    loss (binary cross-entropy, mean over labels); auroc (mean of `label_auroc` over the labels that have one); f1 (mean over
    labels, at the threshold 0.5; 0 for a label that is neither present nor predicted); label_auroc (one for each label; None
    where all rows have the same value). None where an output is NaN or +inf.
    """
    from sklearn.metrics import f1_score, roc_auc_score

    y, z = (
        targets.cpu().double(),
        logits.cpu().double().clamp(min=torch.finfo(torch.float64).min),
    )  # so that -inf is a number
    known = y.isfinite()
    if not z.isfinite().all() or not known.any():
        return {"examples": len(y), "loss": None, "auroc": None, "f1": None, "label_auroc": [None] * y.shape[1]}
    labels = [(y[rows, k].long().numpy(), z[rows, k].numpy()) for k, rows in enumerate(known.T)]
    areas = [float(roc_auc_score(a, b)) if len(a) and 0 < a.mean() < 1 else None for a, b in labels]
    return {
        "examples": len(y),
        "loss": F.binary_cross_entropy_with_logits(z[known], y[known]).item(),
        "auroc": _average_known(areas),
        "f1": float(np.mean([f1_score(a, b > 0, zero_division=0) for a, b in labels if len(a)])),
        "label_auroc": [*areas],
    }


def score_segmentation(logits: Tensor, targets: Tensor) -> Scores:
    """Return the scores of logits [N, C, ...] against classes [N, ...]; fractions in [0, 1].

    loss (cross-entropy, mean over pixels); dice (mean of `class_dice` over the classes that have one); pixel_accuracy (the
    share of pixels with the right class); class_dice (for each class 2 |A and B| / (|A| + |B|) over the pixels of all
    examples, where A is predicted and B is true; None for a class that is neither). loss is None where logits overflow, and
    all are None where a pixel has no finite answer.

    Source: Dice, Measures of the amount of ecologic association between species, 1945, https://doi.org/10.2307/1932409.
    """
    classes, predicted = logits.shape[1], logits.argmax(1)
    known = targets >= 0
    if not find_finite_answers(logits).all() or not known.any():
        return {"examples": len(targets), "loss": None, "dice": None, "pixel_accuracy": None, "class_dice": [None] * classes}
    examples, loss = len(targets), F.cross_entropy(logits, targets, ignore_index=-1).item()
    predicted, targets = predicted[known], targets[known]
    counts = [torch.bincount(of.flatten(), minlength=classes) for of in (predicted, targets, targets[predicted == targets])]
    predictions, truths, hits = (count.tolist() for count in counts)
    dice = [2 * hits[c] / (predictions[c] + truths[c]) if predictions[c] + truths[c] else None for c in range(classes)]
    defined = [of_class for of_class in dice if of_class is not None]
    return {
        "examples": examples,
        "loss": loss if math.isfinite(loss) else None,
        "dice": sum(defined) / len(defined),
        "pixel_accuracy": sum(hits) / targets.numel(),
        "class_dice": [*dice],
    }


def score_survival(
    log_survival: Callable[[Tensor], Tensor], target: Tensor, loss: float, ends: Sequence[float] = ()
) -> Scores:
    """Return the scores of a survival model against targets (time, event) [N, 2].

    loss: as given; concordance (of the pairs of rows of which one has its event while the other is observed, the share in
    which the model gives the first the smaller probability of no event up to then; ties count one half; in [0, 1], None
    without a pair); calibration, if `ends` are given (for each of these times the observed share without an event, by Kaplan
    and Meier, minus the mean predicted probability; 0 at best; None after the last observation).

    log_survival: times [M] -> the logarithm of each row's probability of no event up to then [N, M], or what orders rows so.

    Source: Antolini et al., 2005, https://doi.org/10.1002/sim.2427; with proportional hazards it equals the index of Harrell
    et al., 1982, https://doi.org/10.1001/jama.1982.03320430047030.
    """
    time, event = target[:, 0], target[:, 1] > 0
    comparable = right = 0.0
    for rows in torch.split(event.nonzero().squeeze(1), _EVENTS_AT_ONCE):
        values, at = log_survival(time[rows]), time[rows]
        own = values[rows, torch.arange(len(rows), device=rows.device)]
        later = (time[:, None] > at) | ((time[:, None] == at) & ~event[:, None])
        comparable += later.sum().item()
        right += ((values > own) & later).sum().item() + 0.5 * ((values == own) & later).sum().item()
    is_finite = math.isfinite(loss)
    result: Scores = {"examples": len(target), "loss": loss if is_finite else None, "concordance": None}
    if comparable and is_finite:
        result["concordance"] = right / comparable
    if len(ends):
        stated = time.new_tensor(ends)
        expected = log_survival(stated).exp().mean(0)
        observed = _estimate_survival(time, event, stated)
        is_known = (stated <= time.max()) & expected.isfinite()
        gaps = (observed - expected).tolist()
        result["calibration"] = [gap if known else None for gap, known in zip(gaps, is_known.tolist(), strict=True)]
    return result


def _estimate_survival(time: Tensor, event: Tensor, at: Tensor) -> Tensor:
    """Return the share without an event up to the times `at` [M], of rows with a time [N] and an event or none [N].

    Source: Kaplan & Meier, 1958, https://doi.org/10.1080/01621459.1958.10501452.
    """
    moments, deaths = torch.unique(time[event], return_counts=True)
    at_risk = (time >= moments[:, None]).sum(1)
    shares = torch.cat([at.new_ones(1, dtype=torch.float64), (1 - deaths.double() / at_risk).cumprod(0)])
    return shares[torch.searchsorted(moments, at, right=True)]
