"""Shared parts of all commands: printing, tables, the progress display, exit codes and signals."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from fedmutual.errors import RUN_NOTE
from fedmutual.files import JSON_LOGS, make_log_line

if TYPE_CHECKING:
    from fedmutual.events import Score
    from fedmutual.studies.observers import ProgressDisplay


class _ErrorConsole(Console):
    """The console of messages and progress. A command continues, and keeps its exit code, if nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


out, err = Console(emoji=False), _ErrorConsole(stderr=True, emoji=False)  # ":A:" of "my_module:A: ..." is no emoji


class Code(IntEnum):
    """Exit codes."""

    BAD_INPUT = 2
    DIVERGED = 3
    REFUSED = 4
    STOPPED = 130
    TERMINATED = 143


def log_json(wanted: bool, federation: str = "") -> None:
    """From now on print each line as a JSON object, in the processes of jobs too, if this is wanted."""
    if wanted:
        os.environ[JSON_LOGS] = federation


def is_json() -> bool:
    """Return whether lines are JSON objects."""
    return JSON_LOGS in os.environ


def print_warning(message: Warning | str, *where: object) -> None:
    """Print a note. The signature is that of `warnings.showwarning`."""
    if is_json():
        print(make_log_line(str(message), "warning"), file=sys.stderr, flush=True)
        return
    err.print(f"note: {message}", highlight=False, markup=False, soft_wrap=True)


def print_text(text: str, soft_wrap: bool = False) -> None:
    """Print text without markup, because names of users may look like markup."""
    if is_json():
        print(make_log_line(text), flush=True)
        return
    out.print(text, highlight=False, markup=False, soft_wrap=soft_wrap)


def make_table(*titles: str, texts: int = 1, **options: Any) -> Table:
    """Return an empty table. The first columns are texts, which a narrow terminal folds; the others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **options)
    for n, title in enumerate(titles):
        is_text = n < texts
        table.add_column(title, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    return table


def exit_with_error(problem: object, code: Code) -> NoReturn:
    """Print an error in one sentence, and exit with the code."""
    text = f"{_name_run(problem)}{problem}"
    if is_json():
        print(make_log_line(text, "error"), file=sys.stderr, flush=True)
        sys.exit(code)
    err.print("[bold red]error:[/bold red] ", end="")
    err.print(text, highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)


def _name_run(problem: object) -> str:
    """Return the beginning of an error's sentence: the run that failed, of several, as `train_runs` notes it."""
    notes = [note.removeprefix(RUN_NOTE) for note in getattr(problem, "__notes__", ()) if note.startswith(RUN_NOTE)]
    return "".join(f"{note}: " for note in notes)


@contextmanager
def show_progress(
    line: "Callable[[tuple[Score, ...]], str] | None" = None, runs: int = 1, option: str = "--resume"
) -> Iterator["ProgressDisplay"]:
    """Show the progress of runs. After a stop or an error of training, print one sentence and exit.

    Errors of training: `Diverged`, `Disagreed`, `Refused`. A UserError is raised unchanged.

    line: formats the scores of an evaluation. runs: the number of runs of the command. option: the option with which the
    same command resumes; "" if it resumes without an option.
    """
    from fedmutual.boundary import Refused
    from fedmutual.core import Disagreed, Diverged
    from fedmutual.rundir.logs import format_worst_nodes
    from fedmutual.studies.observers import ProgressDisplay

    watch = ProgressDisplay(err, line, runs=runs) if line else ProgressDisplay(err, end=format_worst_nodes, runs=runs)
    try:
        with stop_on_sigterm(), watch:
            yield watch
    except KeyboardInterrupt as stop:
        how, code = describe_stop(stop)
        given = ["fedmutual", *sys.argv[1:]]
        command = shlex.join(given if not option or option in given else [*given, option])
        exit_with_error(f"{how}; saved rounds are kept; resume with: {command}", code)
    except Diverged as problem:
        fix = "" if problem.batch is None else ". The usual fix is a smaller optimizer.lr, with another --out"
        exit_with_error(f"{_name_run(problem)}{problem}; saved rounds are kept{fix}", Code.DIVERGED)
    except Disagreed as problem:
        exit_with_error(f"{problem}; nothing was trained", Code.REFUSED)
    except Refused as problem:
        exit_with_error(f"{problem}; nothing of the reply was sent", Code.REFUSED)


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM, which a cluster, a container or `kill` sends."""


def describe_stop(stop: KeyboardInterrupt) -> tuple[str, Code]:
    """Return (what stopped this process, as the beginning of a sentence; the exit code)."""
    return ("stopped by SIGTERM", Code.TERMINATED) if isinstance(stop, Terminated) else ("stopped by hand", Code.STOPPED)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Within this context, SIGTERM raises Terminated in this process. SIGTERM ends a forked child as usual."""
    process = os.getpid()

    def raise_terminated(*_: object) -> None:
        if os.getpid() != process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        raise Terminated("SIGTERM")

    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
