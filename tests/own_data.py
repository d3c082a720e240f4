"""Small data of one's own, made by hand: image folders, arrays, tables; and configurations that name them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedmutual import data
from fedmutual.config import Config, parse_config
from fedmutual.data.rows import Rows
from fedmutual.errors import UserError


def config(**tables: Any) -> Config:
    """A configuration from its tables; one client of small batches unless they say otherwise."""
    return parse_config({"partition": {"clients": 2}, "training": {"batch_size": 2}, **tables})


def npz(path: Path, **arrays: Any) -> dict[str, Any]:
    """Write arrays; [data] that names them."""
    np.savez(path, **arrays)
    return {"name": "npz", "root": str(path)}


def image(path: Path, value: int = 0, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> Path:
    """An image file of one value with its own corner pixel; size is (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new(mode, size[::-1], value if mode == "L" else (value, value // 2, 255 - value))
    picture.putpixel((0, 0), 255 if mode == "L" else (255, 255, 255))
    picture.save(path)
    return path


def folder(root: Path, classes: Mapping[str, int], **options: Any) -> dict[str, Any]:
    """root/class/i.png, so many of each; [data] that names them."""
    for k, (name, n) in enumerate(classes.items()):
        for i in range(n):
            image(root / name / f"{i:02}.png", 40 * k + i, **options)
    return {"name": "folder", "root": str(root)}


def everything(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows in one batch."""
    (batch,) = rows.rows([torch.arange(len(rows))])
    return batch[0], batch[1]


def refused(*words: str, **tables: Any) -> str:
    """The one sentence that loading these data is refused with; it must hold the words."""
    with pytest.raises(UserError) as caught:
        data.load(config(**tables))
    said = str(caught.value)
    assert "\n" not in said
    assert not re.search(r"Traceback|^\W*$", said)
    for word in words:
        assert word in said, said
    return said
