"""The headline table: a line a method, with the shared model, the clients' own, and the gain over training alone."""

from collections.abc import Iterable

from fedmutual.report import guarantee, measures
from fedmutual.report.cells import Cell, Column, Table, csv_text, gain, missing, numbers, share
from fedmutual.report.comparison import Comparison, Use
from fedmutual.report.measures import Best
from fedmutual.report.statistics import Gains, Missing
from fedmutual.report.text import count

SHARED, OWN, GAIN = "Shared model, test set", "Client's model, own data", "Gain over local-only"


def headline(comparison: Comparison) -> Table:
    """A line a method, or one for each of its models: the shared model, the clients' own, the gain over training alone."""
    decimals, private = comparison.decimals, guarantee.is_stated(comparison)
    shared = {u: measures.global_best(u) for u in comparison.uses}
    own = {u: measures.own_best(u) for u in comparison.uses}
    chosen_shared, chosen_own = _chosen(shared.values()), _chosen(own.values())
    best_shared, best_own = (f"best on {by}" if by else "best" for by in (chosen_shared, chosen_own))
    rows, lines = [], []
    for u in comparison.uses:
        last, mean, worst = measures.global_last(u), measures.own_last(u), measures.own_last(u, min)
        worst_best = measures.own_best(u, worst=True)
        found = measures.gains(comparison, u)
        rows.append(
            (
                Cell(u.method.label, sub=_state(comparison, u)),
                share(last, decimals),
                _best(shared[u], decimals, chosen_shared),
                share(mean, decimals),
                _best(own[u], decimals, chosen_own),
                share(worst, decimals),
                _best(worst_best, decimals, chosen_own),
                *_gains(found, decimals),
                *([guarantee.cell(u.method)] if private else []),
            )
        )
        values = (last, shared[u].value, mean, own[u].value, worst, worst_best.value)
        about = (u.method.label, u.name, len(u.method.counted))
        spent = [guarantee.epsilon(u.method)] if private else []
        lines.append([*about, *(v for value in values for v in numbers(value)[:2]), *_gain_numbers(found), *spent])
    columns = (
        Column("Method", numeric=False, brief="Method"),
        Column("last round", SHARED, brief=SHARED),
        Column(best_shared, SHARED, note=_caution(comparison, chosen_shared, own=False)),
        Column("mean, last round", OWN, brief="Own data, mean"),
        Column(f"mean, {best_own}", OWN, note=_caution(comparison, chosen_own, own=True)),
        Column("worst, last round", OWN, brief="Own data, worst client"),
        Column(f"worst, {best_own}", OWN, note=_caution(comparison, chosen_own, own=True)),
        Column("mean, points", GAIN, brief="Gain, points"),
        Column("gain/harmed", GAIN, brief="Gain/harmed"),
        *([guarantee.column(comparison)] if private else []),
    )
    names = ("global_last", "global_best", "personal_last", "personal_best", "worst_last", "worst_best", "gain")
    header = ["method", "model", "seeds", *(f"{n}{end}" for n in names for end in ("", "_half_width"))]
    header += ["gain_n", "gain_unit", "gained", "harmed", "equal", *(["epsilon"] if private else [])]
    caption = f"Accuracy of every method, %{_over(comparison)}"
    return Table("headline", caption, columns, tuple(rows), csv_text(header, lines), cards=True)


def _over(comparison: Comparison) -> str:
    seeds = {len(m.counted) for m in comparison.methods}
    if seeds == {1}:
        return " (one seed, so without intervals)"
    many = count(seeds.pop(), "seed") if len(seeds) == 1 else "seeds"
    return f" (mean ± 95 % interval over {many})"


def _state(comparison: Comparison, use: Use) -> str:
    """Said beneath a method's name: whose numbers on own data these are; its rounds and seeds where they need saying."""
    counted = use.method.counted
    if not counted:
        return "nothing evaluated yet"
    said = [use.name] if use.name else []
    said += [] if len({len(m.counted) for m in comparison.methods}) == 1 else [count(len(counted), "seed")]
    run = counted[0]
    return ", ".join(said + ([] if run.finished else [run.state]))


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
    if "test" not in by or (own and not measures.validation_is_test(comparison.first)):
        return ""
    return measures.SEEN


def _gains(found: Gains | Missing, decimals: int) -> tuple[Cell, Cell]:
    if isinstance(found, Missing):
        return missing(found.why), missing(found.why)
    gained, harmed = len(found.gained), len(found.harmed)
    equal = f", {found.equal} equal" if found.equal else ""
    return gain(found.estimate, decimals), Cell(f"{gained}/{harmed}", sub=f"of {len(found.pairs)}{equal}")


def _gain_numbers(found: Gains | Missing) -> list[object]:
    if isinstance(found, Missing):
        return [None] * 7
    e = found.estimate
    return [e.mean, e.half, e.n, e.unit, len(found.gained), len(found.harmed), found.equal]
