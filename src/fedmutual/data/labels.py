"""Matching of labels by class name: the class numbers are equal at all clients, also where a client lacks a class."""

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from difflib import get_close_matches
from numbers import Integral, Number
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.config.grid import format_toml_key
from fedmutual.data.draws import Index, Names
from fedmutual.data.examples import Part, Source, list_names
from fedmutual.errors import ConfigError, DataError, format_count

_MISSING = {"", "nan", "NaN", "NaT", "<NA>"}  # the text of missing values of numpy and pandas


class UnknownClass(DataError):
    """Labels that are none of the federation's classes. `reason` describes the first of them, without the fix."""

    def __init__(
        self,
        where: str,
        unknown: Mapping[str, str],
        classes: Sequence[str],
        client: str | None = None,
        existing: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the unknown label of the row `where`, and propose an entry of data.labels.

        unknown: the owner's name -> the name after data.labels was applied. client: whose own data these are; `existing`
        are the federation's data.labels then, which the fix repeats, because the client's own table would replace them.
        """
        self.where, self.unknown, self.classes = where, unknown, classes
        owner_name, name = next(iter(unknown.items()))
        described = f"{owner_name!r}, which data.labels calls {name!r}," if owner_name != name else f"{owner_name!r}"
        others = f" (nor are {list_names(list(unknown)[1:], 3)})" if len(unknown) > 1 else ""
        owner = "" if client is None else f"client {client!r}: "
        self.reason = f"{owner}{where}: its class {described} is none of the classes {list_names(classes)}{others}"
        similar = {}  # the class that is spelled like a name, or the only class that begins with it
        for n, new in unknown.items():
            begun = [c for c in classes if c.casefold().startswith(new.casefold())]
            similar[n] = next(iter(get_close_matches(new, classes, 1)), begun[0] if len(begun) == 1 else None)
        proposal = "if it is one of them under another name,"
        if similar[owner_name]:
            proposal = f"did you mean {similar[owner_name]!r}? If so,"
        key = "data.labels" if client is None else f"clients.{format_toml_key(client)}.data.labels"
        renamed = format_renames({**(existing or {}), **{n: c or "..." for n, c in similar.items()}})
        super().__init__(f"{self.reason}; {proposal} write {key} = {renamed}, or add it to data.classes")


def format_renames(names: Mapping[str, str]) -> str:
    """Return a TOML table that gives names other names: `{ ill = "sick" }`."""
    return f"{{ {', '.join(f'{format_toml_key(n)} = {json.dumps(new, ensure_ascii=False)}' for n, new in names.items())} }}"


def match_labels(source: Source, config: DataConfig, common: bool = False) -> tuple[tuple[str, ...], list[Index]]:
    """Return the federation's classes, and for each part the class numbers [n] of its rows; -1 without a label.

    The classes are data.classes; else the classes that the data declare; else, for whole numbers, 0 up to the greatest
    label; else the names in the data, sorted. data.labels renames labels before they are matched.

    common: data.labels serves several clients with data of their own, so a name that is missing here is no error.

    Raises:
        ConfigError: data.classes has a name twice, or data.labels renames a name that no label has.
        DataError: a label is neither a whole number nor a name, or is out of range; or there is only one class.
        UnknownClass: a label is none of the classes.
    """
    if config.classes is not None and len(set(config.classes)) < len(config.classes):
        repeated = next(c for c in config.classes if config.classes.count(c) > 1)
        raise ConfigError(f"key 'data.classes' names {repeated!r} twice; name each class once")
    declared, encoded = _list_owner_labels(source, config)
    if not common:
        check_renamed(config.labels, {*(declared or ()), *(str(n) for names, _ in encoded for n in names)})
    renamed = [np.array([config.labels.get(n, n) for n in names]) for names, _ in encoded]
    classes = config.classes or list_classes(declared, renamed, config.labels)
    if len(classes) < 2:
        where = "key 'data.classes' names" if config.classes else f"{source.place}: there is"
        raise DataError(f"{where} only one class, {classes[0]!r}; classification needs two")
    check_unlabelled(config, any("" in names for names in renamed), source.place)
    numbers = {name: i for i, name in enumerate(classes)} | {"": -1}
    class_numbers = []
    for part, (names, codes), new_names in zip(source.parts, encoded, renamed, strict=True):
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
    if source.train.labels.ndim >= 3:  # masks
        return {str(value) for part in source.parts for value in np.unique(part.labels).astype(np.int64)}
    declared, encoded = _list_owner_labels(source, config)
    return {*(declared or ()), *(str(n) for names, _ in encoded for n in names)}


def check_unlabelled(config: DataConfig, has_blank: bool, place: str) -> None:
    """Raise ConfigError where `data.labels` gives values no class, and labels may not be missing."""
    if has_blank and not config.unlabelled:
        raise ConfigError(
            f'{place}: data.labels gives labels no class (""), so these examples are unlabelled; set data.unlabelled = true'
        )


def _list_owner_labels(source: Source, config: DataConfig) -> tuple[tuple[str, ...] | None, list[tuple[Names, Index]]]:
    """Return the classes that the data declare or count (None: neither), and for each part its names and their rows."""
    parts, declared = [_name_whole_numbers(clean_labels(part, config)) for part in source.parts], source.classes
    are_numbers = [_check_kind(part, source.place) for part in parts]
    if declared is None and config.classes is None and all(are_numbers):
        declared = _count_classes(parts)
    encoded = []
    for part, is_number in zip(parts, are_numbers, strict=True):
        if is_number and declared is not None:
            numbers = part.labels.astype(np.int64)
            _refuse_out_of_range(part, (numbers < 0) | (numbers >= len(declared)), f"go from 0 to {len(declared) - 1}")
            present, codes = np.unique(numbers, return_inverse=True)
            names: Names = np.array([declared[i] for i in present])
        else:
            are_bits = part.labels.dtype.kind == "b" and {"0", "1"} <= {*(config.classes or ())}  # at other clients
            labels = part.labels.astype(int) if are_bits else part.labels
            names, codes = np.unique(labels.astype(str), return_inverse=True)
        encoded.append((names, codes.astype(np.int64)))
    return declared, encoded


def _name_whole_numbers(part: Part) -> Part:
    """Return the part with text in place of whole numbers [n] with NaN: pandas makes them of whole numbers with a blank."""
    labels = part.labels
    if labels.dtype.kind != "f" or labels.ndim != 1 or not (missing := np.isnan(labels)).any():
        return part
    if (labels[~missing] % 1).any():
        return part
    return replace(part, labels=np.array(["" if np.isnan(v) else str(int(v)) for v in labels]))


def check_renamed(labels: Mapping[str, str], known: Set[str]) -> None:
    """Raise ConfigError where data.labels renames a name that is not in `known`."""
    for name in (n for n in labels if n not in known):
        similar = get_close_matches(name, known, 1) or [n for n in known if n.strip().casefold() == name.strip().casefold()]
        fix = f"did you mean {similar[0]!r}?" if similar else f"there are {list_names(sorted(known))}"
        raise ConfigError(f"key 'data.labels' renames {name!r}, but no label has that name; {fix}")


def _check_kind(part: Part, place: str) -> bool:
    """Return whether the labels are whole numbers, not names; raise DataError for all other labels."""
    labels = part.labels
    if labels.ndim != 1 or len(labels) != len(part.x):
        fix = "; for one-hot labels use the argmax, for several labels training.task = 'multilabel'"
        raise DataError(
            f"{place}: labels have the shape {list(labels.shape)}; give one label for each of the {len(part.x)} examples"
            + (fix if labels.ndim == 2 else "")
        )
    if labels.dtype.kind not in "biuUT":
        first = next((v for v in labels if labels.dtype.kind == "f" and not float(v).is_integer()), labels[0])
        fix = "give names, with .astype(str)"
        if labels.dtype.kind == "f":
            fix = "give whole numbers, with .astype(int), or set training.task = 'regression' to learn numbers"
        raise DataError(
            f"{place}: labels must be whole numbers or names, but are {labels.dtype.name} ({first!s}, for example); {fix}"
        )
    return labels.dtype.kind in "biu"


def _count_classes(parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the names "0" up to the greatest label, of truth values "False" and "True".

    Raises DataError where most of these classes would have no example.
    """
    if all(part.labels.dtype.kind == "b" for part in parts):
        return ("False", "True")
    # a plain cast to int64 would make greater numbers negative
    clipped = [np.minimum(p.labels.astype(np.uint64), 2**63 - 1) if p.labels.dtype.kind == "u" else p.labels for p in parts]
    present = np.unique(np.concatenate([labels.astype(np.int64) for labels in clipped]))
    lowest, greatest = int(present[0]), int(present[-1])
    if lowest < 0 or greatest + 1 > 2 * len(present):
        wrong = lowest if lowest < 0 else greatest
        rule = f"must count classes from 0, but are {list_names(present.tolist())}"
        for part, labels in zip(parts, clipped, strict=True):
            _refuse_out_of_range(part, labels.astype(np.int64) == wrong, rule)
    return tuple(str(i) for i in range(greatest + 1))


def _refuse_out_of_range(part: Part, is_bad: npt.NDArray[np.bool_], rule: str) -> None:
    """Raise DataError with the first bad label [n] of a part."""
    if is_bad.any():
        row = int(is_bad.argmax())
        raise DataError(
            f"{part.where(row)}: its label {part.labels[row]} is out of range: labels {rule}; fix the label, or name all "
            "classes in data.classes"
        )


def list_classes(
    declared: tuple[str, ...] | None, names_by_part: Iterable[Names], labels: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the classes in order: declared ones after renaming; else names sorted, with whole numbers first."""
    if declared is not None:
        return tuple(name for name in dict.fromkeys(labels.get(n, n) for n in declared) if name)
    names = {str(n) for names in names_by_part for n in names} - {""}
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
        renames = {n: new for n, new in (config.labels | dict.fromkeys(names, preferred)).items() if n != new}
        remarks.append(
            f"{source.place}: classes {', '.join(map(repr, names[:-1]))} and {names[-1]!r} look alike; if they are one, "
            f"write data.labels = {format_renames(renames)}, else name all classes in data.classes"
        )
        if len({" ".join(name.split()) for name in names}) < len(names):
            raise DataError(remarks[-1])
    return remarks


def clean_labels(part: Part, config: DataConfig) -> Part:
    """Return the part with labels of text or numbers [n, ...]. With `data.unlabelled` a missing label is "" or NaN.

    None, NaN and empty text are missing labels. So is the text that numpy and pandas write for NaN, unless data.classes or
    data.labels names that text. Bytes become text, and whole numbers of Python objects [n] are names.

    Raises:
        DataError: labels are missing without `data.unlabelled`, are bytes that are no UTF-8 text, or are of several kinds,
            such as 1 and "1".
    """
    labels = part.labels
    if labels.dtype.kind == "f" and not config.unlabelled:
        _refuse_missing(part, np.isnan(labels))
    if labels.dtype.kind not in "SUTO":
        return part
    values = labels.astype(object)
    for place, value in np.ndenumerate(values):
        if isinstance(value, bytes):
            try:
                values[place] = value.decode()
            except UnicodeDecodeError:
                raise DataError(
                    f"{part.where(place[0])}: its label {value!r} is not UTF-8 text; decode the labels, for example by "
                    "[label.decode('latin-1') for label in y]"
                ) from None
    text = _MISSING - {*(config.classes or ()), *config.labels}
    missing = np.array([isinstance(v, str) and v.strip() in text for v in values.flat], dtype=bool).reshape(values.shape)
    if labels.dtype.kind in "OT":
        import pandas as pd  # takes 0.3 s: imported only for labels that may be objects of pandas

        missing |= pd.isna(values)
    if not config.unlabelled:
        _refuse_missing(part, missing)
    kinds = [_name_kind(value, values.ndim > 1) for value in values.flat]
    known = np.flatnonzero(~missing).tolist()
    other = next((k for k in known if kinds[k] != kinds[known[0]]), None)
    if other is not None:
        first, where = known[0], [part.where(k * len(values) // len(kinds)) for k in (other, known[0])]
        raise DataError(
            f"{where[0]}: its label {values.flat[other]!r} is {kinds[other]}, and the label {values.flat[first]!r} of "
            f"{where[1]} is {kinds[first]}; give all labels one type, for example by .astype(str)"
        )
    are_numbers = bool(known) and kinds[known[0]] == "a number"
    is_plain = values.ndim == 1 and not (are_numbers and not all(isinstance(values[k], Integral) for k in known))
    values[missing] = "" if is_plain or not are_numbers else np.nan
    if is_plain:
        return replace(part, labels=values.astype(str))
    cells = np.asarray(values.tolist())  # of Decimal and Fraction still objects
    return replace(part, labels=cells.astype(float) if cells.dtype == object and are_numbers else cells)


def _refuse_missing(part: Part, missing: npt.NDArray[np.bool_]) -> None:
    """Raise DataError where labels are missing. missing: [n, ...]."""
    rows = np.flatnonzero(missing.any(tuple(range(1, missing.ndim))))
    if len(rows):
        raise DataError(
            f"{part.where(int(rows[0]))}: its label is missing ({len(rows):,} of {format_count(len(missing), 'label')}); "
            "fill in the labels, drop these rows (of a DataFrame by dropna), or set data.unlabelled = true to train on them "
            "without a label"
        )


def check_groups(part: Part, config: DataConfig) -> None:
    """Raise DataError where a row has no group (data.group_by): rows of unknown patients are not those of one patient."""
    groups = np.empty(0, dtype=str) if part.groups is None else part.groups
    rows = np.flatnonzero(np.isin(groups, [*_MISSING, "None"]))
    if len(rows):
        raise DataError(
            f"{part.where(int(rows[0]))}: its group (data.group_by = {config.group_by!r}) is missing ({len(rows):,} of "
            f"{format_count(len(part.x), 'row')}); fill in the groups, give each of these rows its own group, or drop them"
        )


def _name_kind(value: Any, is_one_of_several: bool) -> str:
    if isinstance(value, bool | np.bool_):  # an event beside its time is a number
        return "a number" if is_one_of_several else "a truth value"
    return "a number" if isinstance(value, Number) else "text" if isinstance(value, str) else type(value).__name__
