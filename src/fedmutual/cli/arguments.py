"""Arguments of several commands, and the configuration that the arguments give."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedmutual
from fedmutual.role import DEFAULT_METHODS
from fedmutual.settings import LEAST_TRIALS

if TYPE_CHECKING:
    from fedmutual import Config


class By(StrEnum):
    """The model whose score chooses a setting."""

    PERSONAL = "personal"
    GLOBAL = "global"


File = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, e.g. `--set algorithm.alpha=0.3`; may be repeated."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last saved round; finished runs stay unchanged.")]


def _trust_code(context: typer.Context, is_trusted: bool) -> bool:
    """Trust recorded code until the command ends."""
    if is_trusted:
        from fedmutual.user_code.recorded_code import set_trust

        context.with_resource(set_trust(True))
    return is_trusted


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trust_code,
        is_eager=True,  # before files are read
        help="Import all code that a run folder names, even if it has changed or comes from somebody else. Read it first.",
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Algorithms, separated by commas: names, `module:Class` of your own, or `all` that fit the file; unset, the "
        f"file's algorithm with {', '.join(DEFAULT_METHODS[:-1])} and {DEFAULT_METHODS[-1]}. `centralised` trains on all "
        "data in one place: an upper bound.",
        show_default=False,
    ),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=V1,V2,...",
        help="Values to try, e.g. `--set optimizer.lr=0.003,0.01,0.03`; one value is fixed. May be repeated: a grid. With "
        "--trials also a range: `--set optimizer.lr={log-uniform=[0.001,0.1]}`, or uniform, or integers.",
    ),
]
Tune = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=LEAST_TRIALS,
        help="Before the seeds are trained, each method tries at most N settings on hold-out rows, learning rates first.",
        show_default=False,
    ),
]
Halving = Annotated[
    bool,
    typer.Option(
        "--halving", help="Successive halving: after a part of the rounds only the best third of the settings goes on."
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds, from the configured one upwards.")]
Runs = Annotated[int, typer.Option(min=1, help="The maximum number of runs; if more are needed, none is trained.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs that are trained side by side; unset, one for each core where that is faster."),
]


def parse_names(text: str) -> list[str]:
    """Return the names in a list that is separated by commas, without empty names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Return dotted key -> value of the `--set` arguments. Raises UserError if one cannot be used."""
    from fedmutual.config import parse_override

    return dict(parse_override(text) for text in settings or ())


def read_config(file: Path, settings: list[str] | None) -> "Config":
    """Return the configuration of a file, with the `--set` arguments applied.

    Raises:
        UserError: the file or an argument cannot be used.
    """
    return fedmutual.load_config(file, **parse_settings(settings))
