"""What goes wrong in an algorithm of the user's own, in one sentence: the phase, its hook, what was raised, and where."""

import traceback
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedmutual.core import Message, Phase, Spec
from fedmutual.errors import AlgorithmError, format_error

HOOKS = ("leaves", "send", "begin", "batches", "loss", "edit", "end", "receive")


def make_user_error(problem: BaseException, phase: Phase | None = None, client: str = "") -> BaseException:
    """What to tell of an exception: an AlgorithmError where it comes from a phase of the user's own; else itself.

    phase: whose client's part it came out of; without one, only what a hook raised is of a phase.
    """
    if not isinstance(problem, Exception) or _ours(type(problem)):  # ours are sentences already
        return problem
    whose, hook = _raised_in(problem)
    phase = whose or phase
    if phase is None or _ours(type(phase)):
        return problem
    where = f" at client {client!r}" if client else ""
    raised = f"{hook or 'its work'}{where} raised {format_error(problem)}{_line(problem, phase)}"
    sentence = f"{_called(phase)}: {raised}; log.txt has the traceback"
    return AlgorithmError(sentence, "".join(traceback.format_exception(problem)))


def check_state(phase: Phase, state: object, declared: Spec, sent: Message, shared: bool) -> None:
    """Raise AlgorithmError where `receive` of a user's own phase gave no message, or changed the form of the shared model.

    declared: what replies could hold. sent: to one of the clients. shared: whether there is a shared model.
    """
    if _ours(type(phase)):
        return
    gave = f"{_called(phase)}: receive gave"
    if not isinstance(state, Mapping):
        raise AlgorithmError(f"{gave} {type(state).__name__}, and a dictionary of tensors by their names is wanted")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise AlgorithmError(f"{gave} {type(value).__name__} for {name!r}, and a tensor is wanted")
    for name in (k for k in sent if shared and k in declared):
        before, after = _form(sent[name]), _form(state[name]) if name in state else "nothing"
        if before != after:
            raise AlgorithmError(f"{gave} {after} for {name!r} of the shared model, and {before} is wanted")


def _ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "fedmutual"


def _called(phase: Phase) -> str:
    kind = type(phase)
    return f"phase {kind.__name__.lower()!r} of your algorithm ({kind.__module__}:{kind.__qualname__})"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _raised_in(problem: Exception) -> tuple[Phase | None, str]:
    """The user's phase and its hook that were at work, if any were."""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        phase = frame.f_locals.get("self")
        if frame.f_code.co_name in HOOKS and isinstance(phase, Phase) and not _ours(type(phase)):
            return phase, frame.f_code.co_name
    return None, ""


def _line(problem: Exception, phase: Phase) -> str:
    """The last line in the phase's own module, if it came there."""
    lines = [
        f" (line {number} of {Path(frame.f_code.co_filename).name})"
        for frame, number in traceback.walk_tb(problem.__traceback__)
        if frame.f_globals.get("__name__") == type(phase).__module__
    ]
    return lines[-1] if lines else ""
