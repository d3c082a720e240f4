"""The measures of a run: each gives a number after the last round and, where that makes sense, after the best round.

For most measures the best round is chosen on the same data as the score, which makes the score too high; the tables say
so. If other data choose the best round, the best score is the number that papers print.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from statistics import fmean, pstdev
from typing import Literal

import numpy as np

from fedmutual.role import LOCAL_ONLY
from fedmutual_papers.store import ClientResult, End, Result

MOST_EXAMPLES = 40_000  # of a test set: with more, 5 decimals do not show a difference of one example
ROUNDED = 0.51e-5  # kept accuracies have 5 decimals
CHOSEN_BY_TEST = "best on test"
CHOSEN_BY_ITSELF = "best on those data"
CHOSEN_BY_OTHERS = "each node's best on validation data"

Reading = tuple[float | None, float | None]
"""A number of a run after the last round and after the best round; None if the run lacks the number."""

Beside = Mapping[str, Result]
"""The runs of the same cell and seed, by arm."""

Reader = Callable[[Result, Beside, str], Reading]
"""(a run, the runs beside it, the text after the colon of the measure's name) -> the number of the run."""

NONE: Reading = None, None


@dataclass(frozen=True)
class Measure:
    """A measure: how it is read from a run, its unit, and how its best round is chosen."""

    title: str
    unit: str  # "%", "points", "rounds", "loss", "bytes", "score", "clients"
    read: Reader
    chosen: str = ""  # the data that choose the best round; "" without a best round
    curve: str = ""  # the name of its curve in a result; "" without a curve
    nodes: Callable[[Result, End], Mapping[str, float]] | None = None  # client -> its value, if it is a mean over clients
    only_best: bool = False  # whether it is a number of the models of the best round
    of_weights: bool = False  # whether it is computed from a run's weights when the run has ended
    # (the results of an arm, whether of one client) -> the change of the value by one example; None: it counts no examples
    grain: Callable[[Sequence[Result], bool], float] | None = None
    counted: bool = False  # whether its name ends with a number: "noise:0.2"

    @property
    def counts(self) -> End:
        """Return the end that is compared with the paper: "best" only if validation data chose the best round."""
        return "best" if self.chosen == CHOSEN_BY_OTHERS else "last"

    def is_printed_at(self, at: End) -> bool:
        """Return whether the paper's number stands beside this end; also for a best round that was chosen on test images."""
        return at == self.counts or self.chosen == CHOSEN_BY_TEST


def find(name: str) -> tuple[Measure, str]:
    """Return (the measure, its argument) for a name: "noise:0.2" is the measure "noise" with the argument "0.2".

    Raises:
        ValueError: the measure does not exist, or the argument is missing, or the measure has no argument.
    """
    kind, colon, argument = name.partition(":")
    if kind not in MEASURES:
        raise ValueError(f"there is no measure {name!r}{suggest_near(kind, list(MEASURES))}")
    if colon and not MEASURES[kind].counted:
        raise ValueError(f"the measure {kind!r} takes no number; remove {colon + argument!r}")
    if MEASURES[kind].counted and not _is_number(argument):
        raise ValueError(f"the measure {name!r} needs a number: '{kind}:0.9'")
    return MEASURES[kind], argument


def suggest_near(word: str, known: Sequence[str]) -> str:
    """Return the end of an error message: "; did you mean ...?" with the nearest known word, else all known words."""
    matches = get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; there are {', '.join(known)}"


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def get_title(name: str) -> str:
    """Return the title of a measure in tables."""
    measure, argument = find(name)
    return measure.title.format(argument, percent=f"{100 * float(argument):g}" if argument else "")


def find_step(fractions: Iterable[float]) -> float:
    """Return the step of an accuracy: 1 / n for the smallest n for which all fractions are multiples of 1 / n to 5 decimals.

    n is the number of examples, or a divisor of it: the step is never too small. Return 0.0 without fractions, and if no n
    fits.
    """
    values = set(fractions)
    steps = np.arange(1, MOST_EXAMPLES + 1 if values else 1)
    for value in values:
        steps = steps[np.abs(np.round(value * steps) / steps - value) <= ROUNDED]
    return 1 / float(steps[0]) if len(steps) else 0.0


def _list_client_scores(runs: Iterable[Result]) -> Iterator[float]:
    return (v for run in runs for client in run.clients.values() for v in (client.last, client.best, *client.curve))


def _list_own_accuracies(run: Result, at: End) -> Mapping[str, float]:
    return {i: getattr(client, at) for i, client in run.clients.items()}


def _make_curve_measure(title: str, curve: str, chosen: str, of_clients: bool = True) -> Measure:
    """Return the measure of the last and the highest value of a curve."""

    def read(run: Result, beside: Beside, argument: str) -> Reading:
        values = run.get_curve(curve)
        return (values[-1], max(values)) if values else NONE

    def grain(runs: Sequence[Result], per_client: bool) -> float:
        return find_step(_list_client_scores(runs) if per_client else (v for run in runs for v in run.get_curve(curve)))

    return Measure(title, "%", read, chosen, curve, _list_own_accuracies if of_clients else None, grain=grain)


def _make_transfer_measure(name: str, title: str) -> Measure:
    """Return the measure of ACC, BWT or FWT: each node's value, and the mean over nodes."""

    def nodes(run: Result, at: End) -> Mapping[str, float]:
        return run.transfer[name].get(at, {}) if name in run.transfer else {}

    def read(run: Result, beside: Beside, argument: str) -> Reading:
        last, best = (fmean(values.values()) if (values := nodes(run, at)) else None for at in ("last", "best"))
        return last, best

    def grain(runs: Sequence[Result], per_client: bool) -> float:
        count = 1 if per_client else max((len(nodes(run, "last")) for run in runs if name in run.transfer), default=1)
        return find_step(v for run in runs for at in ("last", "best") for v in nodes(run, at).values()) / count

    return Measure(title, "%", read, CHOSEN_BY_OTHERS, nodes=nodes, grain=grain)


def _make_swing_measure(title: str, curve: str) -> Measure:
    """Return the measure of the standard deviation of the change from value to value in the last quarter of a curve."""

    def read(run: Result, beside: Beside, argument: str) -> Reading:
        values = run.curves.get(curve, ())
        last = values[-max(len(values) // 4, 2) - 1 :]  # so many changes, and two at least
        changes = [b - a for a, b in itertools.pairwise(last)]
        return pstdev(changes) if len(changes) > 1 else None, None

    return Measure(title, "points", read)


def _find_local_only(run: Result, beside: Beside) -> Mapping[str, ClientResult]:
    """Return the clients of the run of independent training beside a run; {} without such a run, or for this run itself."""
    local_only = beside.get(LOCAL_ONLY)
    return {} if local_only is None or local_only is run or local_only.failed else local_only.clients


def _make_gain_measure(title: str, large: bool) -> Measure:
    """Return the mean gain over independent training of the half of the clients with the most, or fewest, training rows."""

    def read(run: Result, beside: Beside, argument: str) -> Reading:
        by_size = sorted(run.clients, key=lambda i: run.clients[i].examples)
        half, alone = len(by_size) // 2, _find_local_only(run, beside)
        chosen = by_size[-half:] if large else by_size[:half]
        return fmean(run.clients[i].last - alone[i].last for i in chosen) if half and alone else None, None

    def grain(runs: Sequence[Result], per_client: bool) -> float:
        return find_step(_list_client_scores(runs)) / max([1, *(len(run.clients) // 2 for run in runs)])

    return Measure(title, "points", read, grain=grain)


def _count_harmed(run: Result, beside: Beside, argument: str) -> Reading:
    """Count the clients whose accuracy is lower than after independent training with the same seed."""
    alone = _find_local_only(run, beside)
    harmed = sum(client.last < alone[i].last for i, client in run.clients.items()) if alone else 0
    return float(harmed) if run.clients and alone else None, None


def _read_rounds_to(run: Result, beside: Beside, argument: str) -> Reading:
    """Read the first evaluated round, from 1, with at least this share of the paper's accuracy of FedAvg."""
    if run.target is None:
        return NONE
    reached = zip(run.evaluated, run.curves.get("global_test", ()), strict=False)
    return next((float(r) for r, value in reached if value >= float(argument) * run.target), None), None


def _make_bytes_measure(title: str, way: Literal["up", "down", "seed"]) -> Measure:
    """Return the mean bytes of a client: per local step (per round, if rounds are epochs), or once in a run ("seed")."""

    def read(run: Result, beside: Beside, argument: str) -> Reading:
        steps = 1 if way == "seed" else run.rounds * max(run.steps, 1)
        return run.traffic.get(way, 0) / len(run.clients) / steps if run.traffic and run.clients else None, None

    return Measure(title, "bytes", read)


_OWN = "clients' model, own validation data, %"
_TRAINED = "clients' personal models or local copies, validation data, %"

MEASURES: dict[str, Measure] = {
    "global_test": _make_curve_measure("global model, test set, %", "global_test", CHOSEN_BY_TEST, of_clients=False),
    "own_validation": _make_curve_measure(_OWN, "own", CHOSEN_BY_ITSELF),
    "worst": Measure(
        "worst client, own validation data, %",
        "%",
        lambda run, *_: (min((c.last for c in run.clients.values()), default=None), None),
    ),
    "harmed": Measure("clients harmed", "clients", _count_harmed),
    "local_validation": _make_curve_measure(_TRAINED, "local", CHOSEN_BY_ITSELF),
    "swing_global": _make_swing_measure("oscillation of the global model, points", "global_test"),
    "swing_own": _make_swing_measure("oscillation of the clients' model, points", "own"),
    "rounds_to": Measure(
        "rounds to {percent} % of the paper's FedAvg",
        "rounds",
        _read_rounds_to,
        counted=True,
        grain=lambda runs, per_client: float(max((run.every for run in runs), default=1)),
    ),
    "noise": Measure(
        "loss with noise {} on the weights",
        "loss",
        lambda run, beside, argument: (run.noise.get(argument), None),
        of_weights=True,
        counted=True,
    ),
    "gain_small": _make_gain_measure("gain of the clients with fewest examples, points", large=False),
    "gain_large": _make_gain_measure("gain of the clients with most examples, points", large=True),
    "acc": _make_transfer_measure("acc", "ACC, all nodes' test data, %"),
    "bwt": _make_transfer_measure("bwt", "BWT, own test data, %"),
    "fwt": _make_transfer_measure("fwt", "FWT, the other nodes' test data, %"),
    "bytes_up": _make_bytes_measure("bytes that a node sends for each local step", "up"),
    "bytes_down": _make_bytes_measure("bytes that a node receives for each local step", "down"),
    "bytes_seed": _make_bytes_measure("bytes of the public examples that a node sent, once", "seed"),
    "projected": Measure("projected mutual steps, %", "%", lambda run, *_: (run.projected, None)),
    "epsilon": Measure("epsilon of all messages, the largest of all clients", "score", lambda run, *_: (run.epsilon, None)),
    "separation": Measure(
        "silhouette of the classes in the features",
        "score",
        lambda run, *_: (None, run.closeup.cloud.silhouette if run.closeup else None),
        CHOSEN_BY_OTHERS,
        only_best=True,
        of_weights=True,
    ),
}
