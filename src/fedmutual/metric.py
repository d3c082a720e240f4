"""What a task declares about its targets and its scores. Nothing here imports torch, so that reports can read it."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

TargetKind = Literal["classes", "numbers", "labels", "masks", "times"]
"""The targets of a task: a class of each example, int64 [B]; numbers, float32 [B] or [B, ...]; 0 or 1 for each label,
float32 [B, L]; a class of each pixel, int64 [B, ...]; the time of an event or of the last observation, and 1 or 0 for an
event or none, float32 [B, 2]. A missing class is -1; a missing number or label is NaN."""


class KindRule(NamedTuple):
    """How targets of a kind are read, and what a network answers."""

    value: Literal["class", "label", "number"]  # the position of a name, int64; 0 or 1, float32; a number, float32
    unit: str  # what a target is, in messages
    answer: str  # for users

    @property
    def is_named(self) -> bool:
        """Return whether `data.classes` names the values, and not the data."""
        return self.value != "number"


KINDS: dict[TargetKind, KindRule] = {
    "classes": KindRule("class", "class", "the probability of each class"),
    "numbers": KindRule("number", "number", "the predicted number, in the unit of the targets"),
    "labels": KindRule("label", "label", "the probability of each label"),
    "masks": KindRule("class", "class", "the probability of each class"),
    "times": KindRule("number", "output", "the probability of no event up to each time, in the unit of the targets"),
}


@dataclass(frozen=True)
class Metric:
    """The main metric of a task: the score that verdicts and tables compare."""

    name: str  # the key of the score
    title: str  # in tables and sentences
    is_fraction: bool = True  # a number in [0, 1], which is shown in percent; else a number in `unit`
    is_higher_better: bool = True
    unit: str = ""

    @property
    def heading(self) -> str:
        """Return the title with a capital letter: "AUROC", "Mean absolute error"."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def sign(self) -> int:
        """Return 1 if a higher value is better, else -1."""
        return 1 if self.is_higher_better else -1

    @property
    def limit(self) -> float:
        """Return the greatest difference of two values: 1 if values are fractions, else infinity."""
        return 1.0 if self.is_fraction else math.inf

    @property
    def ends(self) -> tuple[float, float]:
        """Return the least and the greatest value that the score can have."""
        return (0.0, 1.0) if self.is_fraction else _ENDS.get(self.name, (-math.inf, math.inf))


def describe_undefined(metric: Metric, rows: str) -> str:
    """Return the sentence that a metric has no value on some rows. rows: what they are, as "the hold-out rows"."""
    return f"{metric.title} is undefined on {rows}, for example because they lack a label or an event"


ACCURACY = Metric("accuracy", "accuracy")
UNLABELLED = "no label"  # counted as the last class in partitions, splits and counts

SCORES = {
    metric.name: metric
    for metric in (
        ACCURACY,
        Metric("loss", "loss", is_fraction=False, is_higher_better=False),
        Metric("balanced_accuracy", "balanced accuracy"),
        Metric("majority", "most frequent class"),
        Metric("auroc", "macro AUROC"),
        Metric("f1", "macro F1"),
        Metric("dice", "Dice"),
        Metric("pixel_accuracy", "pixel accuracy"),
        Metric("concordance", "concordance"),
        Metric("quadratic_kappa", "quadratic weighted kappa", is_fraction=False),
        Metric("mean_absolute_error", "mean absolute error", is_fraction=False, is_higher_better=False),
        Metric("r2", "R2", is_fraction=False),
        Metric("recall", "recall"),
        Metric("label_auroc", "AUROC"),
        Metric("class_dice", "Dice"),
        Metric("calibration_error", "expected calibration error", is_higher_better=False),
        Metric("calibration", "observed minus predicted share without an event"),
        Metric("output_mean_absolute_error", "mean absolute error", is_fraction=False, is_higher_better=False),
        Metric("output_r2", "R2", is_fraction=False),
    )
}
"""The name of a score of the package's tasks -> how tables write it."""

PARTS = {"label_auroc": "label", "calibration": "time", "output_mean_absolute_error": "number", "output_r2": "number"}
"""The name of a score that is a list -> what has a number of its own; of other lists a class."""

_ENDS = {"quadratic_kappa": (-1.0, 1.0), "mean_absolute_error": (0.0, math.inf)}


def describe_score(name: str, main: Metric) -> Metric:
    """Return how tables write a score: by `SCORES`; a score of an own task as its main metric, without a unit."""
    return SCORES.get(name) or Metric(name, name.replace("_", " "), main.is_fraction)


def describe_part(name: str) -> tuple[str, str]:
    """Return what each number of a list of scores belongs to, "class" or "time", and the word between both: "of", "at"."""
    part = PARTS.get(name, "class")
    return part, "at" if part == "time" else "of"
