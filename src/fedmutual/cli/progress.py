"""What a person sees while a run goes on: a bar with accuracy and time left; plain lines where there is no terminal."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedmutual.events import Evaluated, Event, Failed, Finished, Noted, Observer, Replied, Score, Started
from fedmutual.rundir.text import TimeLeft, duration, scores_line, told

LINES = 100  # of a run, at most, where there is no terminal; log.txt has a line for every evaluation
_TIMES = 2  # that the same note is said
Said = Callable[[tuple[Score, ...]], str]


class ProgressDisplay:
    """The screen: makes an observer for each run, one after the other or several at once."""

    def __init__(self, console: Console, line: Said = scores_line, end: Said = lambda scores: "", runs: int = 1) -> None:
        """line: what is shown of an evaluation; end: what is said of the last one beside it, if anything.

        runs: how many runs `of` is asked for. Where there are several, each line names the run's number and the time left
        for all of them.
        """
        self.console, self.line, self.end = console, line, end
        self.all_runs = AllRuns(runs) if runs > 1 else None
        self._named = 0  # runs that `of` was asked for
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.failed: dict[BaseException, str] = {}  # what ended a run -> what the run is called
        self._said = set[str]()
        self._noted: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def of(self, label: str) -> Observer:
        """Observer of the run that is called so; runs are numbered in the order of the calls."""
        self._named += 1
        return _Line(self, label, self._named)

    def say_once(self, lines: list[str], label: str) -> None:
        """The same note for every seed is said once."""
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                self.say(line, label)

    def note(self, event: Noted, label: str) -> None:
        """What came up in a round is said; when it does again, that it does; then no more."""
        times = self._noted[label, event.text] = self._noted.get((label, event.text), 0) + 1
        for line in told(event) if times <= _TIMES else ():
            self.say(f"{line} (again; from here on in log.txt alone)" if times == _TIMES else line, label)

    def say(self, line: str, label: str) -> None:
        """A line of a run."""
        self.console.print(f"{label}  {line}".strip(), highlight=False, markup=False, soft_wrap=True)


class AllRuns:
    """How far a command is that trains several runs, one after the other or all at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._since: float | None = None  # the first run's start
        self._begun: dict[int, float] = {}  # a run's number, from 1 -> the fraction of its rounds done before this command
        self._done: dict[int, float] = {}  # the fraction done now

    def start(self, number: int, fraction: float) -> None:
        """The run of this number starts, or goes on after this fraction of its rounds."""
        self._since = time.monotonic() if self._since is None else self._since
        self._begun[number] = self._done[number] = fraction

    def reach(self, number: int, fraction: float) -> None:
        """This fraction of the run's rounds is done."""
        self._done[number] = fraction

    def time_left(self) -> str:
        """Words for the time left for all runs, at the pace so far; empty before any work is done.

        A run that was finished before this command never starts: no run before the latest started one is still to come.
        """
        trained = sum(self._done.values()) - sum(self._begun.values())
        if self._since is None or trained <= 0:
            return ""
        left = self.count - max(self._done) + sum(1 - fraction for fraction in self._done.values())
        return f"{duration((time.monotonic() - self._since) / trained * left)} left for all runs"


class _Line:
    """Observer of one run: a line of the screen."""

    def __init__(self, watch: ProgressDisplay, name: str, number: int) -> None:
        self._watch, self._name, self._number = watch, name, number
        self._label = f"run {number} of {watch.all_runs.count}  {name}".strip() if watch.all_runs else name
        self._left = TimeLeft()
        self._rounds, self._round, self._scores, self._end = 0, 0.0, "", ""
        self._told = 0  # the last round that a line was said of
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        """Show what is new."""
        match event:
            case Started():
                self._start(event)
            case Noted():
                self._watch.note(event, self._label)
            case Replied():
                now = max(event.round - 1, 0) + event.answered / event.expected
                self._round = max(self._round, now)  # a round of several phases does not go back
                self._show()
            case Evaluated():
                self._evaluated(event)
            case Failed() | Finished():
                if self._task is not None:
                    self._watch.bar.remove_task(self._task)
                    self._task = None
                if isinstance(event, Failed):
                    self._watch.failed[event.problem] = self._name
                else:
                    self._finished(event)

    def _evaluated(self, event: Evaluated) -> None:
        self._scores, self._end = self._watch.line(event.scores), self._watch.end(event.scores)
        self._round = event.round
        every = -(-self._rounds // LINES)
        if self._watch.console.is_terminal:
            self._show()
        elif event.round // every > self._told // every or event.round == self._rounds:
            self._told = event.round
            line = f"round {event.round}/{self._rounds}  {self._scores}  {self._time_left(event.round)}"
            self._watch.say(line.rstrip(), self._label)

    def _time_left(self, round: float) -> str:
        """Of this run after `round` rounds; of all runs where there are several."""
        if self._watch.all_runs is None:
            return self._left.after(round)
        self._watch.all_runs.reach(self._number, round / self._rounds)
        return self._watch.all_runs.time_left()

    def _finished(self, event: Finished) -> None:
        if self._watch.all_runs is not None:
            self._watch.all_runs.reach(self._number, 1.0)
        if self._watch.console.is_terminal:
            self._watch.say(f"{event.rounds} rounds  {self._scores}", self._label)
        if self._end:
            self._watch.say(self._end, self._label)

    def _start(self, event: Started) -> None:
        self._left.start(event)
        self._rounds, self._round, self._scores, self._end = event.rounds, event.done, "", ""
        self._told = event.done
        if self._watch.all_runs is not None:
            self._watch.all_runs.start(self._number, event.done / event.rounds)
        if self._watch.console.is_terminal:
            self._task = self._watch.bar.add_task(self._label, total=event.rounds, completed=event.done, said="")
        lines = told(event)
        self._watch.say_once(lines[1:] if not event.done else lines, self._label)

    def _show(self) -> None:
        if self._task is not None:
            said = "  ".join(filter(None, (self._scores, self._time_left(self._round))))
            done = f"{self._label}  {min(int(self._round) + 1, self._rounds)}/{self._rounds}".strip()
            self._watch.bar.update(self._task, completed=self._round, description=done, said=said)
