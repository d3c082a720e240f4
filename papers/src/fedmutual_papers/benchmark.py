"""Write the benchmark page: the accuracy of each method on equal data, and the methods better than the papers' methods."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmutual.algorithms.registry import METHODS
from fedmutual.config.grid import LEARNING_RATE
from fedmutual.report.cells import PageTable, TableCell
from fedmutual.results.estimate import estimate
from fedmutual.results.scale import PERCENT, format_size
from fedmutual.role import LOCAL_ONLY
from fedmutual_papers import prose
from fedmutual_papers.claims import CONTRADICTED, INCONCLUSIVE, SUPPORTED, Judgement, adjust_family, is_significant, judge
from fedmutual_papers.experiment_files import Claim
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.pages import MADE, Page, load_template, render_table
from fedmutual_papers.prose import name_arm
from fedmutual_papers.tables import OWN, make_entry, make_spent_frame, tabulate

ID, NAME, TEMPLATE = "benchmark", "benchmark.md", "benchmark.md.j2"
PAPERS_METHODS = tuple(name for name, method in METHODS.items() if method.role.reference)
COMPARED = (*PAPERS_METHODS, LOCAL_ONLY)  # each with all others
HARMED = "harmed"
MEASURED = {
    OWN: "own data, mean, %",
    "worst": "own data, worst client, %",
    HARMED: "clients harmed",
    "global_test": "shared model, all classes, %",
}


def compare_methods(measured_cells: Sequence[MeasuredCell]) -> list[Judgement]:
    """Return each of COMPARED (`claim.arm`) with each rival (`claim.than`) in each cell, on clients' own data.

    A comparison is supported if the method is better, and contradicted if it is worse. `adjusted` is its p-value, adjusted
    over all pairs at each look; None without enough seeds.
    """
    judged = [
        judge(Claim(text="", measure=OWN, arm=method, than=rival, cells=measured.cell.name), [measured])
        for method in COMPARED
        for measured in measured_cells
        for rival in measured.cell.shown
        if method in measured.cell.shown and rival != method
    ]
    pairs = {_identify_pair(j): (j,) for j in judged}  # the same comparison the other way round has the same p-value
    decided = {pair: one for pair, (one,) in zip(pairs, adjust_family([*pairs.values()]), strict=True)}

    def take(judged: Judgement) -> Judgement:
        pair = decided[_identify_pair(judged)]
        look = judged.first if judged.first and pair.first is None else judged  # the look that decided
        return replace(look, adjusted=pair.adjusted)

    return [take(j) for j in judged]


def _identify_pair(judged: Judgement) -> tuple[str, frozenset[str]]:
    return judged.claim.cells, frozenset((judged.claim.arm, judged.claim.than))


def select(comparisons: Sequence[Judgement], method: str, verdict: str, cell: str = "") -> list[Judgement]:
    """Return the comparisons of a method with a verdict, and with enough seeds, the largest differences first.

    cell: only those of the cell of this name; "": of all cells.
    """
    chosen = [j for j in comparisons if (j.claim.arm, j.verdict) == (method, verdict) and j.adjusted is not None]
    return sorted((j for j in chosen if cell in ("", j.claim.cells)), key=lambda j: -abs(_get_mean(j)))


def _get_mean(judged: Judgement) -> float:
    return judged.overall.mean if judged.overall else 0.0


def describe_rivals(comparisons: Sequence[Judgement], method: str, verdict: str, measured: MeasuredCell) -> str:
    """Return the rivals in a cell with the differences in points: "**Ditto (+1.2)**, FML (+0.3)".

    A verdict that stands after Holm's adjustment is bold.
    """
    texts = []
    for judged in select(comparisons, method, verdict, measured.cell.name):
        bold, rival = "**" if is_significant(judged.adjusted) else "", judged.claim.than
        texts.append(f"{bold}{name_arm(rival, measured.cell.shown[rival])} ({PERCENT.format_gain(_get_mean(judged))}){bold}")
    return ", ".join(texts) or "no method"


def tabulate_cell(measured: MeasuredCell) -> PageTable:
    """Return the table of a cell: one row for each arm with results, the highest accuracy on own data first."""
    steps, moved = make_spent_frame([measured]).set_index("method")["steps"], count_bytes(measured)
    rows = []
    for arm in _sort_arms(measured):
        title, finished = name_arm(arm, measured.cell.shown[arm]), measured.list_finished(arm).values()
        entries = (make_entry(measured, arm, name, "mean", 1) for name in MEASURED)
        forwards = [n for r in finished if (n := r.budget.get("forwards")) is not None]
        rows.append(
            (
                title,
                *(TableCell(entry.text, entry.spread) for entry in entries),  # the column of seeds says what notes would say
                format_size(moved[title]),
                f"{steps[title]:,.0f}",
                f"{fmean(forwards):,.0f}" if forwards else "n/a",
                len(finished),
            )
        )
    heads = (*MEASURED.values(), "bytes", "gradient steps", "forward passes", "seeds")
    return tabulate(measured.cell.name, measured.cell.about.row, ("Method",), heads, rows)


def _sort_arms(measured: MeasuredCell) -> dict[str, float]:
    """Return arm -> mean accuracy on clients' own data, the highest first, only for arms with results."""
    means = {arm: e.mean for arm in measured.cell.shown if (e := measured.estimate(OWN, arm)) is not None}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def count_bytes(measured: MeasuredCell) -> dict[str, float]:
    """Return display name -> the bytes that a client sends and receives in a run, its public examples included."""
    return dict(make_spent_frame([measured]).set_index("method")[["up", "down", "public"]].sum(axis=1))


def make_recommendations(comparisons: Sequence[Judgement], measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return a table of recommended methods in each cell; None if no cell compares methods with local-only training.

    Both choices are better than local-only training. The first harms the fewest clients on average, and has the largest gain
    of equally harmful methods. The second sends and receives the fewest bytes.
    """
    compared = {j.claim.cells for j in comparisons if j.claim.arm == LOCAL_ONLY and j.adjusted is not None}
    rows = []
    for measured in (measured for measured in measured_cells if measured.cell.name in compared):
        lost = select(comparisons, LOCAL_ONLY, CONTRADICTED, measured.cell.name)  # the largest lead over it first
        leads = {j.claim.than: -_get_mean(j) for j in lost}
        names, of_all = {arm: name_arm(arm, measured.cell.shown[arm]) for arm in leads}, count_bytes(measured)
        moved = {arm: of_all[name] for arm, name in names.items()}
        harmed = {arm: e.mean if (e := measured.estimate(HARMED, arm)) else 0.0 for arm in leads}
        texts = [
            f"{names[arm]}: {PERCENT.format_gain(leads[arm])} points compared with local-only training, {harmed[arm]:.1f} "
            f"clients harmed, {format_size(moved[arm])}"
            for numbers in (harmed, moved)
            for arm in sorted(leads, key=numbers.__getitem__)[:1]
        ]
        rows.append((measured.cell.about.row, *(texts or ["local-only training: no method is shown to be better"] * 2)))
    heads = ("Setting", "First choice", "With the fewest bytes")
    return tabulate("recommended", "", heads, (), rows) if rows else None


def pool_gains(measured_cells: Sequence[MeasuredCell]) -> PageTable:
    """Return a table of each method's gain over local-only training: the mean over settings, by kind of skew and over all.

    A setting's kind is the beginning of its name, such as "Label skew". The interval is over the seeds that all settings
    have. Under a gain stands the number of its settings and of its seeds, if it lacks some.
    """
    kinds = dict.fromkeys(_get_kind(m) for m in measured_cells)
    groups = {kind: [m for m in measured_cells if _get_kind(m) == kind] for kind in kinds}
    groups |= {"All settings": list(measured_cells)}
    rows, means = dict[str, list[TableCell]](), dict[str, float]()
    for arm, name in _name_arms(measured_cells).items():
        entries = list[TableCell]()
        for cells in groups.values():
            gains = [by_seed for m in cells if (by_seed := _find_gains(m, arm))]
            seeds = sorted(set.intersection(*map(set, gains))) if gains else []
            gain = estimate([fmean(of[seed] for of in gains) for seed in seeds], "seeds") if seeds else None
            counts = (len(gains), len(cells), "settings"), (len(seeds), max(len(m.seeds) for m in cells), "seeds")
            note = ", ".join(f"{count} of {full} {noun}" for count, full, noun in counts if count < full)
            entries.append(TableCell(*prose.format_value(gain, "points", 1), note) if gain else TableCell("n/a"))
            means[name] = gain.mean if gain else 0.0  # the last group has all settings
        if arm != LOCAL_ONLY:
            rows[name] = entries
    heads = [f"{kind} ({len(cells)})" for kind, cells in groups.items()]
    ordered = sorted(rows, key=lambda name: -means[name])
    return tabulate("pooled", "", ("Method",), heads, [(name, *rows[name]) for name in ordered])


def _name_arms(measured_cells: Sequence[MeasuredCell]) -> dict[str, str]:
    """Return arm -> its display name in the first cell that has the arm."""
    return {arm: name_arm(arm, about) for m in reversed(measured_cells) for arm, about in m.cell.shown.items()}


def _get_kind(measured: MeasuredCell) -> str:
    return measured.cell.about.row.partition(",")[0]


def _find_gains(measured: MeasuredCell, arm: str) -> dict[int, float]:
    """Return seed -> the gain of an arm over local-only training."""
    own, alone = (measured.read_numbers(OWN, of).get(None, {}) for of in (arm, LOCAL_ONLY))
    return {seed: value - alone[seed] for seed, value in own.items() if seed in alone}


def summarise(measured: MeasuredCell) -> dict[str, Any]:
    """Return what the page's template says of a cell; text that needs results is "" without them.

    "harmless": the methods that harm no client in any seed. "missing": the methods with fewer than all seeds. "diverged":
    the methods with runs that diverged. "trials": the most settings that a sweep tried for a method. "rates_at_end": the
    number of methods of which the chosen learning rate is the smallest or the largest that was tried.
    """
    ranked, seeds, tunings = _sort_arms(measured), len(measured.seeds), measured.cell.tunings.values()
    names, best = _name_arms([measured]), next(iter(ranked), "")
    harmed = {arm: measured.estimate(HARMED, arm) for arm in measured.cell.shown if arm in ranked}
    lost = {arm: len(measured.results[arm]) - len(measured.list_finished(arm)) for arm in names}
    return {
        "measured": measured,
        "table": render_table(tabulate_cell(measured), caption=False) if ranked else "",
        "best": names.get(best, ""),
        "best_percent": f"{100 * ranked[best]:.1f}" if best else "",
        "local_percent": f"{100 * ranked[LOCAL_ONLY]:.1f}" if LOCAL_ONLY in ranked else "",
        "harmless": tuple(names[arm] for arm, e in harmed.items() if e is not None and e.mean == 0),
        "missing": tuple(name for arm, name in names.items() if len(measured.results[arm]) < seeds or not seeds),
        "diverged": tuple(f"{names[arm]} in {count} of {seeds} seeds" for arm, count in lost.items() if count),
        "seeds": seeds,
        "trials": max((len(tuning.settings) for tuning in tunings), default=0),
        "rates_at_end": sum(LEARNING_RATE in tuning.ends for tuning in tunings),
    }


def render_benchmark(page: Page, root: Path, pages: str) -> str:
    """Return the benchmark page as Markdown. pages: the relative path from this page to the experiments' pages."""
    comparisons = compare_methods(page.measured_cells)
    recommended = make_recommendations(comparisons, page.measured_cells)
    measured = [j for j in comparisons if j.adjusted is not None]
    decided = [j for method in PAPERS_METHODS for v in (SUPPORTED, CONTRADICTED) for j in select(comparisons, method, v)]
    titles = _name_arms(page.measured_cells)
    cells = {arm: {j.claim.cells for j in measured if j.claim.arm == arm} for arm in COMPARED}
    ranked = {m.cell.name: _sort_arms(m) for m in page.measured_cells}
    return load_template(TEMPLATE, root).render(
        made=MADE,
        pages=pages,
        methods="methods.md",
        index=page.experiment.index,
        compared={
            arm: (titles[arm], [m for m in page.measured_cells if m.cell.name in names])
            for arm, names in cells.items()
            if arm in titles
        },
        papers_methods=PAPERS_METHODS,
        rivals=partial(describe_rivals, comparisons),
        recommended=render_table(recommended, caption=False) if recommended else "",
        percent=lambda cell, arm: f"{100 * ranked[cell][arm]:.1f} %" if arm in ranked.get(cell, ()) else "n/a",
        cells=[summarise(of_cell) for of_cell in page.measured_cells],
        state=prose.describe_state(page.measured_cells),
        comparisons=len(set(map(_identify_pair, measured))),
        robust=sum(is_significant(j.adjusted) for j in decided),
        pooled=render_table(pool_gains(page.measured_cells), caption=False),
        verdicts={"leads": SUPPORTED, "loses": CONTRADICTED, "open": INCONCLUSIVE},
        hardware=list(prose.describe_origins(page.measured_cells)),
        commands=prose.list_commands(page.measured_cells),
    )
