"""Build the table entries of arms: a number with its interval, the paper's number, and a footnote."""

from collections.abc import Iterable

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config.methods import find_method
from fedmutual.errors import format_count, join_words
from fedmutual.report.cells import TableCell
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import format_number, format_percent_number
from fedmutual_papers import measures
from fedmutual_papers.claims import DIVERGED, NOT_RUN, DivergedRuns, Judgement
from fedmutual_papers.measured_cell import MeasuredCell, is_incomplete
from fedmutual_papers.schema import Arm


def name_arm(key: str, arm: Arm) -> str:
    """Return the display name of an arm. key: the arm's key in the cell."""
    return arm.title or (find_method(key).title if key in ALGORITHMS else key)


def format_value(value: Estimate, unit: str, decimals: int) -> tuple[str, str]:
    """Return (the mean as text, "± " with half of the interval's width as text); the second is "" without an interval."""
    if unit in ("%", "points"):
        return format_percent_number(
            value.mean, decimals
        ), "" if value.half is None else f"± {format_percent_number(value.half, decimals)}"
    if unit == "bytes":
        return f"{value.mean:,.0f}", "" if (value.half or 0) < 0.5 else f"± {value.half:,.0f}"
    places = 1 if unit in ("rounds", "times", "clients") else 3
    return format_number(value.mean, places), "" if value.half is None else f"± {format_number(value.half, places)}"


def make_entry(
    measured: MeasuredCell, arm: str, value: Estimate | None, paper: float | None, measure: measures.Measure, decimals: int
) -> TableCell:
    """Return the table cell of an arm's number with the paper's number, or with the reason why there is no number."""
    unit = measure.unit
    paper_text = f"paper {paper:.2f}" if paper is not None else ""
    failed = [f"seed {s}: {r.failed}" for s, r in measured.results[arm].items() if r.failed]
    if value is None:
        unasked = measure.of_weights and any(is_incomplete(measured.cell, r) for r in measured.results[arm].values())
        text = DIVERGED if failed else NOT_RUN if unasked or not measured.results[arm] else _name_missing(unit)
        why = {
            NOT_RUN: "the run has results, but this number of its weights was not computed" if unasked else "",
            "n/a": "n/a: this method does not have this number",
            "not reached": "; ".join(filter(None, ("not reached", measured.describe_arm(arm)))),
        }
        return TableCell(text, sub=paper_text, note="; ".join(failed) or why.get(text, ""))
    mean, spread = format_value(value, unit, decimals)
    missing = len(measured.results[arm]) - value.n
    notes = [measured.describe_arm(arm), f"{value.n} seed" + ("s" if value.n > 1 else "")]
    notes += (
        [
            f"{format_count(missing, 'more seed')} without this number"
            + (", because the target was not reached" if unit == "rounds" else "")
        ]
        if missing
        else []
    )
    return TableCell(
        mean,
        spread,
        paper_text,
        "; ".join(filter(None, (*notes, describe_mixed_versions(measured.list_numerics(arm)), *failed))),
    )


def _name_missing(unit: str) -> str:
    return "not reached" if unit == "rounds" else "n/a"


def describe_mixed_versions(versions: Iterable[int]) -> str:
    """Return "made by numerics versions 1 and 2"; "" if all results have one numerics version."""
    several = sorted(set(versions))
    return f"made by numerics versions {join_words([str(v) for v in several])}" if len(several) > 1 else ""


def describe_divergence(diverged: DivergedRuns) -> str:
    """Return "fml diverged in 2 of 4 runs"; "" if no run diverged."""
    return join_words([f"{arm} diverged in {n} of {format_count(of, 'run')}" for arm, (n, of) in diverged.items()])


def get_unit(judged: Judgement) -> str:
    """Return the unit of a claim's difference: "points" for accuracies, "times" for quotients, else that of the measure."""
    if judged.claim.times is not None:
        return "times"
    measure_unit = measures.find(judged.claim.measure)[0].unit
    return "points" if measure_unit == "%" else measure_unit


def capitalize(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]
