"""What a task declares about its targets and its scores. Nothing here imports torch, so that reports can read it."""

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


ACCURACY = Metric("accuracy", "accuracy")
