"""`fedmutual reproduce`: what the wrapper in app.py hands over, done and said."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedmutual.errors import ConfigError
from fedmutual.events import Observer
from fedmutual.files import write_bytes
from fedmutual.report import cells as report
from fedmutual.report.text import count
from fedmutual.reproduce import (
    Experiment,
    Scale,
    Store,
    experiments,
    findings,
    overview,
    pages,
    printed,
    prose,
    read_experiment,
    repeats,
    reproduce,
)
from fedmutual.reproduce.cell_results import looks
from fedmutual.reproduce.cells import RESULTS, home
from fedmutual.reproduce.front import write_front
from fedmutual.reproduce.plan import check, tells
from fedmutual.reproduce.results import PATIENCE
from fedmutual.rundir.folder import held

Watch = Callable[[str], Observer]


def listed(root: Path | None, console: Console) -> None:
    """Print every id: what it is, how many cells and runs, how many rounds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("id", "what", "cells", "runs a seed", "rounds"):
        table.add_column(name, justify="left" if name in ("id", "what") else "right", overflow="fold")
    for e in experiments(root or home()):
        runs = sum(len(c.arms) for c in e.cells)
        rounds = sorted({c.rounds(arm) for c in e.cells for arm in c.shown})
        table.add_row(e.id, e.index.title, str(len(e.cells)), str(runs), ", ".join(map(str, rounds)))
    console.print(table)


def train(
    id: str,
    only: Sequence[str],
    seeds: int,
    rounds: int | None,
    changed: Mapping[str, Any],
    out: Path,
    results: Path | None,
    root: Path | None,
    watch: Watch,
    console: Console,
) -> list[str]:
    """Train what is not known, write the page into OUT -> the runs that failed, and why."""
    experiment = read_experiment(root or home(), id)
    chosen = experiment.chosen(only)
    check(changed, chosen)
    if results is not None and results.resolve() in (out.resolve(), *out.resolve().parents):
        raise ConfigError(f"--results {results}: is OUT itself or holds it; name a folder that holds results alone")
    told = {k: v for k, v in changed.items() if tells(k)}
    here = {k: v for k, v in changed.items() if not tells(k)}
    scale, store = Scale(rounds, tuple(told.items())), _store(root, results or out / RESULTS)

    say = _sayer(console)
    done = reproduce(chosen, seeds, scale, out, store, here, watch, say)
    say(f"{count(done.trained, 'run')} trained, {done.known} known")
    if done.elsewhere:
        left = f"{count(len(done.elsewhere), 'run')} left to other processes"
        say(f"{left}: {'; '.join(done.elsewhere.values())}. Give the same command when those are done")
    with held(out, "has been writing pages for a minute", "give the same command again", PATIENCE):
        now = _store(root, results or out / RESULTS)  # with what other processes kept meanwhile of other cells
        _conclude(experiment, now, scale, range(seeds), out, console)
    return done.failed


def write_pages(id: str | None, folder: Path, results: Path | None, root: Path | None) -> list[Path]:
    """Write the documentation's pages from results alone -> their paths.

    Those of one experiment or of all; and of all of them the verdicts, the printed numbers and the repeated runs on the
    folder's front page if it has their marks, and the findings beside the folder if the experiments have a template of them.
    """
    root = root or home()
    if id:
        read_experiment(root, id)  # who knows it not says so
    found = experiments(root)
    store = _store(root, results or root / RESULTS)
    told = pages.adjust([pages.page(e, looks(e, store)) for e in found])
    paths = [p for page in told if id in (None, page.experiment.id) for p in pages.write(page, folder, ["md"])]
    write_bytes(folder / overview.NAME, overview.overview(told).encode())
    counts = printed.count_printed(printed.printed_frame([(page.experiment, page.looks) for page in told]))
    made = {
        "printed numbers": printed.printed_table(counts),
        "repeated runs": repeats.repeats_table(repeats.repeats_frame(store)),
    }
    tables = {name: pages.md_table(table, caption=False) for name, table in made.items()}
    return [
        *paths,
        folder / overview.NAME,
        *write_front(folder, tables),
        *findings.write_findings(told, counts, root, folder),
    ]


def _store(root: Path | None, folder: Path) -> Store:
    """Results that came with the experiments, and those of a folder, to which new ones go."""
    shipped = (root or home()) / RESULTS
    return Store(folder) if folder.resolve() == shipped.resolve() else Store(folder, shipped)


def _conclude(experiment: Experiment, store: Store, scale: Scale, seeds: Sequence[int], out: Path, console: Console) -> None:
    """The tables and verdicts in the terminal, the page's files, and where they are."""
    told, say = pages.page(experiment, looks(experiment, store, scale, seeds)), _sayer(console)
    for table in told.tables:
        say(f"\n{table.caption}")
        console.print(_terminal(table))
        for number, note in enumerate(table.notes, 1):
            say(f"({number}) {note}")
    decimals = experiment.index.decimals
    for judged in told.judged:
        reading = f" ({judged.reading})" if judged.reading else ""
        say(f"{judged.claim.text}{reading} {prose.verdict(judged, decimals)}")
    for path in pages.write(told, out):
        say(str(path))


def _sayer(console: Console) -> Callable[[str], None]:
    """Prints text as it is."""

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    return say


def _terminal(table: report.Table) -> Table:
    """A table of the report's for a terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        drawn.add_column(column.title.replace(": ", "\n"), justify="right" if column.numeric else "left")
    for row in table.rows:
        drawn.add_row(*(_text(cell, table.notes) for cell in row))
    return drawn


def _text(cell: report.Cell, notes: Sequence[str]) -> str:
    mark = f" ({notes.index(cell.note) + 1})" if cell.note else ""
    return f"{cell.text} {cell.spread}".strip() + mark + (f"\n{cell.sub}" if cell.sub else "")


def without(option: str, others: Mapping[str, object]) -> None:
    """Raise ConfigError where an option comes together with others, by their names, that would do nothing then."""
    for name, given in others.items():
        if given:
            raise ConfigError(f"{option}; take {name} out")


def one_of(id: str | None) -> str:
    """The id, where one is needed."""
    if id is None:
        raise ConfigError("name an experiment; `fedmutual reproduce --list` shows them")
    return id
