"""What accuracy does not say of a class: the one that is found worst, beside training alone."""

from collections.abc import Iterator
from statistics import fmean

from fedmutual.report.comparison import Comparison, Method
from fedmutual.report.statistics import SAME, Gains, Pair, last_common, matches
from fedmutual.report.text import percent
from fedmutual.report.wording import away, chance
from fedmutual.rundir.recorded_run import RecordedRun

_CLEAR = 0.05  # a difference of recall that is told even where it is not certain


def sentences(comparison: Comparison, data: str = "validation") -> Iterator[str]:
    """Of each federating method the worst class, where its recall on the clients' rows is clearly another than alone.

    Worst is the one that the method and training alone, taken together, find least: were it chosen by the method's own
    recall, chance would make that lower than alone.
    """
    for method in comparison.federated:
        alone = comparison.alone(method)
        found = _by_class(comparison, method, alone, data) if alone and len(comparison.classes) > 1 else {}
        if not found:
            continue
        worst = min(found, key=lambda name: sum(_recalls(found[name])))
        e = found[worst].estimate
        if e.sign or abs(e.mean) > _CLEAR - SAME:
            decimals = comparison.decimals
            ours, other = (percent(recall, decimals) for recall in _recalls(found[worst]))
            far = away(e, decimals, ("above", "below", "level"), "" if e.sign else chance(e))
            combined = f"the lowest recall of {method.label} and local-only combined"
            yield f"Class {worst} has {combined}: {ours} %, alone {other} %: {far}."


def _recalls(gains: Gains) -> tuple[float, float]:
    """Ours and alone: the means over seeds of the means over clients, as the gain is one."""
    by_seed = [[p for p in gains.pairs if p.seed == seed] for seed in gains.seeds]
    return fmean(fmean(p.ours for p in of) for of in by_seed), fmean(fmean(p.other for p in of) for of in by_seed)


def _by_class(comparison: Comparison, method: Method, alone: Method, data: str) -> dict[str, Gains]:
    """Class -> each client's recall of it under both methods, where both have one."""
    pairs: dict[str, list[Pair]] = {}
    for a, b in matches(method.counted, alone.counted):
        rounds = last_common(a, b)
        mine = a.own(a.at(rounds[0]), method.uses[0].model, data)
        theirs = b.own(b.at(rounds[1]), alone.uses[0].model, data)
        for client in mine.keys() & theirs.keys():
            both = zip(comparison.classes, mine[client].recall or (), theirs[client].recall or (), strict=False)
            for number, (name, ours, other) in enumerate(both):
                if ours is not None and other is not None:
                    held = _held(a, client, number, data)
                    pairs.setdefault(name, []).append(Pair(a.seed, client, rounds[0], ours, other, held))
    return {name: Gains(tuple(of)) for name, of in pairs.items()}


def _held(run: RecordedRun, client: str, number: int, data: str) -> int | None:
    """How many examples of a class a client has there, where that is known."""
    holding = run.partition.clients.get(client)
    counts = holding.counts.validation if holding and data == "validation" else None
    return counts[number] if counts else None
