"""The remarks of runs that Python code starts, as warnings. The command line prints remarks instead."""

from collections.abc import Callable

from fedmutual.errors import warn_user
from fedmutual.events import Event, Noted, Observer, Started


def warn_of_remarks(
    watch: Callable[[str], Observer] | None = None, translate: Callable[[str], str] = str
) -> Callable[[str], Observer]:
    """Return a function that makes the observer of a run by the name of the run, as `watch` does.

    The observers issue each remark as a `RemarkWarning`, and an equal remark of several runs once.

    watch: makes an observer that receives each event first. translate: changes the sentence of a remark.
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
