"""The commands. Each command reads its arguments, calls the library and prints the result; nothing is computed here."""

import json
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

import fedmutual
from fedmutual.cli import conclude, data, leads, predictions, privacy, sites, training
from fedmutual.cli.arguments import Resume, Seeds, Set, TrustCode, parse_settings
from fedmutual.cli.terminal import (
    Code,
    err,
    exit_with_error,
    out,
    print_text,
    print_warning,
    show_progress,
)
from fedmutual.engines.child_process import start_fork_server_early
from fedmutual.errors import ConfigError, UserError

app = typer.Typer(
    name="fedmutual",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated mutual learning: participants that differ in data, in model and in objective teach each other.\n\n"
    "Start with `fedmutual demo`; then `fedmutual compare FILE.toml` shows whether federating pays on your data, and "
    "`fedmutual sweep FILE.toml --set KEY=V1,V2` shows which settings are best.\n\n"
    "Exit codes: 0 done, 2 bad input, 3 a client diverged or a federation did not finish, 4 a reply was refused at the "
    "privacy boundary or participants hold different public data, 130 stopped by hand, 143 stopped by SIGTERM.",
)
app.add_typer(data.app, name="data")
app.command()(training.run)
app.command()(training.compare)
app.command()(training.sweep)
app.command()(training.worth)
app.command()(training.demo)

SITES = "Real sites (with the extra fedmutual\\[sites])"


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder that `compare` or `adapt` made.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of the table as JSON, for scripts.")] = False,
) -> None:
    """Write one self-contained page about runs: scores with intervals, curves, gains and bytes. Trains nothing."""
    from fedmutual.report.html import write_page
    from fedmutual.report.terminal import list_comparisons, make_headline_tables
    from fedmutual.report.verdicts import find_answers
    from fedmutual.results.comparison import make_comparisons
    from fedmutual.results.frame import find_runs, read_runs
    from fedmutual.rundir.file_names import ADAPT, CONFIG

    named = list({path.resolve(): path for path in runs}.values())
    adapted = [path for path in named if (path / ADAPT).is_file() and not (path / CONFIG).is_file()]
    if adapted and len(named) == 1:
        if as_json:
            raise ConfigError(f"{named[0]}: --json prints the table of runs, and this is an adaptation; read its {ADAPT}")
        conclude.print_adaptation(named[0], output)
        return
    run_list = read_runs(folder for path in named for folder in find_runs(path))
    compared = make_comparisons(run_list)
    write_page(compared, output)
    if as_json:
        typer.echo(json.dumps(list_comparisons(compared)))
        err.print(f"report: {output}", soft_wrap=True, highlight=False, markup=False)
        return
    out.print(make_headline_tables(compared))
    for line in find_answers(compared):
        print_text(line)
    if held_out := [run.folder for run in run_list if run.held_out]:
        print_text(f"left out, only their hold-out rows were scored: {', '.join(map(str, held_out))}", soft_wrap=True)
    print_text(f"report: {output}", soft_wrap=True)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def reproduce(context: typer.Context) -> None:
    """Train an experiment of the papers over seeds; show our numbers beside the paper's, with a verdict on each claim."""
    command = typer.main.get_command(load_reproduce())
    with command.make_context("reproduce", context.args, context.parent) as of_command:
        command.invoke(of_command)


def load_reproduce() -> typer.Typer:
    """Return the command `reproduce` of the distribution fedmutual-papers, which is imported only when it is needed.

    Raises:
        ConfigError: the distribution is not installed.
    """
    for entry in entry_points(group="fedmutual.commands", name="reproduce"):
        command: typer.Typer = entry.load()
        return command
    raise ConfigError(
        "the papers' experiments come with the distribution fedmutual-papers; run `pip install CLONE/papers`, with the "
        "path of a clone of fedmutual"
    )


@app.command()
def adapt(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run whose shared model is adapted; the run is not changed.")
    ],
    newcomer: Annotated[
        Path, typer.Option("--data", metavar="NEWCOMER.toml", help="The newcomer's data, network, training.")
    ],
    fedavg: Annotated[
        Path | None, typer.Option(help="A FedAvg run to fine-tune; the default is the shared model of RUN.")
    ] = None,
    examples: Annotated[str, typer.Option(help="Numbers of training examples, separated by commas.")] = "50,100,all",
    seeds: Seeds = 3,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; the default is that of the file.")] = None,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/NAME-adapt.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Adapt a trained shared model to a new client: does mutual learning pay, and with how many examples?

    The newcomer also trains from scratch, and fine-tunes. Runs: OUT/WAY/EXAMPLES/SEED, page: OUT/report.html.
    """
    from fedmutual.studies import adapt

    overrides = parse_settings(set) | ({} if rounds is None else {"rounds": rounds})
    folder = out_folder or Path("runs") / f"{adapt.name_newcomer(newcomer, overrides)}-adapt"
    sizes = adapt.parse_sizes(examples)
    start_fork_server_early()
    with show_progress() as watch:
        adapt.adapt(run, newcomer, folder, sizes, seeds, fedavg, resume, overrides, watch.observe)
    conclude.print_adaptation(folder, folder / "report.html")


app.command()(predictions.predict)
app.command()(predictions.export)
app.command()(predictions.score)
app.command()(data.stats)
app.command()(privacy.privacy)
app.command()(privacy.audit)
app.command(rich_help_panel=SITES)(sites.provision)
app.command(rich_help_panel=SITES)(sites.server)
app.command(rich_help_panel=SITES)(sites.site)
app.command(rich_help_panel=SITES)(leads.submit)
app.command(rich_help_panel=SITES)(leads.status)
app.command("stop", rich_help_panel=SITES)(leads.stop_federation)
app.command(rich_help_panel=SITES)(leads.export_job)
app.command(rich_help_panel=SITES)(leads.flower_app)
app.command(rich_help_panel=SITES)(sites.doctor)
app.command(rich_help_panel=SITES)(sites.leave)
app.command(rich_help_panel=SITES)(sites.ledger)
app.command(rich_help_panel=SITES)(sites.watch)


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help="algorithms, methods (a table of all), models, data, experiments, keys, or one algorithm's name",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the known algorithms, models, data sets or experiments; every key; or one algorithm's settings."""
    from fedmutual import data, models
    from fedmutual.algorithms import ALGORITHMS
    from fedmutual.config import reference

    if what == "experiments":
        typer.main.get_command(load_reproduce()).main(["--list"], standalone_mode=False)
    elif what == "keys":
        from fedmutual.sites import reference as of_sites

        print_text(f"{reference.render_page()}\n\n{of_sites.render_sites_page()}", soft_wrap=True)
    elif what == "methods":
        from fedmutual.sites import reference as of_sites

        print_text(of_sites.render_methods(), soft_wrap=True)
    elif what is not None and (what in ALGORITHMS or ":" in what):
        print_text("\n".join(reference.describe_algorithm(what)), soft_wrap=True)
    else:
        lists = {"algorithms": reference.describe_algorithms(), "models": models.NAMES, "data": data.NAMES}
        if what not in lists:
            names = f"name {', '.join(lists)}, experiments, keys, methods or an algorithm, your own as module:Class"
            raise ConfigError(names if what is None else f"there is nothing to list called {what!r}; {names}")
        for name, about in lists[what].items():
            out.print(f"[bold]{name:14}[/bold] ", end="")
            print_text(about)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Handle the options before a command."""
    if version:
        out.print(fedmutual.__version__, highlight=False)
        raise typer.Exit


def main() -> None:
    """Run a command. A mistake of the user becomes one sentence and an exit code."""
    from fedmutual.engines import allocator

    warnings.showwarning = print_warning  # type: ignore[assignment]
    allocator.keep_freed_memory()
    try:
        app()
    except UserError as problem:
        exit_with_error(problem, Code.BAD_INPUT)
