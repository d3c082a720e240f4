"""Write the benchmark page: the accuracy of each method on equal data, and the methods better than the papers' methods."""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmutual.algorithms import ALGORITHMS
from fedmutual.algorithms.registry import METHODS
from fedmutual.errors import join_words
from fedmutual.files import write_bytes
from fedmutual.report.cells import Column, PageTable, TableCell
from fedmutual.report.rendering import make_environment
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import format_points, format_size
from fedmutual.role import LOCAL_ONLY
from fedmutual_papers import measures, prose
from fedmutual_papers.claims import CONTRADICTED, INCONCLUSIVE, SUPPORTED, Judgement, judge
from fedmutual_papers.entries import make_entry, name_arm
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.pages import MADE, Page, render_table
from fedmutual_papers.schema import Claim
from fedmutual_papers.significance import adjust_by_holm, is_significant
from fedmutual_papers.spent import make_spent_frame

ID, NAME, TEMPLATE = "benchmark", "benchmark.md", "benchmark.md.j2"
PAPERS_METHODS = tuple(name for name, method in METHODS.items() if method.role.reference)
OWN, WORST, HARMED, SHARED = "own_validation", "worst", "harmed", "global_test"
COMPARED = (*PAPERS_METHODS, LOCAL_ONLY)  # each with all others


@dataclass(frozen=True)
class MethodComparison:
    """A method less a rival, on clients' own data in one cell, paired by seeds."""

    measured: MeasuredCell
    arm: str  # the rival's arm
    rival: str  # its display name
    judged: Judgement
    adjusted_p: float | None  # after Holm's adjustment over the comparisons of the page; None without enough seeds

    @property
    def verdict(self) -> str:
        """Return "supported" if the method is better, "contradicted" if worse, "inconclusive", or why no verdict exists."""
        return self.judged.verdict

    @property
    def is_robust(self) -> bool:
        """Return whether the verdict stands after Holm's adjustment."""
        return is_significant(self.adjusted_p)

    @property
    def points(self) -> str:
        """Return the mean difference, such as "+1.2", in points."""
        return format_points(self.judged.overall.mean) if self.judged.overall else ""


@dataclass(frozen=True)
class MethodStanding:
    """The comparisons of one method with all others, over all cells."""

    arm: str
    title: str
    comparisons: tuple[MethodComparison, ...]

    @property
    def measured(self) -> list[MethodComparison]:
        """Return the comparisons with enough common seeds for a verdict."""
        return [c for c in self.comparisons if c.adjusted_p is not None]

    def select(self, verdict: str, measured: MeasuredCell | None = None) -> list[MethodComparison]:
        """Return the comparisons with a verdict, the largest differences first. measured: only those of this cell."""
        chosen = [c for c in self.measured if c.verdict == verdict and measured in (None, c.measured)]
        return sorted(chosen, key=lambda c: -abs(c.judged.overall.mean if c.judged.overall else 0.0))

    @property
    def measured_cells(self) -> list[MeasuredCell]:
        """Return the cells in which the method has enough seeds for a comparison, each once."""
        return list({id(c.measured): c.measured for c in self.measured}.values())


def compare_methods(measured_cells: Sequence[MeasuredCell]) -> list[MethodStanding]:
    """Return the standing of each of COMPARED that a cell has, with p-values adjusted over all pairs."""
    judged = [
        (method, rival, measured, judge(_make_claim(method, rival, measured), [measured]))
        for method in COMPARED
        for measured in measured_cells
        for rival in measured.cell.shown
        if method in measured.cell.shown and rival != method
    ]
    p_values = {_make_pair_key(method, rival, measured): j.p for method, rival, measured, j in judged if j.p is not None}
    adjusted = dict(zip(p_values, adjust_by_holm(list(p_values.values())), strict=True))
    return [
        MethodStanding(
            chosen,
            title,
            tuple(
                MethodComparison(
                    measured,
                    rival,
                    name_arm(rival, measured.cell.shown[rival]),
                    j,
                    adjusted.get(_make_pair_key(method, rival, measured)),
                )
                for method, rival, measured, j in judged
                if method == chosen
            ),
        )
        for chosen, title in _name_methods(measured_cells)
    ]


def _name_methods(measured_cells: Sequence[MeasuredCell]) -> Iterator[tuple[str, str]]:
    for method in COMPARED:
        arms = [measured.cell.shown[method] for measured in measured_cells if method in measured.cell.shown]
        if arms:
            yield method, name_arm(method, arms[0])


def _make_claim(method: str, rival: str, measured: MeasuredCell) -> Claim:
    return Claim(text=f"{method} less {rival}", measure=OWN, arm=method, than=rival, cells=measured.cell.name)


def _make_pair_key(method: str, rival: str, measured: MeasuredCell) -> tuple[str, frozenset[str]]:
    """Return one key for a comparison and for the same comparison the other way round."""
    return measured.cell.id, frozenset((method, rival))


def tabulate(measured: MeasuredCell) -> PageTable:
    """Return the table of a cell: one row for each arm with results, the highest accuracy on own data first."""
    work, moved = make_spent_frame([measured]).set_index("method"), count_bytes(measured)
    ranked = sorted(_estimate_own(measured).items(), key=lambda item: -item[1].mean)
    rows = []
    for arm, _ in ranked:
        title = name_arm(arm, measured.cell.shown[arm])
        rows.append(
            (
                TableCell(title),
                *(_make_cell(measured, arm, measure) for measure in (OWN, WORST, HARMED, SHARED)),
                TableCell(format_size(moved[title])),
                TableCell(f"{work.loc[title, 'steps']:,.0f}"),
                TableCell(_format_forwards(measured, arm)),
                TableCell(str(sum(not r.failed for r in measured.results[arm].values()))),
            )
        )
    heads = (
        Column("Method", numeric=False),
        Column("own data, mean, %"),
        Column("own data, worst client, %"),
        Column("clients harmed"),
        Column("shared model, all classes, %"),
        Column("bytes"),
        Column("gradient steps"),
        Column("forward passes"),
        Column("seeds"),
    )
    return PageTable(measured.cell.name, measured.cell.about.row, heads, tuple(rows), "")


def count_bytes(measured: MeasuredCell) -> dict[str, float]:
    """Return display name -> the bytes that a client sends and receives in a run, its public examples included."""
    work = make_spent_frame([measured]).set_index("method")
    return {title: float(row["up"] + row["down"] + row["public"]) for title, row in work.iterrows()}


def make_recommendations(standings: Sequence[MethodStanding]) -> PageTable | None:
    """Return a table of recommended methods in each cell; None if no cell compares methods with local-only training.

    Both choices are better than local-only training. The first harms the fewest clients on average, and has the largest gain
    of equally harmful methods. The second sends and receives the fewest bytes.
    """
    local_only = next((s for s in standings if s.arm == LOCAL_ONLY), None)
    if local_only is None or not local_only.measured_cells:
        return None
    rows = []
    for measured in local_only.measured_cells:
        better = local_only.select(CONTRADICTED, measured)  # local-only training loses to them; the largest lead first
        moved = count_bytes(measured)
        first = min(better, key=lambda c: _count_harmed(c), default=None)
        cheapest = min(better, key=lambda c: moved[c.rival], default=None)
        choices = (_format_choice(c, moved) for c in (first, cheapest))
        rows.append((TableCell(measured.cell.about.row), *choices))
    heads = (
        Column("Setting", numeric=False),
        Column("First choice", numeric=False),
        Column("With the fewest bytes", numeric=False),
    )
    return PageTable("recommended", "", heads, tuple(rows), "")


def _count_harmed(comparison: MethodComparison) -> float:
    harmed = comparison.measured.estimate(HARMED, comparison.arm)
    return harmed.mean if harmed else 0.0


def _format_choice(comparison: MethodComparison | None, moved: Mapping[str, float]) -> TableCell:
    if comparison is None or comparison.judged.overall is None:
        return TableCell("local-only training: no method is shown to be better")
    lead = format_points(-comparison.judged.overall.mean)
    harmed = f"{_count_harmed(comparison):.1f} clients harmed"
    return TableCell(
        f"{comparison.rival}: {lead} points compared with local-only training, {harmed}, "
        f"{format_size(moved[comparison.rival])}"
    )


def _estimate_own(measured: MeasuredCell) -> dict[str, Estimate]:
    """Return arm -> accuracy on clients' own data, only for arms with results."""
    estimates = {arm: measured.estimate(OWN, arm) for arm in measured.cell.shown}
    return {arm: e for arm, e in estimates.items() if e is not None}


def _make_cell(measured: MeasuredCell, arm: str, measure: str) -> TableCell:
    cell = make_entry(measured, arm, measured.estimate(measure, arm), None, measures.find(measure)[0], 1)
    return TableCell(cell.text, cell.spread)  # the column of seeds says what the notes would say


def _format_forwards(measured: MeasuredCell, arm: str) -> str:
    counts = [r.budget.forwards for r in measured.results[arm].values() if r.budget and r.budget.forwards is not None]
    return f"{fmean(counts):,.0f}" if counts else "n/a"


def summarise(measured: MeasuredCell) -> dict[str, Any]:
    """Return what the page's template says of a cell; text that needs results is "" without them.

    "harmless": the methods that harm no client in any seed. "missing": the methods with fewer than all seeds. "trials": the
    most settings that a sweep tried for a method. "rates_at_end": the number of methods of which the chosen learning rate is
    the smallest or the largest that was tried.
    """
    estimates, arms = _estimate_own(measured), measured.cell.shown
    best = max(estimates, key=lambda arm: estimates[arm].mean, default="")
    harmed = {arm: measured.estimate(HARMED, arm) for arm in estimates}
    seeds, tunings = len(measured.seeds), measured.cell.tunings.values()
    return {
        "measured": measured,
        "table": render_table(tabulate(measured), caption=False) if estimates else "",
        "best": name_arm(best, arms[best]) if best else "",
        "best_percent": f"{100 * estimates[best].mean:.1f}" if best else "",
        "local_percent": f"{100 * estimates[LOCAL_ONLY].mean:.1f}" if LOCAL_ONLY in estimates else "",
        "harmless": tuple(name_arm(arm, arms[arm]) for arm, e in harmed.items() if e is not None and e.mean == 0),
        "missing": tuple(name_arm(arm, arms[arm]) for arm in arms if len(measured.results[arm]) < seeds or not seeds),
        "seeds": seeds,
        "trials": max((len(tuning.file.settings) for tuning in tunings), default=0),
        "rates_at_end": sum("optimizer.lr" in tuning.ends for tuning in tunings),
    }


def write_benchmark(pages: Sequence[Page], root: Path, folder: Path) -> list[Path]:
    """Write the benchmark page beside the folder of the pages, from the experiments' template, and return its paths.

    Without the benchmark's experiment or without the template nothing is written.

    Raises:
        RunError: the file cannot be written.
    """
    chosen = [page for page in pages if page.experiment.id == ID]
    if not chosen or not (root / TEMPLATE).exists():
        return []
    path = folder.parent / NAME
    write_bytes(path, render_benchmark(chosen[0], root, folder.name).encode())
    return [path]


def render_benchmark(page: Page, root: Path, pages: str) -> str:
    """Return the benchmark page as Markdown. pages: the relative path from this page to the experiments' pages."""
    environment = make_environment(root, html=False)
    environment.filters |= {"listed": join_words}
    standings = compare_methods(page.measured_cells)
    papers = [s for s in standings if s.arm in PAPERS_METHODS]
    recommended = make_recommendations(standings)
    return environment.get_template(TEMPLATE).render(
        made=MADE,
        pages=pages,
        methods="methods.md",
        index=page.experiment.index,
        standings=standings,
        papers=papers,
        recommended=render_table(recommended, caption=False) if recommended else "",
        percent=partial(_format_own_accuracy, page.measured_cells),
        lines=render_table(tabulate_code_lines(), caption=False),
        cells=[summarise(measured) for measured in page.measured_cells],
        state=prose.describe_state(page.measured_cells),
        comparisons=len({(c.measured.cell.id, frozenset((s.title, c.rival))) for s in standings for c in s.measured}),
        robust_losses=sum(c.is_robust for s in papers for c in s.select(CONTRADICTED)),
        verdicts={"leads": SUPPORTED, "loses": CONTRADICTED, "open": INCONCLUSIVE},
        hardware=list(prose.describe_origins(page.measured_cells)),
        commands=prose.list_commands(page.measured_cells),
    )


def _format_own_accuracy(measured_cells: Sequence[MeasuredCell], cell: str, arm: str) -> str:
    """Return the accuracy of an arm on clients' own data in a cell, such as "93.8 %"; "n/a" without results."""
    values = [m.estimate(OWN, arm) for m in measured_cells if m.cell.name == cell and arm in m.cell.shown]
    return f"{100 * values[0].mean:.1f} %" if values and values[0] else "n/a"


_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_SOURCES = "../src/fedmutual/algorithms"  # relative to the documentation


def count_code_lines(source: str) -> int:
    """Return the number of lines of a Python source without blank lines, comments and docstrings."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and _is_text(node.value)]
    return len(lines - {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)})


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def tabulate_code_lines() -> PageTable:
    """Return a table with a row for each method: its file and its lines of code; a preset's keys in the place of lines."""
    rows = []
    for name, kind in ALGORITHMS.items():
        path, method = Path(inspect.getsourcefile(kind) or ""), METHODS[name]
        keys = ", ".join(f"`model.{key}`" for key in method.model)
        file = f"[{path.name}]({_SOURCES}/{path.name})"
        if method.about is not None:  # another method's class
            cells = (f"{file}, with {keys}" if keys else f"{file}, on pooled data", "none of its own")
        else:
            cells = (f"{file}, with {keys}" if keys else file, str(count_code_lines(path.read_text(encoding="utf-8"))))
        rows.append((TableCell(f"`{name}`"), *map(TableCell, cells)))
    heads = (Column("Method", numeric=False), Column("File", numeric=False), Column("Lines of code"))
    return PageTable("code-lines", "", heads, tuple(rows), "")
