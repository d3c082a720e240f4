"""Predictions for new examples: the probability of each class or label, a number, or a class of each pixel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmutual.errors import RunError
from fedmutual.metric import KINDS, TargetKind
from fedmutual.studies.answering_model import AnsweringModel
from fedmutual.studies.example_files import read_examples
from fedmutual.studies.trained_run import choose_model


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for one example. `kind` says which of `ranked`, `numbers` and `mask` the model gives.

    "classes": one class each; "labels": any number of labels; "numbers": a regression; "masks": a class of each pixel;
    "times": survival.
    """

    example: str  # the image's path; of a table or of arrays "line 3 of rows.csv"
    model: str  # the model that predicted: "personal model of client '3' (cnn1), round 20"
    ranked: tuple[tuple[str, float], ...] = ()
    """Every class or label with its probability, of masks with its share of pixels, the greatest first; () for numbers."""
    numbers: tuple[float, ...] = ()  # of a model that learned numbers or times
    # of a segmentation, for each row of pixels the position of each pixel's class; of a volume, such rows for each layer
    mask: tuple[Any, ...] = ()
    kind: TargetKind = "classes"
    names: tuple[str, ...] = ()  # of several numbers
    thresholds: Mapping[str, float] = field(default_factory=dict)  # by label: fitted by `score --sensitivity`

    @property
    def label(self) -> str:
        """The most probable class or label; of masks the most frequent class. Raises RunError for numbers."""
        return self._get_most_probable()[0]

    @property
    def probability(self) -> float:
        """The probability of `label`; of masks its share of the pixels, in [0, 1]. Raises RunError for numbers."""
        return self._get_most_probable()[1]

    def _get_most_probable(self) -> tuple[str, float]:
        if not self.ranked:
            raise RunError(f"{self.example}: the {self.model} predicts numbers, no label; use `numbers`")
        return self.ranked[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Of several labels those that reach their threshold, 0.5 unless one was fitted, the most probable first."""
        return tuple(name for name, probability in self.ranked if probability >= self.thresholds.get(name, 0.5))


@torch.no_grad()
def predict(
    run_or_model: str | Path,
    files: str | Path | Sequence[str | Path],
    client: str | None = None,
    best: bool = False,
    trust_code: bool = False,
    ensemble: bool = False,
) -> list[Prediction]:
    """Return a prediction for each image, each row of a CSV file, or each `x` of an npz file, scaled as in training.

    run_or_model: a run's folder, or a model file in a run's folder.
    files: one file or several files.
    client: the client whose personal model answers; the shared model answers if it is None or has no personal model.
    best: whether the model of the best round answers, if the run has `records.keep_best`; else the last saved model answers.
    trust_code: whether to import the code that the run's folder names, as `Run` does.
    ensemble: whether the client's personal model and the shared model answer together, of a run with `records.ensemble`.

    Raises:
        UserError: there is no such model, or its code may not be imported; a file cannot be read or is not of the kind that
            the model learned from; or an output is not finite.
    """
    answering = choose_model(Path(run_or_model), client, best, trust_code, ensemble)
    predictions = list[Prediction]()
    for file in [files] if isinstance(files, str | Path) else files:
        for names, raw in read_examples(Path(file), answering):
            answers = answering.compute_answers(answering.compute_outputs(raw, names.__getitem__))
            predictions += [_make_prediction(name, answer, answering) for name, answer in zip(names, answers, strict=True)]
    return predictions


def _make_prediction(example: str, answer: Tensor, answering: AnsweringModel) -> Prediction:
    """Return the prediction of one example. answer: as `compute_answers` gives it, without the batch."""
    kind, classes = answering.kind, answering.takes.classes
    if not KINDS[kind].is_named:
        return Prediction(example, answering.description, numbers=tuple(answer.tolist()), kind=kind, names=answering.names)
    mask: tuple[Any, ...] = ()
    if kind == "masks":
        chosen = answer.argmax(0)
        mask = _make_tuples(chosen.tolist())
        answer = torch.bincount(chosen.flatten(), minlength=len(classes)) / chosen.numel()
    order = answer.argsort(descending=True, stable=True).tolist()
    ranked = tuple((classes[c], float(answer[c])) for c in order)
    fitted = answering.calibration.thresholds if answering.calibration else {}
    thresholds = {name: threshold for name, threshold in fitted.items() if threshold is not None}
    return Prediction(example, answering.description, ranked, mask=mask, kind=kind, thresholds=thresholds)


def _make_tuples(values: Any) -> Any:
    """Return lists in lists as tuples in tuples."""
    return tuple(map(_make_tuples, values)) if isinstance(values, list) else values
