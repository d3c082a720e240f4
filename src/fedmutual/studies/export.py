"""The export of a run's model into a folder that needs no fedmutual: weights, programs of raw inputs, and a model card."""

import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fedmutual.calling import Inputs, Shapes, call_network, map_inputs
from fedmutual.data.scaling import Scaling
from fedmutual.data.space import find_dtype
from fedmutual.errors import RunError, format_error
from fedmutual.files import write_bytes, write_json
from fedmutual.studies.answering_model import AnsweringModel
from fedmutual.studies.model_card import write_model_card
from fedmutual.tensor_files import write_tensors

WEIGHTS, PROGRAM, ONNX, ABOUT, CARD = "weights.safetensors", "model.pt2", "model.onnx", "model.json", "README.md"
_MEANING = {
    WEIGHTS: "the weights of the network alone (safetensors); the scaling is not in them",
    PROGRAM: "a program for `torch.export.load(...).module()`: raw inputs to answers",
    ONNX: "the same program for ONNX runtimes",
    ABOUT: "inputs, classes and scaling for a program to read",
    CARD: "this model card",
}
_INPUT = "x"
_TOLERANCE = 1e-4  # of a probability, or of a number's size: programs may add in another order, and nothing more


class Exported(NamedTuple):
    """What an export wrote."""

    model: str  # which model: "personal model of client '3' (cnn1), round 20"
    files: tuple[Path, ...]
    left_out: tuple[str, ...]  # a sentence for each file that could not be made


def export(answering: AnsweringModel, folder: str | Path) -> Exported:
    """Write a run's model into a new folder -> which model, and the files. All files appear together, or none does.

    Raises:
        RunError: the folder exists or cannot be written.
    """
    target = Path(folder)
    _check_new(target)
    part = target.with_name(f".{target.name}.{os.getpid()}-{token_hex(8)}.part")
    try:
        part.mkdir(parents=True)
        left_out = _write_files(part, answering)
        names = sorted(file.name for file in part.iterdir())
        _check_new(target)  # another process may have made it meanwhile
        part.rename(target)
    except OSError as problem:
        raise RunError(f"{target}: cannot be written ({problem.strerror or problem}); name another folder") from None
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(part)
    return Exported(answering.description, tuple(target / name for name in names), tuple(left_out))


def _check_new(target: Path) -> None:
    if os.path.lexists(target):
        raise RunError(f"{target}: exists already, and an export overwrites nothing; choose another folder")


def _write_files(folder: Path, answering: AnsweringModel) -> list[str]:
    """Write all files of an export into a folder -> a sentence for each that could not be made."""
    takes, output, left_out = answering.takes, answering.output[0], list[str]()
    about = {"model": answering.description, "fedmutual": version("fedmutual"), "classes": json.dumps(takes.classes)}
    write_tensors(folder / WEIGHTS, answering.net.state_dict(), about)
    try:
        program = _export_program(answering)
        archive = io.BytesIO()
        torch.export.save(program, archive)  # given a path on a full disk, torch would end the process
        write_bytes(folder / PROGRAM, archive.getvalue())
        _write_onnx(program, list(takes.shape) if isinstance(takes.shape, Shapes) else [_INPUT], output, folder / ONNX)
    except RunError as problem:
        missing = ONNX if (folder / PROGRAM).exists() else f"{PROGRAM} and {ONNX}"
        left_out = [f"{missing}: {problem}"]
    shape, steps = answering.raw_shape, takes.scaling
    inputs: list[Any] = [
        {"name": _INPUT, "dtype": steps.dtype or "float32", "shape": list(shape), "columns": answering.columns}
    ]
    if isinstance(shape, Shapes):
        dtypes = {name: one.dtype or "float32" for name, one in (steps.inputs or {}).items()}
        inputs = [{"name": name, "dtype": dtypes[name], "shape": one} for name, one in shape.items()]
    fitted = answering.calibration
    calibration = {} if fitted is None else fitted.model_dump(mode="json", include={"temperature", "thresholds"})
    content = {
        "format": 1,
        "model": answering.description,
        "network": answering.network,
        "client": answering.client,
        "round": answering.round,
        "fedmutual": version("fedmutual"),
        "input": inputs if isinstance(shape, Shapes) else inputs[0],
        "output": {"name": output, "dtype": "float32", "kind": answering.kind, "classes": [*answering.names]},
        "scaling": steps.model_dump(mode="json", exclude={"augment", "dtype"}),
        **calibration,
    }
    write_json(folder / ABOUT, content)
    files = {name: text for name, text in _MEANING.items() if name == CARD or (folder / name).exists()}
    write_bytes(folder / CARD, write_model_card(answering, inputs, files, left_out).encode())
    return left_out


class _RawInputModel(nn.Module):
    """A network with the scaling before it and the form of answers after it: raw x [B, *raw_shape] -> answers [B, ...]."""

    def __init__(self, answering: AnsweringModel) -> None:
        super().__init__()
        self.network, self.scale, self.compute_answers = answering.net, answering.make_scaler(), answering.compute_answers

    def forward(self, x: Inputs) -> Tensor:
        """Return probabilities [B, C] or numbers [B] as float32, computed as `predict` computes them."""
        inputs = self.scale(map_inputs(torch.clone, x))  # the scaling may write into its argument
        return self.compute_answers(call_network(self.network, inputs)).float()


@torch.no_grad()
def _export_program(answering: AnsweringModel) -> ExportedProgram:
    """Return the program of a model for any number of examples, after a check that its answers equal the model's."""
    model = _RawInputModel(answering).eval().requires_grad_(False)
    stream, shape, scaling = torch.Generator().manual_seed(0), answering.raw_shape, answering.takes.scaling

    def draw(one: tuple[int, ...], steps: Scaling) -> Tensor:
        x, dtype = torch.rand(3, *one, generator=stream), find_dtype(steps)
        return x if dtype.is_floating_point else x.round().to(dtype)  # the ids 0 and 1, which embeddings have

    named = scaling.inputs or {}
    examples: Inputs = (
        {name: draw(one, named[name]) for name, one in shape.items()} if isinstance(shape, Shapes) else draw(shape, scaling)
    )
    batch = {0: Dim("batch", min=1)}
    sizes = dict.fromkeys(shape, batch) if isinstance(shape, Shapes) else batch
    try:
        with _silence():
            program = torch.export.export(model, (map_inputs(lambda x: x[:2], examples),), dynamic_shapes=(sizes,))
        pairs = [(program.module()(x), model(x)) for x in (map_inputs(lambda x: x[:1], examples), examples)]
        difference = max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)
    except Exception as problem:  # the network may be a user's code, and torch.export fails in many ways
        fixes_batch = "specialized it to be a constant" in str(problem)
        reason = "its code fixes the number of examples; use x.shape[0] in place of len(x)" if fixes_batch else None
        raise RunError(f"torch.export cannot trace the network ({reason or format_error(problem)})") from None
    if not all(b.isfinite().all() for _, b in pairs):
        raise RunError("the answers of the model for random inputs are not finite")
    if not difference <= _TOLERANCE:
        raise RunError(f"the program of torch.export and the model give different answers; they differ by {difference:.2g}")
    return program


def _write_onnx(program: ExportedProgram, inputs: list[str], output: str, path: Path) -> None:
    """Write an .onnx file: the named inputs [batch, *shape], and the named output [batch, ...] float32.

    Raises:
        RunError: a package is missing, or an operation cannot be converted; there is no file then.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise RunError(f"ONNX needs the package {missing[0]!r}: " + 'pip install "fedmutual[onnx]"')
    try:
        with _silence():
            converted = torch.onnx.export(program, dynamo=True, verbose=False, input_names=inputs, output_names=[output])
            assert converted is not None  # so it is with dynamo=True and without a file
            converted.save(path, external_data=False)
    except Exception as problem:  # converters of operations fail in many ways
        path.unlink(missing_ok=True)
        raise RunError(f"the program cannot be converted to ONNX ({format_error(problem)})") from None


@contextmanager
def _silence() -> Iterator[None]:
    """Keep warnings and messages of exporters, which concern their authors, from the user's terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
