"""Describe an exception in a user's algorithm in one sentence: the phase, the hook, the exception, and the line."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from fedmutual.core import Message, Phase, Spec, format_tensor
from fedmutual.errors import AlgorithmError, format_error, format_line

HOOKS = ("leaves", "send", "begin", "batches", "loss", "edit", "end", "receive")


def make_user_error(problem: BaseException, phase: Phase | None = None, client: str = "") -> BaseException:
    """Return an AlgorithmError for an exception in a phase that the user wrote; for another exception, the exception itself.

    phase: the phase that a client ran; None: the phase is searched for in the traceback.
    """
    if not isinstance(problem, Exception) or _is_fedmutuals(type(problem)):  # such an exception is one sentence already
        return problem
    raising_phase, hook = _find_hook(problem)
    phase = raising_phase or phase
    if phase is None or _is_fedmutuals(type(phase)):
        return problem
    where = f" at client {client!r}" if client else ""
    raised = f"{hook or 'its work'}{where} raised {format_error(problem)}{format_line(problem, type(phase).__module__)}"
    sentence = f"{_name_phase(phase)}: {raised}; log.txt has the traceback"
    return AlgorithmError(sentence, "".join(traceback.format_exception(problem)))


@contextmanager
def raise_user_errors(phase: Phase, client: str) -> Iterator[None]:
    """Describe an exception in the block, which runs a phase at a client, as `make_user_error` does.

    Raises:
        AlgorithmError: the exception is of a phase that the user wrote. Other exceptions pass unchanged.
    """
    try:
        yield
    except Exception as problem:
        user_error = make_user_error(problem, phase, client)
        if user_error is problem:
            raise
        raise user_error from problem


def check_state(phase: Phase, state: object, declared: Spec, sent: Message, shared: bool) -> None:
    """Check the result of `receive` in a phase that the user wrote.

    declared: the tensors that replies may hold. sent: a message to a client. shared: whether there is a shared model.

    Raises:
        AlgorithmError: the result is no message, or the shared model has another shape or dtype.
    """
    if _is_fedmutuals(type(phase)):
        return
    returned = f"{_name_phase(phase)}: receive returned"
    if not isinstance(state, Mapping):
        raise AlgorithmError(f"{returned} {type(state).__name__}; return a dictionary, name -> tensor")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise AlgorithmError(f"{returned} {type(value).__name__} for {name!r}; return a tensor")
    for name in (k for k in sent if shared and k in declared):
        before, after = format_tensor(sent[name]), format_tensor(state[name]) if name in state else "nothing"
        if before != after:
            raise AlgorithmError(f"{returned} {after} for {name!r} of the shared model; return {before}")


def _is_fedmutuals(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "fedmutual"


def _name_phase(phase: Phase) -> str:
    kind = type(phase)
    return f"phase {kind.__name__.lower()!r} of your algorithm ({kind.__module__}:{kind.__qualname__})"


def _find_hook(problem: Exception) -> tuple[Phase | None, str]:
    """Return the user's phase and hook in a traceback; (None, "") without one."""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        phase = frame.f_locals.get("self")
        if frame.f_code.co_name in HOOKS and isinstance(phase, Phase) and not _is_fedmutuals(type(phase)):
            return phase, frame.f_code.co_name
    return None, ""
