"""Matching of labels by class name: the class numbers are equal at all clients, also where a client lacks a class."""

import json
import unicodedata
from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.config.grid import format_toml_key
from fedmutual.data.draws import Index, Names
from fedmutual.data.examples import Part, Source, list_names
from fedmutual.data.raw_labels import clean_labels
from fedmutual.errors import ConfigError, DataError


class UnknownClass(DataError):
    """Labels that are none of the federation's classes. `reason` describes the first of them, without the fix."""

    def __init__(
        self,
        where: str,
        unknown: Mapping[str, str],
        classes: Sequence[str],
        key: str = "data.labels",
        existing: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the first unknown label and propose an entry of data.labels.

        Args:
            where: the row of the first unknown label.
            unknown: the owner's name -> the name after data.labels was applied.
            classes: the federation's classes.
            key: the configuration key that renames this owner's labels.
            existing: the entries that `key` already has; the proposed fix keeps them.
        """
        self.where, self.unknown, self.classes = where, unknown, classes
        owner_name, name = next(iter(unknown.items()))
        described = f"{owner_name!r}, which data.labels calls {name!r}," if owner_name != name else f"{owner_name!r}"
        others = f" (nor are {list_names(list(unknown)[1:], 3)})" if len(unknown) > 1 else ""
        self.reason = f"{where}: its class {described} is none of the classes {list_names(classes)}{others}"
        similar = {n: _find_similar(new, classes) for n, new in unknown.items()}
        proposal = (
            f"did you mean {similar[owner_name]!r}? If so,"
            if similar[owner_name]
            else "if it is one of them under another name,"
        )
        renames = {**(existing or {}), **similar}
        renamed = ", ".join(
            f"{format_toml_key(n)} = {json.dumps(class_name or '...', ensure_ascii=False)}"
            for n, class_name in renames.items()
        )
        super().__init__(f"{self.reason}; {proposal} write {key} = {{ {renamed} }}, or add it to data.classes")

    def for_client(self, client: str, common: Mapping[str, str]) -> "UnknownClass":
        """Return this error for a client with data of its own.

        common: the federation's data.labels; the proposed fix repeats them, because the client's own table would replace
        them.
        """
        key = f"clients.{format_toml_key(client)}.data.labels"
        return UnknownClass(f"client {client!r}: {self.where}", self.unknown, self.classes, key, common)


def _find_similar(name: str, classes: Sequence[str]) -> str | None:
    """Return the class that is spelled like `name`, or the only class that begins with `name`; else None."""
    begun = [c for c in classes if c.casefold().startswith(name.casefold())]
    return next(iter(get_close_matches(name, classes, 1)), begun[0] if len(begun) == 1 else None)


def match_labels(source: Source, config: DataConfig, common: bool = False) -> tuple[tuple[str, ...], list[Index]]:
    """Return the federation's classes, and for each part the class numbers [n] of its rows.

    The classes are data.classes; else the classes that the data declare; else, for whole numbers, 0 up to the greatest
    label; else the names in the data, sorted. data.labels renames labels before they are matched.

    common: data.labels serves several clients with data of their own, so a name that is missing here is no error.

    Raises:
        ConfigError: data.classes has a name twice, or data.labels renames a name that no label has.
        DataError: a label is neither a whole number nor a name, or is out of range; or there is only one class.
        UnknownClass: a label is none of the classes.
    """
    parts = [p for p in (source.train, source.test) if p is not None]
    if config.classes is not None and len(set(config.classes)) < len(config.classes):
        repeated = next(c for c in config.classes if config.classes.count(c) > 1)
        raise ConfigError(f"key 'data.classes' names {repeated!r} twice; name each class once")
    declared, encoded = _list_owner_labels(parts, source, config)
    label_names = [names for names, _ in encoded]
    if not common:
        check_renamed(config.labels, {*(declared or ()), *(str(n) for names in label_names for n in names)})
    renamed = [np.array([config.labels.get(n, n) for n in names]) for names in label_names]
    classes = config.classes or list_classes(declared, renamed, config.labels)
    if len(classes) < 2:
        raise DataError(f"{source.place}: there is only one class, {classes[0]!r}; classification needs two")
    numbers = {name: i for i, name in enumerate(classes)}
    class_numbers = []
    for part, (names, codes), new_names in zip(parts, encoded, renamed, strict=True):
        unknown = [i for i, name in enumerate(new_names) if name not in numbers]
        if unknown:
            where = part.where(int(np.argmax(codes == unknown[0])))
            raise UnknownClass(where, {str(names[i]): str(new_names[i]) for i in unknown}, classes)
        class_numbers.append(np.array([numbers[n] for n in new_names], dtype=np.int64)[codes])
    return classes, class_numbers


def list_label_names(source: Source, config: DataConfig) -> set[str]:
    """Return the names of all labels and declared classes, or the values of masks, as the data have them before data.labels.

    Raises:
        DataError: a label is neither a whole number nor a name, or is out of range.
    """
    parts = [p for p in (source.train, source.test) if p is not None]
    if parts[0].labels.ndim == 3:  # masks
        return {str(value) for part in parts for value in np.unique(part.labels).astype(np.int64)}
    declared, encoded = _list_owner_labels(parts, source, config)
    return {*(declared or ()), *(str(n) for names, _ in encoded for n in names)}


def _list_owner_labels(
    parts: Sequence[Part], source: Source, config: DataConfig
) -> tuple[tuple[str, ...] | None, list[tuple[Names, Index]]]:
    """Return the classes that the data declare or count (None: neither), and for each part the result of `_encode_names`."""
    parts = [clean_labels(p, config) for p in parts]
    declared = source.classes
    if declared is None and config.classes is None and all(_get_label_kind(p, source) == "numbers" for p in parts):
        declared = _count_classes(parts, source)
    return declared, [_encode_names(p, declared, source) for p in parts]


def check_renamed(labels: Mapping[str, str], known: Set[str]) -> None:
    """Raise ConfigError where data.labels renames a name that is not in `known`."""
    for name in labels:
        if name not in known:
            similar = get_close_matches(name, known, 1) or [
                n for n in known if n.strip().casefold() == name.strip().casefold()
            ]
            fix = f"did you mean {similar[0]!r}?" if similar else f"there are {list_names(sorted(known))}"
            raise ConfigError(f"key 'data.labels' renames {name!r}, but no label has that name; {fix}")


def _get_label_kind(part: Part, source: Source) -> str:
    """Return "numbers" or "names"; raise DataError for all other labels."""
    labels = part.labels
    if labels.ndim != 1 or len(labels) != len(part.x):
        raise DataError(
            f"{source.place}: labels have the shape {list(labels.shape)}; give one label for each of the {len(part.x)} "
            "examples"
            + ("; for one-hot labels use the argmax, for several labels training.task = 'multilabel'" * (labels.ndim == 2))
        )
    if labels.dtype.kind in "biu":
        return "numbers"
    if labels.dtype.kind in "UT":
        return "names"
    first = labels[0] if labels.dtype.kind != "f" else next((v for v in labels if not float(v).is_integer()), labels[0])
    raise DataError(
        f"{source.place}: labels must be whole numbers or names, but are {labels.dtype.name} ({first!s}, for example); "
        "convert them, for instance with .astype(int)"
    )


def _count_classes(parts: Sequence[Part], source: Source) -> tuple[str, ...]:
    """Return the names "0" up to the greatest label; raise DataError where most of these classes would have no example."""
    labels_by_part = [_clip_to_int64(p.labels) for p in parts]
    present = np.unique(np.concatenate(labels_by_part))
    greatest = int(present[-1])
    if present[0] < 0 or greatest + 1 > 2 * len(present):
        wrong_label = present[0] if present[0] < 0 else greatest
        part, row = next(
            (p, int(np.argmax(c == wrong_label)))
            for p, c in zip(parts, labels_by_part, strict=True)
            if (c == wrong_label).any()
        )
        raise DataError(
            f"{part.where(row)}: its label {part.labels[row]} is out of range: whole numbers must count classes from 0, but "
            f"the labels are {list_names(present.tolist())}; fix the label, or name all classes in data.classes"
        )
    return tuple(str(i) for i in range(greatest + 1))


def _clip_to_int64(labels: npt.NDArray[Any]) -> Index:
    """Return whole numbers as int64, clipped at the greatest int64: a plain cast would make greater numbers negative."""
    if labels.dtype.kind == "u":
        labels = np.minimum(labels.astype(np.uint64), np.iinfo(np.int64).max)
    return labels.astype(np.int64)


def _encode_names(part: Part, declared: tuple[str, ...] | None, source: Source) -> tuple[Names, Index]:
    """Return the owner's class names, and for each row the index of its name."""
    if _get_label_kind(part, source) == "names" or declared is None:
        names, codes = np.unique(part.labels.astype(str), return_inverse=True)
        return names, codes.astype(np.int64)
    numbers: npt.NDArray[Any] = part.labels.astype(np.int64)
    bad_rows = np.flatnonzero((numbers < 0) | (numbers >= len(declared)))
    if len(bad_rows):
        raise DataError(
            f"{part.where(int(bad_rows[0]))}: its label {numbers[bad_rows[0]]} is out of range, there are "
            f"{len(declared)} classes; "
            f"labels go from 0 to {len(declared) - 1}"
        )
    present, codes = np.unique(numbers, return_inverse=True)
    return np.array([declared[i] for i in present]), codes.astype(np.int64)


def list_classes(
    declared: tuple[str, ...] | None, names_by_part: Sequence[Names], labels: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the classes in order: declared ones after renaming; else names sorted, with whole numbers first."""
    if declared is not None:
        return tuple(dict.fromkeys(labels.get(n, n) for n in declared))
    names = {str(n) for names in names_by_part for n in names}
    return tuple(sorted(names, key=lambda n: (not n.isdecimal(), int(n) if n.isdecimal() else 0, n)))


def note_similar_classes(classes: Sequence[str], class_numbers: Index, source: Source, config: DataConfig) -> list[str]:
    """Return a remark on each group of classes whose names differ only in case or Unicode form.

    class_numbers: the class of each row [n]. The remark proposes the name that most rows have.

    Raises:
        DataError: two names differ in blanks only, so that they look equal.
    """
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(classes):
        groups.setdefault(" ".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(i)
    class_counts, remarks = np.bincount(class_numbers, minlength=len(classes)), []
    for group in (g for g in groups.values() if len(g) > 1):
        names, preferred = [classes[i] for i in group], classes[max(group, key=lambda i: class_counts[i])]
        renames = ", ".join(
            f"{format_toml_key(n)} = {json.dumps(new, ensure_ascii=False)}"
            for n, new in (config.labels | dict.fromkeys(names, preferred)).items()
            if n != new
        )
        remarks.append(
            f"{source.place}: classes {', '.join(map(repr, names[:-1]))} and {names[-1]!r} look alike; if they are one, "
            f"write data.labels = {{ {renames} }}, else name all classes in data.classes"
        )
        if len({" ".join(name.split()) for name in names}) < len(names):
            raise DataError(remarks[-1])
    return remarks
