"""The commands. Each reads its arguments, calls the library, and says what came out; nothing is computed here."""

import shlex
import sys
import warnings
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedmutual
from fedmutual.cli import audit, conclude, privacy, sites
from fedmutual.cli import demo as demo_plan
from fedmutual.cli.arguments import By, File, Grid, Methods, Resume, Seeds, Set, TrustCode, read_config
from fedmutual.cli.data import app as data_app
from fedmutual.cli.terminal import (
    Code,
    exit_with_error,
    format_resume_command,
    out,
    print_text,
    print_warning,
    show_progress,
)
from fedmutual.errors import ConfigError, UserError

if TYPE_CHECKING:
    from fedmutual import Config
    from fedmutual.cli.progress import ProgressDisplay

app = typer.Typer(
    name="fedmutual",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated mutual learning: participants that differ in data, in model and in objective teach each other.\n\n"
    "Start with `fedmutual demo`; then `fedmutual compare FILE.toml` tells whether federating pays on your data, and "
    "`fedmutual sweep FILE.toml --set KEY=V1,V2` which settings are best.\n\n"
    "Exit codes: 0 done, 2 bad input, 3 a client diverged or a federation did not finish, 4 a reply was refused at the "
    "privacy boundary or participants hold different public data, 130 stopped by hand, 143 told to stop (SIGTERM).",
)
app.add_typer(data_app, name="data")

NOTHING_TO_GAIN = ("independent", "centralised")  # training alone, and what is no federation
SITES = "Real sites (with the extra fedmutual\\[sites])"


@app.command()
def run(
    file: File,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The run's folder; else runs/NAME.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Train one experiment into a folder: scores, bytes, models, all of it resumable.

    Example: `fedmutual run mnist.toml --set rounds=50 --set algorithm.name=fedavg`
    """
    config = read_config(file, set or [])
    folder = out_folder or Path("runs") / config.name
    with show_progress(format_resume_command("run", set, folder, str(file))) as watch:
        done = fedmutual.run(config, folder, resume=resume, observers=[watch.of("")])
    if config.records.evaluate_on == "holdout":
        print_text(
            f"{done.folder}: hold-out rows alone were scored; metrics.jsonl has the scores that clients share",
            soft_wrap=True,
        )
        return
    from fedmutual.report import headline

    out.print(headline([folder]))
    if config.algorithm["name"] not in NOTHING_TO_GAIN:
        print_text(
            f"`{_against_alone(config.algorithm['name'], file, set or [])}` tells the gain over training alone",
            soft_wrap=True,
        )
    print_text(
        f"{done.folder}: `{shlex.join(('fedmutual', 'report', str(done.folder), '-o', 'report.html'))}` makes a page of it"
    )


@app.command()
def compare(
    file: File,
    methods: Methods = "fml,fedavg,fedprox,independent",
    seeds: Seeds = 3,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; else runs/NAME-compare.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Does it pay on my data? Several methods over several seeds, local-only beside them, and a page that says so.

    Runs go to OUT/METHOD/SEED, the page to OUT/report.html. `--set algorithm.KEY=VALUE` goes to the methods that have KEY.
    """
    from fedmutual.config import load_compared, parse_override

    names = _names(methods)
    config, own = load_compared(file, names, dict(parse_override(text) for text in set or ()))
    folder = out_folder or Path("runs") / f"{config.name}-compare"
    command = format_resume_command("compare", set, folder, str(file), "--methods", methods, "--seeds", str(seeds))
    with show_progress(command, runs=len(names) * seeds) as watch:
        folders = _compare(config, names, seeds, folder, resume, watch, own)
    conclude.print_comparison([(config.name, folders)], folder / "report.html")


@app.command()
def sweep(
    file: File,
    set: Grid = None,
    seeds: Seeds = 1,
    by: Annotated[
        By | None,
        typer.Option(help="Whose hold-out score chooses; unset, of the model that a client would use.", show_default=False),
    ] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; else runs/NAME-sweep.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Which setting is best? Every combination of some values, judged on data held out of training, never on test.

    Example: `fedmutual sweep mnist.toml --set optimizer.lr=0.003,0.01,0.03 --set rounds=10`

    The best scores highest after the last round, which is the model that `run` ends with. Where a setting makes personal
    models worse than local-only training, trained beside it, that is said. Runs go to OUT/SETTING/SEED, and all that was
    found to OUT/sweep.json.
    """
    from fedmutual.cli.sweep import make_sweep_table, print_conclusion
    from fedmutual.config.grid import read_grid
    from fedmutual.rundir.text import holdout_line
    from fedmutual.studies.sweep import carry_out, plan_sweep

    made = plan_sweep(file, read_grid(set or []), seeds, by.value if by else None)
    folder = out_folder or Path("runs") / f"{made.name}-sweep"
    chosen_by = ("--by", by.value) if by else ()
    with show_progress(
        format_resume_command("sweep", set, folder, str(file), "--seeds", str(seeds), *chosen_by), holdout_line
    ) as watch:
        found = carry_out(made, folder, resume, watch.of)
    out.print(make_sweep_table(found))
    for line in print_conclusion(found, file):
        print_text(line, soft_wrap=True)
    if not found.chosen:
        exit_with_error("every setting diverged. A smaller optimizer.lr is the usual mend", Code.DIVERGED)


@app.command()
def demo(
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; else runs/demo.")] = None,
    seeds: Seeds = 5,
    resume: Resume = False,
) -> None:
    """Real handwritten digits, in under two minutes: does federated mutual learning pay, for whom, and what crossed?

    Two experiments: participants with different digits; participants with different networks and few images each.
    """
    folder = out_folder or Path("runs") / "demo"
    if demo_plan.is_finished(folder) and not resume:
        demo_plan.print_finished(folder, seeds)
        return
    demo_plan.print_plan(folder, seeds)
    groups = []
    with show_progress(
        format_resume_command("demo", None, folder, "--seeds", str(seeds)), runs=demo_plan.count_runs(seeds)
    ) as watch:
        for name, methods in demo_plan.EXPERIMENTS.items():
            with as_file(files("fedmutual") / "demo" / f"{name}.toml") as file:
                config = fedmutual.load_config(file)
            groups.append((name, _compare(config, list(methods), seeds, folder / name, resume, watch)))
    conclude.print_comparison(groups, folder / demo_plan.PAGE)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder that `compare` or `adapt` made.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained page of runs: scores with intervals, curves, who gains, what crossed. Trains nothing."""
    from fedmutual.report import find_runs, headline, read_runs, verdict, write_report

    named = list({path.resolve(): path for path in runs}.values())
    adapted = [path for path in named if (path / "adapt.json").is_file() and not (path / "config.toml").is_file()]
    if adapted and len(named) == 1:
        conclude.print_adaptation(named[0], output)
        return
    found = read_runs(folder for path in named for folder in find_runs(path))
    write_report(found, output)
    out.print(headline(found))
    for line in verdict(found):
        print_text(line)
    if held_out := [run.folder for run in found if run.held_out]:
        print_text(f"left out, for hold-out rows alone were scored there: {', '.join(map(str, held_out))}", soft_wrap=True)
    print_text(f"report: {output}", soft_wrap=True)


@app.command()
def reproduce(
    id: Annotated[str | None, typer.Argument(metavar="ID", help="The experiment.", show_default=False)] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List all experiments, and train nothing.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only cells so called, e.g. `mnist/*`; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0, 1, ...; else 3 of them.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="At most so many; all that comes of it is marked.")] = None,
    engine: Annotated[str | None, typer.Option(help="Who does the work, as engine.name.")] = None,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; else runs/reproduce.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Where results are kept, and found format_resume_command; else OUT/results.")
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write the page of ID, or of all, and verdicts.md, from results; train nothing."
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option("--experiments", help="Another folder of experiments.")] = None,
    trust_code: TrustCode = False,
) -> None:
    """An experiment of the papers: trained over seeds, told beside the paper's numbers, with a verdict on each claim.

    What is known is not trained again; what was stopped goes on: give the same command. `--set` changes a key of every run,
    and what comes of it is marked, unless it only says how this machine works, as engine.threads and data.root do.
    Several processes with the same command share the work.

    Example: `fedmutual reproduce table1 --only 'mnist/*' --rounds 50`
    """
    from fedmutual.cli import reproduce as command
    from fedmutual.config import parse_override

    of_training = {
        "--only": only,
        "--seeds": seeds,
        "--rounds": rounds,
        "--engine": engine,
        "--set": set,
        "--out": out_folder,
    }
    if list_them:
        others = {"ID": id, **of_training, "--results": results, "--pages": pages}
        command.without("--list lists all experiments", others)
        return command.listed(root, out)
    if pages is not None:
        command.without("--pages writes from results alone", of_training)
        for path in command.write_pages(id, pages, results, root):
            print_text(str(path), soft_wrap=True)
        return None
    changed = dict(parse_override(text) for text in set or ()) | ({"engine.name": engine} if engine else {})
    with show_progress(f"{shlex.join(('fedmutual', *sys.argv[1:]))}") as watch:
        folder = out_folder or Path("runs") / "reproduce"
        name = command.one_of(id)
        failed = command.train(name, only or (), seeds or 3, rounds, changed, folder, results, root, watch.of, out)
    if failed:
        exit_with_error(f"{len(failed)} runs have no numbers: {'; '.join(failed)}", Code.DIVERGED)
    return None


@app.command()
def adapt(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run whose shared model is adapted; it is only read.")],
    data: Annotated[Path, typer.Option("--data", metavar="NEWCOMER.toml", help="The newcomer's data, network, training.")],
    fedavg: Annotated[Path | None, typer.Option(help="A FedAvg run to fine-tune; else RUN's shared model is.")] = None,
    examples: Annotated[str, typer.Option(help="Training examples, separated by commas.")] = "50,100,all",
    seeds: Seeds = 3,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; else the file's.")] = None,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; else runs/NAME-adapt.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """A newcomer takes a run's shared model on: does adapting it by mutual learning pay, and with how many examples?

    Beside it the newcomer trains from scratch, and fine-tunes. Runs go to OUT/WAY/EXAMPLES/SEED, a page to OUT/report.html.
    """
    from fedmutual.config import parse_override
    from fedmutual.studies import adapt, newcomer

    overrides = dict(parse_override(text) for text in set or ()) | ({} if rounds is None else {"rounds": rounds})
    words = ["--data", str(data), "--examples", examples, "--seeds", str(seeds)]
    words += [word for key, value in (("--fedavg", fedavg), ("--rounds", rounds)) if value for word in (key, str(value))]
    folder, sizes = (
        out_folder or Path("runs") / f"{newcomer.name_newcomer(data, overrides)}-adapt",
        adapt.parse_sizes(examples),
    )
    with show_progress(format_resume_command("adapt", set, folder, str(run), *words)) as watch:
        adapt.adapt(run, data, folder, sizes, seeds, fedavg, resume, overrides, watch.of)
    conclude.print_adaptation(folder, folder / "report.html")


@app.command()
def predict(
    run_or_model: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, or a model file in it.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Images; or CSV or npz files, for runs on such data.")
    ],
    client: Annotated[str | None, typer.Option(help="Whose personal model answers; else the shared model does.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="As it was after its best round (records.keep_best); else after the last.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON an example, for scripts.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Classify new examples, scaled as in training, and say which model answered.

    Who has no model of its own is served by the shared one. Example: `fedmutual predict runs/x scan.png --client 3`
    """
    from fedmutual.cli import answers

    found = fedmutual.predict(run_or_model, files, client, best)
    if as_json:
        for prediction in found:
            typer.echo(answers.format_json_line(prediction))
        return
    print_text(f"answered by: {found[0].model}")
    out.print(answers.format_answers(found))


app.command()(privacy.privacy)
app.command()(audit.audit)
app.command(rich_help_panel=SITES)(sites.provision)
app.command(rich_help_panel=SITES)(sites.server)
app.command(rich_help_panel=SITES)(sites.site)
app.command(rich_help_panel=SITES)(sites.submit)
app.command(rich_help_panel=SITES)(sites.status)
app.command("stop", rich_help_panel=SITES)(sites.stop_federation)
app.command(rich_help_panel=SITES)(sites.doctor)
app.command(rich_help_panel=SITES)(sites.ledger)


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(metavar="WHAT", help="algorithms, models, data, experiments or keys", show_default=False)
    ] = None,
) -> None:
    """List what can be named: algorithms, models, data, experiments; or every key, its type, default and meaning."""
    from fedmutual import data, models
    from fedmutual.config import reference

    if what == "keys":
        from fedmutual.sites import reference as of_sites

        print_text(f"{reference.render_page()}\n\n{of_sites.render_sites_page()}", soft_wrap=True)
        return
    if what == "experiments":
        reproduce(list_them=True)
        return
    lists: dict[str, dict[str, str]] = {
        "algorithms": reference.describe_algorithms(),
        "models": models.NAMES,
        "data": data.NAMES,
    }
    words = f"{', '.join(lists)}, experiments or keys"
    if what is None:
        raise ConfigError(f"say what to list: {words}")
    if what not in lists:
        raise ConfigError(f"there is nothing to list called {what!r}; name {words}")
    for name, about in lists[what].items():
        out.print(f"[bold]{name:14}[/bold] ", end="")
        print_text(about)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options before a command."""
    if version:
        out.print(fedmutual.__version__, highlight=False)
        raise typer.Exit


def main() -> None:
    """The entry point: what a user did wrong becomes one sentence and an exit code."""
    from fedmutual.engines import allocator

    warnings.showwarning = print_warning  # type: ignore[assignment]
    allocator.keep_freed_memory()
    try:
        app()
    except UserError as problem:
        exit_with_error(problem, Code.BAD_INPUT)


def _against_alone(method: str, file: Path, settings: list[str]) -> str:
    """The command that holds a run's method against training alone, with all that was set for the run."""
    sets = [word for text in settings if text.partition("=")[0].strip() != "algorithm.name" for word in ("--set", text)]
    return shlex.join(("fedmutual", "compare", str(file), "--methods", f"{method},independent", *sets))


def _names(methods: str) -> list[str]:
    return [name.strip() for name in methods.split(",") if name.strip()]


def _compare(
    config: "Config",
    methods: list[str],
    seeds: int,
    folder: Path,
    resume: bool,
    watch: "ProgressDisplay",
    own: dict[str, Any] | None = None,
) -> list[Path]:
    from fedmutual.studies.compare import compare as compare_all

    return [r.folder for r in compare_all(config, methods, seeds, folder, resume, watch.of, own)]
