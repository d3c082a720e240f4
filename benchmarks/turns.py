"""Contestants: processes that each hold a federation ready and run rounds when asked, in turns, never two at once.

So a change of the machine's speed affects all contestants alike, and no start-up is timed. The file imports nothing of
fedmutual, because bare.py imports this file.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WARM = 1  # rounds before the first that counts: caches, pages, and what is done once a run


class Contestant:
    """A contestant's process, seen from the measuring process."""

    def __init__(
        self,
        script: str,
        *arguments: object,
        python: Path | str = sys.executable,
        report: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Start the process. report: gets each answer of a contestant that tells more than its seconds."""
        command = [python, HERE / script, *map(str, arguments)]
        self._report = report
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self._answer()
        if report is not None:
            report(json.loads(ready))

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def seconds(self, rounds: int) -> float:
        """Return the seconds of this many rounds."""
        self._process.stdin.write(f"{rounds}\n")
        self._process.stdin.flush()
        answer = json.loads(self._answer())
        if self._report is not None:
            self._report(answer)
            return float(answer["seconds"])
        return float(answer)

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))}: ended with code {self._process.wait()}")
        return line


class Stage:
    """The contestant's end of the connection. Libraries' output goes to stderr, because stdout carries the answers."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> int:
        """Return the number of rounds to run now; 0: the measurement is over."""
        return int(sys.stdin.readline() or 0)

    def tell(self, answer: object) -> None:
        """Report once that the contestant is ready, then the seconds of each request, as JSON."""
        print(json.dumps(answer), file=self._out, flush=True)


class RoundTimer:
    """Measures rounds of a library whose loop begins the next round without a request."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def wait(self) -> None:
        """Wait for the next request; end the process after the last."""
        self._left = self._stage.wait()
        if not self._left:
            raise SystemExit
        self._begun = time.perf_counter()

    def end_round(self, finish: Callable[[float], object] = lambda seconds: seconds) -> None:
        """Count a round; after the last round of a request, report the answer. finish: seconds -> answer."""
        self._left -= 1
        if not self._left:
            self._stage.tell(finish(time.perf_counter() - self._begun))
            self.wait()


def take_turns(
    starts: Mapping[str, Callable[[], Contestant]], turns: int, rounds: Mapping[str, int] | int = 1
) -> dict[str, list[float]]:
    """Return the seconds a round of each contestant, in every turn: A B C, then C B A, and so on.

    rounds: the rounds in a turn of each contestant; several if rounds are short.
    """
    each = dict.fromkeys(starts, rounds) if isinstance(rounds, int) else rounds
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(start()) for name, start in starts.items()}
        for contestant in contestants.values():
            contestant.seconds(WARM)
        for turn in range(turns):
            for name in list(contestants)[:: -1 if turn % 2 else 1]:
                seconds[name].append(contestants[name].seconds(each[name]) / each[name])
    return seconds
