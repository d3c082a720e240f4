"""Progress of runs that Python code starts: a bar in a terminal or a notebook, a few lines elsewhere."""

from importlib.util import find_spec
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedmutual.events import Evaluated, Event, Failed, Finished, Observer, RoundDone, Started
from fedmutual.rundir.text import format_scores

_LINES = 10  # of a run, at most, where there is no terminal


class ProgressBars:
    """A bar for each run. Use as a context manager; `watch` makes the observer of a run."""

    def __init__(self, console: Console | None = None, shown: bool = True) -> None:
        """shown: whether anything is shown at all."""
        # without ipywidgets rich warns in a notebook and shows no bar: then the lines of a terminal that is none
        self._console = console or Console(stderr=True, force_jupyter=None if find_spec("ipywidgets") else False)
        self._is_live = self._console.is_terminal or self._console.is_jupyter
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[scores]}"), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, disable=not (shown and self._is_live))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def watch(self, name: str) -> Observer:
        """Return the observer of the run `name`."""
        bar: TaskID | None = None
        rounds, scores, lines = 1, "", 0

        def observe(event: Event) -> None:
            nonlocal bar, rounds, scores, lines
            match event:
                case Started():
                    rounds, lines = event.rounds, _LINES * event.done // event.rounds
                    bar = self._bars.add_task(name, total=event.rounds, completed=event.done, scores="")
                case Evaluated():
                    scores = format_scores(event.scores)
                case RoundDone() if bar is not None:
                    self._bars.update(bar, completed=event.round, scores=scores)
                    if not self._is_live and _LINES * event.round // rounds > lines:
                        lines = _LINES * event.round // rounds
                        self._console.print(
                            f"{name}: round {event.round} of {rounds}  {scores}",
                            markup=False,
                            highlight=False,
                            soft_wrap=True,
                        )
                case Failed() | Finished() if bar is not None:
                    self._bars.stop_task(bar)
                case _:
                    pass

        return observe
