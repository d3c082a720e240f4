"""The headline table: a line a method, with the shared model, the clients' own, and the gain over training alone."""

from collections.abc import Iterable

from fedmutual.report import guarantee, measures
from fedmutual.report.cells import Column, PageTable, TableCell, csv_text, gain, missing, numbers, share
from fedmutual.report.comparison import RunComparison, Use
from fedmutual.report.measures import Best
from fedmutual.report.scale import MetricScale
from fedmutual.report.statistics import Gains, Missing
from fedmutual.report.text import count

SHARED, OWN, GAIN = "Shared model, test set", "Client's model, own data", "Gain over local-only"


def headline(comparison: RunComparison) -> PageTable:
    """Return the headline table: for each model of each method its accuracies and its gain over local-only training."""
    scale, private = comparison.scale, guarantee.is_stated(comparison)
    shared = {u: measures.global_best(u) for u in comparison.uses}
    own_bests = {u: measures.own_best(u) for u in comparison.uses}
    chosen_shared, chosen_own = _chosen(shared.values()), _chosen(own_bests.values())
    best_shared, best_own = (f"best on {by}" if by else "best" for by in (chosen_shared, chosen_own))
    rows, lines = [], []
    for u in comparison.uses:
        last, mean, worst = measures.global_last(u), measures.own_last(u), measures.own_last(u, u.pick_worst)
        worst_best = measures.own_best(u, worst=True)
        gains = measures.gains(comparison, u)
        rows.append(
            (
                TableCell(u.method.label, sub=_state(comparison, u)),
                share(last, scale),
                _best(shared[u], scale, chosen_shared),
                share(mean, scale),
                _best(own_bests[u], scale, chosen_own),
                share(worst, scale),
                _best(worst_best, scale, chosen_own),
                *_gains(gains, scale),
                *([guarantee.cell(u.method)] if private else []),
            )
        )
        values = (last, shared[u].value, mean, own_bests[u].value, worst, worst_best.value)
        about = (u.method.label, u.name, len(u.method.counted))
        spent = [guarantee.epsilon(u.method)] if private else []
        lines.append([*about, *(v for value in values for v in numbers(value)[:2]), *_gain_numbers(gains), *spent])
    columns = (
        Column("Method", numeric=False, brief="Method"),
        Column("last round", SHARED, brief=SHARED),
        Column(best_shared, SHARED, note=_caution(comparison, chosen_shared, of_clients=False)),
        Column("mean, last round", OWN, brief="Own data, mean"),
        Column(f"mean, {best_own}", OWN, note=_caution(comparison, chosen_own, of_clients=True)),
        Column("worst, last round", OWN, brief="Own data, worst client"),
        Column(f"worst, {best_own}", OWN, note=_caution(comparison, chosen_own, of_clients=True)),
        Column(f"mean{scale.difference_head}", GAIN, brief=f"Gain{scale.difference_head}"),
        Column("gain/harmed", GAIN, brief="Gain/harmed"),
        *([guarantee.column(comparison)] if private else []),
    )
    names = ("global_last", "global_best", "personal_last", "personal_best", "worst_last", "worst_best", "gain")
    header = ["method", "model", "seeds", *(f"{n}{end}" for n in names for end in ("", "_half_width"))]
    header += ["gain_n", "gain_unit", "gained", "harmed", "equal", *(["epsilon"] if private else [])]
    title = scale.metric.heading
    caption = f"{title} of every method{scale.head}{_over(comparison)}"
    return PageTable("headline", caption, columns, tuple(rows), csv_text(header, lines), cards=True)


def _over(comparison: RunComparison) -> str:
    seeds = {len(m.counted) for m in comparison.methods}
    if seeds == {1}:
        return " (one seed, so without intervals)"
    many = count(seeds.pop(), "seed") if len(seeds) == 1 else "seeds"
    return f" (mean ± 95 % interval over {many})"


def _state(comparison: RunComparison, use: Use) -> str:
    """Return the line below a method's name: the model, the seeds where their number differs, the state if unfinished."""
    counted = use.method.counted
    if not counted:
        return "nothing evaluated yet"
    words = [use.name] if use.name else []
    words += [] if len({len(m.counted) for m in comparison.methods}) == 1 else [count(len(counted), "seed")]
    run = counted[0]
    return ", ".join(words + ([] if run.finished else [run.state]))


def _chosen(bests: Iterable[Best]) -> str:
    """Return the data that chose the best rounds; "" where models differ in that."""
    by = {b.by for b in bests if b.by}
    return by.pop() if len(by) == 1 else ""


def _best(best: Best, scale: MetricScale, common: str) -> TableCell:
    """A chosen round's number; which rounds these were, and what chose them where the column does not say so."""
    if isinstance(best.value, Missing):
        return missing(best.value.why)
    rounds = sorted(set(best.rounds))
    which = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
    return share(best.value, scale, which if common else f"on {best.by}, {which}")


def _caution(comparison: RunComparison, by: str, of_clients: bool) -> str:
    """Return the footnote for a best round that was chosen on the rows on which it is scored."""
    if "test" not in by or (of_clients and not measures.validation_is_test(comparison.first)):
        return ""
    return measures.SEEN


def _gains(gains: Gains | Missing, scale: MetricScale) -> tuple[TableCell, TableCell]:
    if isinstance(gains, Missing):
        return missing(gains.why), missing(gains.why)
    gained, harmed = len(gains.gained), len(gains.harmed)
    equal = f", {gains.equal} equal" if gains.equal else ""
    return gain(gains.estimate, scale), TableCell(f"{gained}/{harmed}", sub=f"of {len(gains.pairs)}{equal}")


def _gain_numbers(gains: Gains | Missing) -> list[object]:
    if isinstance(gains, Missing):
        return [None] * 7
    estimate = gains.estimate
    return [estimate.mean, estimate.half, estimate.n, estimate.unit, len(gains.gained), len(gains.harmed), gains.equal]
