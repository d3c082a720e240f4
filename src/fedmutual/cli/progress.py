"""The progress display of a run: a bar with accuracy and time left; plain lines if there is no terminal."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedmutual.events import Evaluated, Event, Failed, Finished, Noted, Observer, Replied, Score, Started
from fedmutual.rundir.text import TimeLeft, describe_event, format_duration, format_scores

LINES = 100  # at most, of a run without a terminal; log.txt has a line for every evaluation
_TIMES = 2  # how often a repeated note is printed
FormatScores = Callable[[tuple[Score, ...]], str]


class ProgressDisplay:
    """The display of a command. It makes an observer for each run; runs may be trained in turn or side by side."""

    def __init__(
        self, console: Console, line: FormatScores = format_scores, end: FormatScores = lambda scores: "", runs: int = 1
    ) -> None:
        """line: formats the scores of an evaluation. end: formats a line after the last evaluation; "" for no line.

        runs: the number of observers that `observe` makes. With several runs, each line has the number of its run and the
        time left for all runs.
        """
        self.console, self.line, self.end = console, line, end
        self.all_runs = AllRuns(runs) if runs > 1 else None
        self._run_count = 0  # observers that `observe` has made
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.failed: dict[BaseException, str] = {}  # the error that ended a run -> the label of the run
        self._printed_lines = set[str]()
        self._note_counts: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def observe(self, label: str) -> Observer:
        """Return an observer of the run with this label; runs are numbered in the order of the calls."""
        self._run_count += 1
        return _Line(self, label, self._run_count)

    def say_once(self, lines: list[str], label: str) -> None:
        """Print the lines that no run has printed before."""
        for line in lines:
            if line not in self._printed_lines:
                self._printed_lines.add(line)
                self.say(line, label)

    def note(self, event: Noted, label: str) -> None:
        """Print a note of a round the first time, mark it as repeated the second time, and ignore it afterwards."""
        times = self._note_counts[label, event.text] = self._note_counts.get((label, event.text), 0) + 1
        for line in describe_event(event) if times <= _TIMES else ():
            self.say(f"{line} (again; from now on only in log.txt)" if times == _TIMES else line, label)

    def say(self, line: str, label: str) -> None:
        """Print a line of a run."""
        self.console.print(f"{label}  {line}".strip(), highlight=False, markup=False, soft_wrap=True)


class AllRuns:
    """The progress of a command that trains several runs, in turn or side by side."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._since: float | None = None  # the first run's start
        self._begun: dict[int, float] = {}  # a run's number, from 1 -> the fraction of its rounds done before this command
        self._done: dict[int, float] = {}  # the fraction done now

    def start(self, number: int, fraction: float) -> None:
        """Record that a run starts, or resumes after this fraction of its rounds. number: of the run, from 1."""
        self._since = time.monotonic() if self._since is None else self._since
        self._begun[number] = self._done[number] = fraction

    def reach(self, number: int, fraction: float) -> None:
        """Record that this fraction of a run's rounds is done. number: of the run, from 1."""
        self._done[number] = fraction

    def format_time_left(self) -> str:
        """Return the time left for all runs, at the speed so far, as text; "" before any work is done.

        Runs start in the order of their numbers, and a run that was finished before this command never starts.
        """
        trained = sum(self._done.values()) - sum(self._begun.values())
        if self._since is None or trained <= 0:
            return ""
        left = self.count - max(self._done) + sum(1 - fraction for fraction in self._done.values())
        return f"{format_duration((time.monotonic() - self._since) / trained * left)} left for all runs"


class _Line:
    """An observer of one run: a line of the display."""

    def __init__(self, watch: ProgressDisplay, name: str, number: int) -> None:
        self._watch, self._name, self._number = watch, name, number
        self._label = f"run {number} of {watch.all_runs.count}  {name}".strip() if watch.all_runs else name
        self._left = TimeLeft()
        self._rounds, self._round, self._scores, self._end = 0, 0.0, "", ""
        self._printed_round = 0  # the last round with a printed line
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        """Show the news of an event."""
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
                self._show_scores(event)
            case Failed() | Finished():
                if self._task is not None:
                    self._watch.bar.remove_task(self._task)
                    self._task = None
                if isinstance(event, Failed):
                    self._watch.failed[event.problem] = self._name
                    self._reach_end()
                else:
                    self._finish(event)

    def _show_scores(self, event: Evaluated) -> None:
        self._scores, self._end = self._watch.line(event.scores), self._watch.end(event.scores)
        self._round = event.round
        every = -(-self._rounds // LINES)
        if self._watch.console.is_terminal:
            self._show()
        elif event.round // every > self._printed_round // every or event.round == self._rounds:
            self._printed_round = event.round
            line = f"round {event.round}/{self._rounds}  {self._scores}  {self._time_left(event.round)}"
            self._watch.say(line.rstrip(), self._label)

    def _time_left(self, round: float) -> str:
        """Return the time left for this run after `round` rounds, or for all runs if there are several."""
        if self._watch.all_runs is None:
            return self._left.estimate_after(round)
        self._watch.all_runs.reach(self._number, round / self._rounds)
        return self._watch.all_runs.format_time_left()

    def _reach_end(self) -> None:
        """Record that nothing of this run is left to train."""
        if self._watch.all_runs is not None:
            self._watch.all_runs.reach(self._number, 1.0)

    def _finish(self, event: Finished) -> None:
        self._reach_end()
        if self._watch.console.is_terminal:
            self._watch.say(f"{event.rounds} rounds  {self._scores}", self._label)
        if self._end:
            self._watch.say(self._end, self._label)

    def _start(self, event: Started) -> None:
        self._left.start(event)
        self._rounds, self._round, self._scores, self._end = event.rounds, event.done, "", ""
        self._printed_round = event.done
        if self._watch.all_runs is not None:
            self._watch.all_runs.start(self._number, event.done / event.rounds)
        if self._watch.console.is_terminal:
            self._task = self._watch.bar.add_task(self._label, total=event.rounds, completed=event.done, text="")
        lines = describe_event(event)
        self._watch.say_once(lines[1:] if not event.done else lines, self._label)

    def _show(self) -> None:
        if self._task is not None:
            text = "  ".join(filter(None, (self._scores, self._time_left(self._round))))
            done = f"{self._label}  {min(int(self._round) + 1, self._rounds)}/{self._rounds}".strip()
            self._watch.bar.update(self._task, completed=self._round, description=done, text=text)
