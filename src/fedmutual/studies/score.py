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
from fedmutual.boundary import release_metrics
from fedmutual.calling import find_image_shape, map_inputs
from fedmutual.config import make_client_config
from fedmutual.core import Task, get_metric
from fedmutual.data import folder
from fedmutual.data.check import digest_rows
from fedmutual.data.draws import Names
from fedmutual.data.examples import Examples, Source, join_examples
from fedmutual.data.objects import Label, add_targets, is_frame, make_memory_source, name_columns
from fedmutual.data.sources import TABLES
from fedmutual.data.space_files import fit_form
from fedmutual.data.table_file import SUFFIXES
from fedmutual.data.targets import check_masks, read_targets
from fedmutual.errors import ConfigError, DataError, UserError, format_count, warn_user
from fedmutual.in_memory import PREFIX
from fedmutual.metric import ACCURACY, KINDS, Metric
from fedmutual.results.estimate import compute_bootstrap_interval, compute_newcombe_interval, compute_wilson_interval
from fedmutual.rundir.file_names import SUBGROUPS
from fedmutual.rundir.record_files import read_subgroups, write_record
from fedmutual.rundir.schema import GroupScore, Reliability, Subgroups, SubgroupsFile
from fedmutual.studies.answering_model import AnsweringModel, OwnRows, split_rows
from fedmutual.studies.calibration import measure_reliability

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class FileScore:
    """The scores of a model on a labelled file, which is `file`. Accuracies and their intervals are fractions in [0, 1]."""

    file: str
    model: str  # the model: "personal model of client '3' (cnn1), round 20"
    classes: tuple[str, ...]  # or labels, times or several numbers
    values: Mapping[str, Any]  # as `score` of the task returns them: numbers, None, or a list with a number for each class
    metric: Metric | None  # the main metric of the task, if the task has one
    interval: Interval  # 95 % of the main metric over the rows; None where a resample has no such score
    training_rows: int | None  # rows of the file that the model was trained on; None: the run's data cannot be read again
    groups: Mapping[str, GroupScore] | None = None  # by value of a column
    reliability: Reliability | None = None  # of the probabilities; None of a model that states none


@torch.no_grad()
def score(
    answering: AnsweringModel, rows: Any = None, label: Label = None, by: str | None = None, keep: bool = False
) -> FileScore:
    """Return the scores of a run's model on labelled examples.

    rows: a CSV or npz file, a folder of images by class, a form of `Site.train`, or None: the run's own test rows. label:
    the columns of the targets of a DataFrame; of a table in a file those of the training, if it is None. Classes are matched
    by name, after the renaming of the run's `data.labels`; several labels and the classes of masks by position. The interval
    is Wilson's for an accuracy, and for another main metric the percentiles of 500 bootstrap resamples of the rows. A
    `RemarkWarning` says how many rows the model was trained on, if the run's data can be read again.
    by: a column (of metadata.csv, of a DataFrame; of an npz file an array) whose values are groups to be scored apart.
    keep: write the scores of these groups of the run's own test rows into the run's folder, for model card and page.

    Raises:
        UserError: an output of the model is not finite; or the rows cannot be read, lack labels, or have a class that the
            model lacks.
    """
    if keep and (rows is not None or by is None):
        raise ConfigError("--keep is for groups of the run's own test rows: give --by COLUMN, and no file")
    task, metric = answering.task, get_metric(answering.task)
    if rows is None:
        file, outputs, targets, groups = _score_own(answering, by)
        training_rows: int | None = 0
    else:
        is_file = isinstance(rows, str | Path)
        source = _read_labelled(Path(rows), label, answering, by) if is_file else _take_labelled(rows, label, answering, by)
        file, part = str(rows) if is_file else source.place, source.train
        targets, groups = _read_targets(source, answering), part.groups
        outputs = answering.compute_row_outputs(part.x, range(len(part.x)), part.where)
        training_rows = _count_training_rows(answering, source)
    reliability = measure_reliability(answering, outputs, targets, file) if answering.states_probabilities else None
    outputs = answering.apply_temperature(outputs)
    values = _score_rows(task, outputs, targets)
    by_group = None
    if groups is not None:
        if metric is None:
            raise UserError(f"{file}: the task has no main metric to compare groups by; give the task the member 'metric'")
        by_group = dict(_score_groups(task, metric, outputs, targets, groups))
        if keep:
            owner, role, round = answering.owner, answering.role, answering.round
            kept = Subgroups(client=owner, role=role, round=round, by=str(by), metric=metric, groups=by_group)
            others = [s for s in read_subgroups(answering.folder) if (s.identity, s.by) != (kept.identity, by)]
            write_record(answering.folder / SUBGROUPS, SubgroupsFile(models=(*others, kept)))
    if training_rows:
        whose = "of the clients" if answering.owner is None else f"of client {answering.owner!r}"
        warn_user(
            f"{file}: {format_count(training_rows, 'row')} of {len(targets):,} {'is' if training_rows == 1 else 'are'} in "
            f"the training data {whose}, so the score says less about new rows; score rows that the run did not train on"
        )
    interval = None if metric is None else _find_interval(task, metric, outputs, targets, [torch.arange(len(targets))])
    return FileScore(
        file, answering.description, answering.names, values, metric, interval, training_rows, by_group, reliability
    )


def _score_rows(task: Task, outputs: Tensor, targets: Tensor) -> Mapping[str, Any]:
    """Return the scores of some rows as a run records them: a score that is not finite is None."""
    return release_metrics(task.score(outputs, targets), task.tells, "the model", width=outputs.shape[1])


def _score_own(answering: AnsweringModel, by: str | None) -> tuple[str, Tensor, Tensor, Names | None]:
    """Return the name of the run's own test rows, their outputs and targets, and their values of the column `by`."""
    prepared, federation = answering.read_run_data()
    test_rows = answering.list_own_rows(federation, prepared)["test"]  # every run has some
    groups = None if by is None else _read_groups(answering, by, test_rows)
    return f"{answering.folder}, test rows", *answering.compute_own_outputs(test_rows, prepared), groups


def _read_groups(answering: AnsweringModel, by: str, own_rows: OwnRows) -> Names:
    """Return the values [N] of a column in own rows; it may be a column that the model takes."""
    groups = []
    for client, rows in own_rows.items():
        config = make_client_config(answering.config, client) if client else answering.config
        others = {key: {c: v for c, v in getattr(config.data, key).items() if c != by} for key in ("columns", "replace")}
        changed = config.data.model_copy(update={"group_by": by, **others})
        with answering.use_code():
            (read,) = data.prepare(config.model_copy(update={"data": changed})).values()
        if read.table.groups is None:
            fix = "score a file or a DataFrame that has it"
            raise DataError(f"{read.source.place}: the run did not keep a column {by!r}; {fix}")
        groups.append(read.table.groups[rows.index])
    return np.concatenate(groups)


def _find_interval(task: Task, metric: Metric, outputs: Tensor, targets: Tensor, parts: Sequence[Tensor]) -> Interval:
    """Return the 95 % interval of the main metric of some rows, or of the difference between two groups; see `score`."""
    if metric != ACCURACY:
        return _resample(task, metric, outputs, parts, targets)
    shares = []
    for rows in parts:
        values = _score_rows(task, outputs[rows], targets[rows])
        if values[metric.name] is None:
            return None
        shares.append((values[metric.name], values.get("examples", len(rows))))
    return compute_newcombe_interval(*shares) if len(shares) == 2 else compute_wilson_interval(*shares[0])


def _score_groups(
    task: Task, metric: Metric, outputs: Tensor, targets: Tensor, groups: Names
) -> Iterator[tuple[str, GroupScore]]:
    """Yield the score of each group, in the order of their names. groups: of each row [N]."""
    for name in sorted(set(groups.tolist())):
        is_member = torch.from_numpy(groups == name)
        parts = [rows for rows in (is_member.nonzero()[:, 0], (~is_member).nonzero()[:, 0]) if len(rows)]
        scores = [_score_rows(task, outputs[rows], targets[rows]) for rows in parts]
        count, values = scores[0].get("examples", len(parts[0])), [s[metric.name] for s in scores]
        intervals = [_find_interval(task, metric, outputs, targets, parts[:1]), None]
        difference = None
        if len(parts) == 2 and None not in values:
            difference = values[0] - values[1]
            intervals[1] = _find_interval(task, metric, outputs, targets, parts)
        yield name, GroupScore(count, values[0], intervals[0], difference, intervals[1])


def _count_training_rows(answering: AnsweringModel, source: Source) -> int | None:
    """Return how many rows of a file equal a training row of the model; None if the run's data cannot be read again.

    Only files, the data set "digits" and objects of the caller are read: others may be user code or a download.
    """
    config = answering.config
    names = {config.data.name, *(client.data.name for client in config.clients.values())} - {None}
    if not {name for name in names if not str(name).startswith(PREFIX)} <= {"digits", "folder", "npz", "datasets", *TABLES}:
        return None
    try:
        data_by_client, federation = answering.read_run_data()
    except UserError:
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
    for part in split_rows(rows):
        yield from digest_rows(map_inputs(Tensor.float, examples.take(part)))


def _read_targets(source: Source, answering: AnsweringModel) -> Tensor:
    """Return the targets of a labelled file, as the task takes them."""
    takes, kind = answering.takes, answering.kind
    learned = takes.classes if kind == "masks" and _have_learned_names(answering) else ()
    are_named = KINDS[kind].is_named and not learned
    data = answering.data.model_copy(update={"classes": takes.classes if are_named else None})
    _, (read,) = read_targets(source, data, kind, takes.classes, common=True, learned=learned)
    if kind == "masks":
        check_masks(read, find_image_shape(takes.shape), data, source.place)
    return torch.from_numpy(read)


def _have_learned_names(answering: AnsweringModel) -> bool:
    """Return whether the classes of masks are values and names of data.labels: not those of data.classes or of the data."""
    config = answering.data
    names = {*config.labels.values()}
    return config.classes is None and all(c in names or c.removeprefix("-").isdecimal() for c in answering.takes.classes)


def _resample(task: Task, metric: Metric, outputs: Tensor, parts: Sequence[Tensor], targets: Tensor) -> Interval:
    """Return the 95 % interval of the main metric of some rows, or of the difference between two groups of rows.

    By the bootstrap over the rows of each group. The group of the first row is always drawn first, so that the interval of
    B - A is that of A - B with opposite signs. None: there is one row, or the metric of a resample is undefined.
    """
    ordered = sorted(parts, key=lambda part: int(part[0]))

    def score_rows(*chosen: npt.NDArray[np.int64]) -> float:
        values = [task.score(outputs[rows], targets[rows])[metric.name] for rows in chosen]
        return math.nan if None in values else float(values[0] - sum(values[1:]))

    interval = compute_bootstrap_interval(score_rows, [part.numpy() for part in ordered])
    return interval if interval is None or ordered[0] is parts[0] else (-interval[1], -interval[0])


def _read_labelled(file: Path, label: Label, answering: AnsweringModel, by: str | None) -> Source:
    """Return the rows of a labelled file, unscaled, with their labels, and with groups by the column `by`.

    label: the columns of the labels of a table; None: those of the training.
    """
    takes, is_table = answering.takes, file.suffix.lower() in SUFFIXES
    data = answering.data.model_copy(update={"root": file, "test": None, "group_by": by})  # of the training files
    is_image, foreign = answering.is_image(file, labelled=True), label is not None and not is_table
    if not is_image:
        data = data if label is None or foreign else data.model_copy(update={"label": label})
        source = answering.read_file(file, data, labelled=True)
    if foreign:
        raise DataError(f"{file}: label = {label!r} names a column, and this is no table; remove label")
    if not is_image:
        return source if is_table else _name_classes(source, answering)
    source = folder.read_folder(data.model_copy(update={"classes": takes.classes}), domains=False, kind=answering.kind)
    if source.test is not None:
        raise DataError(f"{file}: contains the folders train and test; name one of the two")
    for note in source.notes:
        warn_user(note)
    return source


def _take_labelled(rows: Any, label: Label, answering: AnsweringModel, by: str | None) -> Source:
    """Return labelled objects in memory, unscaled; the columns of a DataFrame by the names that the model learned."""
    place, label = "the data to score", name_columns(label)
    if is_frame(rows):
        rows = rows.rename(columns=str)
        label = answering.data.label if label is None and {*answering.data.label_columns} <= {*rows} else label
    if by is not None and (not is_frame(rows) or by not in rows):
        raise DataError(f"{place} have no column {by!r}; give a DataFrame with it, or leave out `by`")
    groups = None if by is None else rows[by].astype(str).to_numpy(dtype=object).astype(str)
    if is_frame(rows):
        names = [label] if isinstance(label, str) else [*(label or ())]
        missing = next((name for name in names if name not in rows), None)
        if missing is not None or not names:
            about = f"have no column {missing!r}" if names else "are a DataFrame"
            raise DataError(f"{place} {about}; name the column of the targets: run.score(data, label='COLUMN')")
        rows = (rows, rows[label if isinstance(label, str) else names])
    is_pair = isinstance(rows, tuple | list) and len(rows) == 2
    if is_pair and is_frame(rows[0]) and answering.takes.columns is not None:
        source = Source(place, add_targets(answering.read_frame(rows[0], place), rows[1], place))
    elif answering.encoding is not None:
        raise DataError(f"{place}: the model encodes columns of a table; give it a DataFrame")
    else:
        rows = (answering.arrange(rows[0], place), rows[1]) if is_pair else rows
        length = answering.steps or answering.data.length  # of series in a Dataset
        source = make_memory_source(rows, None, None, place, answering.data.model_copy(update={"length": length}))
    fitted = _name_classes(fit_form(source, answering.takes), answering)
    return replace(fitted, train=replace(fitted.train, groups=groups), test=None)


def _name_classes(source: Source, answering: AnsweringModel) -> Source:
    """Return rows with class names as labels; whole numbers count the model's classes from 0."""
    numbers, classes = source.train.labels, answering.takes.classes
    are_names = source.classes is not None or numbers.dtype.kind not in "biu"
    if answering.kind != "classes" or are_names or {str(n) for n in np.unique(numbers)} <= {*classes}:
        return source
    row = next((i for i, n in enumerate(numbers) if not 0 <= n < len(classes)), None)
    if row is not None:
        raise DataError(
            f"{source.train.where(row)}: its label {numbers[row]} is no class of the model, which has {len(classes)}, from "
            f"0 to {len(classes) - 1}; fix the label, or save the names of the classes as labels"
        )
    return replace(source, train=replace(source.train, labels=np.array(classes)[numbers.astype(int)]))
