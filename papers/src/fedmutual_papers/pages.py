"""Write the pages of the papers from stored results only: of an experiment, of all verdicts, and of the findings."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Template

from fedmutual.errors import join_words
from fedmutual.files import write_bytes
from fedmutual.report.cells import PageTable, TableCell
from fedmutual.report.plots import Styles
from fedmutual.report.rendering import make_environment
from fedmutual_papers import figures, prose, tables
from fedmutual_papers.claims import (
    CONTRADICTED,
    DECIDED,
    DIVERGED,
    INCONCLUSIVE,
    NOT_RUN,
    SUPPORTED,
    TOO_SHORT,
    Judgement,
    Line,
    adjust_family,
    judge_readings,
)
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.measured_cell import MeasuredCell

FIGURES = "figures"
MADE = "<!-- Made by `fedmutual reproduce --pages FOLDER` from the results; not to be edited. -->"
VERDICTS, FINDINGS, TEMPLATE = "verdicts.md", "findings.md", "findings.md.j2"
FIGURE = f"{FIGURES}/findings.svg"
HOLDS, DEPENDS, FAILS, OPEN, UNMEASURED = "holds", "depends", "fails", "open", "unmeasured"


@dataclass(frozen=True)
class Page:
    """The content of an experiment's page."""

    experiment: PaperExperiment
    measured_cells: Sequence[MeasuredCell]
    claims: tuple[tuple[Judgement, ...], ...]  # the readings of each claim, and the columns of a table

    @property
    def judged(self) -> tuple[Judgement, ...]:
        """Return every reading of every claim."""
        return tuple(judged for readings in self.claims for judged in readings)

    @cached_property
    def tables(self) -> Sequence[PageTable]:
        """Return the tables of results."""
        return tables.make_tables(self.experiment, self.measured_cells)

    @cached_property
    def figures(self) -> dict[str, figures.Plot]:
        """Return the pictures by their file names, relative to the folder of the page."""
        pictures = figures.make_pictures(self.experiment, self.measured_cells)
        return {f"{FIGURES}/{self.experiment.id}-{picture.id}.svg": picture for picture in pictures}

    @property
    def differences(self) -> list[str]:
        """Return the differences from the paper: choices, shortened cells, and initial weights."""
        return [*self.experiment.differences, *prose.describe_shortening(self.measured_cells)]

    def describe(self, only_judged: bool) -> dict[str, Any]:
        """Return the content for a template. only_judged: whether verdicts of cells that were not run are left out."""
        index, decimals = self.experiment.index, self.experiment.index.decimals

        def list_tables(readings: Sequence[Judgement]) -> list[tuple[str, PageTable]]:
            of_lines = (j for j in readings if len(j.judged_lines) > 1 and (j.part or j.parts == 1))
            return [(judged.title, tables.make_verdicts_table(judged, decimals, only_judged)) for judged in of_lines]

        return {
            "index": index,
            "command": f"fedmutual reproduce {self.experiment.id}",
            "state": prose.describe_state(self.measured_cells),
            "verdicts": tables.make_claims_table(self.claims, decimals),
            "claims": [
                {"asked": prose.say("question", [*{j.reading: j for j in of}.values()]), "tables": list_tables(of)}
                for of in self.claims
            ],
            "numbers_heading": "Ours beside the paper's" if index.paper else "Numbers",
            "differences_heading": "Differences from the paper" if index.paper else "Choices",
            "tables": self.tables,
            "spent": tables.make_spent_table(self.measured_cells),
            "tunings": tables.make_tunings_table(self.measured_cells),
            "differences": self.differences,
            "code": self.experiment.code,
            "origins": list(prose.describe_origins(self.measured_cells)),
            "commands": prose.list_commands(self.measured_cells),
            "budgets": prose.say("budgets"),
            "p_values": prose.say("p_values"),
        }


def make_page(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> Page:
    """Return the page of an experiment from the given results, before `adjust`."""
    judged = tuple(judge_readings(claim, measured_cells) for claim in experiment.index.claims)
    return Page(experiment, measured_cells, judged)


def adjust(pages: Sequence[Page]) -> list[Page]:
    """Return the pages with Holm's adjusted p-values. `pages`: those of complete families."""
    families: dict[str, list[tuple[Judgement, ...]]] = {}
    for page in pages:
        families.setdefault(page.experiment.family, []).extend(page.claims)
    adjusted = {family: iter(adjust_family(claims)) for family, claims in families.items()}
    return [replace(page, claims=tuple(islice(adjusted[page.experiment.family], len(page.claims)))) for page in pages]


def render(page: Page, folder: Path, kinds: Sequence[str] = ("md", "html", "json")) -> dict[Path, str]:
    """Return the files of a page in a folder, of the given kinds, and its figures: path -> text."""
    makers: dict[str, Callable[[Page], str]] = {"md": partial(render_markdown, folder=folder)}
    makers |= {"html": render_html, "json": render_json}
    texts = {folder / f"{page.experiment.id}.{kind}": makers[kind](page) for kind in kinds}
    return texts | {folder / name: figures.make_standalone_svg(picture) for name, picture in page.figures.items()}


def write(texts: Mapping[Path, str]) -> list[Path]:
    """Write the files of pages and remove their older figures; return the paths without those of figures.

    Raises:
        RunError: a file cannot be written.
    """
    written = [path for path in texts if path.suffix != ".svg"]
    for old in (old for path in written for old in (path.parent / FIGURES).glob(f"{path.stem}-*.svg")):
        if old not in texts:
            old.unlink(missing_ok=True)
    for path, text in texts.items():
        write_bytes(path, text.encode())
    return written


def load_template(name: str, root: Path | str = "fedmutual_papers") -> Template:
    """Return a template of Markdown with the filter `table` (`render_table`). root: the folder of the templates."""
    environment = make_environment(root, html=False)
    environment.filters["table"] = render_table
    return environment.get_template(name)


def render_markdown(page: Page, folder: Path | None = None) -> str:
    """Return the page as Markdown. folder: where the page will lie, for links to files outside it; None: no such links."""
    sweeps = dict.fromkeys(t.path for measured in page.measured_cells for t in measured.cell.tunings.values())
    links = [f"[{path.name}]({Path(os.path.relpath(path, folder)).as_posix()})" for path in sweeps] if folder else []
    drawn = [(figures.describe_picture(picture), name, picture.title) for name, picture in page.figures.items()]
    content = page.describe(only_judged=True)
    return load_template("experiment.md.j2").render(content, made=MADE, figures=drawn, sweeps=join_words(links))


def render_table(table: PageTable, caption: bool = True) -> str:
    """Return a table as Markdown, with its footnotes below."""
    footnotes = table.footnotes

    def format_cell(cell: TableCell) -> str:
        text = f"{cell.text} {cell.spread}".strip().replace("|", "\\|")
        mark = f"<sup>{footnotes.index(cell.note) + 1}</sup>" if cell.note else ""
        return text + mark + (f"<br>{cell.sub}" if cell.sub else "")

    rules = ["---" if not c.numeric else "---:" for c in table.columns]
    lines = [[c.title for c in table.columns], rules, *([format_cell(c) for c in row] for row in table.rows)]
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "".join(f"\n{n}. {note}" for n, note in enumerate(footnotes, 1))
    return (f"*{table.caption}*\n\n" if caption else "") + drawn + (f"\n\nNotes:\n{notes}" if notes else "")


def render_html(page: Page) -> str:
    """Return the page as one self-contained HTML file."""
    styles: Styles = {}
    environment = make_environment("fedmutual_papers", "fedmutual.report", html=True)
    drawn = [
        (p.title, figures.draw(p, f"f-{p.id}", styles), figures.make_number_table(p, page.experiment.index.decimals))
        for p in page.figures.values()
    ]
    return environment.get_template("experiment.html.j2").render(
        page.describe(only_judged=False), figures=drawn, styles=styles, version=version("fedmutual")
    )


def render_json(page: Page) -> str:
    """Return the numbers of the page as JSON: claims with verdicts, and the value of each arm and measure."""
    claims = [(readings[0].claim.text, [_describe_reading(judged) for judged in readings]) for readings in page.claims]
    content = {
        "format": 1,
        "id": page.experiment.id,
        "title": page.experiment.index.title,
        "paper": page.experiment.index.paper,
        "differences": page.differences,
        "code": list(page.experiment.code),
        "numbers": list(tables.list_records(page.experiment, page.measured_cells)),
        "spent": tables.list_spent(page.measured_cells),
        "claims": [{"claim": text, **first, "readings": others} for text, (first, *others) in claims],
        "made": list(prose.describe_origins(page.measured_cells)),
        "commands": prose.list_commands(page.measured_cells),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _describe_reading(judged: Judgement) -> dict[str, Any]:
    def describe(of: Judgement | Line, difference: Any) -> dict[str, Any]:
        diverged = {arm: n for arm, (n, _) in of.diverged.items()}
        verdict = of.standing if isinstance(of, Judgement) else of.verdict
        return {"verdict": verdict, "diverged": diverged, "difference": difference and asdict(difference)}

    return {
        "reading": judged.reading,
        **describe(judged, judged.overall),
        "part": judged.part,
        "p": judged.p,
        "holm": dict.fromkeys(("page", "all"), judged.adjusted),  # both names of older files
        "detectable": judged.detectable,
        "unit": judged.unit,
        "of": judged.claim.scope,
        "apart": [*judged.unpaired, *judged.other_lengths],
        "where": [{"where": x.title, "state": x.scale, **describe(x, x.difference)} for x in judged.lines],
    }


def render_overview(pages: Sequence[Page]) -> str:
    """Return the page of all verdicts as Markdown: their counts, then each claim."""
    judged = [j for page in pages for j in page.judged]
    return load_template("verdicts.md.j2").render(
        made=MADE,
        claims=sum(len(page.claims) for page in pages),
        judged=judged,
        decided=sum(j.standing in DECIDED for j in judged),
        counts=count_verdicts(judged),
        p_values=prose.say("p_values"),
        pages=[
            (
                index := page.experiment.index,
                page.experiment.id,
                prose.describe_state(page.measured_cells),
                tables.make_claims_table(page.claims, index.decimals),
            )
            for page in pages
            if page.claims
        ],
    )


def count_verdicts(judged: Sequence[Judgement]) -> PageTable:
    """Return the table of verdict counts."""
    counts = Counter(j.standing for j in judged)
    rows = [(prose.capitalize(v), counts[v]) for v in (*DECIDED, INCONCLUSIVE, TOO_SHORT, DIVERGED, NOT_RUN)]
    return tables.tabulate("counts", "", ("Verdict",), ("Verdicts",), rows)


def render_findings(
    pages: Sequence[Page], counts: pd.DataFrame, root: Path, folder: Path, gains: Mapping[str, Sequence[str]]
) -> dict[Path, str]:
    """Return the page of the findings, which lies beside the folder of the pages, and its figure: path -> text.

    counts: the numbers of printed values by state; the sum is in the row "all". gains: method -> its gains over local-only
    training in the benchmark, as text. The template is that of the experiments; without it there is no page.
    """
    if not (root / TEMPLATE).exists():
        return {}
    path, picture = folder.parent / FINDINGS, make_forest(pages)
    place = Path(os.path.relpath(folder, path.parent)).as_posix()
    groups: dict[str, list[dict[str, str]]] = {name: [] for name in (HOLDS, DEPENDS, FAILS, OPEN, UNMEASURED)}
    for page in pages:
        for readings in filter(_is_finding, page.claims):
            verdicts = describe_readings(readings, page.experiment.index.decimals)
            finding = {"text": _name_finding(readings), "verdicts": verdicts, "id": page.experiment.id}
            groups[decide_outcome(readings)].append(finding)
    measured = {
        _name_finding(of) + (f", {judged.title}" if number else ""): prose.say(
            "difference", judged.unit, judged.overall, page.experiment.index.decimals
        )
        for page in pages
        for of in page.claims
        for number, judged in enumerate(of)
        if judged.overall is not None
    }
    text = load_template(TEMPLATE, root).render(
        made=MADE,
        pages=place,
        methods="methods.md",
        figure=f"{place}/{FIGURE}",
        picture=picture,
        groups=groups,
        printed=counts.loc[tables.ALL].to_dict(),
        gains=gains,
        measured=measured,
    )
    return {path: text, folder / FIGURE: figures.make_standalone_svg(picture)}


def _is_finding(readings: Sequence[Judgement]) -> bool:
    """Return whether the page of findings has a claim: its file says so, or one of its readings is decided."""
    return bool(readings[0].claim.finding) or any(judged.standing in DECIDED for judged in readings)


def _name_finding(readings: Sequence[Judgement]) -> str:
    return readings[0].claim.finding or readings[0].claim.text.removesuffix(".")


def decide_outcome(readings: Sequence[Judgement]) -> str:
    """Return the outcome of a claim over all readings."""
    outcomes = {SUPPORTED: HOLDS, CONTRADICTED: FAILS, INCONCLUSIVE: OPEN}
    measured = {judged.standing for judged in readings} & outcomes.keys()
    return DEPENDS if len(measured) > 1 else outcomes[measured.pop()] if measured else UNMEASURED


def describe_readings(readings: Sequence[Judgement], decimals: int) -> str:
    """Return each reading's verdict: "As the paper trains: supported: +1.2 points ...; at equal steps: not run"."""
    return prose.capitalize(prose.say("readings", readings, decimals))


def make_forest(pages: Sequence[Page]) -> figures.Forest:
    """Return the forest plot of the findings that are differences in points and have a verdict."""
    rows = []
    for readings in (readings for page in pages for readings in filter(_is_finding, page.claims)):
        label = _name_finding(readings)
        for number, judged in enumerate(readings):
            is_measured = judged.standing in (*DECIDED, INCONCLUSIVE)
            if is_measured and judged.overall is not None and judged.unit == "points":
                sign = {SUPPORTED: 1, CONTRADICTED: -1}.get(judged.standing, 0)
                rows.append((label if number == 0 else f"{label} {judged.title}", judged.overall, sign))
                label = "\N{HORIZONTAL ELLIPSIS}"  # the readings below it are of the same claim
    return figures.Forest("The papers' claims that were measured", tuple(rows))
