"""Targets by kind: classes of examples, numbers, several labels of an example, masks, and times."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.core import TargetKind, Task, get_target_kind
from fedmutual.data.draws import Index
from fedmutual.data.examples import Part, Source, list_names
from fedmutual.data.labels import check_renamed, check_unlabelled, clean_labels, format_renames, list_classes, match_labels
from fedmutual.errors import ConfigError, DataError
from fedmutual.metric import KINDS

Targets = npt.NDArray[np.float32] | npt.NDArray[np.int64]
Read = tuple[tuple[str, ...], Sequence[Targets | Index]]
_MOST_CLASSES = 254  # the greatest class of masks whose classes have no names: 255 is a gray value, or marks no class
_MOST_LISTED = 10  # values of masks, in a message


DEFAULT_TIMES = tuple(2.0**k for k in range(-10, 21))
"""The ends of the intervals of survival without `data.times`: they depend on no data, and fit any unit."""


def name_outputs(task: Task, config: DataConfig, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the outputs that the data do not name: the times of a survival task, else `columns`.

    Raises:
        ConfigError: data.times is set, and the task has no intervals of time.
    """
    is_survival = get_target_kind(task) == "times"
    if is_survival and task.outputs is None:
        return tuple(f"{end:.10g}" for end in config.times or DEFAULT_TIMES)
    if config.times is not None:
        why = "which learns intervals of time; remove the key"
        if is_survival:
            why = "because cox estimates no baseline hazard: it has no probabilities and no calibration; change one key"
        raise ConfigError(f"key 'data.times' is for training.task = 'survival', {why}")
    return ("log hazard ratio",) if is_survival else columns


def read_targets(
    source: Source,
    config: DataConfig,
    kind: TargetKind,
    columns: tuple[str, ...],
    common: bool = False,
    learned: Sequence[str] = (),
) -> Read:
    """Return the names of the outputs, and the targets of each part, as `TargetKind` describes them.

    classes: see `labels.match_labels`. columns: the names of numbers, and of the outputs for times. Labels, and the classes
    of masks, are named by data.classes, by the names that the data declare, or else "0", "1", ... common: as in
    `match_labels`. learned: the classes of masks that a model learned without data.classes.

    Raises:
        DataError: a target is not of its kind, or there is not one target for each example.
        ConfigError: a key of [data] is set and has no meaning for these targets; data.classes names too few outputs; or
            several label columns are named, and the task learns classes.
    """
    rule = KINDS[kind]
    if config.labels and rule.value != "class":
        raise ConfigError(f"key 'data.labels' is for classes, but the task learns {kind}; remove the key")
    if config.uncertain and rule.value != "label":
        raise ConfigError(f"key 'data.uncertain' is for training.task = 'multilabel', but the task learns {kind}; remove it")
    if kind == "times" and (config.unlabelled or config.classes):
        fix = "a row without an event is one with the event 0" if config.unlabelled else "data.times names its outputs"
        raise ConfigError(
            f"key 'data.{'unlabelled' if config.unlabelled else 'classes'}' is not for survival: {fix}; remove it"
        )
    if kind == "classes":
        if source.label_columns and source.classes == source.label_columns:
            raise ConfigError(
                "key 'data.label' is a list, but the task learns one class of an example; name one column without a list, "
                "or set training.task, for example to 'multilabel', 'regression' or 'survival'"
            )
        return match_labels(source, config, common)
    test = source.test and clean_labels(source.test, config)
    source = replace(source, train=clean_labels(source.train, config), test=test)
    if kind == "masks":
        return _match_masks([_read_masks(part, source.place) for part in source.parts], source, config, common, learned)
    named = source.label_columns if kind == "times" else config.classes or source.classes or source.label_columns or columns
    targets = [_read_values(part, source.place, kind, config, named) for part in source.parts]
    if kind == "times":
        return columns, targets
    widths = [part.shape[1] if part.ndim == 2 else 1 for part in targets]
    if len(set(widths)) > 1:
        raise DataError(
            f"{source.place}: training rows have {widths[0]} {kind} and test rows {widths[1]}; give both the same {kind}"
        )
    counted = columns if widths[0] == 1 and rule.value == "number" else tuple(str(k) for k in range(widths[0]))
    if kind == "numbers" and not config.classes:
        return next((names for names in (columns, named) if len(names) == widths[0]), counted), targets
    names = config.classes or source.classes or counted
    if len(names) != widths[0]:
        key = "key 'data.classes'" if config.classes else f"{source.place}: 'classes'"
        has = f"{widths[0]} {kind}" if widths[0] > 1 else f"one {rule.unit}"
        fix = f"name each {rule.unit} once{', or remove the key' if config.classes else ''}"
        raise ConfigError(f"{key} has {len(names)} names, but targets have {has}; {fix}")
    return tuple(names), targets


def _check_shape(part: Part, place: str, is_right: bool, wanted: str) -> None:
    """Raise DataError unless the targets have the right number of axes, and one entry for each example."""
    if not is_right or len(part.labels) != len(part.x) or not part.labels.size:
        raise DataError(f"{place}: targets have the shape {list(part.labels.shape)}; give {wanted}")


def _read_values(part: Part, place: str, kind: TargetKind, config: DataConfig, names: Sequence[str]) -> Targets:
    """Return numbers float32 [n] or [n, ...], 0 and 1 of labels [n, L], or (time, event) [n, 2]; NaN where one is missing.

    names: of the columns, for messages. A single column of labels is one label; a single column of numbers has no axis.
    """
    import pandas as pd  # takes 0.3 s: imported only where targets are numbers

    values, count = part.labels, f"{len(part.x)} examples"
    if kind == "labels":
        values = values[:, None] if values.ndim == 1 else values
        wanted = f"0 or 1 for each of the {count} and each label: [examples, labels]"
        _check_shape(part, place, values.ndim == 2, wanted)
        if part.labels.ndim == 1 and values.dtype.kind not in "biuf":
            fix = "of a table, name the columns of 0 and 1 in a list: data.label = [...]"
            raise DataError(f"{place}: targets are {values.dtype.name}; give 0 or 1 for each label; {fix}")
    elif kind == "times":
        wanted = (
            f"two numbers for each of the {count}: the time, and 1 for an event or 0 for none; of a table, name both columns"
        )
        _check_shape(part, place, values.ndim == 2 and values.shape[1] == 2, f"{wanted}: data.label = ['time', 'event']")
    else:
        _check_shape(part, place, values.ndim >= 1, f"one number for each of the {count}")
        values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    cells: Any = pd.Series(values.reshape(-1))
    if values.dtype.kind in "UOT" and kind != "numbers":
        cells = cells.astype(str).str.strip().str.casefold().replace({"true": "1", "false": "0"})
    targets: Targets = pd.to_numeric(cells, errors="coerce").to_numpy(np.float32).reshape(values.shape)
    is_bad = ~np.isfinite(targets)
    if config.unlabelled:
        is_bad &= ~(cells.isna() | (cells == "")).to_numpy().reshape(values.shape)
    wanted = "a finite number; fix it, or set training.task = 'classification'"
    if kind == "labels":
        is_uncertain, wanted = targets == -1, "0 or 1, for each label; fix it"
        if config.uncertain is not None:
            targets[is_uncertain] = np.nan if config.uncertain == "ignore" else float(config.uncertain)
            is_bad &= ~is_uncertain
        elif is_uncertain.any():
            wanted = "0 or 1, for each label; if -1 marks an uncertain finding, set data.uncertain = 'ignore', '0' or '1'"
        is_bad |= (targets != 0) & (targets != 1) & ~np.isnan(targets)
    elif kind == "times":
        is_bad |= np.stack([targets[:, 0] < 0, (targets[:, 1] != 0) & (targets[:, 1] != 1)], 1)
        wanted = "a time of at least 0 and an event of 0 or 1; fix it"
    bad_rows = np.flatnonzero(is_bad.reshape(len(targets), -1).any(1))
    if len(bad_rows):
        row = int(bad_rows[0])
        column = int(is_bad[row].reshape(-1).argmax())
        cell = np.asarray(values[row]).reshape(-1)[column]
        owner = f" of {names[column]!r}" if targets.ndim > 1 and column < len(names) else ""
        raise DataError(f"{part.where(row)}: its target {str(cell)!r}{owner} is not {wanted}")
    return targets


def _read_masks(part: Part, place: str) -> npt.NDArray[np.int64]:
    """Return a class number of each pixel [n, *sides]."""
    values = part.labels
    wanted = (
        f"a class number for each pixel of the {len(part.x)} images: [images, height, width], or of volumes [..., depth, "
    )
    _check_shape(part, place, values.ndim >= 3, f"{wanted}height, width]")
    if values.dtype.kind not in "biu":
        raise DataError(f"{place}: targets are {values.dtype.name}; give whole numbers, the class of each pixel")
    return values.astype(np.int64)


def _match_masks(
    masks: Sequence[npt.NDArray[np.int64]], source: Source, config: DataConfig, common: bool, learned: Sequence[str]
) -> Read:
    """Return the names of the classes, and the masks [n, *sides] of each part with the numbers of the classes.

    data.labels names the class of a value, or "": the value is no class, and its pixels are unlabelled (-1). A value that
    data.labels does not name is the number of its class in data.classes, or in the classes that the data declare. Without
    any of these, each value is a class, numbered from 0.
    learned: the classes of a model; a value is not the number of its class in them, because training sorted their names.
    """
    values: list[int] = np.unique(np.concatenate([np.unique(mask) for mask in masks])).tolist()
    class_values = [value for value in values if config.labels.get(str(value)) != ""]
    if not class_values:
        raise DataError(f"{source.place}: data.labels gives no value of the masks a class; name the class of a value")
    lowest, greatest = class_values[0], class_values[-1]

    def refuse(value: int, fix: str) -> NoReturn:
        part, mask = next((p, m) for p, m in zip(source.parts, masks, strict=True) if (m == value).any())
        row = int((mask == value).reshape(len(mask), -1).any(1).argmax())
        raise DataError(
            f"{part.where(row)}: its mask holds {value}, which is no class; the masks hold the values "
            f"{list_names(values, _MOST_LISTED)}, and classes are numbered from 0; {fix}, or fix the mask"
        )

    if not common:
        check_renamed(config.labels, {*map(str, values)})
    declared = config.classes or source.classes
    if declared is None and not config.labels and not learned:
        if lowest < 0 or greatest >= min(2 * len(values), _MOST_CLASSES + 1):
            fix = "number the classes from 0"
            if len(values) <= _MOST_LISTED:
                renames = format_renames({str(v): str(i) for i, v in enumerate(values) if v != i})
                fix = f"give each value its class: data.labels = {renames}"
            refuse(lowest if lowest < 0 else greatest, f"{fix}, or name all in data.classes")
        declared = tuple(str(k) for k in range(greatest + 1))
    names = [config.labels.get(str(v), declared[v] if declared and 0 <= v < len(declared) else str(v)) for v in values]
    classes = tuple(learned or declared or list_classes(None, [np.array(names)], {}))
    check_unlabelled(config, "" in names, source.place)
    if not learned and not config.classes and not source.classes and len(class_values) == 1:
        raise DataError(
            f"{source.place}: all masks hold the value {lowest} alone; a segmentation needs two classes: correct the masks, "
            "or name all classes in data.classes"
        )
    for value, name in zip(values, names, strict=True):
        if name and name not in classes:
            refuse(value, f"name all classes in data.classes (there are {list_names(classes)})")
    numbers = np.array([classes.index(name) if name else -1 for name in names], dtype=np.int64)
    return classes, [numbers[np.searchsorted(values, mask)] for mask in masks]


def check_masks(targets: npt.NDArray[Any], shape: tuple[int, ...], config: DataConfig, place: str) -> None:
    """Check masks [n, *sides] against the shape of one example as a network sees it, and against the augmentation.

    Raises:
        DataError: the masks have other sides than the images.
        ConfigError: data.augment would move the pixels of an image, and not those of its mask.
    """
    if config.augment != "none":
        raise ConfigError(
            f"key 'data.augment': {config.augment!r} moves the pixels of an image, but not of its mask; remove the key"
        )
    if targets.shape[1:] != shape[1:]:
        fix = "remove 'data.size', and bring images and masks to one size" if config.size else "give both the same sides"
        if targets.ndim == len(shape) + 1:
            axis = next((axis for axis in (1, targets.ndim - 1) if targets.shape[axis] == 1), None)
            fix = (
                "convert colours to class numbers first" if axis is None else f"remove the axis of size 1: y.squeeze({axis})"
            )
        raise DataError(f"{place}: masks are {list(targets.shape[1:])} and images {list(shape[1:])}; {fix}")


def note_one_class(targets: npt.NDArray[Any], classes: Sequence[str], place: str) -> list[str]:
    """Return a remark on masks [n, *sides] that all hold the same class; [] for other masks."""
    if (targets[targets >= 0] != targets.max()).any():
        return []
    name = classes[int(targets.max())]
    return [f"{place}: all masks hold the class {name!r} alone, so a model that gives only {name!r} has a Dice score of 1"]
