"""Contestants: processes that each hold a federation ready and run rounds when told, in turns, never two at once.

So that a machine that drifts drifts for all, and no start-up is timed. Knows nothing of fedmutual: bare.py imports it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
WARM = 1  # rounds before the first that counts: caches, pages, and what is done once a run


class Contestant:
    """A process, seen from here."""

    def __init__(self, script: str, *arguments: object) -> None:
        command = [sys.executable, HERE / script, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def seconds(self, rounds: int) -> float:
        """How long it takes for so many rounds."""
        self._process.stdin.write(f"{rounds}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))}: ended with code {self._process.wait()}")
        return line


class Stage:
    """The contestant's own end. What libraries print goes to stderr, for stdout is where it answers."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> int:
        """How many rounds to run now; 0: it is over."""
        return int(sys.stdin.readline() or 0)

    def tell(self, answer: object) -> None:
        """Once when ready, then the seconds of what was asked."""
        print(answer, file=self._out, flush=True)


def take_turns(
    starts: Mapping[str, Callable[[], Contestant]], turns: int, rounds: Mapping[str, int] | int = 1
) -> dict[str, list[float]]:
    """Seconds a round of each contestant, in every turn: A B C, then C B A, and so on.

    rounds: how many make a turn, of each; where rounds are short, several.
    """
    each = dict.fromkeys(starts, rounds) if isinstance(rounds, int) else rounds
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    with ExitStack() as stack:
        there = {name: stack.enter_context(start()) for name, start in starts.items()}
        for contestant in there.values():
            contestant.seconds(WARM)
        for turn in range(turns):
            for name in list(there)[:: -1 if turn % 2 else 1]:
                seconds[name].append(there[name].seconds(each[name]) / each[name])
    return seconds
