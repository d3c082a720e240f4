"""A folder of images or volumes: root/class/**/*.png; with train and test folders above the classes; or root/domain/class.

Instead of the folders of the classes, images and their masks have equal names in the folders images and masks; or images lie
anywhere, and metadata.csv has their labels.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.data import medical
from fedmutual.data.arrays import require_root
from fedmutual.data.draws import Names
from fedmutual.data.examples import Part, Source, list_names
from fedmutual.data.images import EXTENSIONS, ImageExamples, describe_files, read_mask
from fedmutual.errors import DataError, format_count
from fedmutual.metric import TargetKind

METADATA = "metadata.csv"  # columns: file_name, relative to the folder, and those of data.group_by and data.label
IMAGES, MASKS = "images", "masks"  # the folders of a segmentation
_MAC_COPY = "__MACOSX"  # a folder in zip files of macOS, with hidden files
_TRAINING, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_ENDINGS = ", ".join(sorted({*EXTENSIONS, *medical.PACKAGES}))
_MOST_KINDS = 10


def read_folder(config: DataConfig, domains: bool = False, kind: TargetKind = "classes") -> Source:
    """Return the images below data.root. `domains`: the folders above the class folders are the domains.

    kind: "masks" are read from files; other targets than classes, and those of a data.label that is set, from metadata.csv.

    Raises:
        ConfigError: data.root is not set.
        DataError: a folder is missing or has no images, the layout of the folders is unclear, the first image or a mask
            cannot be read, or the metadata lack a file.
    """
    root = require_root(config)
    parts_found = None if config.test is not None else _find_parts(root, config, domains)
    place, test_place = parts_found or (root, config.test)
    train, images, masks = _read_part(place, root, config, domains, kind, None)
    test, parts = None, {place: images}
    if test_place is not None:
        base = root if parts_found else test_place
        test, parts[test_place], test_masks = _read_part(test_place, base, config, domains, kind, images)
        masks += test_masks
    is_gray = len(images.first) == 1 and images.first.dtype == np.uint8
    notes = [f"images are read as gray, because the first image is gray ({images.files[0]})"] if is_gray else []
    read_files = {file for part in parts.values() for file in part.files}
    has_metadata = _is_in_metadata(root, config, kind)
    for part_place, part in parts.items():
        depth = 3 if domains else 2
        nested = [f for f in part.files if len(f.relative_to(part_place).parts) > depth and not masks]
        if nested and not has_metadata:
            notes.append(
                f"{part_place}: {format_count(len(nested), 'image')} in folders inside the folders of the classes, for "
                f"example {nested[0].relative_to(part_place)}: read as images of these classes"
            )
    about, remarks = describe_files([file for part in parts.values() for file in part.files])
    bases = [root, *([config.test] if config.test is not None else [])]
    read_files.update(masks)
    read_files.update(*(medical.list_slices(file) for file in [*read_files] if file.is_dir()))
    if config.group_by is not None or has_metadata:
        read_files.update(base / METADATA for base in bases)
    for base in bases:
        unread = [f for f in _list_files(base) if f not in read_files]
        if unread:
            remarks.append(
                f"{base}: {format_count(len(unread), 'file')} {'is' if len(unread) == 1 else 'are'} not read: "
                f"{_count_kinds(unread, base)}; images have the endings {_ENDINGS}"
            )
    classes = config.label_columns if has_metadata and not isinstance(config.label, str) else None
    return Source(str(root), train, test, classes, notes=(*notes, *remarks), read=about)


def make_image_part(images: ImageExamples, labels: Any, groups: Names | None = None, domains: Names | None = None) -> Part:
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


def _is_in_metadata(base: Path, config: DataConfig, kind: TargetKind) -> bool:
    """Return whether metadata.csv has the labels: of other targets, and of classes if it has the column data.label."""
    if kind != "classes" or config.label == DataConfig().label:
        return kind not in ("classes", "masks")
    path = base / METADATA
    header = path.read_text(encoding="utf-8-sig", errors="replace").partition("\n")[0] if path.is_file() else ""
    return config.label in (name.strip(' "\r') for name in re.split(r"[,;\t|]", header))


def _read_part(
    place: Path, base: Path, config: DataConfig, domains: bool, kind: TargetKind, like: ImageExamples | None
) -> tuple[Part, ImageExamples, list[Path]]:
    """Return a part of the data, its images, and the files of its masks."""
    if not place.is_dir():
        raise DataError(f"{place}: there is no such folder; key 'data.root' or 'data.test' names it")
    files, domain_names, masks = list[Path](), list[str](), list[Path]()
    labels: Any = []
    for domain in _list_folders(place) if domains else [place]:
        before = len(files)
        if kind == "masks":
            for file, mask in _pair_files(domain, config.slices):
                files.append(file)
                masks.append(mask)
        elif _is_in_metadata(base, config, kind):
            files += list_images(domain, "", config.slices)
        else:
            files_by_class = {folder: list_images(folder, slices=config.slices) for folder in _list_folders(domain)}
            if not _are_classes(files_by_class, config):
                _check_depth(domain, files_by_class, domains)
            for class_folder, class_files in files_by_class.items():
                files += class_files
                labels += [class_folder.name] * len(class_files)
        domain_names += [domain.name] * (len(files) - before)
    images, names = ImageExamples(files, base, config, like), [str(f.relative_to(base)) for f in files]
    has_labels, groups = not masks and _is_in_metadata(base, config, kind), None
    if masks:
        labels = _read_masks(masks, config)
    if has_labels or config.group_by is not None:
        from fedmutual.data import table  # imports pandas, which takes 0.3 s

        read, groups = table.read_metadata(base / METADATA, names, config, has_labels, kind != "classes")
        labels = labels if read is None else read
    return make_image_part(images, labels, groups, np.array(domain_names) if domains else None), images, masks


def _pair_files(place: Path, slices: bool) -> list[tuple[Path, Path]]:
    """Return the images of place/images with the masks of equal name in place/masks; endings may differ.

    Raises:
        DataError: a folder is missing, or an image or a mask has no other half.
    """
    by_name = {}
    for folder in (place / IMAGES, place / MASKS):
        if not folder.is_dir():
            raise DataError(f"{folder}: there is no such folder; a segmentation has images/NAME.png and masks/NAME.png")
        files = list_images(folder, "", slices)
        by_name[folder.name] = {_strip_ending(f.relative_to(folder)): f for f in files}
        if len(by_name[folder.name]) < len(files):
            raise DataError(f"{folder}: two files differ in their endings only; remove one of them")
    images, masks = by_name[IMAGES], by_name[MASKS]
    for name in sorted(images.keys() ^ masks.keys()):
        has, lacks = (images[name], MASKS) if name in images else (masks[name], IMAGES)
        raise DataError(
            f"{has}: there is no file of this name in {place / lacks}; add it, remove this file, or give the image and its "
            "mask one name"
        )
    for name in (n for n in sorted(images) if images[n].is_dir() != masks[n].is_dir()):
        raise DataError(
            f"{images[name]} and {masks[name]}: DICOM slices and a file have different axes; save both as slices or as files"
        )
    return [(images[name], masks[name]) for name in sorted(images)]


def _strip_ending(file: Path) -> str:
    ending = next((e for e in (".nii.gz", file.suffix) if file.name.lower().endswith(e.lower())), "")
    return str(file)[: len(str(file)) - len(ending)]


def _read_masks(files: Sequence[Path], config: DataConfig) -> npt.NDArray[Any]:
    """Return masks [n, H, W] or [n, D, H, W]. Raises DataError where one cannot be read, or has other sides."""
    masks = [read_mask(file, config.size) for file in files]
    other = next((k for k, mask in enumerate(masks) if mask.shape != masks[0].shape), None)
    if other is not None:
        here, there = (" x ".join(map(str, masks[k].shape)) for k in (other, 0))
        raise DataError(f"{files[other]} is {here} and {files[0]} is {there}; resize images and masks with data.size")
    return np.stack(masks)


def list_images(folder: Path, kind: str = "class", slices: bool = False) -> list[Path]:
    """Return the images of a folder, with those in folders inside it. kind: "class" if the folder is that of a class.

    slices: data.slices, whether a folder of DICOM slices is one image.
    """
    files = _list_files(folder)
    images = [f for f in files if _is_readable(f) and not _is_hidden(f, folder)]
    if not images:
        others = f" ({_count_kinds(files, folder)})" if files else ""
        what = f"the folder of class {folder.name!r}" if kind else "the folder"
        place = (
            "images lie in root/class, or in root/domain/class with partition.kind = 'domains', and" if kind else "images"
        )
        raise DataError(f"{folder}: {what} holds no images{others}; fill or remove it ({place} have the endings {_ENDINGS})")
    return medical.group_slices(images) if slices else images


def _is_readable(file: Path) -> bool:
    ending = medical.find_ending(file)
    return ending in EXTENSIONS or (ending in medical.PACKAGES and medical.is_installed(ending))


def _list_files(place: Path) -> list[Path]:
    """Return all files below a folder, sorted. A link to a folder is followed, unless the link leads to a folder above."""

    def refuse(problem: OSError) -> NoReturn:
        raise DataError(f"{problem.filename}: the folder cannot be read ({problem.strerror}); permit reading, or remove it")

    def leads_upward(folder: Path) -> bool:
        return folder.is_symlink() and any(above.resolve().is_relative_to(folder.resolve()) for above in folder.parents)

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
        ending = medical.find_ending(file)
        if _is_hidden(file, place):
            kind = "hidden"
        elif _is_readable(file):
            kind = "outside the folders of the classes"
        elif ending in medical.PACKAGES:
            kind = f"{ending} files: {medical.INSTALL}"
        else:
            kind = ending or "without an ending"
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
