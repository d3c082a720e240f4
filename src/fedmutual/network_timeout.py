"""Downloads that others' code does for us, which sets no limit to how long it waits."""

import contextlib
import socket
import sys
from collections.abc import Iterator

PATIENCE = 30.0  # seconds without a byte before a download is given up


@contextlib.contextmanager
def limit_waiting() -> Iterator[None]:
    """Within, connections are given up after `PATIENCE`, and what is printed goes to the standard error."""
    waited = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        socket.setdefaulttimeout(waited)


def shorten_error(problem: Exception) -> str:
    """What went wrong, short enough for a sentence."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
