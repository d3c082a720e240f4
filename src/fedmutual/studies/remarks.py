"""Warnings of the remarks of runs that Python code starts. The command line prints the remarks instead."""

from collections.abc import Callable

from fedmutual.errors import warn_user
from fedmutual.events import Event, Noted, Observer, Started


def make_warning_observers(
    watch: Callable[[str], Observer] | None = None, translate: Callable[[str], str] = str
) -> Callable[[str], Observer]:
    """Return a function: name of a run -> its observer, which issues each remark as a `RemarkWarning`.

    An equal remark of several runs is issued once.

    watch: name of a run -> an observer that gets each event first. translate: changes the sentence of a remark.
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
                    warn_user(prefix + translate(remark))

        return observe

    return observe_run
