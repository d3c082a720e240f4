"""What a person sees while a run goes on: a bar with accuracy and time left; plain lines where there is no terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedmutual.records.events import Evaluated, Event, Failed, Finished, Noted, Replied, Started
from fedmutual.records.text import TimeLeft, scores_line, told


class Watch:
    """Observer of one run, or of one after the other under one heading."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._label = ""
        self._left = TimeLeft()
        self._rounds, self._round, self._scores, self._said = 0, 0.0, "", set[str]()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def label(self, text: str) -> None:
        """What the next run is called."""
        self._label = text

    def __call__(self, event: Event) -> None:
        """Show what is new."""
        match event:
            case Started():
                self._start(event)
            case Noted():
                self._say_once(told(event))
            case Replied():
                self._round = max(event.round - 1, 0) + event.answered / event.expected
                self._show()
            case Evaluated():
                self._scores = scores_line(event.scores)
                self._round = event.round
                if self._console.is_terminal:
                    self._show()
                else:
                    left = self._left.after(event.round)
                    self._print(f"round {event.round}/{self._rounds}  {self._scores}  {left}".rstrip())
            case Failed() | Finished():
                if self._task is not None:
                    self._bar.remove_task(self._task)
                    self._task = None
                if isinstance(event, Finished) and self._console.is_terminal:
                    self._print(f"{event.rounds} rounds  {self._scores}")

    def _start(self, event: Started) -> None:
        self._left.start(event)
        self._rounds, self._round, self._scores = event.rounds, event.done, ""
        if self._console.is_terminal:
            self._task = self._bar.add_task(self._label, total=event.rounds, completed=event.done, said="")
        lines = told(event)
        self._say_once(lines[1:] if not event.done else lines)

    def _say_once(self, lines: list[str]) -> None:
        """The same note for every seed is said once."""
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                self._print(line)

    def _show(self) -> None:
        if self._task is not None:
            said = "  ".join(filter(None, (self._scores, self._left.after(self._round))))
            done = f"{self._label}  {min(int(self._round) + 1, self._rounds)}/{self._rounds}".strip()
            self._bar.update(self._task, completed=self._round, description=done, said=said)

    def _print(self, line: str) -> None:
        self._console.print(f"{self._label}  {line}".strip(), highlight=False, markup=False, soft_wrap=True)
