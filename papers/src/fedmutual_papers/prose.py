"""Words and numbers of results: names, values and p-values, and the sentences of templates/sentences.j2."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from statistics import median
from typing import Any

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config.methods import find_method
from fedmutual.errors import join_words
from fedmutual.report.rendering import make_environment
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import format_number, format_signed
from fedmutual.rundir.logs import format_duration
from fedmutual_papers.experiment_files import Arm
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.store import Result


def name_arm(key: str, arm: Arm) -> str:
    """Return the display name of an arm. key: the arm's key in the cell."""
    return arm.title or (find_method(key).title if key in ALGORITHMS else key)


def capitalize(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def format_value(value: Estimate, unit: str, decimals: int) -> tuple[str, str]:
    """Return (the mean as text, "± " with half of the interval's width as text); the second is "" without an interval."""

    def format_one(number: float) -> str:
        if unit in ("%", "points"):
            return format_number(100 * number, decimals)
        if unit == "bytes":
            return f"{number:,.0f}"
        return format_number(number, 1 if unit in ("rounds", "times", "clients") else 3)

    is_certain = value.half is None or (unit == "bytes" and value.half < 0.5)
    return format_one(value.mean), "" if is_certain or value.half is None else f"± {format_one(value.half)}"


def format_difference(value: float, unit: str, decimals: int) -> str:
    """Return a difference with its sign, such as "+1.20"; a ratio without."""
    if unit == "times":
        return f"{value:,.1f}"
    if unit == "points":
        return format_signed(100 * value, decimals)
    return format_signed(value, {"rounds": 1, "bytes": 0}.get(unit, 3))


def _count_words(words: Sequence[str]) -> str:
    """Return how often each word is there: "2 supported and 1 contradicted"."""
    return join_words([f"{n} {word}" for word, n in Counter(words).most_common()])


def format_p_value(p: float | None) -> str:
    """Return "0.012" or "< 0.001"; "" for None."""
    return "" if p is None else "< 0.001" if p < 0.001 else format_number(p, 3)


@cache
def _load_sentences() -> Any:
    environment = make_environment("fedmutual_papers", html=False)
    environment.filters |= {
        "capitalized": capitalize,
        "difference": format_difference,
        "tally": _count_words,
    }
    return environment.get_template("sentences.j2").module


def say(macro: str, *values: object) -> str:
    """Return the text of a macro of templates/sentences.j2."""
    return " ".join(str(getattr(_load_sentences(), macro)(*values)).split())


describe_verdict, describe_state = (partial(say, name) for name in ("verdict", "state"))


def describe_shortening(measured_cells: Sequence[MeasuredCell]) -> Iterator[str]:
    """Yield one sentence for each way in which cells are shortened, and for each kind of non-random initial weights."""
    ways: dict[str, list[str]] = {}
    for measured in measured_cells:
        if measured.words:
            ways.setdefault(measured.words.removeprefix("shortened: "), []).append(measured.cell.name)
    for way, names in ways.items():
        yield f"Shortened, {way}: {join_words(names) if len(names) < 7 else f'{len(names)} cells'}."
    for weights in dict.fromkeys(r.made.weights for r in _list_results(measured_cells) if r.made.weights):
        yield f"Initial weights of the networks: {'; '.join(weights)}."


def describe_origins(measured_cells: Sequence[MeasuredCell]) -> Iterator[str]:
    """Yield one line with hardware, versions and time for each set-up that made results."""
    groups: dict[str, list[Result]] = {}
    for result in _list_results(measured_cells):
        key = (result.version, *result.made.model_dump(exclude={"command", "weights"}).items())
        groups.setdefault(str(key), []).append(result)
    for group in groups.values():
        timed = [r for r in group if r.seconds]
        pace = median(r.seconds / r.rounds for r in timed) if timed else 0.0
        total = format_duration(sum(r.seconds for r in timed))
        yield say("origin", group[0].made, group[0].version, len(group), len(timed), total, pace)


def list_commands(measured_cells: Sequence[MeasuredCell]) -> list[str]:
    """Return the commands that made the results, each once, with the present place of the experiments."""
    commands = (r.made.command for r in _list_results(measured_cells))
    return list(dict.fromkeys(command.replace(" experiments/", " papers/experiments/") for command in commands))


def _list_results(measured_cells: Sequence[MeasuredCell]) -> list[Result]:
    """Return all shown results; a run that several cells share comes once."""
    return list({r.fingerprint: r for measured in measured_cells for r in measured.all_results}.values())
