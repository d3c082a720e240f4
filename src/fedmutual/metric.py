"""What a task declares about its targets and its scores. Nothing here imports torch, so that reports can read it."""

from dataclasses import dataclass
from typing import Literal

TargetKind = Literal["classes", "numbers", "labels", "masks"]
"""The targets of a task: a class of each example, int64 [B]; a number, float32 [B]; 0 or 1 for each label, float32 [B, L];
a class of each pixel, int64 [B, H, W]."""


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
