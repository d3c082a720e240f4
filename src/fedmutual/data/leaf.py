"""FEMNIST as LEAF writes it: json files below train and test, each with the examples of some writers.

Caldas et al., LEAF: A Benchmark for Federated Settings, 2018, https://arxiv.org/abs/1812.01097,
https://github.com/TalwalkarLab/leaf. A file holds `users` and, for each of them in `user_data`, `x`: images as lists of 784
numbers from 0 to 1, and `y`: class numbers from 0 to 61.
"""

import string
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmutual.config import DataConfig
from fedmutual.data.arrays import require_root
from fedmutual.data.examples import ArrayExamples, Part, Source
from fedmutual.errors import DataError

CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_SIDE = 28
_Image = Annotated[list[float], Field(min_length=_SIDE**2, max_length=_SIDE**2)]


class _Writer(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)
    x: list[_Image]
    y: list[Annotated[int, Field(ge=0, lt=len(CLASSES))]]


class _LeafFile(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")
    user_data: dict[str, _Writer]


def read_femnist(config: DataConfig) -> Source:
    """Return FEMNIST from data.root, the folder above LEAF's train and test; each writer is a domain.

    Raises:
        DataError: a folder or its json files are missing or damaged, or a writer has rows in one part only.
        ConfigError: data.root is not set.
    """
    root = require_root(config)
    train, test = (_read_part(root / part) for part in ("train", "test"))
    assert train.domains is not None
    assert test.domains is not None
    alone = np.setxor1d(train.domains, test.domains)
    if len(alone):
        raise DataError(
            f"{root}: writer {str(alone[0])!r} has examples in one of train and test only; let LEAF split by sample "
            "(preprocess.sh -t sample)"
        )
    return Source(str(root), train, test, CLASSES)


def _read_part(folder: Path) -> Part:
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder}: there are no json files of LEAF; key 'data.root' names the folder above train and test")
    images, labels, writers = [], list[int](), list[str]()
    for path in files:
        for writer, rows in _read_file(path).user_data.items():
            if len(rows.x) != len(rows.y):
                raise DataError(f"{path}: writer {writer!r} has {len(rows.x)} images and {len(rows.y)} labels")
            images += [np.array(x, dtype=np.float32).reshape(1, _SIDE, _SIDE) for x in rows.x]
            labels += rows.y
            writers += [writer] * len(rows.y)
    if not images:
        raise DataError(f"{folder}: its json files hold no examples")
    numbers = np.array(labels, dtype=np.int64)
    return Part(ArrayExamples(np.stack(images)), numbers, lambda i: f"example {i} of {folder}", domains=np.array(writers))


def _read_file(path: Path) -> _LeafFile:
    try:
        return _LeafFile.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: is no json file of LEAF's FEMNIST ({where}: {first['msg']})") from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror or problem})") from None
