"""The measures of a run: each gives a number after the last round and, where that makes sense, after the best round.

For most measures the best round is chosen on the same data as the score, which makes the score too high; the tables say
so. If other data choose the best round, the best score is the number that papers print.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from statistics import fmean, pstdev
from typing import Any, Literal

import numpy as np

from fedmutual.role import LOCAL_ONLY
from fedmutual_papers.store import ClientResult, Result

FALL = 0.05  # of accuracy: noise that lowers it by so much is large enough for a claim
MARGIN = 0.01  # a smaller loss of accuracy harms no client
MOST_EXAMPLES = 40_000  # of a test set: with more, 5 decimals do not show a difference of one example
ROUNDED = 0.51e-5  # kept accuracies have 5 decimals
CHOSEN_BY_TEST = "best on test"
CHOSEN_BY_ITSELF = "best on those data"
CHOSEN_BY_OTHERS = "each node's best on validation data"
ENDPOINT = 10  # evaluated rounds at the end of a run, whose mean is the run's score
End = Literal["mean", "last", "best"]
ENDS: Mapping[End, Callable[[Sequence[float]], float]] = {
    "mean": lambda curve: fmean(curve[-ENDPOINT:]) if len(curve) >= ENDPOINT else curve[-1],
    "last": lambda curve: curve[-1],
    "best": max,
}
"""End of a run -> the value of a curve there; the mean of a run with few evaluated rounds is the value of the last one."""

Values = Mapping[str | None, float]
"""Client -> its value; None: the value of the whole run, which without such an entry is the mean over clients."""


@dataclass(frozen=True)
class Measure:
    """A measure: how it is read from a run, its unit, and how its best round is chosen.

    `read` takes a run, the end, the runs of the same cell and seed by arm, the number after the colon of the measure's
    name, and the paper's accuracy of FedAvg; {}: the run lacks the number. `grain` takes the runs of an arm, and whether
    the value is of one client, and returns the change of the value by one example.
    """

    title: str
    unit: str  # "%", "points", "rounds", "loss", "bytes", "score", "clients"
    read: Callable[..., Values]
    chosen: str = ""  # the data that choose the best round; "" without a best round
    curve: str = ""  # the name of its curve in a result; "" without a curve
    of_clients: bool = False  # whether each client has a value
    only_best: bool = False  # whether it is a number of the models of the best round
    of_weights: bool = False  # whether it is computed from a run's weights when the run has ended
    grain: Callable[[Sequence[Result], bool], float] | None = None  # None: it counts no examples
    counted: bool = False  # whether its name ends with a number: "noise:0.2"

    @property
    def counts(self) -> End:
        """Return the end that is compared with the paper: "best" only if validation data chose the best round."""
        return "best" if self.chosen == CHOSEN_BY_OTHERS else "mean"

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


def read_values(
    name: str, run: Result, at: End, beside: Mapping[str, Result] | None = None, target: float | None = None
) -> Values:
    """Return the values of a measure of a run at an end, with the value of the whole run under None; {} without one.

    A measure in % or in points is a fraction. beside: the runs of the same cell and seed, by arm. target: the paper's
    accuracy of FedAvg, a fraction.
    """
    kind, argument = find(name)
    values = kind.read(run, at, beside or {}, argument, target)
    return values if not values or None in values else {**values, None: fmean(values.values())}


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


def _get_end(client: ClientResult, at: End) -> float:
    """Return a client's value at an end; where its curve was not kept, the mean is the value of the last round."""
    if client.curve:
        return ENDS[at](client.curve)
    return client.best if at == "best" else client.last


def _find_client_step(runs: Iterable[Result]) -> float:
    return find_step(v for run in runs for c in run.clients.values() for v in (c.last, c.best, *c.curve))


def _last(read: Callable[..., float | None]) -> Callable[..., Values]:
    """Return the reader of one number at the end of a run. read: takes what `Measure.read` takes but the end."""

    def read_last(run: Result, at: End, *more: Any) -> Values:
        number = None if at == "best" else read(run, *more)
        return {} if number is None else {None: number}

    return read_last


def _make_curve_measure(title: str, curve: str, chosen: str, of_clients: bool = True) -> Measure:
    """Return the measure of the values at the ends of a curve."""

    def read(run: Result, at: End, *_: Any) -> Values:
        own: Values = {i: _get_end(client, at) for i, client in run.clients.items()} if of_clients else {}
        return {**own, None: ENDS[at](values)} if (values := run.get_curve(curve)) else {}

    def grain(runs: Sequence[Result], per_client: bool) -> float:
        return _find_client_step(runs) if per_client else find_step(v for run in runs for v in run.get_curve(curve))

    return Measure(title, "%", read, chosen, curve, of_clients, grain=grain)


def _make_transfer_measure(name: str, title: str) -> Measure:
    """Return the measure of ACC, BWT or FWT: each node's value, and the mean over nodes."""

    def grain(runs: Sequence[Result], per_client: bool) -> float:
        of_runs = [run.transfer[name] for run in runs if name in run.transfer]
        count = 1 if per_client else max((len(ends["last"]) for ends in of_runs), default=1)
        return find_step(v for ends in of_runs for nodes in ends.values() for v in nodes.values()) / count

    def read(run: Result, at: End, *_: Any) -> Values:
        return dict(run.transfer.get(name, {}).get("best" if at == "best" else "last", {}).items())

    return Measure(title, "%", read, CHOSEN_BY_OTHERS, of_clients=True, grain=grain)


def _make_swing_measure(title: str, curve: str) -> Measure:
    """Return the measure of the standard deviation of the change from value to value in the last quarter of a curve."""

    def read(run: Result, *_: Any) -> float | None:
        values = run.curves.get(curve, ())
        last = values[-max(len(values) // 4, 2) - 1 :]  # so many changes, and two at least
        changes = [b - a for a, b in itertools.pairwise(last)]
        return pstdev(changes) if len(changes) > 1 else None

    return Measure(title, "points", _last(read))


def _find_gains(run: Result, beside: Mapping[str, Result], *_: Any) -> dict[str, float]:
    """Return client -> its gain over local-only training with the same seed, the fewest training rows first; or {}."""
    alone = beside.get(LOCAL_ONLY, run)
    if alone is run or alone.failed:
        return {}
    by_size = sorted(run.clients.items(), key=lambda item: item[1].examples)
    return {i: _get_end(client, "mean") - _get_end(alone.clients[i], "mean") for i, client in by_size}


def _make_gain_measure(title: str, large: bool) -> Measure:
    """Return the mean gain over independent training of the half of the clients with the most, or fewest, training rows."""

    def read(*of_run: Any) -> float | None:
        gains = [*_find_gains(*of_run).values()]
        half = len(gains) // 2
        return fmean(gains[-half:] if large else gains[:half]) if half else None

    def grain(runs: Sequence[Result], per_client: bool) -> float:
        return _find_client_step(runs) / max([1, *(len(run.clients) // 2 for run in runs)])

    return Measure(title, "points", _last(read), grain=grain)


def _count_harmed(run: Result, beside: Mapping[str, Result], *_: Any) -> float | None:
    """Count the clients that lose more than a point or, where this is more, more than one test example."""

    def find_margin(client: str) -> float:
        under_each_arm = [r.clients[client] for r in beside.values() if client in r.clients]
        return max(MARGIN, find_step(v for c in under_each_arm for v in (c.last, c.best))) + 2 * ROUNDED

    gains = _find_gains(run, beside)
    return float(sum(gain < -find_margin(i) for i, gain in gains.items())) if gains else None


def _read_rounds_to(run: Result, beside: Any, share: str, target: float | None) -> float | None:
    """Read the first evaluated round, from 1, with at least this share of the paper's accuracy of FedAvg."""
    reached = zip(run.evaluated, run.curves.get("global_test", ()) if target is not None else (), strict=False)
    return next((float(r) for r, value in reached if value >= float(share) * (target or 0.0)), None)


def _find_noise_increase(run: Result, beside: Mapping[str, Result], *_: Any) -> float | None:
    """Return the increase of the loss with the smallest noise that lowers FedAvg's accuracy by FALL, or with the largest."""
    accuracies = beside["fedavg"].noise_accuracy if "fedavg" in beside else {}
    noises = sorted((float(deviation), deviation) for deviation in accuracies.keys() & run.noise.keys() if deviation != "0")
    hurting = (deviation for _, deviation in noises if accuracies["0"] - accuracies[deviation] >= FALL)
    deviation = next(hurting, noises[-1][1] if noises else None)
    return None if deviation is None else run.noise[deviation] - run.noise["0"]


def _read_early(run: Result, *_: Any) -> float | None:
    """Read the mean accuracy of the analysed node over the first tenth of the rounds: how fast it converges."""
    return fmean(run.closeup.validation[: max(len(run.evaluated) // 10, 1)]) if run.closeup else None


def _make_bytes_measure(title: str, way: str) -> Measure:
    """Return the mean bytes of a client: per local step (per round, if rounds are epochs), or once in a run ("seed")."""

    def read(run: Result, *_: Any) -> float | None:
        steps = 1 if way == "seed" else run.rounds * max(run.steps, 1)
        return run.traffic.get(way, 0) / len(run.clients) / steps if run.traffic and run.clients else None  # type: ignore[call-overload]

    return Measure(title, "bytes", _last(read))


_OWN = "clients' model, own validation data, %"
_TRAINED = "clients' personal models or local copies, validation data, %"

MEASURES: dict[str, Measure] = {
    "global_test": _make_curve_measure("global model, test set, %", "global_test", CHOSEN_BY_TEST, of_clients=False),
    "own_validation": _make_curve_measure(_OWN, "own", CHOSEN_BY_ITSELF),
    "worst": Measure(
        "worst client, own validation data, %",
        "%",
        _last(lambda run, *_: min((_get_end(client, "mean") for client in run.clients.values()), default=None)),
    ),
    "harmed": Measure("clients harmed", "clients", _last(_count_harmed)),
    "local_validation": _make_curve_measure(_TRAINED, "local", CHOSEN_BY_ITSELF),
    "swing_global": _make_swing_measure("oscillation of the global model, points", "global_test"),
    "swing_own": _make_swing_measure("oscillation of the clients' model, points", "own"),
    "rounds_to": Measure(
        "rounds to {percent} % of the paper's FedAvg",
        "rounds",
        _last(_read_rounds_to),
        counted=True,
        grain=lambda runs, per_client: float(max((run.every for run in runs), default=1)),
    ),
    "loss": Measure("loss of the last global model", "loss", _last(lambda run, *_: run.noise.get("0")), of_weights=True),
    "noise_increase": Measure(
        "increase of the loss with noise on the weights", "loss", _last(_find_noise_increase), of_weights=True
    ),
    "noise": Measure(
        "increase of the loss with noise {} on the weights",
        "loss",
        _last(lambda run, beside, argument, *_: run.noise[argument] - run.noise["0"] if argument in run.noise else None),
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
    "projected": Measure("projected mutual steps, %", "%", _last(lambda run, *_: run.projected)),
    "epsilon": Measure("epsilon of all messages, the largest of all clients", "score", _last(lambda run, *_: run.epsilon)),
    "early": Measure(
        "the node's accuracy on all nodes' validation data, first tenth of the rounds, %", "%", _last(_read_early)
    ),
    "separation": Measure(
        "silhouette of the classes in the features",
        "score",
        lambda run, at, *_: {None: run.closeup.cloud.silhouette} if run.closeup and at == "best" else {},
        CHOSEN_BY_OTHERS,
        only_best=True,
        of_weights=True,
    ),
}
