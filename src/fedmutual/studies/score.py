"""A run's model scored on a labelled file: how good its answers are there, with an interval."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmutual.data import arrays, folder, labels, table
from fedmutual.data.encoding import parse_encoding
from fedmutual.data.examples import ArrayExamples, Part, Source, listed
from fedmutual.data.table_file import SUFFIXES
from fedmutual.errors import DataError
from fedmutual.evaluation import forward_in_parts
from fedmutual.report.statistics import wilson_interval
from fedmutual.scores import Scores, score_classification
from fedmutual.studies.predict import AnsweringModel, choose_model, make_scaler, scale_examples, takes_pixels

_AT_ONCE = 512  # rows of a forward


@dataclass(frozen=True)
class FileScore:
    """The scores of a model on a labelled file."""

    file: str
    model: str  # the model: "personal model of client '3' (cnn1), round 20"
    classes: tuple[str, ...]
    values: Scores  # as `fedmutual.scores.score_classification` gives them; fractions in [0, 1]
    interval: tuple[float, float]  # 95 % of the accuracy, Wilson's, over the file's rows


@torch.no_grad()
def score_file(
    run_or_model: str | Path, file: str | Path, client: str | None = None, best: bool = False, trust_code: bool = False
) -> FileScore:
    """Score a run's model on a labelled CSV or npz file, or on a folder of images by class.

    run_or_model, client, best, trust_code: the model, as for `fedmutual.predict`. Labels are matched by class
    name, after the renaming of the run's `data.labels`.

    Raises:
        UserError: there is no such model, or the file cannot be read, lacks labels, or has a class that the model lacks.
    """
    answering = choose_model(Path(run_or_model), client, best, trust_code)
    source = _read_labelled(Path(file), answering)
    _, (targets,) = labels.match_labels(
        source, answering.data.model_copy(update={"classes": answering.takes.classes}), common=True
    )
    values = score_classification(_compute_logits(source, answering), torch.from_numpy(targets))
    accuracy = values["accuracy"]
    assert isinstance(accuracy, float)
    return FileScore(
        str(file), answering.description, answering.takes.classes, values, wilson_interval(accuracy, len(targets))
    )


def _compute_logits(source: Source, answering: AnsweringModel) -> Tensor:
    """Return the network's outputs [n, C] for all rows of a labelled file."""
    scaled, part = make_scaler(answering.takes), source.train
    logits = []
    for start in range(0, len(part.x), _AT_ONCE):
        rows = range(start, min(start + _AT_ONCE, len(part.x)))
        names = [part.where(row) for row in rows]
        x = scale_examples(part.x.take(rows), names.__getitem__, answering.takes, scaled)
        logits.append(forward_in_parts(answering.net, x))
    return torch.cat(logits)


def _read_labelled(file: Path, answering: AnsweringModel) -> Source:
    """Return the rows of a labelled file, unscaled, with their labels.

    Raises:
        DataError: the file is of another kind than the model's data, or cannot be read.
    """
    takes = answering.takes
    data = answering.data.model_copy(update={"root": file, "test": None, "group_by": None})  # of the training files
    if file.is_dir() and takes_pixels(takes):
        source = folder.read_folder(data, domains=False)
        if source.test is not None:
            raise DataError(f"{file}: holds the folders train and test; name one of the two")
        return source
    if file.suffix.lower() in SUFFIXES and takes.columns is not None:
        encoded = takes.scaling.get("columns")
        values, names, name_row = table.read_labelled(file, takes.columns, data.label, encoded and parse_encoding(encoded))
        return Source(str(file), Part(ArrayExamples(values), names, name_row))
    if file.suffix.lower() == ".npz" and takes.columns is None:
        source = arrays.make_source(arrays.read_arrays(file, missing="name another"), data, str(file))
        return replace(source, train=_name_classes(source, takes.classes), test=None)
    raise DataError(f"{file}: holds no labelled examples that this model takes; give it {_describe_labelled(answering)}")


def _name_classes(source: Source, classes: Sequence[str]) -> Part:
    """Return the rows of an npz file with class names as labels; whole numbers count the model's classes from 0."""
    numbers = source.train.labels
    if source.classes is not None or numbers.dtype.kind not in "biu" or {str(n) for n in np.unique(numbers)} <= {*classes}:
        return source.train
    row = next((i for i, n in enumerate(numbers) if not 0 <= n < len(classes)), None)
    if row is not None:
        raise DataError(
            f"{source.train.where(row)}: its label {numbers[row]} is no class of the model, which has {len(classes)}, from "
            f"0 to {len(classes) - 1}; fix the label, or save the names of the classes as labels"
        )
    return replace(source.train, labels=np.array(classes)[numbers.astype(int)])


def _describe_labelled(answering: AnsweringModel) -> str:
    """Return a description of the files that a model can be scored on."""
    takes = answering.takes
    if takes.columns is not None:
        return f"a CSV file with the columns {listed([*takes.columns, answering.data.label])}"
    shape = ", ".join(map(str, takes.shape))
    arrays_text = f"an npz file with the arrays 'x' of shape [n, {shape}] and 'y'"
    return f"{arrays_text}, or a folder of images by class" if takes_pixels(takes) else arrays_text
