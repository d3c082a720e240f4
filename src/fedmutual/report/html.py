"""One self-contained page of runs: no script, font, style or picture from anywhere else.

Curves show at most 100 rounds and tables at most 40, so a longer run makes only the CSV longer. The page of four methods
over three seeds, five clients, ten classes and twenty rounds has 130 kB; each further comparison adds about as much.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmutual.errors import format_count
from fedmutual.metric import ACCURACY
from fedmutual.report import measures, provenance, tables
from fedmutual.report.cells import PageTable
from fedmutual.report.columns import DOMAIN_ROWS
from fedmutual.report.curves import BYTES, SLOTS, Picture, make_data_table, make_pictures
from fedmutual.report.plots import Styles, draw_curves, draw_gains, draw_reliability
from fedmutual.report.rendering import check_page, load_page_template, write_text
from fedmutual.report.verdicts import Verdict, judge
from fedmutual.results.comparison import RunComparison, find_differences, make_comparisons
from fedmutual.results.frame import RunFacts, read_runs
from fedmutual.results.gains import Gains
from fedmutual.rundir.schema import TRANSFER_DATA, Calibration, Reliability

_CURVES = 2  # pictures of curves that are not folded


Figure = dict[str, Any]
"""A picture in the page: its title, its content as SVG text, and the table with its numbers."""


def write_report(runs: Sequence[Path | RunFacts], out: Path) -> None:
    """Write the page of some run folders, in one step: `out` is the whole page, or as it was before.

    Raises:
        RunError: a folder is no run folder or is damaged, all runs are of a sweep, or `out` cannot be written or is another
            file than a page.
    """
    write_page(make_comparisons(read_runs(runs)), out)


def write_page(compared: Sequence[RunComparison], out: Path, judged: Callable[[RunComparison], Verdict] = judge) -> None:
    """Write the page of some comparisons in one step, with a verdict on each.

    Raises:
        RunError: as `write_text`.
    """
    check_page(Path(out))
    write_text(render(compared, judged), Path(out))


def render(compared: Sequence[RunComparison], judged: Callable[[RunComparison], Verdict] = judge) -> str:
    """Return the page of some comparisons as HTML: one text with all styles and pictures, which loads no other file."""
    styles: Styles = {}
    sections = [_make_section(c, judged(c), f"c{number}", styles) for number, c in enumerate(compared, 1)]
    template = load_page_template("report.html.j2")
    return template.render(
        sections=sections, styles=styles, differences=find_differences(compared), version=version("fedmutual")
    )


def _make_section(comparison: RunComparison, verdict: Verdict, id: str, styles: Styles) -> dict[str, object]:
    """Return the content of the page about one comparison, by the names that the template gives it."""
    scale, domains = comparison.scale, comparison.domains
    pictures = make_pictures(comparison)
    over_time, over_bytes = [p for p in pictures if p.unit != BYTES], [p for p in pictures if p.unit == BYTES]
    by_domain = [tables.make_node_headline(comparison), *tables.make_node_tables(comparison)] if domains else []
    headline = tables.make_client_headline(comparison)
    seen = tables.list_calibrations(comparison)
    calibration = tables.make_calibration_tables(seen)
    reliability = next((t for t in calibration if t.id == tables.RELIABILITY), None)
    calibration = [t for t in calibration if t is not reliability]
    over = format_count(max(len(m.counted) for m in comparison.methods), "seed")

    def draw(picture: Picture) -> Figure:
        svg = draw_curves(picture, f"{id}-{picture.id}", styles)
        return {"title": picture.title, "svg": svg, "table": make_data_table(picture, scale)}

    return {
        "id": id,
        "comparison": comparison,
        "subtitle": provenance.make_subtitle(comparison),
        "facts": provenance.list_facts(comparison),
        "verdict": verdict,
        "answer": _draw_gains(comparison, "acc" if domains else "", f"{id}-gain", styles),
        "summary": (by_domain[0] if by_domain else headline).shorten(f"Last round{scale.head} (means over {over})"),
        "own_domain": _draw_gains(comparison, "bwt", f"{id}-own", styles) if domains else None,
        "domains": by_domain,
        "choice": tables.describe_choice(comparison) if domains else "",
        "headline": headline,
        "decision": tables.make_decision_table(comparison),
        "clients": tables.make_client_table(comparison),
        "beyond": tables.make_other_score_table(comparison) if comparison.metric == ACCURACY else None,
        "others": tables.make_other_task_table(comparison),
        "parts": [*tables.make_part_tables(comparison), *calibration, *tables.list_group_tables(comparison)],
        "reliability": _draw_reliability(seen, reliability, f"{id}-reliable", styles),
        "curves": [*map(draw, over_time[:_CURVES])],
        "more_curves": [*map(draw, over_time[_CURVES:])],
        "costs": [*map(draw, over_bytes)],
        "holdings": tables.make_holdings_tables(comparison),
        "bytes": provenance.make_method_bytes_table(comparison),
        "tensors": provenance.make_tensor_table(comparison),
        "runs": provenance.list_runs(comparison),
        "notes": provenance.list_run_notes(comparison),
        "config": provenance.make_configuration_tables(comparison),
        "environment": provenance.make_environment_tables(comparison),
    }


def _draw_reliability(
    shown: Sequence[tuple[str, Calibration, Reliability]], table: PageTable | None, id: str, styles: Styles
) -> Figure | None:
    """Return a reliability curve of each model, named by what distinguishes it; None where there is none.

    The curve is of the first rows that were scored: the test rows, if the model has some.
    """
    if table is None:
        return None
    first = {name.split(": ")[0]: seen for name, _, seen in reversed(shown)}
    words = [name.replace("personal model of ", "client ").split(", ") for name in reversed(first)]
    distinct = [[word for word in each if not all(word in other for other in words)] or each[2:3] for each in words]
    curves = [(", ".join(each), seen) for each, seen in zip(distinct, reversed(first.values()), strict=True)]
    title = "Reliability: frequency by mean probability, %"
    title += f" (of {len(curves)} curves the first {SLOTS})" if len(curves) > SLOTS else ""
    return {"title": title, "svg": draw_reliability(curves, id, styles), "table": table}


def _draw_gains(comparison: RunComparison, measure: str, id: str, styles: Styles) -> Figure | None:
    """Return the gains of each model on own validation data, or of nodes by a measure; None where there is no gain."""
    title, noun, data, lines = "Gain over local-only on own validation data", "client", "validation", comparison.lines
    if measure:
        title, noun = f"Gain over local-only on {DOMAIN_ROWS[measure]} ({measure.upper()})", "node"
        data, lines = TRANSFER_DATA[measure], comparison.methods
    gains = [(line.method if measure else line.label, measures.measure_gains(comparison, line, data)) for line in lines]
    drawn = [(label, g) for label, g in gains if isinstance(g, Gains)]
    return {"title": title, "svg": draw_gains(drawn, id, styles, noun, comparison.scale), "table": None} if drawn else None
