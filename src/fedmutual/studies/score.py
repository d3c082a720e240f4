"""A run's model scored on a labelled file, with an interval of the main metric over the rows of the file."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmutual import data
from fedmutual.core import Task, get_metric
from fedmutual.data import arrays, folder, table
from fedmutual.data.check import digest_rows
from fedmutual.data.encoding import parse_encoding
from fedmutual.data.examples import Examples, Part, Source, join_examples, list_names
from fedmutual.data.scaling import find_form
from fedmutual.data.sources import TABLES
from fedmutual.data.table_file import SUFFIXES
from fedmutual.data.targets import check_masks, read_targets
from fedmutual.errors import DataError, UserError, format_count, warn_user
from fedmutual.federation.evaluation import forward_in_parts
from fedmutual.metric import ACCURACY, Metric
from fedmutual.results.estimate import compute_wilson_interval
from fedmutual.rundir.file_names import PARTITION
from fedmutual.rundir.record_files import read_record
from fedmutual.rundir.schema import RecordedPartition
from fedmutual.studies.answering_model import (
    ROWS_AT_ONCE,
    AnsweringModel,
    check_outputs,
    choose_model,
    find_run_folder,
    is_pixel_input,
    make_scaler,
    scale_examples,
)
from fedmutual.studies.trained_run import Run
from fedmutual.user_code import plugins

RESAMPLES = 500


@dataclass(frozen=True)
class FileScore:
    """The scores of a model on a labelled file, which is `file`. Accuracies and their intervals are fractions in [0, 1]."""

    file: str
    model: str  # the model: "personal model of client '3' (cnn1), round 20"
    classes: tuple[str, ...]  # or labels
    values: Mapping[str, Any]  # as `score` of the task returns them: numbers, None, or a list with a number for each class
    metric: Metric | None  # the main metric of the task, if the task has one
    interval: tuple[float, float] | None  # 95 % of the main metric over the rows; None where a resample has no such score
    training_rows: int | None  # rows of the file that the model was trained on; None: the run's data cannot be read again


@torch.no_grad()
def score_file(
    run_or_model: str | Path, file: str | Path, client: str | None = None, best: bool = False, trust_code: bool = False
) -> FileScore:
    """Return the scores of a run's model on a labelled CSV or npz file, or on a folder of images by class.

    run_or_model, client, best, trust_code: the model, as for `fedmutual.predict`. Classes are matched by name, after the
    renaming of the run's `data.labels`; several labels and the classes of masks by position. The interval is Wilson's for
    an accuracy, and for another main metric the percentiles of 500 bootstrap resamples of the rows. A `RemarkWarning` says
    how many rows the model was trained on, if the run's data can be read again.

    Raises:
        UserError: there is no such model, or an output of it is not finite; or the file cannot be read, lacks labels, or has
            a class that the model lacks.
    """
    answering = choose_model(Path(run_or_model), client, best, trust_code)
    source = _read_labelled(Path(file), answering)
    targets = _read_targets(source, answering)
    outputs, metric = _compute_outputs(source, answering), get_metric(answering.task)
    values = answering.task.score(outputs, targets)
    if metric is None:
        interval = None
    elif metric == ACCURACY:
        interval = compute_wilson_interval(values[metric.name], len(targets))
    else:
        interval = _resample(answering.task, metric, outputs, targets)
    classes = () if answering.kind == "numbers" else answering.takes.classes
    training_rows = _count_training_rows(Run(find_run_folder(Path(run_or_model)), trust_code), answering, source)
    if training_rows:
        whose = "of the clients" if answering.owner is None else f"of client {answering.owner!r}"
        warn_user(
            f"{file}: {format_count(training_rows, 'row')} of {len(targets):,} {'is' if training_rows == 1 else 'are'} in "
            f"the training data {whose}, so the score says less about new rows; score rows that the run did not train on"
        )
    return FileScore(str(file), answering.description, classes, values, metric, interval, training_rows)


def _count_training_rows(run: Run, answering: AnsweringModel, source: Source) -> int | None:
    """Return how many rows of a file equal a training row of the model; None if the run's data cannot be read again.

    Only files and the data set "digits" are read: other data sets may be user code or a download.
    """
    config = run.config
    names = {config.data.name, *(client.data.name for client in config.clients.values())} - {None}
    if not names <= {"digits", "folder", "npz", *TABLES}:
        return None
    try:
        with plugins.use_rule(run._code):
            data_by_client = data.prepare(config)
            federation = data.load(config, data_by_client)
    except UserError:
        return None
    if federation.partition["fingerprint"] != read_record(run.folder / PARTITION, RecordedPartition).fingerprint:
        return None
    digests = set[int]()
    for client in federation.clients if answering.owner is None else [answering.owner]:
        examples = join_examples(data_by_client[client if client in data_by_client else ""].source)
        shares = federation.clients[client]
        for rows in (shares.private, shares.public):
            digests.update(_digest_examples(examples, rows.index.tolist()) if rows is not None else ())
    return sum(digest in digests for digest in _digest_examples(source.train.x, range(len(source.train.x))))


def _digest_examples(examples: Examples, rows: Sequence[int]) -> Iterator[int]:
    """Yield the digest of each stored example, as float32 because files hold numbers in several types."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield from digest_rows(examples.take(rows[start : start + ROWS_AT_ONCE]).float())


def _read_targets(source: Source, answering: AnsweringModel) -> Tensor:
    """Return the targets of a labelled file, as the task takes them.

    Raises:
        DataError: a target is none of the classes, or not of the kind that the model learned.
    """
    takes = answering.takes
    learned = takes.classes if answering.kind == "masks" and _have_learned_names(answering) else ()
    are_named = answering.kind != "numbers" and not learned
    data = answering.data.model_copy(update={"classes": takes.classes if are_named else None})
    _, (read,) = read_targets(source, data, answering.kind, takes.classes, common=True, learned=learned)
    if answering.kind == "masks":
        check_masks(read, takes.shape, data, source.place)
    return torch.from_numpy(read)


def _have_learned_names(answering: AnsweringModel) -> bool:
    """Return whether the classes of masks are values and names of data.labels: not those of data.classes or of the data."""
    config = answering.data
    names = {*config.labels.values()}
    return config.classes is None and all(c in names or c.removeprefix("-").isdecimal() for c in answering.takes.classes)


def _resample(task: Task, metric: Metric, outputs: Tensor, targets: Tensor) -> tuple[float, float] | None:
    """Return the 95 % interval of the main metric by the bootstrap over rows: Efron 1979, https://doi.org/10.1214/aos/1176344552.

    None: there is one row, or the metric of a resample is undefined.
    """
    from scipy.stats import bootstrap  # takes a second

    def score_rows(rows: npt.NDArray[np.int64]) -> float:
        value = task.score(outputs[rows], targets[rows])[metric.name]
        return math.nan if value is None else float(value)

    if len(targets) < 2:
        return None
    result = bootstrap(
        (np.arange(len(targets)),), score_rows, vectorized=False, n_resamples=RESAMPLES, method="percentile", random_state=0
    )
    low, high = (float(end) for end in result.confidence_interval)
    return (low, high) if math.isfinite(low + high) else None


def _compute_outputs(source: Source, answering: AnsweringModel) -> Tensor:
    """Return the network's outputs [n, ...] for all rows of a labelled file."""
    scaled, part = make_scaler(answering.takes), source.train
    outputs = []
    for start in range(0, len(part.x), ROWS_AT_ONCE):
        rows = range(start, min(start + ROWS_AT_ONCE, len(part.x)))
        names = [part.where(row) for row in rows]
        x = scale_examples(part.x.take(rows), names.__getitem__, answering.takes, scaled)
        outputs.append(check_outputs(forward_in_parts(answering.net, x), names.__getitem__, answering))
    return torch.cat(outputs)


def _read_labelled(file: Path, answering: AnsweringModel) -> Source:
    """Return the rows of a labelled file, unscaled, with their labels.

    Raises:
        DataError: the file is of another kind than the model's data, or cannot be read.
    """
    takes = answering.takes
    data = answering.data.model_copy(update={"root": file, "test": None, "group_by": None})  # of the training files
    if file.is_dir() and is_pixel_input(takes) and answering.kind == "classes":
        source = folder.read_folder(data.model_copy(update={"classes": takes.classes}), domains=False)
        if source.test is not None:
            raise DataError(f"{file}: contains the folders train and test; name one of the two")
        for note in source.notes:
            warn_user(note)
        return source
    if file.suffix.lower() in SUFFIXES and takes.columns is not None:
        encoded = takes.scaling.get("columns")
        encoding, is_number = encoded and parse_encoding(encoded), answering.kind == "numbers"
        rows = table.read_rows(file, takes.columns, data, encoding, labelled=True, numbers=is_number)
        return Source(str(file), rows)
    if file.suffix.lower() == ".npz" and takes.columns is None:
        source = arrays.make_source(arrays.read_arrays(file, missing="name another"), data, str(file))
        source = source.with_form(find_form(takes.scaling, takes.shape))
        named = _name_classes(source, takes.classes) if answering.kind == "classes" else source.train
        return replace(source, train=named, test=None)
    raise DataError(f"{file}: contains no labelled examples for this model; give it {_describe_labelled(answering)}")


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
        return f"a CSV file with the columns {list_names([*takes.columns, *answering.data.label_columns])}"
    shape = ", ".join(map(str, takes.shape))
    arrays_text = f"an npz file with the arrays 'x' of shape [n, {shape}] and 'y'"
    return (
        f"{arrays_text}, or a folder of images by class"
        if is_pixel_input(takes) and answering.kind == "classes"
        else arrays_text
    )
