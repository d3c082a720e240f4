"""Predictions for new examples: the probability of each class or label, a number, or a class of each pixel."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fedmutual.data import arrays, images, table
from fedmutual.data.encoding import parse_encoding
from fedmutual.data.examples import BadRows, convert_array, list_names
from fedmutual.data.objects import convert_features
from fedmutual.data.scaling import find_form
from fedmutual.data.table_file import SUFFIXES
from fedmutual.errors import DataError, RunError
from fedmutual.metric import TargetKind
from fedmutual.studies.answering_model import (
    ROWS_AT_ONCE,
    AnsweringModel,
    check_outputs,
    choose_model,
    choose_model_of_run,
    is_pixel_input,
    list_columns,
    make_scaler,
    scale_examples,
)
from fedmutual.studies.trained_run import Run

Learned = tuple[Sequence[str], Tensor]  # examples: what they are called, unscaled x [B, *shape]


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for one example. `kind` says which of `ranked`, `numbers` and `mask` the model gives.

    "classes": one class each; "labels": any number of labels; "numbers": a regression; "masks": a class of each pixel.
    """

    example: str  # the image's path; of a table or of arrays "line 3 of rows.csv"
    model: str  # the model that predicted: "personal model of client '3' (cnn1), round 20"
    ranked: tuple[tuple[str, float], ...] = ()
    """Every class or label with its probability, of masks with its share of pixels, the greatest first; () for numbers."""
    numbers: tuple[float, ...] = ()  # the outputs of a model that learned numbers; of a regression one
    mask: tuple[tuple[int, ...], ...] = ()  # of a segmentation, for each row of pixels the position of each pixel's class
    kind: TargetKind = "classes"

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
            raise RunError(
                f"{self.example}: the {self.model} predicts numbers, and has no `label` or `probability`; use `numbers`"
            )
        return self.ranked[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Of several labels those with a probability of at least 0.5, the most probable first."""
        return tuple(name for name, probability in self.ranked if probability >= 0.5)


@torch.no_grad()
def predict_arrays(run: Run, x: Any, client: str | None = None, best: bool = False) -> pd.DataFrame:
    """Return answers for examples in memory, one row for each example [n], as `Run.predict`.

    x: an array, tensor or DataFrame `[n, *shape]` of unscaled values; columns of a DataFrame are matched by name.

    Raises:
        UserError: the run has no such model, it segments images, the examples do not fit it, or an output is not finite.
    """
    answering = choose_model_of_run(run, client, best)
    takes = answering.takes
    if answering.kind == "masks":
        raise RunError(
            f"{run.folder}: masks are no table; save the images with numpy.savez(FILE, x=images), and take `mask` of each "
            "answer of fedmutual.predict(RUN, FILE)"
        )
    raw = convert_array(convert_features(x, "x", takes.columns), "x", find_form(takes.scaling, takes.shape))
    scaled = make_scaler(takes)
    parts = list[Tensor]()
    for n, part in enumerate(torch.split(raw, ROWS_AT_ONCE)):
        parts.append(_answer(part, partial(_name_row, n * ROWS_AT_ONCE), answering, scaled))
    answers = torch.cat(parts)
    names = list(takes.classes) if answers.shape[1] == len(takes.classes) else list(map(str, range(answers.shape[1])))
    return pd.DataFrame(answers.numpy(), columns=names)


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
    scaled, predictions = make_scaler(answering.takes), list[Prediction]()
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(f) for f in files]
    for names, raw in _read_examples(paths, answering):
        answers = _answer(raw, names.__getitem__, answering, scaled)
        predictions += [make_prediction(name, answer, answering) for name, answer in zip(names, answers, strict=True)]
    return predictions


def _answer(
    raw: Tensor, where: Callable[[int], str], answering: AnsweringModel, scaled: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the answers of a model for raw examples [B, ...]. Raises as `scale_examples` and `check_outputs`."""
    outputs = answering.net(scale_examples(raw, where, answering.takes, scaled))
    return answering.form.compute(check_outputs(outputs, where, answering))


def _name_row(start: int, row: int) -> str:
    return f"row {start + row} of x"


def make_prediction(example: str, answer: Tensor, answering: AnsweringModel) -> Prediction:
    """Return the prediction of one example.

    answer: as the model's form computes it, without the batch: classes [C], numbers [outputs], labels [L], masks [C, H, W].
    """
    kind, classes = answering.kind, answering.takes.classes
    if kind == "numbers":
        return Prediction(example, answering.description, numbers=tuple(answer.tolist()), kind=kind)
    mask: tuple[tuple[int, ...], ...] = ()
    if kind == "masks":
        chosen = answer.argmax(0)
        mask = tuple(tuple(row) for row in chosen.tolist())
        answer = torch.bincount(chosen.flatten(), minlength=len(classes)) / chosen.numel()
    order = answer.argsort(descending=True, stable=True).tolist()
    ranked = tuple((classes[c], float(answer[c])) for c in order)
    return Prediction(example, answering.description, ranked, mask=mask, kind=kind)


def _read_examples(files: Sequence[Path], answering: AnsweringModel) -> Iterator[Learned]:
    for file in files:
        if file.suffix.lower() not in (*SUFFIXES, ".npz"):
            yield [str(file)], _read_one_image(file, answering)
            continue
        if file.suffix.lower() in SUFFIXES:
            if answering.takes.columns is None:
                raise DataError(
                    f"{file}: the model learned from no table of named columns; give it {_describe_wanted(answering)}"
                )
            encoded = answering.takes.scaling.get("columns")
            encoding = encoded and parse_encoding(encoded)
            rows = table.read_rows(file, answering.takes.columns, answering.data, encoding)
            x, called = rows.x.take(range(len(rows.x))), rows.where
        elif answering.takes.scaling.get("columns"):
            raise DataError(
                f"{file}: the model learned from a table with data.columns; give it {_describe_wanted(answering)}"
            )
        else:
            called = partial("row {1} of 'x' in {0}".format, file)
            form = find_form(answering.takes.scaling, answering.takes.shape)
            values = arrays.get_array(arrays.read_arrays(file, missing="name another"), "x", str(file))
            x = convert_array(values, f"{file}: array 'x'", form, called)
        if not len(x):
            raise DataError(f"{file}: there are no rows in it")
        for start in range(0, len(x), ROWS_AT_ONCE):
            part = x[start : start + ROWS_AT_ONCE]
            yield [called(start + k) for k in range(len(part))], part


def _read_one_image(file: Path, answering: AnsweringModel) -> Tensor:
    """Return one image [1, C, H, W] of uint8, read as the images of the run."""
    takes, shape = answering.takes, answering.takes.shape
    most = takes.scaling["divisor"]
    if not is_pixel_input(takes) or shape[0] not in (1, 3):
        raise DataError(f"{file}: the model did not learn from pixels of 8 bits; give it {_describe_wanted(answering)}")
    x = torch.tensor(images.decode_image(file, shape[0] == 1, takes.scaling.get("size") if answering.files else None)[None])
    if x.max() > most:
        raise BadRows(
            f"{file} has pixels up to {int(x.max())}, and those that the model learned from go up to {most:g}; "
            "scale it to that range"
        )
    return x


def _describe_wanted(answering: AnsweringModel) -> str:
    """Return in words which inputs a model takes."""
    takes = answering.takes
    if takes.columns is not None:
        return f"a CSV file with the columns {list_names(list_columns(takes) or ())}"
    return (
        "images"
        if is_pixel_input(takes)
        else f"an npz file with an array 'x' of shape [n, {', '.join(map(str, takes.shape))}]"
    )
