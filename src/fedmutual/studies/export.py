"""The export of a run's model into a folder that needs no fedmutual: weights, programs of raw inputs, and a model card."""

import json
import os
import shutil
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import torch

from fedmutual.errors import RunError
from fedmutual.files import write_bytes, write_json
from fedmutual.studies.answering_model import AnsweringModel, choose_model, find_raw_shape, find_run_folder, list_columns
from fedmutual.studies.exported_model import (
    INPUT,
    convert_to_onnx,
    export_program,
    make_raw_input_model,
    serialise_program,
)
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


class Exported(NamedTuple):
    """What an export wrote."""

    model: str  # which model: "personal model of client '3' (cnn1), round 20"
    files: tuple[Path, ...]
    left_out: tuple[str, ...]  # a sentence for each file that could not be made


def export(
    run_or_model: str | Path, folder: str | Path, client: str | None = None, best: bool = False, trust_code: bool = False
) -> Exported:
    """Write a run's model into a new folder -> which model, and the files. All files appear together, or none does.

    run_or_model, client, best, trust_code: which model, as `fedmutual.predict` takes them.

    Raises:
        UserError: there is no such model, its code may not be imported, or the folder exists or cannot be written.
    """
    target = Path(folder)
    if os.path.lexists(target):
        raise RunError(f"{target}: exists already, and an export overwrites nothing; choose another folder with --to")
    answering = choose_model(Path(run_or_model), client, best, trust_code)
    run_folder = find_run_folder(Path(run_or_model))
    part = target.with_name(f".{target.name}.{os.getpid()}-{token_hex(8)}.part")
    try:
        try:
            part.mkdir(parents=True)
            left_out = _write_files(part, run_folder, answering)
            names = sorted(file.name for file in part.iterdir())
            _rename_folder(part, target)
        except OSError as problem:
            raise RunError(
                f"{target}: cannot be written ({problem.strerror or problem}); choose another folder with --to"
            ) from None
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(part)
    return Exported(answering.description, tuple(target / name for name in names), tuple(left_out))


def _rename_folder(part: Path, target: Path) -> None:
    """Give the finished folder its name; another process may have made a folder of that name meanwhile."""
    if os.path.lexists(target):
        raise RunError(f"{target}: was made by another process meanwhile; choose another folder with --to")
    part.rename(target)


def _write_files(folder: Path, run_folder: Path, answering: AnsweringModel) -> list[str]:
    """Write all files of an export into a folder -> a sentence for each that could not be made."""
    takes, left_out = answering.takes, list[str]()
    about = {"model": answering.description, "fedmutual": version("fedmutual"), "classes": json.dumps(takes.classes)}
    write_tensors(folder / WEIGHTS, answering.net.state_dict(), about)
    try:
        program = export_program(make_raw_input_model(answering), find_raw_shape(takes), getattr(torch, takes.dtype))
        write_bytes(folder / PROGRAM, serialise_program(program))
    except RunError as problem:
        left_out += [f"{PROGRAM} and {ONNX}: {problem}"]
    else:
        try:
            write_bytes(folder / ONNX, convert_to_onnx(program, answering.form.name))
        except RunError as problem:
            left_out += [f"{ONNX}: {problem}"]
    write_json(
        folder / ABOUT,
        {
            "format": 1,
            "model": answering.description,
            "network": answering.network,
            "client": answering.client,
            "round": answering.round,
            "fedmutual": version("fedmutual"),
            "input": {
                "name": INPUT,
                "dtype": takes.dtype,
                "shape": list(find_raw_shape(takes)),
                "columns": list_columns(takes),
            },
            "output": {
                "name": answering.form.name,
                "dtype": "float32",
                "kind": answering.kind,
                "classes": [] if answering.kind == "numbers" else list(takes.classes),
            },
            "scaling": {
                key: takes.scaling[key] for key in ("divisor", "mean", "std", "size", "columns") if key in takes.scaling
            },
        },
    )
    files = {name: text for name, text in _MEANING.items() if name == CARD or (folder / name).exists()}
    write_bytes(folder / CARD, write_model_card(run_folder, answering, files, left_out).encode())
    return left_out
