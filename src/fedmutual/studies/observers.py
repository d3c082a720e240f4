"""What a user sees of runs: a bar with accuracy and time left, or plain lines; in Python a warning for each remark."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedmutual.errors import warn_user
from fedmutual.events import Evaluated, Event, Failed, Finished, Noted, Observer, Replied, Score, Started
from fedmutual.rundir.logs import AllRuns, describe_event, format_scores

LINES = 100  # at most, of a run without a terminal; log.txt has a line for every evaluation
FormatScores = Callable[[tuple[Score, ...]], str]
Watch = Callable[[str], Observer]
"""Name of a run -> its observer."""


def make_warning_observers(watch: Watch | None = None) -> Watch:
    """Return a function: name of a run -> its observer, which issues each remark as a `RemarkWarning`.

    An equal remark of several runs is issued once. watch: name of a run -> an observer that gets each event first.
    """
    issued = set[str]()

    def observe_run(name: str) -> Observer:
        observer = watch(name) if watch else None

        def observe(event: Event) -> None:
            if observer:
                observer(event)
            prefix, remarks = "", tuple[str, ...]()
            if isinstance(event, Started):
                remarks = event.notes
            elif isinstance(event, Noted):
                prefix, remarks = f"{name}, {f'round {event.round}' if event.round else 'at the start'}: ", (event.text,)
            for remark in remarks:
                if remark not in issued:
                    issued.add(remark)
                    warn_user(prefix + remark)

        return observe

    return observe_run


class ProgressDisplay:
    """The display of a command. It makes an observer for each run; runs may be trained in turn or side by side."""

    def __init__(
        self,
        console: Console,
        line: FormatScores = format_scores,
        end: FormatScores = lambda scores: "",
        runs: int = 1,
        lines: int = LINES,
        has_notes: bool = True,
    ) -> None:
        """line: formats the scores of an evaluation. end: formats a line after the last evaluation; "" for no line.

        runs: the number of observers that `observe` makes. With several runs, each line has the number of its run and the
        time left for all runs. lines: of a run without a terminal, at most. has_notes: whether remarks are printed.
        """
        self.console, self.line, self.end, self.lines, self.has_notes = console, line, end, lines, has_notes
        self.is_live = console.is_terminal or console.is_jupyter
        self.all_runs = AllRuns(runs) if runs > 1 else None
        self._run_count = 0  # observers that `observe` has made
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self.bar = Progress(*columns, console=console, transient=True, disable=not self.is_live)
        self._printed = set[tuple[str, str]]()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def observe(self, label: str) -> Observer:
        """Return an observer of the run with this label; runs are numbered in the order of the calls."""
        self._run_count += 1
        return _Line(self, label, self._run_count)

    def say(self, line: str, label: str, once: tuple[str, str] | None = None) -> None:
        """Print a line of a run; with `once` only the first line of this key."""
        if once is None or once not in self._printed:
            self._printed |= {once} if once else set()
            self.console.print(f"{label}  {line}".strip(), highlight=False, markup=False, soft_wrap=True)


class _Line:
    """An observer of one run: a line of the display."""

    def __init__(self, watch: ProgressDisplay, name: str, number: int) -> None:
        self._watch = watch
        self._label = f"run {number} of {watch.all_runs.count}  {name}".strip() if watch.all_runs else name
        self._runs, self._number = (watch.all_runs, number) if watch.all_runs else (AllRuns(1), 1)
        self._rounds, self._round, self._scores, self._end = 0, 0.0, "", ""
        self._printed_round = 0  # the last round with a printed line
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        """Show the news of an event."""
        match event:
            case Started():
                self._start(event)
            case Noted() if self._watch.has_notes:
                for line in describe_event(event):
                    self._watch.say(line, self._label, once=(self._label, event.text))
            case Replied():
                now = max(event.round - 1, 0) + event.answered / event.expected
                self._reach(max(self._round, now))  # a round of several phases does not go back
            case Evaluated():
                self._scores, self._end = self._watch.line(event.scores), self._watch.end(event.scores)
                self._reach(event.round)
                self._print_scores(event.round)
            case Failed() | Finished():
                if self._task is not None:
                    self._watch.bar.remove_task(self._task)
                    self._task = None
                self._runs.reach(self._number, 1.0)  # nothing of this run is left to train
                if isinstance(event, Failed):
                    return
                if self._watch.is_live:
                    self._watch.say(f"{event.rounds} rounds  {self._scores}", self._label)
                if self._end:
                    self._watch.say(self._end, self._label)
            case _:
                pass

    def _start(self, event: Started) -> None:
        self._rounds, self._round, self._scores, self._end = event.rounds, event.done, "", ""
        self._printed_round = event.done
        self._runs.start(self._number, event.done / event.rounds)
        if self._watch.is_live:
            self._task = self._watch.bar.add_task(self._label, total=event.rounds, completed=event.done, text="")
        for line in describe_event(event)[0 if event.done else 1 :] if self._watch.has_notes else ():
            self._watch.say(line, self._label, once=("", line))

    def _reach(self, round: float) -> None:
        """Record that this many rounds are done, and update the bar."""
        self._round = round
        self._runs.reach(self._number, round / self._rounds)
        if self._task is not None:
            text = "  ".join(filter(None, (self._scores, self._runs.format_time_left())))
            done = f"{self._label}  {min(int(round) + 1, self._rounds)}/{self._rounds}".strip()
            self._watch.bar.update(self._task, completed=round, description=done, text=text)

    def _print_scores(self, round: int) -> None:
        """Print a line without a terminal, at most `lines` of a run."""
        every = -(-self._rounds // self._watch.lines)
        is_due = round // every > self._printed_round // every or round == self._rounds
        if is_due and not self._watch.is_live:
            self._printed_round = round
            line = f"round {round}/{self._rounds}  {self._scores}  {self._runs.format_time_left()}"
            self._watch.say(line.rstrip(), self._label)
