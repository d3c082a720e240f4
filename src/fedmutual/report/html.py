"""One self-contained page of runs: no script, font, style or picture from anywhere else.

What sets its size: a picture of curves costs about 100 bytes a method and round (line, band and what it says), its CSV
8 bytes a round and run, a table about 30 bytes a cell. Lines are thinned to 100 rounds, tables to 40, so long runs grow
by their CSV alone; style and script are 10 kB. Four methods over three seeds, five clients, ten classes and twenty
rounds make 130 kB; every further comparison in the page costs its own.
"""

import codecs
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fedmutual.errors import RunError, format_count
from fedmutual.files import replace_file
from fedmutual.metric import ACCURACY
from fedmutual.report import domains, measures, other_tasks, provenance, tables, traffic
from fedmutual.report.answer import Verdict
from fedmutual.report.cells import PageTable
from fedmutual.report.cost_curves import TITLE, draw_costs, has_seed_set, make_courses, make_page_cost_table
from fedmutual.report.curves import make_data_table, make_pictures
from fedmutual.report.gain_plot import draw_gains
from fedmutual.report.plots import draw_curves
from fedmutual.report.rendering import load_page_template
from fedmutual.report.svg import Styles
from fedmutual.report.verdicts import judge
from fedmutual.results.comparison import RunComparison, find_differences, make_comparisons
from fedmutual.results.gains import Gains
from fedmutual.rundir.recorded_run import RecordedRun, read_runs

_CURVES = 2  # pictures of curves that are not folded


@dataclass(frozen=True)
class DrawnPicture:
    """A picture: its title, its content as SVG text, and the table with its numbers."""

    title: str
    svg: str
    table: PageTable | None = None
    public: bool = False  # whether a public seed set is in it


def write_report(runs: Sequence[Path | RecordedRun], out: Path) -> None:
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


def check_page(out: Path) -> None:
    """Raise RunError if `out` is a folder, or a file of another kind than a page."""
    if os.path.isdir(out):  # `Path.is_dir` raises PermissionError in a folder that may not be entered
        raise RunError(f"{out}: is a folder; name a file with -o")
    if _is_other_kind(out):
        raise RunError(f"{out}: is there and no page of HTML; name another file with -o")


def write_text(page: str, out: Path) -> None:
    """Write a page in one step.

    Raises:
        RunError: as `check_page`, or `out` cannot be written.
    """
    check_page(out)
    with replace_file(out, sync=False, fix="name another file with -o") as file:  # follows no link that lies there
        file.write(page.encode())


def _is_other_kind(out: Path) -> bool:
    """Whether the path is a file of another kind than a page, for example a file of a run."""
    try:
        start = out.read_bytes()[:64].removeprefix(codecs.BOM_UTF8) if out.is_file() else b""
    except OSError:
        return False
    return bool(start) and not start.lstrip().lower().startswith((b"<!doctype html", b"<html"))


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
    by_domain = [tables.make_node_headline(comparison), *domains.make_tables(comparison)] if comparison.domains else []
    headline = tables.make_client_headline(comparison)
    over = format_count(max(len(m.counted) for m in comparison.methods), "seed")
    shown = [
        DrawnPicture(p.title, draw_curves(p, f"{id}-{p.id}", styles), make_data_table(p, comparison.scale))
        for p in make_pictures(comparison)
    ]
    return {
        "id": id,
        "comparison": comparison,
        "subtitle": provenance.make_subtitle(comparison),
        "facts": provenance.list_facts(comparison),
        "verdict": verdict,
        "answer": _draw_gains(comparison, domains.ACC if comparison.domains else None, f"{id}-gain", styles),
        "summary": (by_domain[0] if by_domain else headline).shorten(
            f"Last round{comparison.scale.head} (means over {over})"
        ),
        "own_domain": _draw_gains(comparison, domains.BWT, f"{id}-own", styles) if comparison.domains else None,
        "domains": by_domain,
        "choice": domains.describe_choice(comparison) if comparison.domains else "",
        "headline": headline,
        "decision": tables.make_decision_table(comparison),
        "clients": tables.make_client_table(comparison),
        "beyond": tables.make_other_score_table(comparison) if comparison.metric == ACCURACY else None,
        "others": other_tasks.make_other_task_table(comparison),
        "recall": tables.make_recall_table(comparison),
        "curves": shown[:_CURVES],
        "more_curves": shown[_CURVES:],
        "costs": _make_cost_section(comparison, id, styles),
        "holdings": tables.make_holdings_tables(comparison),
        "bytes": [
            f(comparison)
            for f in (traffic.make_method_bytes_table, traffic.make_client_bytes_table, traffic.make_round_bytes_table)
        ],
        "tensors": traffic.make_tensor_table(comparison),
        "runs": provenance.list_runs(comparison),
        "notes": provenance.list_run_notes(comparison),
        "config": provenance.make_configuration_tables(comparison),
        "environment": provenance.make_environment_tables(comparison),
    }


def _draw_gains(
    comparison: RunComparison, measure: domains.DomainMeasure | None, id: str, styles: Styles
) -> DrawnPicture | None:
    """The gains of each model on own validation data, or of nodes by a measure; None where there is no gain."""
    if measure:
        uses = [(m.label, m.uses[0]) for m in comparison.methods]
        title, noun = f"Gain over local-only on {measure.rows} ({measure.name})", "node"
    else:
        uses = [(use.label, use) for use in comparison.uses]
        title, noun = "Gain over local-only on own validation data", "client"
    data = measure.data if measure else "validation"
    method_gains = [
        (label, g) for label, use in uses if isinstance(g := measures.measure_gains(comparison, use, data), Gains)
    ]
    return DrawnPicture(title, draw_gains(method_gains, id, styles, noun, comparison.scale)) if method_gains else None


def _make_cost_section(comparison: RunComparison, id: str, styles: Styles) -> DrawnPicture | None:
    """Return the table and picture of accuracy against bytes, for clients that are domains."""
    drawn = make_courses(comparison) if comparison.domains else []
    if not drawn:
        return None
    scale = comparison.scale
    return DrawnPicture(
        TITLE, draw_costs(drawn, scale, f"{id}-costs", styles), make_page_cost_table(drawn, scale), has_seed_set(drawn)
    )
