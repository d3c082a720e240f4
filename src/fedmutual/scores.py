"""Scores of a network: of classes accuracy and more, of numbers the errors, of labels AUROC and F1, of masks Dice."""

import math

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

LEAST_ROWS, DECIMALS = 50, 2
"""With `share.metrics = "accuracy"`: the fewest rows of an accuracy that is sent, and the decimals of its rounding."""


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

    p [N, C], y [N], counts [C]. All classes are ranked at once: a tenth of the time of a curve for each.
    """
    present = counts.nonzero()[0]
    if len(present) < 2 or not np.isfinite(p).all():
        return None
    from scipy.stats import rankdata  # a second to import, and only those who evaluate need it

    ranks = rankdata(p[:, present], axis=0)
    positive = counts[present]
    sums = np.where(y[:, None] == present, ranks, 0.0).sum(0)
    areas = (sums - positive * (positive + 1) / 2) / (positive * (len(y) - positive))
    return float(areas.mean())


def score_regression(output: Tensor, target: Tensor) -> Scores:
    """Return the scores of numbers [N] against targets [N], in the targets' units.

    loss (mean squared error); mean_absolute_error; r2 (the share of the targets' variance that is explained, 1 at best,
    below 0 if worse than always predicting their mean; None where all targets are equal). None where outputs are not finite.
    """
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    y, out = target.cpu().double().numpy(), output.cpu().double().numpy()
    if not np.isfinite(out).all():
        return {"examples": len(y), "loss": None, "mean_absolute_error": None, "r2": None}
    return {
        "examples": len(y),
        "loss": float(mean_squared_error(y, out)),
        "mean_absolute_error": float(mean_absolute_error(y, out)),
        "r2": float(r2_score(y, out)) if len(np.unique(y)) > 1 else None,
    }


def score_multilabel(logits: Tensor, targets: Tensor) -> Scores:
    """Return the scores of logits [N, L] against targets [N, L] of 0 and 1; fractions in [0, 1].

    loss (binary cross-entropy, mean over labels); auroc (mean of `label_auroc` over the labels that have one); f1 (mean over
    labels, at the threshold 0.5; 0 for a label that is neither present nor predicted); label_auroc (one for each label; None
    where all rows have the same value). None where an output is NaN or +inf.
    """
    from sklearn.metrics import f1_score, roc_auc_score

    y, z = (
        targets.cpu().long().numpy(),
        logits.cpu().double().clamp(min=torch.finfo(torch.float64).min),
    )  # so that -inf is a number
    if not z.isfinite().all():
        return {"examples": len(y), "loss": None, "auroc": None, "f1": None, "label_auroc": [None] * y.shape[1]}
    areas = [float(roc_auc_score(y[:, k], z[:, k])) if 0 < y[:, k].mean() < 1 else None for k in range(y.shape[1])]
    known = [area for area in areas if area is not None]
    return {
        "examples": len(y),
        "loss": F.binary_cross_entropy_with_logits(z, targets.cpu().double()).item(),
        "auroc": float(np.mean(known)) if known else None,
        "f1": float(np.mean([f1_score(y[:, k], z[:, k] > 0, zero_division=0) for k in range(y.shape[1])])),
        "label_auroc": [*areas],
    }


def score_segmentation(logits: Tensor, targets: Tensor) -> Scores:
    """Return the scores of logits [N, C, H, W] against classes [N, H, W]; fractions in [0, 1].

    loss (cross-entropy, mean over pixels); dice (mean of `class_dice` over the classes that have one); pixel_accuracy (the
    share of pixels with the right class); class_dice (for each class 2 |A and B| / (|A| + |B|) over the pixels of all
    examples, where A is predicted and B is true; None for a class that is neither). loss is None where logits overflow, and
    all are None where a pixel has no finite answer.

    Source: Dice, Measures of the amount of ecologic association between species, 1945, https://doi.org/10.2307/1932409.
    """
    classes, predicted = logits.shape[1], logits.argmax(1)
    if not find_finite_answers(logits).all():
        return {"examples": len(targets), "loss": None, "dice": None, "pixel_accuracy": None, "class_dice": [None] * classes}
    counts = [torch.bincount(of.flatten(), minlength=classes) for of in (predicted, targets, targets[predicted == targets])]
    predictions, truths, hits = (count.tolist() for count in counts)
    dice = [2 * hits[c] / (predictions[c] + truths[c]) if predictions[c] + truths[c] else None for c in range(classes)]
    defined = [of_class for of_class in dice if of_class is not None]
    loss = F.cross_entropy(logits, targets).item()
    return {
        "examples": len(targets),
        "loss": loss if math.isfinite(loss) else None,
        "dice": sum(defined) / len(defined),
        "pixel_accuracy": sum(hits) / targets.numel(),
        "class_dice": [*dice],
    }
