"""The command `fedmutual reproduce`, which `fedmutual` finds by the entry point of this distribution."""

from pathlib import Path
from typing import Annotated

import typer

from fedmutual.cli.arguments import Jobs, Set, TrustCode
from fedmutual.cli.terminal import Code, exit_with_error, out, print_text, show_progress
from fedmutual.engines.child_process import expect_workers

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def reproduce(
    id: Annotated[str | None, typer.Argument(metavar="ID", help="The experiment.", show_default=False)] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List all experiments, and train nothing.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only the cells with such names, e.g. `mnist/*`; may be repeated."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="The number of seeds of each cell; the default is 3.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The most rounds of a run; shortened results are marked.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="The engine, as the key engine.name.")] = None,
    jobs: Jobs = None,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/reproduce.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="The folder of results, read and written; the default is OUT/results.")
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the page of ID, or of all experiments, and verdicts.md from results; train nothing.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compute the numbers and verdicts of ID, or of all experiments, again from results, and compare them with "
            "the pages in --pages FOLDER, in a clone docs/reproduction; write nothing.",
        ),
    ] = False,
    root: Annotated[Path | None, typer.Option("--experiments", help="Another folder of experiments.")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Train an experiment of the papers over seeds; show our numbers beside the paper's, with a verdict on each claim.

    Runs with results are not trained again; to resume a stopped command, give it again. `--set` changes a key of every run,
    and the changed results are marked, unless the key affects only the machine, for example engine.threads and data.root.
    Several processes with one command share the work.

    Example: `fedmutual reproduce table1 --only 'mnist/*' --rounds 50`
    """
    from fedmutual.config import parse_override
    from fedmutual.errors import ConfigError, format_count
    from fedmutual_papers import reproduce as command

    options: dict[str, object] = {
        "--only": only,
        "--seeds": seeds,
        "--rounds": rounds,
        "--engine": engine,
        "--jobs": jobs,
        "--set": set,
    }
    options |= {"--out": out_folder, "ID": id, "--results": results, "--pages": pages}
    reason = "--verify only compares" if verify else "--pages writes from results alone" if pages is not None else ""
    used = ("ID", "--results", "--pages") if reason else tuple(options)
    if list_them:
        reason, used = "--list lists all experiments", ()
    if unused := [name for name, value in options.items() if value and name not in used]:
        raise ConfigError(f"{reason}; remove {unused[0]}")
    if list_them:
        return command.print_experiments(root, out)
    if verify:
        differences = command.verify_pages(id, pages or command.find_pages(root), results, root)
        for difference in differences:
            print_text(difference, soft_wrap=True)
        if differences:
            lines, differ = format_count(len(differences), "line"), "differs" if len(differences) == 1 else "differ"
            exit_with_error(f"{lines} of the pages {differ} from the results", Code.BAD_INPUT)
        return None
    if pages is not None:
        for path in command.write_pages(id, pages, results, root):
            print_text(str(path), soft_wrap=True)
        return None
    changed = dict(parse_override(text) for text in set or ()) | ({"engine.name": engine} if engine else {})
    expect_workers([changed.get("engine.name", "auto")], jobs)
    folder = out_folder or Path("runs") / "reproduce"
    with show_progress(option="") as watch:
        failed = command.train(id, only or (), seeds or 3, rounds, changed, folder, results, root, watch.observe, out, jobs)
    if failed:
        exit_with_error(f"{len(failed)} runs have no numbers: {'; '.join(failed)}", Code.DIVERGED)
    return None
