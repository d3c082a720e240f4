"""Labels are matched by class name: a site that lacks a class keeps the numbers of the others."""

import json
from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.config.grid import toml_key
from fedmutual.data.draws import Index, Names
from fedmutual.data.examples import Part, Source, listed
from fedmutual.errors import ConfigError, DataError

Targets = npt.NDArray[np.float32]


class UnknownClass(DataError):
    """Labels that are none of the federation's classes; `what` says so of the first of them, without a mend."""

    def __init__(
        self,
        where: str,
        odd: Mapping[str, str],
        classes: Sequence[str],
        key: str = "data.labels",
        kept: Mapping[str, str] | None = None,
    ) -> None:
        """odd: the owner's name -> what data.labels makes of it. key: where this owner's names are mended, beside `kept`."""
        self.where, self.odd, self.classes = where, odd, classes
        own, name = next(iter(odd.items()))
        called = f"{own!r}, which data.labels calls {name!r}," if own != name else f"{own!r}"
        more = f" (nor are {listed(list(odd)[1:], 3)})" if len(odd) > 1 else ""
        self.what = f"{where}: its class {called} is none of the classes {listed(classes)}{more}"
        near = {n: _near(new, classes) for n, new in odd.items()}
        mend = f"did you mean {near[own]!r}? If so," if near[own] else "if it is one of them under another name,"
        table = {**(kept or {}), **near}
        renamed = ", ".join(f"{toml_key(n)} = {json.dumps(to or '...', ensure_ascii=False)}" for n, to in table.items())
        super().__init__(f"{self.what}; {mend} write {key} = {{ {renamed} }}, or add it to data.classes")

    def of(self, client: str, common: Mapping[str, str]) -> "UnknownClass":
        """The same, where a client brings data of its own. common: of data.labels, which labels of its own would replace."""
        key = f"clients.{toml_key(client)}.data.labels"
        return UnknownClass(f"client {client!r}: {self.where}", self.odd, self.classes, key, common)


def _near(name: str, classes: Sequence[str]) -> str | None:
    """The class that a name most likely stands for: one like it, or the only one that it begins."""
    begun = [c for c in classes if c.casefold().startswith(name.casefold())]
    return next(iter(get_close_matches(name, classes, 1)), begun[0] if len(begun) == 1 else None)


def match(source: Source, config: DataConfig, common: bool = False) -> tuple[tuple[str, ...], list[Index]]:
    """-> (the federation's classes, for each part the class numbers [n] of its rows).

    The classes are data.classes; else those the data declare; else, of labels that are whole numbers, 0 up to the
    greatest; else the names found, sorted. data.labels renames before anything is matched; where it is common to clients
    with data of their own, it may rename what is called so at others only.

    Raises:
        DataError: a label that is neither whole number nor name, out of range, or none of the classes.
    """
    parts = [p for p in (source.train, source.test) if p is not None]
    if config.classes is not None and len(set(config.classes)) < len(config.classes):
        twice = next(c for c in config.classes if config.classes.count(c) > 1)
        raise ConfigError(f"key 'data.classes' names {twice!r} twice; name each class once")
    declared, own = _declared(parts, source, config)
    found = [names for names, _ in own]
    if not common:
        check_renamed(config.labels, {*(declared or ()), *(str(n) for names in found for n in names)})
    renamed = [np.array([config.labels.get(n, n) for n in names]) for names in found]
    classes = config.classes or _classes(declared, renamed, config.labels)
    if len(classes) < 2:
        raise DataError(
            f"{source.place}: there is one class only, {classes[0]!r}; two are needed to tell one from the other"
        )
    numbers = {name: i for i, name in enumerate(classes)}
    coded = []
    for part, (names, codes), new in zip(parts, own, renamed, strict=True):
        odd = [i for i, name in enumerate(new) if name not in numbers]
        if odd:
            where = part.where(int(np.argmax(codes == odd[0])))
            raise UnknownClass(where, {str(names[i]): str(new[i]) for i in odd}, classes)
        coded.append(np.array([numbers[n] for n in new], dtype=np.int64)[codes])
    return classes, coded


def called(source: Source, config: DataConfig) -> set[str]:
    """What the owner's labels are called, before data.labels renames any."""
    declared, own = _declared([p for p in (source.train, source.test) if p is not None], source, config)
    return {*(declared or ()), *(str(n) for names, _ in own for n in names)}


def _declared(
    parts: Sequence[Part], source: Source, config: DataConfig
) -> tuple[tuple[str, ...] | None, list[tuple[Names, Index]]]:
    """-> (the classes that the data declare, or count; of each part as `_named`)."""
    declared = source.classes
    if declared is None and config.classes is None and all(_kind(p, source) == "numbers" for p in parts):
        declared = _counted(parts, source)
    return declared, [_named(p, declared, source) for p in parts]


def numbers(source: Source, config: DataConfig) -> list[Targets]:
    """The targets [n] of each part's rows as they are.

    Raises:
        DataError: a target is no finite number, or they are not one a row.
        ConfigError: a key is for classes.
    """
    for key in ("classes", "labels"):
        if getattr(config, key):
            raise ConfigError(f"key 'data.{key}' is for classes, and the task learns numbers; take it out")
    import pandas as pd  # a third of a second, which only who learns numbers waits for

    found = []
    for part in (p for p in (source.train, source.test) if p is not None):
        values = part.labels
        if values.ndim != 1 or len(values) != len(part.x):
            raise DataError(
                f"{source.place}: targets have the shape {list(values.shape)}, and one number for each of {len(part.x)} "
                "examples is wanted"
            )
        targets = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float32)
        bad = np.flatnonzero(~np.isfinite(targets))
        if len(bad):
            raise DataError(
                f"{part.where(int(bad[0]))}: its target {str(values[bad[0]])!r} is no finite number; mend it, or set "
                "training.task = 'classification'"
            )
        found.append(targets)
    return found


def check_renamed(labels: Mapping[str, str], known: Set[str]) -> None:
    """Raise ConfigError where data.labels renames what no label is called."""
    for name in labels:
        if name not in known:
            near = get_close_matches(name, known, 1) or [n for n in known if n.strip().casefold() == name.strip().casefold()]
            mend = f"did you mean {near[0]!r}?" if near else f"there are {listed(sorted(known))}"
            raise ConfigError(f"key 'data.labels' renames {name!r}, and no label is called so; {mend}")


def _kind(part: Part, source: Source) -> str:
    """ "numbers" or "names"; anything else is refused."""
    labels = part.labels
    if labels.ndim != 1 or len(labels) != len(part.x):
        raise DataError(
            f"{source.place}: labels have the shape {list(labels.shape)}, and one for each of {len(part.x)} examples is "
            "wanted" + ("; of one-hot labels take the argmax" if labels.ndim == 2 else "")
        )
    if labels.dtype.kind in "biu":
        return "numbers"
    if labels.dtype.kind in "UT":
        return "names"
    first = labels[0] if labels.dtype.kind != "f" else next((v for v in labels if not float(v).is_integer()), labels[0])
    raise DataError(
        f"{source.place}: labels must be whole numbers or names, and are {labels.dtype.name} ({first!s}, for example); "
        "convert them, for instance with .astype(int)"
    )


def _counted(parts: Sequence[Part], source: Source) -> tuple[str, ...]:
    """The names "0" up to the greatest label. Refused where most of them would stand for nothing."""
    coded = [_int64(p.labels) for p in parts]
    there = np.unique(np.concatenate(coded))
    most = int(there[-1])
    if there[0] < 0 or most + 1 > 2 * len(there):
        odd = there[0] if there[0] < 0 else most
        part, row = next((p, int(np.argmax(c == odd))) for p, c in zip(parts, coded, strict=True) if (c == odd).any())
        raise DataError(
            f"{part.where(row)}: its label {part.labels[row]} is out of range, for whole numbers count classes from 0 and "
            f"the labels are {listed(there.tolist())}; mend it, or name all classes in data.classes"
        )
    return tuple(str(i) for i in range(most + 1))


def _int64(labels: npt.NDArray[Any]) -> Index:
    """Whole numbers; of greater ones the greatest, where a cast would turn them negative."""
    whole = labels.astype(np.uint64) if labels.dtype.kind == "u" else labels
    return np.asarray(np.minimum(whole, np.iinfo(np.int64).max), dtype=np.int64)


def _named(part: Part, declared: tuple[str, ...] | None, source: Source) -> tuple[Names, Index]:
    """-> (the owner's names, for each row which of them)."""
    if _kind(part, source) == "names" or declared is None:
        names, codes = np.unique(part.labels.astype(str), return_inverse=True)
        return names, codes.astype(np.int64)
    numbers: npt.NDArray[Any] = part.labels.astype(np.int64)
    bad = np.flatnonzero((numbers < 0) | (numbers >= len(declared)))
    if len(bad):
        raise DataError(
            f"{part.where(int(bad[0]))}: its label {numbers[bad[0]]} is out of range, there are {len(declared)} classes; "
            f"labels go from 0 to {len(declared) - 1}"
        )
    there, codes = np.unique(numbers, return_inverse=True)
    return np.array([declared[i] for i in there]), codes.astype(np.int64)


def _classes(declared: tuple[str, ...] | None, found: Sequence[Names], labels: Mapping[str, str]) -> tuple[str, ...]:
    if declared is not None:
        return tuple(dict.fromkeys(labels.get(n, n) for n in declared))
    names = {str(n) for names in found for n in names}
    return tuple(sorted(names, key=lambda n: (not n.isdecimal(), int(n) if n.isdecimal() else 0, n)))
