"""The end of a command that trained runs: print the tables and the verdict, and write the page."""

from pathlib import Path

from rich.markup import escape

from fedmutual.cli.terminal import out, print_text


def print_comparison(groups: list[tuple[str, list[Path]]], page: Path) -> None:
    """Print the tables and the verdict of each group (name, folders), write the page, and print its path.

    Raises:
        RunError: a folder is not the folder of a run, or is damaged; or the page cannot be written.
    """
    from fedmutual.report.html import write_report
    from fedmutual.report.terminal import make_cost_table, make_headline_tables
    from fedmutual.report.verdicts import find_answers
    from fedmutual.results.frame import read_runs

    groups_of_runs = [(name, read_runs(folders)) for name, folders in groups]
    for name, runs in groups_of_runs:
        out.print(f"\n[bold]{escape(name)}[/bold]")
        out.print(make_headline_tables(runs))
        out.print(make_cost_table(runs))
        for line in find_answers(runs):
            print_text(line)
    write_report([run for _, runs in groups_of_runs for run in runs], page)
    print_text(f"\nreport: {page}", soft_wrap=True)


def print_adaptation(folder: Path, page: Path) -> None:
    """Print the table of an adaptation and whether adapting pays, write the page, and print its path.

    Raises:
        RunError: the adaptation is missing, unfinished or damaged; or the page cannot be written.
    """
    from fedmutual.report.adaptation import summarise_adaptation, write_adaptation

    table, sentences = summarise_adaptation(folder)
    out.print(table)
    for line in sentences:
        print_text(line)
    write_adaptation(folder, page)
    print_text(f"report: {page}", soft_wrap=True)
