"""Write the page of an experiment as Markdown, HTML and JSON, with the figures as files, from stored results only."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmutual.errors import join_words
from fedmutual.files import write_bytes
from fedmutual.report.cells import PageTable, TableCell
from fedmutual.report.plots import Styles
from fedmutual.report.rendering import make_environment
from fedmutual_papers import prose, tables
from fedmutual_papers.claims import Judgement, judge_readings
from fedmutual_papers.entries import capitalize, get_unit
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.figures import (
    Plot,
    describe_picture,
    draw,
    make_number_table,
    make_pictures,
    make_standalone_svg,
)
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.numbers import list_records
from fedmutual_papers.significance import adjust_by_holm
from fedmutual_papers.spent import make_spent_frame, make_spent_table

FIGURES = "figures"
MADE = "<!-- Made by `fedmutual reproduce --pages FOLDER` from the results; not to be edited. -->"


@dataclass(frozen=True)
class Page:
    """The content of an experiment's page."""

    experiment: PaperExperiment
    measured_cells: Sequence[MeasuredCell]
    claims: tuple[tuple[Judgement, ...], ...]  # the readings of each claim
    tables: tuple[PageTable, ...]
    pictures: tuple[Plot, ...]

    @property
    def judged(self) -> tuple[Judgement, ...]:
        """Return every reading of every claim."""
        return tuple(judged for readings in self.claims for judged in readings)

    @property
    def tunings(self) -> PageTable | None:
        """Return the table of tuned settings; None if no sweep chose a setting."""
        return tables.make_tunings_table(self.measured_cells)

    @property
    def spent(self) -> PageTable | None:
        """Return the table of training work for each arm; None if nothing was run."""
        return make_spent_table(self.measured_cells)

    @property
    def differences(self) -> list[str]:
        """Return the differences from the paper: choices, shortened cells, and initial weights."""
        return [
            *self.experiment.differences,
            *prose.describe_shortening(self.measured_cells),
            *prose.describe_initial_weights(self.measured_cells),
        ]

    @property
    def numbers_heading(self) -> str:
        """Return the heading of the tables of results."""
        return "Ours beside the paper's" if self.experiment.index.paper else "Numbers"

    @property
    def differences_heading(self) -> str:
        """Return the heading of the differences; of an experiment that no paper has they are choices."""
        return "Differences from the paper" if self.experiment.index.paper else "Choices"

    def make_figure_path(self, picture: Plot) -> str:
        """Return the file name of a picture, relative to the folder of the page."""
        return f"{FIGURES}/{self.experiment.id}-{picture.id}.svg"


def make_page(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> Page:
    """Return the page of an experiment from the given results."""
    judged = tuple(judge_readings(claim, measured_cells) for claim in experiment.index.claims)
    page_tables = tuple(tables.make_tables(experiment, measured_cells))
    return adjust(
        [Page(experiment, measured_cells, judged, page_tables, tuple(make_pictures(experiment, measured_cells)))],
        over_all=False,
    )[0]


def adjust(pages: Sequence[Page], over_all: bool = True) -> list[Page]:
    """Return the pages with Holm's adjusted p-values for every verdict with a p-value: over its page, and over all pages.

    over_all: whether `pages` are all pages; otherwise the adjusted value over all pages is None.
    """
    adjusted = []
    all_values = iter(adjust_by_holm([j.p for page in pages for j in page.judged if j.p is not None]))
    for page in pages:
        page_values = iter(adjust_by_holm([j.p for j in page.judged if j.p is not None]))
        claims = tuple(
            tuple(
                j if j.p is None else replace(j, holm=(next(page_values), next(all_values) if over_all else None))
                for j in readings
            )
            for readings in page.claims
        )
        adjusted.append(replace(page, claims=claims))
    return adjusted


def write(page: Page, folder: Path, kinds: Sequence[str] = ("md", "html", "json")) -> list[Path]:
    """Write the page as files of the given kinds, and its figures, into a folder, and return the paths of the page.

    Raises:
        RunError: the folder cannot be written.
    """
    makers: dict[str, Callable[[Page], str]] = {
        "md": partial(render_markdown, folder=folder),
        "html": render_html,
        "json": render_json,
    }
    id = page.experiment.id
    drawings = {page.make_figure_path(p): make_standalone_svg(p) for p in page.pictures}
    for old in (folder / FIGURES).glob(f"{id}-*.svg"):
        if f"{FIGURES}/{old.name}" not in drawings:
            old.unlink(missing_ok=True)
    for name, drawn in drawings.items():
        write_bytes(folder / name, drawn.encode())
    paths = [folder / f"{id}.{kind}" for kind in kinds]
    for path, kind in zip(paths, kinds, strict=True):
        write_bytes(path, makers[kind](page).encode())
    return paths


def render_markdown(page: Page, folder: Path | None = None) -> str:
    """Return the page as Markdown. folder: where the page will lie, for links to files outside it; None: no such links."""
    index, decimals = page.experiment.index, page.experiment.index.decimals
    parts = [
        MADE,
        f"# {index.title}",
        f"{index.about} ({index.paper})" if index.paper else index.about,
        f"    {prose.make_command(page.experiment)}",
        prose.describe_state(page.measured_cells),
    ]
    if page.claims or index.paper:
        parts.append("## Claims and verdicts")
    if page.claims:
        parts += [render_table(tables.make_claims_table(page.claims, decimals), caption=False), prose.P_VALUES]
    elif index.paper:
        parts.append("The paper makes no claim here that numbers can confirm or contradict.")
    if index.supports:
        parts.append(index.supports)
    for number, readings in enumerate(page.claims, 1):
        parts.append(f"**{number}:** {_format_question(readings)}")
        for judged in readings:
            if len(judged.judged_lines) > 1:
                parts += [f"*{number}, {judged.reading}*"] * (len(readings) > 1)
                parts.append(render_table(_tabulate_run_cells(judged, decimals), caption=False))
    parts.append(f"## {page.numbers_heading}")
    parts += [render_table(t) for t in page.tables]
    parts.append("Ours: mean ± half of the 95 % interval (Student's t) over seeds.")
    if page.spent:
        parts += ["## Cost of each method", render_table(page.spent), prose.BUDGETS]
    if page.pictures:
        parts.append("## Figures")
        parts += [f"![{describe_picture(p)}]({page.make_figure_path(p)})\n\n*{p.title}*" for p in page.pictures]
    if page.tunings:
        parts += ["## How settings were chosen", render_table(page.tunings)]
        if folder is not None:
            parts.append(f"Files of the sweeps: {join_words(_link_sweeps(page, folder))}.")
    parts += [f"## {page.differences_heading}", _number_sentences(page.differences)]
    if code := page.experiment.code:
        parts += ["## Differences of the authors' public code", _number_sentences(code)]
    parts.append("## Hardware and time")
    parts.append("\n".join(f"- {line}" for line in prose.describe_origins(page.measured_cells)) or "Nothing was run yet.")
    if commands := prose.list_commands(page.measured_cells):
        parts += ["Commands that made the results:", "\n".join(f"    {c}" for c in commands)]
    return "\n\n".join(parts) + "\n"


def _number_sentences(sentences: Sequence[str]) -> str:
    return "\n".join(f"{n}. {sentence}" for n, sentence in enumerate(sentences, 1))


def _link_sweeps(page: Page, folder: Path) -> list[str]:
    """Return one Markdown link for each sweep file."""
    paths = dict.fromkeys(t.path for measured in page.measured_cells for t in measured.cell.tunings.values())
    return [f"[{path.name}]({Path(os.path.relpath(path, folder)).as_posix()})" for path in paths]


def _format_question(readings: Sequence[Judgement]) -> str:
    """Return the comparison and condition of the first reading, then the comparisons of the other readings."""
    others = (f" {capitalize(j.reading)}: {prose.describe_comparison(j)}." for j in readings[1:])
    return f"{prose.describe_condition(readings[0])}.{''.join(others)}"


def _tabulate_run_cells(judged: Judgement, decimals: int) -> PageTable:
    """Return the claim's table without the cells that were not run."""
    table = tables.make_verdicts_table(judged, decimals)
    rows = tuple(r for r, line in zip(table.rows, judged.lines, strict=True) if line.is_judged)
    return PageTable(table.id, table.caption, table.columns, rows, table.csv)


def render_table(table: PageTable, caption: bool = True) -> str:
    """Return a table as Markdown, with its footnotes below."""
    heads = [f"{c.group}: {c.name}" if c.group else c.name for c in table.columns]
    rules = ["---" if not c.numeric else "---:" for c in table.columns]
    lines = [heads, rules, *([_format_cell(c, table.footnotes) for c in row] for row in table.rows)]
    footnotes = "".join(f"\n{n}. {note}" for n, note in enumerate(table.footnotes, 1))
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (f"*{table.caption}*\n\n" if caption else "") + drawn + (f"\n\nNotes:\n{footnotes}" if footnotes else "")


def _format_cell(cell: TableCell, footnotes: Sequence[str]) -> str:
    text = f"{cell.text} {cell.spread}".strip().replace("|", "\\|")
    mark = f"<sup>{footnotes.index(cell.note) + 1}</sup>" if cell.note else ""
    return text + mark + (f"<br>{cell.sub}" if cell.sub else "")


def render_html(page: Page) -> str:
    """Return the page as one self-contained HTML file."""
    styles: Styles = {}
    decimals = page.experiment.index.decimals
    environment = make_environment("fedmutual_papers", "fedmutual.report", html=True)
    figures = [(p.title, draw(p, f"f-{p.id}", styles), make_number_table(p, decimals)) for p in page.pictures]
    claims = [
        {
            "asked": _format_question(readings),
            "tables": [(j.reading, tables.make_verdicts_table(j, decimals)) for j in readings if len(j.judged_lines) > 1],
        }
        for readings in page.claims
    ]
    return environment.get_template("experiment.html.j2").render(
        id=page.experiment.id,
        index=page.experiment.index,
        command=prose.make_command(page.experiment),
        state=prose.describe_state(page.measured_cells).replace("**", ""),
        claims=claims,
        verdicts=tables.make_claims_table(page.claims, decimals) if page.claims or page.experiment.index.paper else None,
        numbers_heading=page.numbers_heading,
        differences_heading=page.differences_heading,
        spent=page.spent,
        budgets=prose.BUDGETS,
        tunings=page.tunings,
        p_values=prose.P_VALUES,
        tables=page.tables,
        figures=figures,
        differences=page.differences,
        code=page.experiment.code,
        made=list(prose.describe_origins(page.measured_cells)),
        commands=prose.list_commands(page.measured_cells),
        styles=styles,
        version=version("fedmutual"),
    )


def render_json(page: Page) -> str:
    """Return the numbers of the page as JSON: claims with verdicts, and the value of each arm and measure."""
    content: Mapping[str, Any] = {
        "format": 1,
        "id": page.experiment.id,
        "title": page.experiment.index.title,
        "paper": page.experiment.index.paper,
        "differences": page.differences,
        "code": list(page.experiment.code),
        "numbers": list(list_records(page.experiment, page.measured_cells)),
        "spent": json.loads(make_spent_frame(page.measured_cells).to_json(orient="records")),
        "claims": [_describe_claim(readings) for readings in page.claims],
        "made": list(prose.describe_origins(page.measured_cells)),
        "commands": prose.list_commands(page.measured_cells),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _describe_claim(readings: Sequence[Judgement]) -> dict[str, Any]:
    """Return the claim under its first reading, with the other readings in "readings"."""
    first, *others = map(_describe_reading, readings)
    return {"claim": readings[0].claim.text, **first, "readings": others}


def _describe_reading(judged: Judgement) -> dict[str, Any]:
    lines = [
        {
            "where": line.title,
            "verdict": line.verdict,
            "state": line.scale,
            "diverged": {arm: n for arm, (n, _) in line.diverged.items()},
            "difference": asdict(line.difference) if line.difference else None,
        }
        for line in judged.lines
    ]
    about: dict[str, Any] = {
        "reading": judged.reading,
        "verdict": judged.verdict,
        "p": judged.p,
        "holm": {"page": judged.holm[0], "all": judged.holm[1]},
        "unit": get_unit(judged),
    }
    diverged = {arm: n for arm, (n, _) in judged.diverged.items()}
    about |= {"of": judged.claim.scope, "apart": [*judged.unpaired, *judged.other_lengths], "diverged": diverged}
    return {**about, "difference": asdict(judged.overall) if judged.overall else None, "where": lines}
