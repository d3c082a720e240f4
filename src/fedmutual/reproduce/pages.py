"""An experiment's page, as Markdown, HTML and JSON, with its figures as files: all from the results alone."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmutual.files import write_bytes
from fedmutual.report.cells import Cell, Table
from fedmutual.report.rendering import make_environment
from fedmutual.report.svg import Styles
from fedmutual.report.text import listed
from fedmutual.reproduce import prose, tables
from fedmutual.reproduce.cell_results import Look
from fedmutual.reproduce.cells import Experiment
from fedmutual.reproduce.claims import Judged, judge_readings
from fedmutual.reproduce.entries import capital, unit
from fedmutual.reproduce.figures import Drawn, draw, numbers_of, pictures, standalone, summary
from fedmutual.reproduce.numbers import numbers
from fedmutual.reproduce.significance import holm
from fedmutual.reproduce.spent import spent, spent_frame

FIGURES = "figures"
MADE = "<!-- Made by `fedmutual reproduce --pages FOLDER` from the results; not to be edited. -->"


@dataclass(frozen=True)
class Page:
    """All that is told of an experiment."""

    experiment: Experiment
    looks: Sequence[Look]
    claims: tuple[tuple[Judged, ...], ...]  # the readings of each claim
    tables: tuple[Table, ...]
    pictures: tuple[Drawn, ...]

    @property
    def judged(self) -> tuple[Judged, ...]:
        """Every reading of every claim."""
        return tuple(judged for readings in self.claims for judged in readings)

    @property
    def tunings(self) -> Table | None:
        """How the settings of its arms were chosen; None where no sweep did."""
        return tables.tunings(self.looks)

    @property
    def spent(self) -> Table | None:
        """What each arm spent on training; None where nothing was run."""
        return spent(self.looks)

    @property
    def differences(self) -> list[str]:
        """How this differs from what the paper did: what was chosen, what was shortened, what networks began with."""
        return [*self.experiment.differences, *prose.shortened(self.looks), *prose.begun(self.looks)]

    def figure(self, picture: Drawn) -> str:
        """The name of a picture's file."""
        return f"{FIGURES}/{self.experiment.id}-{picture.id}.svg"


def page(experiment: Experiment, looks: Sequence[Look]) -> Page:
    """What is told of an experiment as it looks."""
    judged = tuple(judge_readings(claim, looks) for claim in experiment.index.claims)
    found = tuple(tables.all_tables(experiment, looks))
    return adjust([Page(experiment, looks, judged, found, tuple(pictures(experiment, looks)))], over_all=False)[0]


def adjust(pages: Sequence[Page], over_all: bool = True) -> list[Page]:
    """The pages with Holm's adjusted p-values beside every verdict that has one: over its own page, and over all of them.

    over_all: whether these are all pages; else there is no adjusted value over all.
    """
    adjusted = []
    whole = iter(holm([j.p for one in pages for j in one.judged if j.p is not None]))
    for one in pages:
        own = iter(holm([j.p for j in one.judged if j.p is not None]))
        claims = tuple(
            tuple(j if j.p is None else replace(j, holm=(next(own), next(whole) if over_all else None)) for j in readings)
            for readings in one.claims
        )
        adjusted.append(replace(one, claims=claims))
    return adjusted


def write(told: Page, folder: Path, kinds: Sequence[str] = ("md", "html", "json")) -> list[Path]:
    """Write the page as files of these kinds into a folder, figures below it -> their paths.

    Raises:
        RunError: the folder cannot be written.
    """
    makers: dict[str, Callable[[Page], str]] = {"md": partial(markdown, folder=folder), "html": html, "json": as_json}
    id = told.experiment.id
    names = {told.figure(p): standalone(p) for p in told.pictures}
    for old in (folder / FIGURES).glob(f"{id}-*.svg"):
        if f"{FIGURES}/{old.name}" not in names:
            old.unlink(missing_ok=True)
    for name, drawn in names.items():
        write_bytes(folder / name, drawn.encode())
    paths = [folder / f"{id}.{kind}" for kind in kinds]
    for path, kind in zip(paths, kinds, strict=True):
        write_bytes(path, makers[kind](told).encode())
    return paths


def markdown(told: Page, folder: Path | None = None) -> str:
    """The page as Markdown. folder: where it will lie, for links to files that are no part of it."""
    index, decimals = told.experiment.index, told.experiment.index.decimals
    parts = [
        MADE,
        f"# {index.title}",
        f"{index.about} ({index.paper})",
        f"    {prose.command(told.experiment)}",
        prose.state(told.looks),
        "## What is claimed, and the verdict",
    ]
    if told.claims:
        parts += [md_table(tables.claims(told.claims, decimals), caption=False), prose.P_VALUES]
    else:
        parts.append("The paper claims nothing here that numbers could settle.")
    if index.supports:
        parts.append(index.supports)
    for number, readings in enumerate(told.claims, 1):
        parts.append(f"**{number}:** {_asked(readings)}")
        for judged in readings:
            if len(judged.told) > 1:
                parts += [f"*{number}, {judged.reading}*"] * (len(readings) > 1)
                parts.append(md_table(_of_run(judged, decimals), caption=False))
    parts.append("## Ours beside the paper's")
    parts += [md_table(t) for t in told.tables]
    parts.append("Ours: mean ± half of the 95 % interval (Student's t) over seeds.")
    if told.spent:
        parts += ["## What each arm spent", md_table(told.spent), prose.BUDGETS]
    if told.pictures:
        parts.append("## Figures")
        parts += [f"![{summary(p)}]({told.figure(p)})\n\n*{p.title}*" for p in told.pictures]
    if told.tunings:
        parts += ["## How settings were chosen", md_table(told.tunings)]
        if folder is not None:
            parts.append(f"The sweeps: {listed(_links(told, folder))}.")
    parts += ["## Differences from the paper", _numbered(told.differences)]
    if code := told.experiment.code:
        parts += ["## What the authors' public code does otherwise", _numbered(code)]
    parts.append("## Hardware and time")
    parts.append("\n".join(f"- {line}" for line in prose.made(told.looks)) or "Nothing was run yet.")
    if commands := prose.commands(told.looks):
        parts += ["Made by:", "\n".join(f"    {c}" for c in commands)]
    return "\n\n".join(parts) + "\n"


def _numbered(sentences: Sequence[str]) -> str:
    return "\n".join(f"{n}. {sentence}" for n, sentence in enumerate(sentences, 1))


def _links(told: Page, folder: Path) -> list[str]:
    """Links to the files of the sweeps, each once."""
    paths = dict.fromkeys(t.path for look in told.looks for t in look.cell.tunings.values())
    return [f"[{path.name}]({Path(os.path.relpath(path, folder)).as_posix()})" for path in paths]


def _asked(readings: Sequence[Judged]) -> str:
    """What of which arms is compared, and when that supports the claim: of the first reading, then what others change."""
    others = (f" {capital(j.reading)}: {prose.operands(j)}." for j in readings[1:])
    return f"{prose.asked(readings[0])}.{''.join(others)}"


def _of_run(judged: Judged, decimals: int) -> Table:
    """The table of a claim without the cells that were not run."""
    table = tables.verdicts(judged, decimals)
    rows = tuple(r for r, line in zip(table.rows, judged.lines, strict=True) if line.told)
    return Table(table.id, table.caption, table.columns, rows, table.csv)


def md_table(table: Table, caption: bool = True) -> str:
    """A table as Markdown, its footnotes below it."""
    heads = [f"{c.group}: {c.name}" if c.group else c.name for c in table.columns]
    rules = ["---" if not c.numeric else "---:" for c in table.columns]
    lines = [heads, rules, *([_md_cell(c, table.notes) for c in row] for row in table.rows)]
    notes = "".join(f"\n{n}. {note}" for n, note in enumerate(table.notes, 1))
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (f"*{table.caption}*\n\n" if caption else "") + drawn + (f"\n\nNotes:\n{notes}" if notes else "")


def _md_cell(cell: Cell, notes: Sequence[str]) -> str:
    text = f"{cell.text} {cell.spread}".strip().replace("|", "\\|")
    mark = f"<sup>{notes.index(cell.note) + 1}</sup>" if cell.note else ""
    return text + mark + (f"<br>{cell.sub}" if cell.sub else "")


def html(told: Page) -> str:
    """The page as one self-contained HTML file."""
    styles: Styles = {}
    decimals = told.experiment.index.decimals
    environment = make_environment("fedmutual.reproduce", "fedmutual.report", html=True)
    figures = [(p.title, draw(p, f"f-{p.id}", styles), numbers_of(p, decimals)) for p in told.pictures]
    claims = [
        {
            "asked": _asked(readings),
            "tables": [(j.reading, tables.verdicts(j, decimals)) for j in readings if len(j.told) > 1],
        }
        for readings in told.claims
    ]
    return environment.get_template("experiment.html.j2").render(
        id=told.experiment.id,
        index=told.experiment.index,
        command=prose.command(told.experiment),
        state=prose.state(told.looks).replace("**", ""),
        claims=claims,
        verdicts=tables.claims(told.claims, decimals),
        spent=told.spent,
        budgets=prose.BUDGETS,
        tunings=told.tunings,
        p_values=prose.P_VALUES,
        tables=told.tables,
        figures=figures,
        differences=told.differences,
        code=told.experiment.code,
        made=list(prose.made(told.looks)),
        commands=prose.commands(told.looks),
        styles=styles,
        version=version("fedmutual"),
    )


def as_json(told: Page) -> str:
    """The page's numbers."""
    content: Mapping[str, Any] = {
        "format": 1,
        "id": told.experiment.id,
        "title": told.experiment.index.title,
        "paper": told.experiment.index.paper,
        "differences": told.differences,
        "code": list(told.experiment.code),
        "numbers": list(numbers(told.experiment, told.looks)),
        "spent": json.loads(spent_frame(told.looks).to_json(orient="records")),
        "claims": [_claim(readings) for readings in told.claims],
        "made": list(prose.made(told.looks)),
        "commands": prose.commands(told.looks),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _claim(readings: Sequence[Judged]) -> dict[str, Any]:
    """The claim as the paper trains; its other readings in "readings"."""
    first, *others = map(_reading, readings)
    return {"claim": readings[0].claim.text, **first, "readings": others}


def _reading(judged: Judged) -> dict[str, Any]:
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
        "unit": unit(judged),
    }
    diverged = {arm: n for arm, (n, _) in judged.diverged.items()}
    about |= {"of": judged.claim.whose, "apart": [*judged.unpaired, *judged.other_lengths], "diverged": diverged}
    return {**about, "difference": asdict(judged.overall) if judged.overall else None, "where": lines}
