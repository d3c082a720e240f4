"""What a command that trained prints at its end: the table, the answer in one sentence, and the page's path."""

from pathlib import Path

from rich.markup import escape

from fedmutual.cli.terminal import out, print_text


def print_comparison(groups: list[tuple[str, list[Path]]], page: Path) -> None:
    """Write the page; print the tables, the answer and the page's path."""
    from fedmutual.report import headline, make_cost_table, read_runs, verdict, write_report

    found = [(name, read_runs(folders)) for name, folders in groups]
    for name, runs in found:
        out.print(f"\n[bold]{escape(name)}[/bold]")
        out.print(headline(runs))
        out.print(make_cost_table(runs))
        for line in verdict(runs):
            print_text(line)
    write_report([run for _, runs in found for run in runs], page)
    print_text(f"\nreport: {page}", soft_wrap=True)


def print_adaptation(folder: Path, page: Path) -> None:
    """The table, whether adapting pays, and the page's path."""
    from fedmutual.report import adapted, write_adaptation

    table, sentences = adapted(folder)
    out.print(table)
    for line in sentences:
        print_text(line)
    write_adaptation(folder, page)
    print_text(f"report: {page}", soft_wrap=True)
