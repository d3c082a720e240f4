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


CALLS = {
    "fedmutual": ["--version", "--help", "", "nonsense", "--nonsense"],
    "fedmutual run": [
        "run fml.toml --out new",
        "run fml.toml --out new --resume",
        "run fml.toml --out fml",
        "run missing.toml",
        "run newcomer.csv",
        "run fml.toml --set nonsense=1",
        "run fml.toml --set algorithm.name=nonsense",
        "run fml.toml --set rounds=0",
        "run fml.toml --nonsense",
        "run fml.toml --out fml --resume --set seed=1",
        "run fml.toml --out broken --set optimizer.lr=1e30",
        "run fml.toml --out leaking --set algorithm.name=leaking:Leaking",
    ],
    "fedmutual compare": [
        "compare methods.toml --methods independent,fedavg --seeds 1 --set rounds=1 --out new-compare",
        "compare methods.toml --methods independent,fedavg --seeds 1 --set rounds=1 --out new-compare --resume",
        "compare missing.toml",
        "compare methods.toml --methods nonsense",
        "compare methods.toml --seeds 0",
        "compare methods.toml --set nonsense=1",
        "compare methods.toml --methods fedavg --seeds 1 --set optimizer.lr=1e30 --out broken-compare",
    ],
    "fedmutual sweep": [
        "sweep methods.toml --set rounds=1,2 --set algorithm.name=independent --out new-sweep",
        "sweep missing.toml --set rounds=1,2",
        "sweep methods.toml --set rounds=1",
        "sweep methods.toml --set nonsense=1,2",
        "sweep methods.toml --set rounds=1,2 --by nonsense",
        "sweep methods.toml --set optimizer.lr=1e30,1e31 --set algorithm.name=independent --out broken-sweep",
    ],
    "fedmutual demo": ["demo --seeds 0", "demo --out fml/config.toml"],
    "fedmutual report": [
        "report fml -o page.html",
        "report compare -o page.html",
        "report adapt -o page.html",
        "report missing",
        "report papers",
        "report",
    ],
    "fedmutual reproduce": [
        "reproduce --list",
        "reproduce --list --experiments papers",
        "reproduce tiny --seeds 1 --rounds 1 --only digits --experiments papers --out new-reproduce",
        "reproduce tiny --pages pages --results reproduce/results --experiments papers",
        "reproduce",
        "reproduce nonsense",
        "reproduce tiny --experiments missing",
        "reproduce tiny --only nonsense --experiments papers",
        "reproduce tiny --set nonsense=1 --experiments papers",
        "reproduce --list --pages pages",
        "reproduce tiny --seeds 1 --set optimizer.lr=1e30 --experiments papers --out broken-reproduce",
    ],
    "fedmutual adapt": [
        "adapt fml --data newcomer.toml --examples 40 --seeds 1 --out new-adapt",
        "adapt missing --data newcomer.toml",
        "adapt fml --data missing.toml",
        "adapt fml --data newcomer.toml --examples nonsense",
        "adapt fml --data newcomer.toml --set nonsense=1",
        "adapt fml --data newcomer.toml --fedavg part",
        "adapt fml",
    ],
    "fedmutual predict": [
        "predict fml four.npz",
        "predict fml four.npz --client 1 --json",
        "predict records four.npz --client 0 --best",
        "predict fml/server/round-2.safetensors four.npz",
        "predict missing four.npz",
        "predict fml missing.npz",
        "predict fml four.npz --client nonsense",
        "predict fml four.npz --best",
        "predict part four.npz",
    ],
    "fedmutual export": [
        "export fml --client 1 --to new-model",
        "export fml --to fml",
        "export missing --to new-model",
        "export fml --client nonsense --to new-model",
        "export part --to new-model",
        "export fml",
    ],
    "fedmutual score": [
        "score fml labelled.npz",
        "score fml labelled.npz --client 1 --json",
        "score fml four.npz",
        "score missing labelled.npz",
        "score fml missing.npz",
        "score part labelled.npz",
    ],
    "fedmutual data": ["data", "data nonsense"],
    "fedmutual data show": ["data show fml.toml", "data show missing.toml", "data show fml.toml --set nonsense=1"],
    "fedmutual data check": ["data check fml.toml", "data check missing.toml", "data check fml.toml --set nonsense=1"],
    "fedmutual data give": [
        "data give missing.toml --site sites/north/site.toml",
        "data give sites/federation.toml --site missing.toml",
        "data give sites/federation.toml --site sites/north/site.toml",
    ],
    "fedmutual audit": ["audit fml", "audit fml --shadows 0 --out audited", "audit missing", "audit centralised"],
    "fedmutual stats": ["stats fml.toml", "stats missing.toml", "stats fml.toml --set nonsense=1"],
    "fedmutual privacy": [
        "privacy fml.toml --epsilon 4 --set privacy.nets=both",
        "privacy fml.toml",
        "privacy missing.toml",
        "privacy fml.toml --epsilon 4 --set nonsense=1",
    ],
    "fedmutual list": [
        "list algorithms",
        "list models",
        "list data",
        "list experiments",
        "list keys",
        "list",
        "list nonsense",
    ],
    # What needs a server that runs is called in tests/sites.
    "fedmutual provision": [
        "provision missing.toml",
        "provision fml.toml",
        "provision sites/federation.toml --renew nonsense --out kits",
    ],
    "fedmutual server": ["server --kit missing", "server --kit fml", "server"],
    "fedmutual site": ["site --kit missing --config sites/north/site.toml", "site --kit missing"],
    "fedmutual submit": ["submit sites/federation.toml --kit missing", "submit missing.toml --kit missing"],
    "fedmutual status": ["status sites/federation.toml --kit missing", "status missing.toml --kit missing"],
    "fedmutual stop": ["stop sites/federation.toml --kit missing", "stop missing.toml --kit missing"],
    "fedmutual doctor": ["doctor --kit missing", "doctor"],
    "fedmutual ledger": [
        "ledger sites/north/site.toml",
        "ledger sites/north/state/wards --full",
        "ledger sites/north/state --json",
        "ledger missing",
        "ledger fml",
    ],
}
"""Command -> calls of it, in the folder of all samples: good ones, of wrong files, with wrong keys."""


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
