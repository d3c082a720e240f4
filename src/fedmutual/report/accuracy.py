"""The headline table: a line a method, with the shared model, the clients' own, and the gain over training alone."""

from collections.abc import Iterable

from fedmutual.report import measures
from fedmutual.report.cells import Cell, Column, Table, csv_text, gain, missing, numbers, share
from fedmutual.report.comparison import Comparison, Method
from fedmutual.report.measures import Best
from fedmutual.report.statistics import Gains, Missing
from fedmutual.report.text import count

SHARED, OWN, GAIN = "Shared model, test set", "Client's model, own data", "Gain over local-only"


def headline(comparison: Comparison) -> Table:
    """A line a method: the shared model, the clients' own, the gain over training alone."""
    decimals = comparison.decimals
    shared = {m.label: measures.global_best(m) for m in comparison.methods}
    own = {m.label: measures.own_best(m) for m in comparison.methods}
    chosen_shared, chosen_own = _chosen(shared.values()), _chosen(own.values())
    best_shared, best_own = (f"best on {by}" if by else "best" for by in (chosen_shared, chosen_own))
    rows, lines = [], []
    for m in comparison.methods:
        last, mean, worst = measures.global_last(m), measures.own_last(m), measures.own_last(m, min)
        worst_best = measures.own_best(m, worst=True)
        found = measures.gains(comparison, m)
        rows.append(
            (
                Cell(m.label, sub=_state(comparison, m)),
                share(last, decimals),
                _best(shared[m.label], decimals, chosen_shared),
                share(mean, decimals),
                _best(own[m.label], decimals, chosen_own),
                share(worst, decimals),
                _best(worst_best, decimals, chosen_own),
                *_gains(found, decimals),
            )
        )
        values = (last, shared[m.label].value, mean, own[m.label].value, worst, worst_best.value)
        lines.append([m.label, len(m.counted), *(v for value in values for v in numbers(value)[:2]), *_gain_numbers(found)])
    columns = (
        Column("Method", numeric=False),
        Column("last round", SHARED),
        Column(best_shared, SHARED, note=_caution(comparison, chosen_shared, own=False)),
        Column("mean, last round", OWN),
        Column(f"mean, {best_own}", OWN, note=_caution(comparison, chosen_own, own=True)),
        Column("worst, last round", OWN),
        Column(f"worst, {best_own}", OWN, note=_caution(comparison, chosen_own, own=True)),
        Column("mean, points", GAIN),
        Column("gain / harmed", GAIN),
    )
    names = ("global_last", "global_best", "personal_last", "personal_best", "worst_last", "worst_best", "gain")
    header = ["method", "seeds", *(f"{n}{end}" for n in names for end in ("", "_half_width"))]
    header += ["gain_n", "gain_unit", "gained", "harmed", "equal"]
    caption = f"Accuracy of every method, %{_over(comparison)}"
    return Table("headline", caption, columns, tuple(rows), csv_text(header, lines), cards=True)


def _over(comparison: Comparison) -> str:
    seeds = {len(m.counted) for m in comparison.methods}
    if seeds == {1}:
        return " (one seed, so without intervals)"
    many = count(seeds.pop(), "seed") if len(seeds) == 1 else "seeds"
    return f" (mean ± 95 % interval over {many})"


def _state(comparison: Comparison, method: Method) -> str:
    """Said beneath a method's name where its rounds or its number of seeds need saying."""
    if not method.counted:
        return "nothing evaluated yet"
    run = method.counted[0]
    said = [] if len({len(m.counted) for m in comparison.methods}) == 1 else [count(len(method.counted), "seed")]
    return ", ".join(said + ([] if run.finished else [f"unfinished: round {run.reached} of {run.settings.rounds}"]))


def _chosen(found: Iterable[Best]) -> str:
    """What chose the best rounds, if it is the same for all."""
    by = {b.by for b in found if b.by}
    return by.pop() if len(by) == 1 else ""


def _best(best: Best, decimals: int, common: str) -> Cell:
    """A chosen round's number; which rounds these were, and what chose them where the column does not say so."""
    if isinstance(best.value, Missing):
        return missing(best.value.why)
    rounds = sorted(set(best.rounds))
    which = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
    return share(best.value, decimals, which if common else f"on {best.by}, {which}")


def _caution(comparison: Comparison, by: str, own: bool) -> str:
    """A footnote to a best that was chosen on the very data that it is scored on."""
    if by != "test" or (own and not measures.validation_is_test(comparison.first)):
        return ""
    return "the best round was chosen on the very test examples that it is scored on: too good for a forecast"


def _gains(found: Gains | Missing, decimals: int) -> tuple[Cell, Cell]:
    if isinstance(found, Missing):
        return missing(found.why), missing(found.why)
    gained, harmed = len(found.gained), len(found.harmed)
    equal = f", {found.equal} equal" if found.equal else ""
    return gain(found.estimate, decimals), Cell(f"{gained} / {harmed}", sub=f"of {len(found.pairs)}{equal}")


def _gain_numbers(found: Gains | Missing) -> list[object]:
    if isinstance(found, Missing):
        return [None] * 7
    e = found.estimate
    return [e.mean, e.half, e.n, e.unit, len(found.gained), len(found.harmed), found.equal]
