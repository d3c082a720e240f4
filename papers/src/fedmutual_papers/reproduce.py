"""The work of `fedmutual reproduce`: list the experiments, train cells, print tables, write pages and verify them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from fedmutual.errors import ConfigError, format_count
from fedmutual.report.terminal import make_sheet
from fedmutual.rundir.folder import lock_folder
from fedmutual_papers import benchmark, pages, prose, tables
from fedmutual_papers.experiment_files import RESULTS, find_home, read_experiment, read_experiments
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, check, has_effect
from fedmutual_papers.run import Say, Watch, train_cells
from fedmutual_papers.store import LOCK_LIMIT, ResultStore

FRONT = "README.md"
# The comment lines before and after the table of the front page.
TABLE_BEGIN = "<!-- printed numbers: made by `fedmutual reproduce --pages FOLDER` from the results; not to be edited -->"
TABLE_END = "<!-- end of printed numbers -->"


def print_experiments(root: Path | None, console: Console) -> None:
    """Print a table of all experiments: id, title, number of cells, runs per seed, rounds.

    root: the folder of the experiments; None: the one of `find_home`.

    Raises:
        ConfigError: the folder has no experiment, or an experiment cannot be read.
    """
    rows = []
    for e in read_experiments(root or find_home()):
        rounds = sorted({c.get_rounds(arm) for c in e.cells for arm in c.shown})
        runs = sum(len(c.arms) for c in e.cells)
        rows.append((e.id, e.index.title, len(e.cells), runs, ", ".join(map(str, rounds))))
    heads = ("cells", "runs a seed", "rounds")
    console.print(make_sheet(tables.tabulate("experiments", "", ("id", "what"), heads, rows)))


def train(
    id: str | None,
    only: Sequence[str],
    seeds: int,
    rounds: int | None,
    changed: Mapping[str, Any],
    out: Path,
    results: Path | None,
    root: Path | None,
    watch: Watch,
    console: Console,
    jobs: int | None = None,
) -> list[str]:
    """Train the runs without a known result, write the page into OUT, and return the failed runs with their reasons.

    Raises:
        UserError: there is no such experiment or cell, a key cannot be changed, or `results` contains `out`.
    """
    if id is None:
        raise ConfigError("name an experiment; `fedmutual reproduce --list` shows them")
    experiment = read_experiment(root or find_home(), id)
    chosen = experiment.choose_cells(only)
    check(changed, chosen)
    if results is not None and results.resolve() in (out.resolve(), *out.resolve().parents):
        raise ConfigError(f"--results {results}: is OUT or contains OUT; name a folder that holds only results")
    scale = Scale(rounds, tuple((k, v) for k, v in changed.items() if has_effect(k)))
    here = {k: v for k, v in changed.items() if not has_effect(k)}

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    queue = train_cells(chosen, seeds, scale, out, _open_store(root, results or out / RESULTS), here, watch, say, jobs)
    say(f"{format_count(queue.trained, 'run')} trained, {queue.known} known")
    if queue.elsewhere:
        left = f"{format_count(len(queue.elsewhere), 'run')} left to other processes"
        say(f"{left}: {'; '.join(queue.elsewhere.values())}. Run this command again when they are done")
    with lock_folder(out, "has been writing pages for a minute", "run this command again", LOCK_LIMIT):
        now = _open_store(root, results or out / RESULTS)  # with results that other processes stored meanwhile
        family = [e for e in read_experiments(root or find_home()) if e.family == experiment.family and e.id != id]
        measured = read_measured_cells(experiment, now, scale, seeds)
        page, *_ = pages.adjust(
            [pages.make_page(experiment, measured), *(pages.make_page(e, read_measured_cells(e, now)) for e in family)]
        )
        _print_page(page, console, say)
        for path in pages.write(pages.render(page, out)):
            say(str(path))
    return queue.failed


def write_pages(id: str | None, folder: Path, results: Path | None, root: Path | None) -> list[Path]:
    """Write the pages of `render_pages`, without training, and return their paths.

    Raises:
        ConfigError: the id is unknown, or an experiment cannot be read.
        RunError: a result is damaged, or a file cannot be written.
    """
    return pages.write(render_pages(id, folder, results, root))


def find_pages(root: Path | None) -> Path:
    """Return the folder of the pages in a clone; ConfigError: the experiments are in no clone."""
    folder = (root or find_home()).parents[1] / "docs" / "reproduction"
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; name the folder of the pages with --pages")
    return folder


def verify_pages(id: str | None, folder: Path, results: Path | None, root: Path | None) -> list[str]:
    """Compute every number and verdict again from the results, and return one sentence for each difference from the pages.

    id: of one experiment only its page, its figures and the pages of verdicts and findings are compared; None: all pages.

    Raises:
        ConfigError, RunError: as `write_pages`. No file is changed.
    """
    differences = []
    for path, text in render_pages(id, folder, results, root).items():
        if not (id in (None, path.stem) or path.name in (pages.VERDICTS, pages.FINDINGS) or path.suffix == ".svg"):
            continue
        printed = path.read_text(encoding="utf-8") if path.exists() else None
        if printed is None:
            differences.append(f"{path} does not exist; `fedmutual reproduce --pages {folder}` writes it")
        elif path.suffix == ".svg" and printed != text:
            differences.append(f"{path} is not drawn from these results")
        elif printed != text:
            before, after = printed.splitlines(), text.splitlines()
            for kind, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
                pairs = zip_longest(before[a:b], after[c:d], fillvalue="") if kind != "equal" else ()
                differences += [f"{path}, line {a + 1}: prints {old!r}, but the results give {new!r}" for old, new in pairs]
    return differences


def render_pages(id: str | None, folder: Path, results: Path | None, root: Path | None) -> dict[Path, str]:
    """Return the pages of the documentation from results: path -> text.

    id: one experiment; None: all. The overview of verdicts covers all experiments. The table of the folder's front page is
    filled in if the page has marks for it. Pages of findings and of the benchmark exist if there are templates for them.

    Raises:
        ConfigError: the id is unknown, or an experiment cannot be read.
        RunError: a result is damaged.
    """
    root = root or find_home()
    if id:
        read_experiment(root, id)  # raises an error for an unknown id
    store = _open_store(root, results or root / RESULTS)
    all_pages = pages.adjust([pages.make_page(e, read_measured_cells(e, store)) for e in read_experiments(root)])
    counts = tables.make_printed_frame((page.experiment, page.measured_cells) for page in all_pages)
    texts: dict[Path, str] = {}
    for page in (page for page in all_pages if id in (None, page.experiment.id)):
        texts |= pages.render(page, folder, ["md"])
    texts[folder / pages.VERDICTS] = pages.render_overview(all_pages)
    texts |= fill_front(folder, pages.render_table(tables.make_printed_table(counts), caption=False))
    of_benchmark = [
        page for page in all_pages if page.experiment.id == benchmark.ID and (root / benchmark.TEMPLATE).exists()
    ]
    pooled = [row for page in of_benchmark for row in benchmark.pool_gains(page.measured_cells).rows]
    gains = {name.text: [f"{e.text} {e.spread}".strip() for e in entries] for name, *entries in pooled}
    texts |= pages.render_findings(all_pages, counts, root, folder, gains)
    for page in of_benchmark:
        texts[folder.parent / benchmark.NAME] = benchmark.render_benchmark(page, root, folder.name)
    return texts


def _open_store(root: Path | None, folder: Path) -> ResultStore:
    """Return the results in a folder, which receives new results, and the results that came with the experiments."""
    shipped = (root or find_home()) / RESULTS
    return ResultStore(*dict.fromkeys((folder.resolve(), shipped.resolve())))


def _print_page(page: pages.Page, console: Console, say: Say) -> None:
    """Print the tables and the verdicts."""
    for table in page.tables:
        say(f"\n{table.caption}")
        console.print(replace(make_sheet(table, notes=True), caption=""))
        for number, note in enumerate(table.footnotes, 1):
            say(f"({number}) {note}")
    for judged in page.judged:
        reading = f" ({judged.title})" if judged.title else ""
        say(f"{judged.claim.text}{reading} {prose.describe_verdict(judged, page.experiment.index.decimals)}")


def fill_front(folder: Path, table: str) -> dict[Path, str]:
    """Return the front page with a table, in Markdown, between the marks: path -> text; {} for a page without marks."""
    path = folder / FRONT
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    head, begun, rest = text.partition(TABLE_BEGIN)
    _, ended, tail = rest.partition(TABLE_END)
    return {path: f"{head}{TABLE_BEGIN}\n\n{table}\n\n{TABLE_END}{tail}"} if begun and ended else {}
