"""The command line: every command, option, type and default, and the exit codes, are those of the snapshots."""

import os
import signal
import types
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from outside import internals
from outside.snapshots import Snapshots

pytestmark = pytest.mark.long

NAMES = {bool: "flag", int: "whole number", float: "number", str: "text", Path: "path"}


def commands(command: Any, name: str = "fedmutual") -> dict[str, Any]:
    """A command and those below it, by what a user types."""
    commands_by_name = {name: command}
    for word, inner in getattr(command, "commands", {}).items():
        commands_by_name |= commands(inner, f"{name} {word}")
    return commands_by_name


def describe(command: Any) -> dict[str, str]:
    """What a user can give to a command: argument or option -> its type, whether it is needed, its default."""
    hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
    described, position = {}, 0
    for parameter in command.params:
        words = _words(parameter, hints[parameter.name])
        if parameter.param_type_name == "argument":
            position += 1
            described[parameter.metavar or parameter.name.upper()] = f"argument {position}: {words}"
        else:
            described[", ".join([*parameter.opts, *parameter.secondary_opts])] = words
    return described


def _words(parameter: Any, hint: Any) -> str:
    """ "text, repeated; needed". hint: the annotation of the function's parameter, Annotated[type, typer's description]."""
    kind, *about = get_args(hint)
    least = next((f" >= {one.min}" for one in about if getattr(one, "min", None) is not None), "")
    is_repeated = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    default = "unset" if parameter.default is None else f"default {parameter.default}"
    return f"{_type_name(kind)}{least}{', repeated' if is_repeated else ''}; {'needed' if parameter.required else default}"


def _type_name(kind: Any) -> str:
    """ "path" for Path, Path | None and list[Path]; the values of an Enum."""
    if get_origin(kind) in (types.UnionType, Union, list):
        (kind, *_) = (inner for inner in get_args(kind) if inner is not type(None))
        return _type_name(kind)
    return " or ".join(member.value for member in kind) if issubclass(kind, Enum) else NAMES[kind]


def test_every_command_and_option(snapshots):
    now = {name: describe(command) for name, command in commands(internals.command_line()).items()}
    snapshots.check("command_line", "commands", now)


CALLS = Snapshots().read("exit_codes")
"""Command -> calls of it, in the folder of all samples, with their exit codes: good ones, of wrong files, with wrong keys.

A new call is a line of exit_codes.json, with any code until it is recorded. What needs a server that runs is called in
tests/sites.
"""


@pytest.mark.parametrize("command", CALLS)
def test_exit_codes(command, snapshots, samples, cli, digit):
    (samples / "leaking.py").write_text(internals.LEAKING_ALGORITHM)
    (samples / "newcomer.csv").write_text("no TOML, but a table\n")
    now = {}
    for call in CALLS[command]:
        code, _, err = cli(*call.split())
        assert "Traceback" not in err, call
        now[call] = code
    snapshots.check("exit_codes", command, now)


def test_every_command_is_called():
    groups = {name for name, command in commands(internals.command_line()).items()}
    assert set(CALLS) == groups


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exit_codes_of_a_command_that_is_stopped(samples, cli, monkeypatch, number, expected):
    """The signal comes with a gradient step of the first round."""
    step = torch.optim.SGD.step

    def stopped(self, *args):
        os.kill(os.getpid(), number)
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", stopped)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test that a script started with & ignores it
    try:
        code, _, _ = cli("run", "fml.toml", "--out", "new")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == expected
    monkeypatch.undo()
    monkeypatch.chdir(samples)
    assert cli("run", "fml.toml", "--out", "new", "--resume")[0] == 0
