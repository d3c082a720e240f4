"""Files of new examples as the model of a run takes them: tables, arrays, images, and folders that datasets saved."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedmutual.calling import Inputs, find_image_shape, list_tensors
from fedmutual.data import arrays, images, saved, table
from fedmutual.errors import BadRows, DataError
from fedmutual.studies.answering_model import AnsweringModel, split_inputs


def read_examples(file: Path, answering: AnsweringModel) -> Iterator[tuple[Sequence[str], Inputs]]:
    """Yield the examples of a file in batches: their names, and unscaled x [B, *raw_shape]."""
    takes = answering.takes
    called: Callable[[int], str]
    match answering.find_reader(file, labelled=False):
        case "table":
            rows = table.read_rows(file, takes.columns or (), answering.data, answering.encoding)
            x, called = rows.x.take(range(len(rows.x))), rows.where
        case "npz":
            called = partial("row {1} of 'x' in {0}".format, file)
            read = arrays.read_arrays(file, missing="name another")
            values = arrays.read_inputs(read, answering.list_arrays(read), "x", str(file))
            x = answering.convert(values, f"{file}: array 'x'", called)
        case "saved":
            called = partial("row {1} of {0}".format, file)
            x = answering.convert(saved.read_rows(file, answering.data, takes.shape, labelled=False)["x"], str(file), called)
        case _:
            yield [str(file)], _read_image(file, answering)
            return
    if not len(list_tensors(x)[0]):
        raise DataError(f"{file}: there are no rows in it")
    yield from split_inputs(x, called)


def _read_image(file: Path, answering: AnsweringModel) -> Tensor:
    """Return one image [1, C, H, W], or volume, read as the images of the run."""
    takes, is_file = answering.takes, answering.files
    size, channels = takes.scaling.get("size") if is_file else None, find_image_shape(takes.shape)[0]
    x = torch.tensor(images.decode_image(file, channels, size, answering.data.max if is_file else None)[None])
    if (most := takes.scaling["divisor"]) != 1 and x.max() > most:
        raise BadRows(f"{file} has pixels up to {int(x.max())}, and the model learned from up to {most:g}; scale the image")
    return x
