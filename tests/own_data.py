"""Build small data of a user: image folders, arrays, tables; and configurations that name them."""

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
    """Return a configuration from its tables; by default one client with small batches."""
    return parse_config({"partition": {"clients": 2}, "training": {"batch_size": 2}, **tables})


def npz(path: Path, **arrays: Any) -> dict[str, Any]:
    """Write arrays and return the table [data] that names them."""
    np.savez(path, **arrays)
    return {"name": "npz", "root": str(path)}


def image(path: Path, value: int = 0, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> Path:
    """Write an image file of one value with a different corner pixel; size is (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new(mode, size[::-1], value if mode == "L" else (value, value // 2, 255 - value))
    picture.putpixel((0, 0), 255 if mode == "L" else (255, 255, 255))
    picture.save(path)
    return path


def folder(root: Path, classes: Mapping[str, int], **options: Any) -> dict[str, Any]:
    """Write root/class/i.png, a number of images for each class; return the table [data] that names them."""
    for k, (name, n) in enumerate(classes.items()):
        for i in range(n):
            image(root / name / f"{i:02}.png", 40 * k + i, **options)
    return {"name": "folder", "root": str(root)}


def everything(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all rows in one batch."""
    (batch,) = rows.rows([torch.arange(len(rows))])
    return batch[0], batch[1]


def refused(*words: str, **tables: Any) -> str:
    """Return the one sentence with which the data are refused; it must hold the given words."""
    with pytest.raises(UserError) as caught:
        data.load(config(**tables))
    message = str(caught.value)
    assert "\n" not in message
    assert not re.search(r"Traceback|^\W*$", message)
    for word in words:
        assert word in message, message
    return message


OWN_TASK = """
from dataclasses import dataclass

from fedmutual.core import Metric
from fedmutual.losses import Regression

MEDIAN_ERROR = Metric("median_error", "median error", is_fraction=False, is_higher_better=False, unit="points")


@dataclass(frozen=True)
class Median(Regression):
    tells: tuple = ("examples", "median_error")
    metric: Metric = MEDIAN_ERROR

    def score(self, output, target):
        return {"examples": len(target), "median_error": (output.squeeze(-1) - target).abs().median().item()}
"""

RUN = """
name = "{name}"
rounds = 1
data = {data}
partition = {{ kind = "iid", clients = 2 }}
split = {{ test = 0.3 }}
model = {{ shared = "mlp" }}
training = {{ local_epochs = 1, batch_size = 8 }}
engine = {{ device = "cpu" }}
"""
