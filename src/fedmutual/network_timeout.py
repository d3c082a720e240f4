"""Limit the waiting time of downloads by libraries that set no limit themselves."""

import contextlib
import socket
import sys
from collections.abc import Iterator

SILENCE_LIMIT = 30.0  # seconds without a byte before a download is given up


@contextlib.contextmanager
def limit_waiting() -> Iterator[None]:
    """Within, give up downloads after `SILENCE_LIMIT` seconds without a byte; standard output goes to standard error."""
    waited = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_LIMIT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        socket.setdefaulttimeout(waited)


def shorten_error(problem: Exception) -> str:
    """Return the text of a download error, short enough for a sentence."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
