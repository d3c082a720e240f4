"""The end of a command that trained runs: print the tables and the verdict, and write the page."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from fedmutual.cli.terminal import Code, exit_with_error, make_table, out, print_text

if TYPE_CHECKING:
    from fedmutual.studies.sweep import Sweep


def print_comparison(groups: list[tuple[str, list[Path]]], page: Path) -> None:
    """Print the tables and the verdict of each group (name, folders), write the page, and print its path.

    Raises:
        RunError: a folder is not the folder of a run, or is damaged; or the page cannot be written.
    """
    from fedmutual.report.html import write_page
    from fedmutual.report.terminal import make_cost_table, make_headline_tables
    from fedmutual.report.verdicts import find_answers
    from fedmutual.results.comparison import make_comparisons
    from fedmutual.results.frame import read_runs

    groups_of_comparisons = [(name, make_comparisons(read_runs(folders))) for name, folders in groups]
    for name, compared in groups_of_comparisons:
        out.print(f"\n[bold]{escape(name)}[/bold]")
        out.print(make_headline_tables(compared))
        out.print(make_cost_table(compared))
        for line in find_answers(compared):
            print_text(line)
    write_page([comparison for _, compared in groups_of_comparisons for comparison in compared], page)
    print_text(f"\nreport: {page}", soft_wrap=True)


def print_adaptation(folder: Path, page: Path) -> None:
    """Print the table of an adaptation and whether adapting pays, write the page, and print its path.

    Raises:
        RunError: the adaptation is missing, unfinished or damaged; or the page cannot be written.
    """
    from fedmutual.report.adaptation import summarise_adaptation, write_adaptation
    from fedmutual.report.terminal import make_sheet

    table, sentences = summarise_adaptation(folder)
    out.print(make_sheet(table))
    for line in sentences:
        print_text(line)
    write_adaptation(folder, page)
    print_text(f"report: {page}", soft_wrap=True)


def print_sweep(result: "Sweep", file: Path) -> None:
    """Print a table with one line for each setting, what the numbers mean, warnings, and the command for the best setting.

    The table has the main metric on hold-out rows, with 95 % intervals over seeds. Exit with an error if all diverged.
    """
    from fedmutual.config.grid import format_value
    from fedmutual.metric import ACCURACY
    from fedmutual.report.cells import format_spread
    from fedmutual.results.comparison import MODELS
    from fedmutual.results.gains import Gains
    from fedmutual.results.scale import MetricScale
    from fedmutual.studies.sweep import RESULT

    metric = next((tried.metric for tried in result.tried if tried.runs), ACCURACY)
    head = MetricScale(metric=metric)
    is_halved = len({tried.round for tried in result.tried}) > 1
    titles = [
        "setting",
        *(["rounds"] if is_halved else []),
        *(f"hold-out{head.head}\n{name} round" for name in ("last", "best")),
    ]
    if any(tried.local_only for tried in result.tried):
        titles.append(f"personal models over\nlocal-only{head.difference_head}")
    table = make_table(*titles)
    for tried in result.tried:
        if tried.last is None or tried.best is None:
            seeds = "" if len(tried.folders) == 1 else f" ({len(tried.diverged)} of {len(tried.folders)} seeds)"
            cells = [f"diverged{seeds}" if tried.diverged else "n/a"]
        else:
            digits = 2 if tried.examples >= 5000 else 1  # 2: where an example weighs 0.02 % or less
            scale = MetricScale(digits, tried.metric)
            last, best = (
                f"{scale.format_value(e.mean)} {format_spread(e, scale)}".rstrip() for e in (tried.last, tried.best)
            )
            rounds = sorted(set(tried.best_rounds))
            cells = [last, f"{best} ({rounds[0]}{f' to {rounds[-1]}' if len(rounds) > 1 else ''})"]
            if isinstance(tried.gain, Gains):
                gain = tried.gain.estimate
                cells.append(f"{scale.format_gain(gain.mean)} {format_spread(gain, scale)}".rstrip())
        chosen = tried is result.chosen
        if is_halved:
            cells.insert(0, str(tried.round))
        table.add_row(escape(tried.label) + (" *" if chosen else ""), *cells, style="bold" if chosen else "")
    out.print(table)
    if result.chosen is None:
        lines = ["Nothing can be chosen."]
    else:
        models = " or ".join(dict.fromkeys(MODELS[t.model] for t in result.tried if t.model))
        number = len(result.chosen.folders)
        over = f"clients, then over {number} seeds with its 95 % interval" if number > 1 else "clients"
        lines = [
            f"* is best after the last round. {metric.heading} of the {models} on rows held out of the clients' training "
            f"data ({result.chosen.examples:,} in all), mean over {over}; in brackets the best round."
        ]
    lines += [f"warning: {warning}" for warning in result.warnings]
    lines += [f"{tried.label}, seed {seed}: {how}" for tried in result.tried for seed, how in tried.diverged.items()]
    if result.chosen:
        sets = (word for key, value in result.chosen.values.items() for word in ("--set", f"{key}={format_value(value)}"))
        lines += [f"chosen: {result.chosen.label}; run it: {shlex.join(('fedmutual', 'run', str(file), *sets))}"]
    for line in [*lines, f"all trainings: {format_cost(result.budget)}", f"all results: {result.folder / RESULT}"]:
        print_text(line, soft_wrap=True)
    if not result.chosen:
        if result.unscored:
            exit_with_error(result.failure, Code.BAD_INPUT)
        exit_with_error(f"{result.failure}. A smaller optimizer.lr is the usual fix", Code.DIVERGED)


def format_cost(cost: Mapping[str, int | None]) -> str:
    """Return the cost of all trainings of a sweep in words: "12 runs, 40 rounds, 1,200 gradient steps, 3.1 MB"."""
    from fedmutual.errors import format_count
    from fedmutual.results.scale import format_size

    counts = {"runs": "run", "rounds": "round", "steps": "gradient step"}
    known = {key: number for key, number in cost.items() if number is not None}
    words = [format_count(known[key], word) for key, word in counts.items() if key in known]
    sent = sum(known.get(key, 0) for key in ("down", "up"))
    return ", ".join([*words, *([f"{format_size(sent)} sent and received"] if sent else [])])


def print_worth(runs: list[Path], folder: Path, as_json: bool = False, joining: str | None = None) -> None:
    """Print what participants give to each other, or what one gains by joining, and write page and JSON into the folder.

    Raises:
        RunError: runs are missing or damaged, or differ in more than who takes part; or a file cannot be written.
    """
    from fedmutual.files import write_json
    from fedmutual.report import worth as report
    from fedmutual.report.terminal import make_sheet
    from fedmutual.results.frame import read_runs
    from fedmutual.results.worth import Worth

    facts = read_runs(runs)
    worth = Worth(facts)
    if joining is None:
        place, title = folder / "worth", f"Worth of the participants of {worth.name}"
        sentences, tables, record = report.find_worth(worth), report.make_worth_tables(worth), report.describe_worth(worth)
    else:
        place, title = folder / "join", f"Does {joining} gain by joining {worth.name}?"
        joined = (worth, joining, *worth.judge_joining(joining, [run for run in facts if not run.role.federates]))
        sentences, tables = report.find_joining(*joined), [report.make_joining_table(*joined[:3])]
        record = report.describe_joining(*joined)
    page, file = place.with_suffix(".html"), place.with_suffix(".json")
    report.write_worth(worth, title, sentences, tables, page)
    write_json(file, record)
    if as_json:
        typer.echo(json.dumps(record))
        return
    out.print(make_sheet(tables[0]))
    for line in sentences:
        print_text(line)
    print_text(f"{file}; page: {page}", soft_wrap=True)
