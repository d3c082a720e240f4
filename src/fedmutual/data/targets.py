"""Targets by kind: classes of examples, numbers, several labels of an example, and masks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.core import TargetKind
from fedmutual.data.draws import Index
from fedmutual.data.examples import Part, Source, list_names
from fedmutual.data.labels import check_renamed, clean_labels, format_renames, list_classes, match_labels
from fedmutual.errors import ConfigError, DataError

Targets = npt.NDArray[np.float32] | npt.NDArray[np.int64]
Read = tuple[tuple[str, ...], Sequence[Targets | Index]]
_MOST_CLASSES = 254  # the greatest class of masks whose classes have no names: 255 is a gray value, or marks no class
_MOST_LISTED = 10  # values of masks, in a message


def read_targets(
    source: Source,
    config: DataConfig,
    kind: TargetKind,
    columns: tuple[str, ...],
    common: bool = False,
    learned: Sequence[str] = (),
) -> Read:
    """Return the names of the outputs, and the targets of each part.

    classes: int64 [n], see `labels.match_labels`; numbers: float32 [n]; labels: float32 [n, L]; masks: int64 [n, H, W].
    columns: the name of the numbers. Labels, and the classes of masks, are named by data.classes, by the names that the data
    declare, or else "0", "1", ... common: as in `match_labels`. learned: the classes of masks that a model learned without
    data.classes.

    Raises:
        DataError: a target is not of its kind, or there is not one target for each example.
        ConfigError: data.classes or data.labels is set and has no meaning for these targets, or names too few labels.
    """
    if kind == "classes":
        return match_labels(source, config, common)
    if kind == "numbers" and config.classes:
        raise ConfigError("key 'data.classes' is for classes, but the task learns numbers; remove the key")
    if config.labels and kind != "masks":
        raise ConfigError(f"key 'data.labels' is for classes, but the task learns {kind}; remove the key")
    test = source.test and clean_labels(source.test, config)
    source = replace(source, train=clean_labels(source.train, config), test=test)
    if kind == "numbers":
        return columns, [_read_numbers(part, source.place) for part in source.parts]
    if kind == "masks":
        return _match_masks([_read_masks(part, source.place) for part in source.parts], source, config, common, learned)
    targets = [_read_labels(part, source.place) for part in source.parts]
    widths = [part.shape[1] for part in targets]
    if len(set(widths)) > 1:
        raise DataError(
            f"{source.place}: training rows have {widths[0]} labels and test rows {widths[1]}; give both the same labels"
        )
    names = config.classes or source.classes or tuple(str(k) for k in range(widths[0]))
    if len(names) != widths[0]:
        key = "key 'data.classes'" if config.classes else f"{source.place}: 'classes'"
        raise ConfigError(f"{key} has {len(names)} names, but targets have {widths[0]} labels; name each label once")
    return tuple(names), targets


def _check_shape(part: Part, place: str, is_right: bool, wanted: str) -> None:
    """Raise DataError unless the targets have the right number of axes, and one entry for each example."""
    if not is_right or len(part.labels) != len(part.x) or not part.labels.size:
        raise DataError(f"{place}: targets have the shape {list(part.labels.shape)}; give {wanted}")


def _read_numbers(part: Part, place: str) -> Targets:
    import pandas as pd  # takes 0.3 s: imported only where targets are numbers

    values = part.labels
    _check_shape(part, place, values.ndim == 1, f"one number for each of the {len(part.x)} examples")
    targets: Targets = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float32)
    bad_rows = np.flatnonzero(~np.isfinite(targets))
    if len(bad_rows):
        raise DataError(
            f"{part.where(int(bad_rows[0]))}: its target {str(values[bad_rows[0]])!r} is not a finite number; fix it, or "
            "set training.task = 'classification'"
        )
    return targets


def _read_labels(part: Part, place: str) -> Targets:
    """Return labels [n, L] of 0 and 1; a single column [n] is one label."""
    values = part.labels[:, None] if part.labels.ndim == 1 else part.labels
    wanted = f"0 or 1 for each of the {len(part.x)} examples and each label: [examples, labels]"
    _check_shape(part, place, values.ndim == 2, wanted)
    if values.dtype.kind not in "biuf":
        fix = "of a table, name the columns of 0 and 1 in a list: data.label = [...]"
        raise DataError(f"{place}: targets are {values.dtype.name}; give 0 or 1 for each label; {fix}")
    bad_rows = np.flatnonzero(((values != 0) & (values != 1)).any(1))
    if len(bad_rows):
        wrong = list_names(values[bad_rows[0]].tolist(), 5)
        raise DataError(f"{part.where(int(bad_rows[0]))}: its target {wrong} must hold 0 or 1 for each label; fix it")
    return values.astype(np.float32)


def _read_masks(part: Part, place: str) -> npt.NDArray[np.int64]:
    """Return a class number of each pixel [n, H, W]."""
    values, fix = part.labels, ""
    if values.ndim == 4:
        axis = next((axis for axis in (1, 3) if values.shape[axis] == 1), None)
        fix = "convert colours to class numbers first" if axis is None else f"remove the axis of size 1: y.squeeze({axis})"
    wanted = f"a class number for each pixel of the {len(part.x)} images: [images, height, width]"
    _check_shape(part, place, values.ndim == 3, f"{wanted}; {fix}" if fix else wanted)
    if values.dtype.kind not in "biu":
        raise DataError(f"{place}: targets are {values.dtype.name}; give whole numbers, the class of each pixel")
    return values.astype(np.int64)


def _match_masks(
    masks: Sequence[npt.NDArray[np.int64]], source: Source, config: DataConfig, common: bool, learned: Sequence[str]
) -> Read:
    """Return the names of the classes, and the masks [n, H, W] of each part with the numbers of the classes.

    data.labels names the class of a value. A value that data.labels does not name is the number of its class in
    data.classes, or in the classes that the data declare. Without any of these, each value is a class, numbered from 0.
    learned: the classes of a model; a value is not the number of its class in them, because training sorted their names.
    """
    values: list[int] = np.unique(np.concatenate([np.unique(mask) for mask in masks])).tolist()
    lowest, greatest = values[0], values[-1]

    def refuse(value: int, fix: str) -> NoReturn:
        part, mask = next((p, m) for p, m in zip(source.parts, masks, strict=True) if (m == value).any())
        row = int((mask == value).any((1, 2)).argmax())
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
    if not learned and not config.classes and not source.classes and len(values) == 1:
        raise DataError(
            f"{source.place}: all masks hold the value {lowest} alone; a segmentation needs two classes: correct the masks, "
            "or name all classes in data.classes"
        )
    for value, name in zip(values, names, strict=True):
        if name not in classes:
            refuse(value, f"name all classes in data.classes (there are {list_names(classes)})")
    numbers = np.array([classes.index(name) for name in names], dtype=np.int64)
    return classes, [numbers[np.searchsorted(values, mask)] for mask in masks]


def check_masks(targets: npt.NDArray[Any], shape: tuple[int, ...], config: DataConfig, place: str) -> None:
    """Check masks [n, H, W] against the shape of one example as a network sees it, and against the augmentation.

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
        raise DataError(f"{place}: masks are {list(targets.shape[1:])} and images {list(shape[1:])}; {fix}")


def note_one_class(targets: npt.NDArray[Any], classes: Sequence[str], place: str) -> list[str]:
    """Return a remark on masks [n, H, W] that all hold the same class; [] for other masks."""
    if (targets != targets.flat[0]).any():
        return []
    name = classes[int(targets.flat[0])]
    return [f"{place}: all masks hold the class {name!r} alone, so a model that gives only {name!r} has a Dice score of 1"]
