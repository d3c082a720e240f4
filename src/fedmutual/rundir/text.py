"""A run as lines of text, for log.txt and for output that is not a terminal."""

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from fedmutual.errors import AlgorithmError
from fedmutual.events import Evaluated, Event, Failed, Finished, Noted, Score, Started
from fedmutual.rundir.file_names import LOG
from fedmutual.rundir.logs import append
from fedmutual.rundir.transfer import MEASURES

_CALLED = {"global": "shared", "personal": "personal", "meme": "fork"}  # a score's model, as the report's tables have it


class TextLog:
    """Observer: appends to log.txt, with the time of day."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG

    def __call__(self, event: Event) -> None:
        """Append the lines of the event, if there are any."""
        if said := [*told(event), *_trace(event)]:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            append(self._path, (f"{now}  {line}" for line in said))


def _trace(event: Event) -> list[str]:
    """Return the traceback lines of an error in a user's algorithm."""
    if isinstance(event, Failed) and isinstance(event.problem, AlgorithmError):
        return event.problem.trace.splitlines()
    return []


class TimeLeft:
    """Estimate the time of the remaining rounds from the time of the finished rounds."""

    def __init__(self) -> None:
        self._since, self._done, self._rounds = time.monotonic(), 0, 0

    def start(self, event: Started) -> None:
        """Start the clock."""
        self._since, self._done, self._rounds = time.monotonic(), event.done, event.rounds

    def after(self, round: float) -> str:
        """Return the remaining time after `round` rounds as text, "" before any progress; fractions of a round count."""
        if round <= self._done:
            return ""
        return f"{duration((time.monotonic() - self._since) / (round - self._done) * (self._rounds - round))} left"


def told(event: Event) -> list[str]:
    """Return the lines of an event; events that only report progress have no line."""
    match event:
        case Started():
            whither = f"round {event.done + 1} of {event.rounds}" if event.done < event.rounds else "the summary"
            start = f"resumed, going on with {whither}" if event.done else f"started, {event.rounds} rounds"
            return [f"{start}, clients {', '.join(event.clients)}", *(f"note: {n}" for n in event.notes)]
        case Noted():
            return [f"note {'at the start' if event.round < 1 else f'in round {event.round}'}: {event.text}"]
        case Evaluated():
            return [f"round {event.round}  {scores_line(event.scores)}"]
        case Failed():
            return [f"stopped in round {event.round}: {type(event.problem).__name__}: {event.problem}"]
        case Finished():
            return [f"finished {event.rounds} rounds"]
    return []


def scores_line(scores: tuple[Score, ...]) -> str:
    """ "shared 91.2 %  personal 98.1 % (worst 97.0 %)": the shared model on the test set, the clients' own on their rows.

    Where clients are domains "ACC 89.1 %  BWT 93.3 %  FWT 87.7 %", means over them; of hold-out rows alone `holdout_line`.
    """
    if nodes := transfers(scores):
        return "  ".join(f"{name} {percent(sum(of.values()) / len(of))}" for name, of in nodes.items())
    parts = [f"{_CALLED['global']} {said(s.values)}" for s in scores if s.model == "global" and s.client is None]
    for model in ("personal", "meme"):
        parts += _of_clients(scores, model, "validation", worst=True)
    return "  ".join(parts) or holdout_line(scores)


def _of_clients(scores: tuple[Score, ...], model: str, data: str, worst: bool = False) -> list[str]:
    """The mean accuracy of a model on the clients' own such rows, and the worst; each client's score whose task has none."""
    own = [s for s in scores if s.model == model and s.data == data and s.client is not None]
    shares = [share for s in own if (share := accuracy(s.values)) is not None]
    low = f" (worst {percent(min(shares))})" if shares and worst else ""
    mean = [f"{_CALLED[model]} {percent(sum(shares) / len(shares))}{low}"] if shares else []
    return mean + [f"{_CALLED[model]} of {s.client} {said(s.values)}" for s in own if accuracy(s.values) is None]


def worst_line(scores: tuple[Score, ...]) -> str:
    """ "worst node: ACC 86.0 % (40)  BWT 92.0 % (0)  FWT 84.0 % (40)"; nothing where clients are no domains."""
    worst = {name: min(of.items(), key=lambda found: found[1]) for name, of in transfers(scores).items()}
    told = "  ".join(f"{name} {percent(share)} ({node})" for name, (node, share) in worst.items())
    return f"worst node: {told}" if told else ""


def transfers(scores: tuple[Score, ...]) -> dict[str, dict[str, float]]:
    """ "ACC", "BWT", "FWT" -> node -> accuracy of the model that it would use; empty where clients are no domains."""
    there = {s.model for s in scores if s.client is not None and s.data == MEASURES["bwt"]}
    model = next((m for m in ("personal", "global", "meme") if m in there), None)
    found: dict[str, dict[str, float]] = {}
    for name, data in MEASURES.items() if model else ():
        for s in scores:
            if (s.model, s.data) == (model, data) and s.client is not None and (share := accuracy(s.values)) is not None:
                found.setdefault(name.upper(), {})[s.client] = share
    return found


def holdout_line(scores: tuple[Score, ...]) -> str:
    """ "personal 98.1 % on hold-out": what a setting is chosen by, and nothing of test or validation data."""
    found = [part for model in ("personal", "global", "meme") for part in _of_clients(scores, model, "holdout")]
    return f"{'  '.join(found)} on hold-out" if found else "no scores are shared"


def said(values: Mapping[str, object]) -> str:
    """Return the accuracy as text; for a task without an accuracy its first score, "loss 0.123"."""
    share = accuracy(values)
    if share is not None:
        return percent(share)
    found = next(((k, v) for k, v in values.items() if isinstance(v, float)), None)
    return f"{found[0]} {found[1]:.4g}" if found else "without a score"


def accuracy(values: Mapping[str, object]) -> float | None:
    """Return the accuracy of a score; None for a task without an accuracy."""
    found = values.get("accuracy")
    return float(found) if isinstance(found, int | float) else None


def percent(fraction: float) -> str:
    """0.912 -> "91.2 %"."""
    return f"{100 * fraction:.1f} %"


def duration(seconds: float) -> str:
    """75 -> "1 min 15 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
