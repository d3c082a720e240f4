"""The commands that train: run, compare, sweep and demo."""

import shlex
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

import fedmutual
from fedmutual.cli import conclude
from fedmutual.cli import demo as demo_plan
from fedmutual.cli.arguments import By, File, Grid, Jobs, Methods, Resume, Seeds, Set, TrustCode, Tune, read_config
from fedmutual.cli.terminal import (
    Code,
    exit_with_error,
    format_resume_command,
    out,
    print_text,
    show_progress,
)
from fedmutual.engines.child_process import expect_workers, start_fork_server_early
from fedmutual.role import LOCAL_ONLY


def run(
    file: File,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The run's folder; the default is runs/NAME.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Train one experiment, and write scores, bytes and models into a folder. The run can be resumed.

    Example: `fedmutual run mnist.toml --set rounds=50 --set algorithm.name=fedavg`
    """
    from fedmutual.studies.run import train_run

    config = read_config(file, set or [])
    folder = out_folder or Path("runs") / config.name
    expect_workers([config.engine.name])
    with show_progress(format_resume_command("run", set, folder, str(file))) as watch:
        finished = train_run(config, folder, resume, [watch.observe("")])
    if config.records.evaluate_on == "holdout":
        print_text(
            f"{finished.folder}: only hold-out rows were scored; metrics.jsonl has the scores that clients share",
            soft_wrap=True,
        )
        return
    from fedmutual.config.methods import find_method
    from fedmutual.report.terminal import make_headline_tables

    out.print(make_headline_tables([folder]))
    if find_method(config.algorithm["name"]).role.federates:
        print_text(
            f"`{_format_compare_command(config.algorithm['name'], file, set or [])}` shows the gain over training alone",
            soft_wrap=True,
        )
    print_text(
        f"{finished.folder}: "
        f"`{shlex.join(('fedmutual', 'report', str(finished.folder), '-o', 'report.html'))}` makes its page"
    )


def compare(
    file: File,
    methods: Methods = None,
    seeds: Seeds = 3,
    tune: Tune = None,
    jobs: Jobs = None,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/NAME-compare.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Does a federation improve my models? Compare methods with local-only training over several seeds, and write a page.

    Runs: OUT/METHOD/SEED, page: OUT/report.html. `--set algorithm.KEY=VALUE` applies to the methods that have KEY.
    `--tune 8` lets each method try 8 settings on hold-out rows first; keys that `--set` names are not tuned.
    """
    from fedmutual.cli.methods import choose_methods, tune_methods
    from fedmutual.config import parse_override
    from fedmutual.studies.compare import compare as train_methods

    config, names, method_settings = choose_methods(file, methods, dict(parse_override(text) for text in set or ()))
    expect_workers([config.engine.name], jobs)
    folder = out_folder or Path("runs") / f"{config.name}-compare"
    chosen = () if methods is None else ("--methods", methods)
    words = (*chosen, "--seeds", str(seeds), *(() if tune is None else ("--tune", str(tune))))
    command = format_resume_command("compare", set, folder, str(file), *words)
    tuned = None
    if tune is not None:
        tuned = tune_methods(config, names, tune, folder, resume, command, method_settings, set or [], jobs)
    with show_progress(command, runs=len(names) * seeds) as watch:
        runs = train_methods(config, names, seeds, folder, resume, watch.observe, method_settings, tuned, jobs)
    conclude.print_comparison([(config.name, [run.folder for run in runs])], folder / "report.html")


def sweep(
    file: File,
    set: Grid = None,
    seeds: Seeds = 1,
    by: Annotated[
        By | None,
        typer.Option(
            help="The model whose hold-out score chooses; unset, the model that a client would use.", show_default=False
        ),
    ] = None,
    jobs: Jobs = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/NAME-sweep.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Which setting is best? Train every combination of values; choose by data held out of training, never by test data.

    Example: `fedmutual sweep mnist.toml --set optimizer.lr=0.003,0.01,0.03 --set rounds=10`

    The best setting has the best score after the last round, because `run` ends with that model. A warning names settings
    whose personal models are worse than after local-only training. Runs: OUT/SETTING/SEED, all results: OUT/sweep.json.
    """
    from fedmutual.cli.sweep import format_conclusion, make_sweep_table
    from fedmutual.config.grid import read_grid
    from fedmutual.rundir.text import format_holdout_scores
    from fedmutual.studies.sweep import train_sweep
    from fedmutual.studies.sweep_plan import plan_sweep

    plan = plan_sweep(file, read_grid(set or []), seeds, by.value if by else None, out_folder)
    expect_workers([setting.config.engine.name for setting in plan.combinations], jobs)
    chosen_by = ("--by", by.value) if by else ()
    command = format_resume_command("sweep", set, plan.study.out, str(file), "--seeds", str(seeds), *chosen_by)
    with show_progress(command, format_holdout_scores, runs=len(plan.study.runs)) as watch:
        result = train_sweep(plan, resume, watch.observe, jobs)
    out.print(make_sweep_table(result))
    for line in format_conclusion(result, file):
        print_text(line, soft_wrap=True)
    if not result.chosen:
        exit_with_error("every setting diverged. A smaller optimizer.lr is the usual fix", Code.DIVERGED)


def demo(
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/demo.")] = None,
    seeds: Seeds = 5,
    jobs: Jobs = None,
    resume: Resume = False,
) -> None:
    """Does federated mutual learning improve models of handwritten digits, for which clients, and with how many bytes?

    Two experiments: clients with few images and different networks, where mutual learning pays; clients with different
    digits, where mutual learning gains little.
    """
    folder = out_folder or Path("runs") / "demo"
    if demo_plan.is_finished(folder) and not resume:
        demo_plan.print_finished(folder, seeds)
        return
    demo_plan.print_plan(folder, seeds)
    start_fork_server_early()  # its imports, which take seconds, run beside those below
    from fedmutual.studies.compare import compare as train_methods

    groups = []
    with show_progress(
        format_resume_command("demo", None, folder, "--seeds", str(seeds)), runs=demo_plan.count_runs(seeds)
    ) as watch:
        for name, methods in demo_plan.EXPERIMENTS.items():
            with as_file(files("fedmutual") / "demo" / f"{name}.toml") as file:
                config = fedmutual.load_config(file)
            runs = train_methods(config, list(methods), seeds, folder / name, resume, watch.observe, jobs=jobs)
            groups.append((name, [run.folder for run in runs]))
    conclude.print_comparison(groups, folder / demo_plan.PAGE)


def _format_compare_command(method: str, file: Path, settings: list[str]) -> str:
    """Return the command that compares a run's method with local-only training, with the settings of the run."""
    sets = [word for text in settings if text.partition("=")[0].strip() != "algorithm.name" for word in ("--set", text)]
    return shlex.join(("fedmutual", "compare", str(file), "--methods", f"{method},{LOCAL_ONLY}", *sets))
