"""The headline table: a line a method, with the shared model, the clients' own, and the gain over training alone."""

from collections.abc import Iterable

from fedmutual.errors import format_count
from fedmutual.report import guarantee, measures
from fedmutual.report.cells import (
    Column,
    PageTable,
    TableCell,
    format_csv,
    list_numbers,
    make_gain_cell,
    make_missing_cell,
    make_share_cell,
)
from fedmutual.report.comparison import RunComparison, Use
from fedmutual.report.measures import Best
from fedmutual.report.scale import MetricScale
from fedmutual.report.statistics import Gains, Missing

SHARED, OWN, GAIN = "Shared model, test set", "Client's model, own data", "Gain over local-only"


def make_headline_table(comparison: RunComparison) -> PageTable:
    """Return the headline table: for each model of each method its accuracies and its gain over local-only training."""
    scale, private = comparison.scale, guarantee.is_stated(comparison)
    shared = {u: measures.average_global_best(u) for u in comparison.uses}
    own_bests = {u: measures.average_own_best(u) for u in comparison.uses}
    chosen_shared, chosen_own = _find_choosing_data(shared.values()), _find_choosing_data(own_bests.values())
    best_shared, best_own = (f"best on {by}" if by else "best" for by in (chosen_shared, chosen_own))
    rows, lines = [], []
    for u in comparison.uses:
        last, mean, worst = (
            measures.average_global_last(u),
            measures.average_own_last(u),
            measures.average_own_last(u, u.worst),
        )
        worst_best = measures.average_own_best(u, worst=True)
        gains = measures.measure_gains(comparison, u)
        rows.append(
            (
                TableCell(u.method.label, sub=_describe_state(comparison, u)),
                make_share_cell(last, scale),
                _format_best(shared[u], scale, chosen_shared),
                make_share_cell(mean, scale),
                _format_best(own_bests[u], scale, chosen_own),
                make_share_cell(worst, scale),
                _format_best(worst_best, scale, chosen_own),
                *_format_gains(gains, scale),
                *([guarantee.make_cell(u.method)] if private else []),
            )
        )
        values = (last, shared[u].value, mean, own_bests[u].value, worst, worst_best.value)
        about = (u.method.label, u.name, len(u.method.counted))
        spent = [guarantee.find_epsilon(u.method)] if private else []
        lines.append([*about, *(v for value in values for v in list_numbers(value)[:2]), *_list_gain_numbers(gains), *spent])
    columns = (
        Column("Method", numeric=False, brief="Method"),
        Column("last round", SHARED, brief=SHARED),
        Column(best_shared, SHARED, note=_describe_caution(comparison, chosen_shared, of_clients=False)),
        Column("mean, last round", OWN, brief="Own data, mean"),
        Column(f"mean, {best_own}", OWN, note=_describe_caution(comparison, chosen_own, of_clients=True)),
        Column("worst, last round", OWN, brief="Own data, worst client"),
        Column(f"worst, {best_own}", OWN, note=_describe_caution(comparison, chosen_own, of_clients=True)),
        Column(f"mean{scale.difference_head}", GAIN, brief=f"Gain{scale.difference_head}"),
        Column("gain/harmed", GAIN, brief="Gain/harmed"),
        *([guarantee.make_column(comparison)] if private else []),
    )
    names = ("global_last", "global_best", "personal_last", "personal_best", "worst_last", "worst_best", "gain")
    header = ["method", "model", "seeds", *(f"{n}{end}" for n in names for end in ("", "_half_width"))]
    header += ["gain_n", "gain_unit", "gained", "harmed", "equal", *(["epsilon"] if private else [])]
    title = scale.metric.heading
    caption = f"{title} of every method{scale.head}{_describe_repetitions(comparison)}"
    return PageTable("headline", caption, columns, tuple(rows), format_csv(header, lines), cards=True)


def _describe_repetitions(comparison: RunComparison) -> str:
    seeds = {len(m.counted) for m in comparison.methods}
    if seeds == {1}:
        return " (one seed, so without intervals)"
    many = format_count(seeds.pop(), "seed") if len(seeds) == 1 else "seeds"
    return f" (mean ± 95 % interval over {many})"


def _describe_state(comparison: RunComparison, use: Use) -> str:
    """Return the line below a method's name: the model, the seeds where their number differs, the state if unfinished."""
    counted = use.method.counted
    if not counted:
        return "nothing evaluated yet"
    words = [use.name] if use.name else []
    words += [] if len({len(m.counted) for m in comparison.methods}) == 1 else [format_count(len(counted), "seed")]
    run = counted[0]
    return ", ".join(words + ([] if run.finished else [run.state]))


def _find_choosing_data(bests: Iterable[Best]) -> str:
    """Return the data that chose the best rounds; "" where models differ in that."""
    by = {b.by for b in bests if b.by}
    return by.pop() if len(by) == 1 else ""


def _format_best(best: Best, scale: MetricScale, common: str) -> TableCell:
    """A chosen round's number; which rounds these were, and what chose them where the column does not say so."""
    if isinstance(best.value, Missing):
        return make_missing_cell(best.value.why)
    rounds = sorted(set(best.rounds))
    which = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
    return make_share_cell(best.value, scale, which if common else f"on {best.by}, {which}")


def _describe_caution(comparison: RunComparison, by: str, of_clients: bool) -> str:
    """Return the footnote for a best round that was chosen on the rows on which it is scored."""
    if "test" not in by or (of_clients and not measures.is_validation_test(comparison.first)):
        return ""
    return measures.SEEN


def _format_gains(gains: Gains | Missing, scale: MetricScale) -> tuple[TableCell, TableCell]:
    if isinstance(gains, Missing):
        return make_missing_cell(gains.why), make_missing_cell(gains.why)
    gained, harmed = len(gains.gained), len(gains.harmed)
    equal = f", {gains.equal} equal" if gains.equal else ""
    return make_gain_cell(gains.estimate, scale), TableCell(f"{gained}/{harmed}", sub=f"of {len(gains.pairs)}{equal}")


def _list_gain_numbers(gains: Gains | Missing) -> list[object]:
    if isinstance(gains, Missing):
        return [None] * 7
    estimate = gains.estimate
    return [estimate.mean, estimate.half, estimate.n, estimate.unit, len(gains.gained), len(gains.harmed), gains.equal]
