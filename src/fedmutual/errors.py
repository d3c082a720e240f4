"""Errors caused by user input: one sentence that names the file, the key or the client, and the fix. Warnings of remarks."""

import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

RUN_NOTE = "run: "  # begins the note of an error that names the run that failed, of several
_SKIPPED = ("fedmutual", "torch", "contextlib")  # a remark is shown at the last line outside these packages
_LISTED_ROWS = 3  # unusable examples in a message


class UserError(Exception):
    """Bad input. The command line prints its one sentence and exits with 2; no traceback."""


class ConfigError(UserError):
    """A configuration that is not valid."""


class DataError(UserError):
    """Data that cannot be used for training."""


class BadRows(DataError):
    """Examples that cannot be used. `args` holds one sentence for each example; the message shows the first three."""

    def __str__(self) -> str:
        sentences = list_problems(self)
        omitted = len(sentences) - _LISTED_ROWS
        return "; ".join(sentences[:_LISTED_ROWS]) + (f"; and {omitted} more" if omitted > 0 else "")


def list_problems(problem: DataError) -> list[str]:
    """Return all sentences of an error about data, each once: one for each unusable example of `BadRows`."""
    if not isinstance(problem, BadRows):
        return [str(problem)]
    return list(dict.fromkeys(map(str, problem.args)))  # a fault of the whole data set is raised for every batch


class RunError(UserError):
    """A run folder that is missing, foreign, damaged, in use or not writable."""


class Busy(RunError):
    """A folder that another process is writing."""


TRACE_IN_LOG = "; log.txt has the traceback"  # may end the sentence of an AlgorithmError


class AlgorithmError(UserError):
    """A user's algorithm or task that raised an error, or returned something that cannot be used."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        """trace: the traceback of the error, for log.txt."""
        super().__init__(sentence, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


class RemarkWarning(UserWarning):
    """A remark on an experiment that can be trained, such as a key without effect. The run's log.txt has the remark, too."""


def warn_user(remark: str) -> None:
    """Issue a `RemarkWarning` at the line outside fedmutual, and outside decorators of torch and Python, that made the call.

    The registry of shown warnings is new: otherwise Python would not show an equal remark of the next run.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED:
        frame = frame.f_back
    warnings.warn_explicit(
        remark, RemarkWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), registry={}
    )


def format_error(problem: Exception) -> str:
    """Return the type and the first line of an error from code outside fedmutual."""
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or ['no message'])[0]}"


def shorten_error(problem: Exception) -> str:
    """Return the first line of an error's text, short enough for a sentence; without a text, the type of the error."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200].rstrip(".")


def format_line(problem: Exception, module: str) -> str:
    """Return the last line of a module in an error's traceback, such as " (line 8 of tasks.py)"; "" without one."""
    lines = [
        f" (line {number} of {Path(frame.f_code.co_filename).name})"
        for frame, number in traceback.walk_tb(problem.__traceback__)
        if frame.f_globals.get("__name__") == module
    ]
    return lines[-1] if lines else ""


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 client", "1,200 clients"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def suggest_name(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the fix for an unknown name: "did you mean 'x'?" with the most similar known name; `otherwise` if none is."""
    near = get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Return words as one clause: "a", "a and b", "a, b and c"."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
