"""A folder of images: root/class/**/*.png; with train and test folders above the classes; or root/domain/class."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from fedmutual.config import DataConfig
from fedmutual.data.arrays import require_root
from fedmutual.data.draws import Names
from fedmutual.data.examples import Part, Source, list_names
from fedmutual.data.images import EXTENSIONS, ImageExamples
from fedmutual.errors import DataError, format_count

METADATA = "metadata.csv"  # columns: file_name, relative to the folder, and the column of data.group_by
_MAC_COPY = "__MACOSX"  # a folder in zip files of macOS, with hidden files
_TRAINING, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_ENDINGS = ", ".join(sorted(EXTENSIONS))
_MOST_KINDS = 10


def read_folder(config: DataConfig, domains: bool = False) -> Source:
    """Return the images below data.root. `domains`: the folders above the class folders are the domains.

    Raises:
        ConfigError: data.root is not set.
        DataError: a folder is missing or has no images, the layout of the folders is unclear, the first image cannot be
            read, or the metadata lack a file.
    """
    root = require_root(config)
    parts_found = None if config.test is not None else _find_parts(root, config, domains)
    place, test_place = parts_found or (root, config.test)
    train, images = _read_part(place, root, config, domains, None)
    test, parts = None, {place: images}
    if test_place is not None:
        test, parts[test_place] = _read_part(test_place, root if parts_found else test_place, config, domains, images)
    notes = [f"images are read as gray, because the first image is gray ({images.files[0]})"] if images.gray else []
    for part_place, part in parts.items():
        nested = [f for f in part.files if len(f.relative_to(part_place).parts) > (3 if domains else 2)]
        if nested:
            notes.append(
                f"{part_place}: {format_count(len(nested), 'image')} in folders inside the folders of the classes, for "
                f"example {nested[0].relative_to(part_place)}: read as images of these classes"
            )
        notes += part.describe_transparency()
    bases = [root, *([config.test] if config.test is not None else [])]
    read_files = {file for part in parts.values() for file in part.files}
    if config.group_by is not None:
        read_files.update(base / METADATA for base in bases)
    for base in bases:
        unread = [f for f in _list_files(base) if f not in read_files]
        if unread:
            notes.append(
                f"{base}: {format_count(len(unread), 'file')} {'is' if len(unread) == 1 else 'are'} not read: "
                f"{_count_kinds(unread, base)}; images have the endings {_ENDINGS}"
            )
    return Source(str(root), train, test, notes=tuple(notes))


def make_image_part(
    images: ImageExamples, labels: Sequence[str], groups: Names | None = None, domains: Names | None = None
) -> Part:
    """Return image files as a part of a data set; a file is the name of its row."""
    return Part(images, np.array(labels), lambda i: str(images.files[i]), groups, domains)


def _find_parts(root: Path, config: DataConfig, domains: bool) -> tuple[Path, Path] | None:
    """Return the folders `train` and `test` of the root, in small or capital letters; None if one of them is missing.

    Raises:
        DataError: two folders have other names of a training and a test part, for example `train` and `val`.
    """
    folders = {f.name.lower(): f for f in sorted(root.iterdir()) if f.is_dir()} if root.is_dir() else {}
    if {"train", "test"} <= folders.keys():
        return folders["train"], folders["test"]
    train, test = (next((folders[n] for n in names if n in folders), None) for names in (_TRAINING, _TEST))
    if train is not None and test is not None and not domains and not _are_classes((train, test), config):
        raise DataError(
            f"{root}: has the folders {train.name!r} and {test.name!r}, but not 'train' and 'test'; set data.root = "
            f"'{train}' and data.test = '{test}', or, if both are classes, name all classes in data.classes"
        )
    return None


def _are_classes(folders: Iterable[Path], config: DataConfig) -> bool:
    """Return whether the configuration names each of these folders as a class."""
    return config.classes is not None and {f.name for f in folders} <= {*config.classes, *config.labels}


def _read_part(
    place: Path, base: Path, config: DataConfig, domains: bool, like: ImageExamples | None
) -> tuple[Part, ImageExamples]:
    if not place.is_dir():
        raise DataError(f"{place}: there is no such folder; key 'data.root' or 'data.test' names it")
    files, labels, domain_names = list[Path](), list[str](), list[str]()
    for domain in _list_folders(place) if domains else [place]:
        files_by_class = {folder: list_images(folder) for folder in _list_folders(domain)}
        if not _are_classes(files_by_class, config):
            _check_depth(domain, files_by_class, domains)
        for class_folder, class_files in files_by_class.items():
            files += class_files
            labels += [class_folder.name] * len(class_files)
            domain_names += [domain.name] * len(class_files)
    images = ImageExamples(files, base, config.size, like)
    groups = _read_groups(base, files, config.group_by) if config.group_by is not None else None
    return make_image_part(images, labels, groups, np.array(domain_names) if domains else None), images


def list_images(class_folder: Path) -> list[Path]:
    """Return the images of a class, with those in folders inside the folder of the class."""
    files = _list_files(class_folder)
    images = [f for f in files if f.suffix.lower() in EXTENSIONS and not _is_hidden(f, class_folder)]
    if not images:
        others = f" ({_count_kinds(files, class_folder)})" if files else ""
        raise DataError(
            f"{class_folder}: the folder of class {class_folder.name!r} holds no images{others}; fill or remove it "
            "(images lie in root/class, or in root/domain/class with partition.kind = 'domains', and have the endings "
            f"{_ENDINGS})"
        )
    return images


def _list_files(place: Path) -> list[Path]:
    """Return all files below a folder, sorted. A link to a folder is followed, unless the link leads to a folder above."""

    def refuse(problem: OSError) -> NoReturn:
        raise DataError(f"{problem.filename}: the folder cannot be read ({problem.strerror}); permit reading, or remove it")

    def leads_upward(folder: Path) -> bool:
        return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())

    files: list[Path] = []
    for name, inner_names, file_names in os.walk(place, onerror=refuse, followlinks=True):
        folder = Path(name)
        inner_names[:] = [inner for inner in inner_names if not leads_upward(folder / inner)]
        files += [folder / file_name for file_name in file_names]
    return sorted(files)


def _is_hidden(file: Path, place: Path) -> bool:
    return any(part.startswith(".") or part == _MAC_COPY for part in file.relative_to(place).parts)


def _check_depth(place: Path, files_by_class: Mapping[Path, Sequence[Path]], domains: bool) -> None:
    """Raise DataError if the folders of `place` may be parts or domains, with the folders of the classes inside them.

    They may be if some folders hold images in inner folders only, and the name of an inner folder occurs again; or if
    `place` holds one folder, and its images are in inner folders only.
    """
    nested = [folder for folder, files in files_by_class.items() if all(f.parent != folder for f in files)]
    inside = Counter(name for c in nested for name in {f.relative_to(c).parts[0] for f in files_by_class[c]})
    inside.update({c.name for c in files_by_class} & set(inside))
    repeated = sorted(name for name, count in inside.items() if count > 1)
    if repeated or len(files_by_class) == len(nested) == 1:
        fix = (
            "let data.root name the folder of the domains"
            if domains
            else "set partition.kind = 'domains', or let data.root (and data.test) name the folder of the classes"
        )
        raise DataError(
            f"{place}: images lie in folders inside {list_names([f.name for f in nested], 3)}, and the inner folders "
            f"({list_names(repeated or sorted(inside), 3)}) may be the classes; if so, {fix}; if not, name the classes in "
            "data.classes"
        )


def _count_kinds(files: Iterable[Path], place: Path) -> str:
    """Return how many files of each kind there are, with an example: "30 .heic (dog/1.heic), 1 hidden (.DS_Store)"."""
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        ending = file.suffix.lower()
        if _is_hidden(file, place):
            kind = "hidden"
        elif ending in EXTENSIONS:
            kind = "outside the folders of the classes"
        else:  # digits are no ending: DICOM files have names such as IM.0001
            kind = "without an ending" if ending[1:].isdigit() or not ending else ending
        by_kind.setdefault(kind, []).append(file)
    kinds = sorted(by_kind.items(), key=lambda item: -len(item[1]))
    listed = ", ".join(f"{len(of_kind)} {kind} ({of_kind[0].relative_to(place)})" for kind, of_kind in kinds[:_MOST_KINDS])
    others = sum(len(of_kind) for _, of_kind in kinds[_MOST_KINDS:])
    return f"{listed}{f' and {others} more' if others else ''}"


def _list_folders(place: Path) -> list[Path]:
    folders = sorted(f for f in place.iterdir() if f.is_dir() and not _is_hidden(f, place))
    if not folders:
        raise DataError(
            f"{place}: has no folder of a class; put images into root/class, or into root/domain/class with "
            "partition.kind = 'domains'"
        )
    return folders


def _read_groups(base: Path, files: Sequence[Path], column: str) -> Names:
    import pandas as pd  # takes 0.3 s: imported only for groups

    path = base / METADATA
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no such file; data.group_by needs it, with the columns file_name and {column}"
        ) from None
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read as CSV ({str(problem).strip().splitlines()[0]})") from None
    for name in ("file_name", column):
        if name not in table:
            raise DataError(f"{path}: there is no column {name!r}; it has {list_names(list(table.columns))}")
    group_by_file = dict(zip((os.path.normpath(n) for n in table["file_name"]), table[column], strict=True))
    missing_files = [f for f in files if not group_by_file.get(str(f.relative_to(base)))]
    if missing_files:
        raise DataError(f"{path}: it names no {column} for {missing_files[0].relative_to(base)}; add a line for every image")
    return np.array([group_by_file[str(f.relative_to(base))] for f in files])
