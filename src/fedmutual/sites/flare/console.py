"""Lines on the console of an operator while a process runs, each with the time."""

import time
from collections import Counter


def print_line(line: object) -> None:
    """Print a line on the console of this host. The line is not logged and not sent."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


_line_counts: Counter[str] = Counter()  # kind -> lines so far


def print_line_seldom(kind: str, line: object) -> None:
    """Print only the first, second, fourth, eighth ... line of a kind, so that other participants cannot flood the console.

    kind: a constant of the program, never text of another participant.
    """
    _line_counts[kind] += 1
    if _line_counts[kind] & (_line_counts[kind] - 1) == 0:
        print_line(line if _line_counts[kind] == 1 else f"{line} ({_line_counts[kind]} of this kind so far)")
