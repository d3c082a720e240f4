"""A model in the forms that other programs take: weights, a `torch.export` program, ONNX, with the scaling inside."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fedmutual.errors import RunError, format_error
from fedmutual.studies.answering_model import AnswerForm, AnsweringModel, make_scaler

ONNX_PACKAGES = ("onnx", "onnxscript")
ONNX_HINT = 'pip install "fedmutual[onnx]"'
INPUT = "x"
_TOLERANCE = 1e-4  # of a probability, or of a number's size: programs may add in another order, and nothing more


class RawInputModel(nn.Module):
    """A network with the scaling before it and the form of answers after it: raw x [B, *shape] -> answers [B, ...]."""

    def __init__(self, network: nn.Module, scale: Callable[[Tensor], Tensor], form: AnswerForm) -> None:
        super().__init__()
        self.network = network
        self.form = form
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities [B, C] or numbers [B] as float32, computed as `predict` computes them."""
        outputs: Tensor = self.network(self._scale(x.clone()))  # the scaling may write into its argument
        return self.form.compute(outputs).float()


def make_raw_input_model(answering: AnsweringModel) -> RawInputModel:
    """Return the model that answers as a module of raw inputs, in eval mode and without gradients."""
    return RawInputModel(answering.net, make_scaler(answering.takes), answering.form).eval().requires_grad_(False)


@torch.no_grad()
def export_program(model: RawInputModel, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ExportedProgram:
    """Return the program of a model for any number of examples, after a check that its answers equal the model's.

    shape, dtype: of one raw example.

    Raises:
        RunError: torch.export cannot trace the network, or the program computes other answers.
    """
    examples = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    if not dtype.is_floating_point:
        examples = examples.round().to(dtype)  # the ids 0 and 1, which embeddings have
    try:
        with _silence():
            program = torch.export.export(model, (examples[:2],), dynamic_shapes=({0: Dim("batch", min=1)},))
        pairs = [(program.module()(x), model(x)) for x in (examples[:1], examples)]
        difference = max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)
    except Exception as problem:  # the network may be a user's code, and torch.export fails in many ways
        raise RunError(f"torch.export cannot trace the network ({_take_first_line(problem)})") from None
    if not all(b.isfinite().all() for _, b in pairs):
        raise RunError("the answers of the model for random inputs are not finite")
    if not difference <= _TOLERANCE:
        raise RunError(f"the program of torch.export and the model give different answers; they differ by {difference:.2g}")
    return program


def serialise_program(program: ExportedProgram) -> bytes:
    """Return the content of a .pt2 file, which `torch.export.load` reads."""
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def convert_to_onnx(program: ExportedProgram, output: str) -> bytes:
    """Return the content of an .onnx file: input `x` [batch, *shape], and the named output [batch, ...] float32.

    Raises:
        RunError: a package of the extra `onnx` is missing, or the program cannot be converted.
    """
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if missing:
        raise RunError(f"ONNX needs the package {missing[0]!r}: {ONNX_HINT}")
    try:
        with _silence(), TemporaryDirectory() as folder:
            converted = torch.onnx.export(program, dynamo=True, verbose=False, input_names=[INPUT], output_names=[output])
            assert converted is not None  # so it is with dynamo=True and without a file
            converted.save(path := str(Path(folder) / "model.onnx"), external_data=False)
            return Path(path).read_bytes()
    except Exception as problem:  # converters of operations fail in many ways
        raise RunError(f"the program cannot be converted to ONNX ({_take_first_line(problem)})") from None


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


def _take_first_line(problem: Exception) -> str:
    return format_error(problem).strip().splitlines()[0]
