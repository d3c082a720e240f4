"""Files of new examples as the model of a run takes them: tables, arrays, images, and folders that datasets saved."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedmutual.calling import Inputs, find_image_shape
from fedmutual.data import images
from fedmutual.errors import BadRows
from fedmutual.studies.answering_model import AnsweringModel, split_rows


def read_examples(file: Path, answering: AnsweringModel) -> Iterator[tuple[Sequence[str], Inputs]]:
    """Yield the examples of a file in batches: their names, and unscaled x [B, *raw_shape]."""
    if answering.is_image(file, labelled=False):
        yield [str(file)], _read_image(file, answering)
        return
    part = answering.read_file(file, answering.data, labelled=False).train
    for rows in split_rows(range(len(part.x))):
        yield [*map(part.where, rows)], part.x.take(rows)


def _read_image(file: Path, answering: AnsweringModel) -> Tensor:
    """Return one image [1, C, H, W], or volume, read as the images of the run."""
    takes, is_file = answering.takes, answering.files
    size, channels = takes.scaling.size if is_file else None, find_image_shape(takes.shape)[0]
    x = torch.tensor(images.decode_image(file, channels, size, answering.data.max if is_file else None)[None])
    if (most := takes.scaling.divisor) != 1 and x.max() > most:
        raise BadRows(f"{file} has pixels up to {int(x.max())}, and the model learned from up to {most:g}; scale the image")
    return x
