"""The measures of a run: each gives a number after the last round and, where that makes sense, after the best round.

For most measures the best round is chosen on the same data as the score, which makes the score too high; the tables say
so. If other data choose the best round, the best score is the number that papers print.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np

from fedmutual.role import LOCAL_ONLY
from fedmutual_papers.result import ClientResult, Result
from fedmutual_papers.schema import End

MOST_EXAMPLES = 40_000  # of a test set: with more, 5 decimals do not show a difference of one example
ROUNDED = 0.51e-5  # kept accuracies have 5 decimals
CHOSEN_BY_TEST = "best on test"
CHOSEN_BY_ITSELF = "best on those data"
CHOSEN_BY_OTHERS = "each node's best on validation data"


class Reading(NamedTuple):
    """A number of a run after the last round and after the best round; None if the run lacks the number."""

    last: float | None
    best: float | None = None


Beside = Mapping[str, Result]
"""The runs of the same cell and seed, by arm."""

Reader = Callable[[Result, Beside, str], Reading]
"""(a run, the runs beside it, the text after the colon of the measure's name) -> the number of the run."""

Grain = Callable[[Sequence[Result], bool], float]
"""(the results of an arm, whether of one client) -> the change of the value by one example."""


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
    grain: Grain | None = None  # None: the measure counts no examples
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
        LookupError: the measure does not exist.
        ValueError: the argument is missing, or the measure has no argument.
    """
    kind, colon, argument = name.partition(":")
    if kind not in MEASURES:
        raise LookupError(f"there is no measure {name!r}")
    if colon and not MEASURES[kind].counted:
        raise ValueError(f"the measure {kind!r} takes no number; remove {colon + argument!r}")
    if MEASURES[kind].counted and not _is_number(argument):
        raise ValueError(f"the measure {name!r} needs a number: '{kind}:0.9'")
    return MEASURES[kind], argument


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def get_title(name: str) -> str:
    """Return the title of a measure in tables."""
    measure, argument = find(name)
    return measure.title.format(argument, percent=f"{100 * float(argument):g}" if argument else "")


def measure_oscillation(curve: Sequence[float]) -> float | None:
    """Return the standard deviation of the change from value to value in the last quarter of a curve; None if too short.

    The result has the unit of the curve: a fraction for accuracies.
    """
    last = curve[-max(len(curve) // 4, 2) - 1 :]  # so many changes, and two at least
    changes = [b - a for a, b in itertools.pairwise(last)]
    return pstdev(changes) if len(changes) > 1 else None


def find_reached_round(result: Result, target: float) -> float | None:
    """Return the first evaluated round, from 1, with an accuracy of the global model of at least `target`, a fraction.

    None: the accuracy is lower in all rounds.
    """
    curve = result.curves.get("global_test", ())
    return next((float(r) for r, value in zip(result.evaluated, curve, strict=False) if value >= target), None)


def name_trained_curve(result: Result) -> str:
    """Return the curve name of the model that a client trained: the personal model, else the copy before averaging."""
    return "copies" if "copies" in result.curves and result.model != "personal" else "own"


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


def _list_client_steps(result: Result) -> Iterator[float]:
    return (v for client in result.clients.values() for v in (client.last, client.best, *client.curve))


def _make_curve_grain(name: Callable[[Result], str]) -> Grain:
    def grain(results: Sequence[Result], per_client: bool) -> float:
        each = (_list_client_steps(r) if per_client else r.curves.get(name(r), ()) for r in results)
        return find_step(itertools.chain.from_iterable(each))

    return grain


def _make_node_grain(name: str) -> Grain:
    def grain(results: Sequence[Result], per_client: bool) -> float:
        ends = [r.transfer[name] for r in results if name in r.transfer]
        nodes = 1 if per_client else max((len(e.last) for e in ends), default=1)
        return find_step(v for e in ends for v in (*e.last.values(), *e.best.values())) / nodes

    return grain


def _find_gain_grain(results: Sequence[Result], per_client: bool) -> float:
    half = max((len(r.clients) // 2 for r in results), default=0)
    return find_step(v for r in results for v in _list_client_steps(r)) / max(half, 1)


def _make_curve_measure(name: Callable[[Result], str]) -> Reader:
    """Read the last and the highest value of a curve. name: the run -> the name of its curve."""

    def read(result: Result, beside: Beside, argument: str) -> Reading:
        curve = result.curves.get(name(result))
        return Reading(curve[-1], max(curve)) if curve else Reading(None)

    return read


def _make_swing_measure(name: str) -> Reader:
    return lambda result, beside, argument: Reading(measure_oscillation(result.curves.get(name, ())))


def _read_rounds_to(result: Result, beside: Beside, argument: str) -> Reading:
    return Reading(None if result.target is None else find_reached_round(result, float(argument) * result.target))


def _find_local_only(result: Result, beside: Beside) -> Mapping[str, ClientResult]:
    """Return the clients of the run of independent training beside a run; {} without such a run, or for this run itself."""
    local_only = beside.get(LOCAL_ONLY)
    return {} if local_only is None or local_only is result or local_only.failed else local_only.clients


def _make_gain_measure(large: bool) -> Reader:
    """Read the mean gain over independent training of the half of the clients with the most, or fewest, training rows."""

    def read(result: Result, beside: Beside, argument: str) -> Reading:
        by_size = sorted(result.clients, key=lambda i: result.clients[i].examples)
        half, alone = len(by_size) // 2, _find_local_only(result, beside)
        chosen = by_size[-half:] if large else by_size[:half]
        return Reading(fmean(result.clients[i].last - alone[i].last for i in chosen) if half and alone else None)

    return read


def _count_harmed(result: Result, beside: Beside, argument: str) -> Reading:
    """Count the clients whose accuracy is lower than after independent training with the same seed."""
    if not result.clients or not (alone := _find_local_only(result, beside)):
        return Reading(None)
    return Reading(float(sum(client.last < alone[i].last for i, client in result.clients.items())))


def _list_own_accuracies(result: Result, at: End) -> Mapping[str, float]:
    return {i: getattr(client, at) for i, client in result.clients.items()}


def _make_transfer_measure(name: str, title: str) -> Measure:
    """Return the measure of ACC, BWT or FWT: each node's value, and the mean over nodes."""

    def nodes(result: Result, at: End) -> Mapping[str, float]:
        return getattr(result.transfer[name], at) if name in result.transfer else {}

    def read(result: Result, beside: Beside, argument: str) -> Reading:
        return Reading(*(fmean(values.values()) if (values := nodes(result, at)) else None for at in ("last", "best")))

    return Measure(title, "%", read, CHOSEN_BY_OTHERS, nodes=nodes, grain=_make_node_grain(name))


def _make_bytes_measure(way: str, once: bool = False) -> Reader:
    """Read the mean bytes of a client: per local step (per round, if rounds are epochs), or once in a run."""

    def read(result: Result, beside: Beside, argument: str) -> Reading:
        if result.traffic is None or not result.clients:
            return Reading(None)
        steps = 1 if once else result.rounds * max(result.steps, 1)
        return Reading(getattr(result.traffic, way) / len(result.clients) / steps)

    return read


MEASURES: dict[str, Measure] = {
    "global_test": Measure(
        "global model, test set, %",
        "%",
        _make_curve_measure(lambda result: "global_test"),
        CHOSEN_BY_TEST,
        "global_test",
        grain=_make_curve_grain(lambda result: "global_test"),
    ),
    "own_validation": Measure(
        "clients' model, own validation data, %",
        "%",
        _make_curve_measure(lambda result: "own"),
        CHOSEN_BY_ITSELF,
        "own",
        _list_own_accuracies,
        grain=_make_curve_grain(lambda result: "own"),
    ),
    "worst": Measure(
        "worst client, own validation data, %",
        "%",
        lambda result, *_: Reading(min((c.last for c in result.clients.values()), default=None)),
    ),
    "harmed": Measure("clients harmed", "clients", _count_harmed),
    "local_validation": Measure(
        "clients' personal models or local copies, validation data, %",
        "%",
        _make_curve_measure(name_trained_curve),
        CHOSEN_BY_ITSELF,
        "local",
        _list_own_accuracies,
        grain=_make_curve_grain(name_trained_curve),
    ),
    "swing_global": Measure("oscillation of the global model, points", "points", _make_swing_measure("global_test")),
    "swing_own": Measure("oscillation of the clients' model, points", "points", _make_swing_measure("own")),
    "rounds_to": Measure(
        "rounds to {percent} % of the paper's FedAvg",
        "rounds",
        _read_rounds_to,
        counted=True,
        grain=lambda results, per_client: float(max((r.every for r in results), default=1)),
    ),
    "noise": Measure(
        "loss with noise {} on the weights",
        "loss",
        lambda result, beside, argument: Reading(result.noise.get(argument)),
        of_weights=True,
        counted=True,
    ),
    "gain_small": Measure(
        "gain of the clients with fewest examples, points", "points", _make_gain_measure(False), grain=_find_gain_grain
    ),
    "gain_large": Measure(
        "gain of the clients with most examples, points", "points", _make_gain_measure(True), grain=_find_gain_grain
    ),
    "acc": _make_transfer_measure("acc", "ACC, all nodes' test data, %"),
    "bwt": _make_transfer_measure("bwt", "BWT, own test data, %"),
    "fwt": _make_transfer_measure("fwt", "FWT, the other nodes' test data, %"),
    "bytes_up": Measure("bytes that a node sends for each local step", "bytes", _make_bytes_measure("up")),
    "bytes_down": Measure("bytes that a node receives for each local step", "bytes", _make_bytes_measure("down")),
    "bytes_seed": Measure(
        "bytes of the public examples that a node sent, once", "bytes", _make_bytes_measure("seed", once=True)
    ),
    "projected": Measure("projected mutual steps, %", "%", lambda result, *_: Reading(result.projected)),
    "epsilon": Measure(
        "epsilon of all messages, the largest of all clients", "score", lambda result, *_: Reading(result.epsilon)
    ),
    "separation": Measure(
        "silhouette of the classes in the features",
        "score",
        lambda result, *_: Reading(None, result.closeup.cloud.silhouette if result.closeup else None),
        CHOSEN_BY_OTHERS,
        only_best=True,
        of_weights=True,
    ),
}
