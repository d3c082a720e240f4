"""What every command shares: how it speaks, how it is watched, and how it ends."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

if TYPE_CHECKING:
    from fedmutual.cli.progress import ProgressDisplay
    from fedmutual.events import Score

out, err = Console(emoji=False), Console(stderr=True, emoji=False)  # ":A:" of "my_module:A: ..." is no emoji


class Code(IntEnum):
    """Exit codes."""

    BAD_INPUT = 2
    DIVERGED = 3
    REFUSED = 4
    STOPPED = 130
    TERMINATED = 143


def print_warning(message: Warning | str, *where: object) -> None:
    """What a user should know; fits warnings.showwarning."""
    err.print(f"note: {message}", highlight=False, markup=False, soft_wrap=True)


def print_text(text: str, soft_wrap: bool = False) -> None:
    """Print text as it is: what users name may look like markup."""
    out.print(text, highlight=False, markup=False, soft_wrap=soft_wrap)


def exit_with_error(problem: object, code: Code) -> NoReturn:
    """End with one sentence."""
    err.print("[bold red]error:[/bold red] ", end="")
    err.print(str(problem), highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)


def format_resume_command(command: str, settings: list[str] | None, folder: Path, *arguments: str) -> str:
    """The command that goes on with what is saved, as a shell takes it."""
    sets = [word for setting in settings or () for word in ("--set", setting)]
    return shlex.join(("fedmutual", command, *arguments, *sets, "--out", str(folder), "--resume"))


@contextmanager
def show_progress(
    command: str, line: "Callable[[tuple[Score, ...]], str] | None" = None, runs: int = 1
) -> Iterator["ProgressDisplay"]:
    """Shows a run as it goes, of its scores what `line` says; its stops are one sentence: what is kept, how to go on.

    runs: how many runs the command trains.
    """
    from fedmutual.boundary import Refused
    from fedmutual.cli.progress import ProgressDisplay
    from fedmutual.core import Disagreed, Diverged
    from fedmutual.rundir.text import worst_line

    watch = ProgressDisplay(err, line, runs=runs) if line else ProgressDisplay(err, end=worst_line, runs=runs)
    try:
        with stop_on_sigterm(), watch:
            yield watch
    except KeyboardInterrupt as told:
        how, code = ("told to stop", Code.TERMINATED) if isinstance(told, Terminated) else ("stopped by hand", Code.STOPPED)
        exit_with_error(f"{how}; what was saved is kept, go on with: {command}", code)
    except Diverged as problem:
        whose = watch.failed.get(problem)
        what = f"{whose}: {problem}" if whose else str(problem)
        exit_with_error(
            f"{what}; what was saved is kept. The usual mend is a smaller optimizer.lr, with another --out", Code.DIVERGED
        )
    except Disagreed as problem:
        exit_with_error(f"{problem}; nothing was trained", Code.REFUSED)
    except Refused as problem:
        exit_with_error(f"{problem}; nothing of the reply was sent", Code.REFUSED)


class Terminated(KeyboardInterrupt):
    """Told to stop by SIGTERM: what a cluster, a container or `kill` sends."""


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """While it lasts, SIGTERM stops this process as Ctrl-C does. A child forked meanwhile dies of it, as it would."""
    here = os.getpid()

    def stopped(*_: object) -> None:
        if os.getpid() != here:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        raise Terminated("SIGTERM")

    before = signal.signal(signal.SIGTERM, stopped)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
