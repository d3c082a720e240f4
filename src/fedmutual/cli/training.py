"""The commands that train: run, compare, worth, sweep and demo. `demo` prints before torch is imported, which takes long."""

import shlex
from importlib.resources import as_file, files
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fedmutual
from fedmutual.cli import conclude
from fedmutual.cli.arguments import (
    By,
    File,
    Grid,
    Halving,
    Jobs,
    Methods,
    Resume,
    Runs,
    Seeds,
    Set,
    TrustCode,
    Tune,
    parse_names,
    parse_settings,
    read_config,
)
from fedmutual.cli.terminal import err, out, print_text, show_progress
from fedmutual.engines.child_process import expect_workers, start_fork_server_early
from fedmutual.errors import ConfigError, join_words
from fedmutual.role import LOCAL_ONLY
from fedmutual.settings import MOST_COALITION_RUNS, MOST_TRIALS

if TYPE_CHECKING:
    from fedmutual import Config


EXPERIMENTS = {
    "different-networks": (
        ("fml", "fedavg", "independent"),
        "40 images of all ten digits a client. Alone that is too few, so mutual learning should pay.",
    ),
    "different-digits": (
        ("fml", "fedavg", "fedprox", "independent"),
        "60 images of four digits a client. Alone that is enough for these four, and a client is scored on these four only, "
        "so mutual learning should gain little.",
    ),
}
"""The name of an experiment, without ".toml" in `fedmutual.demo` -> the methods, and the expected result."""

_SECONDS_PER_RUN = 0.7  # measured: 35 runs in 25 s on two cores


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
    from fedmutual.studies.study import list_runs, train_runs

    config = read_config(file, set)
    folder = out_folder or Path("runs") / config.name
    expect_workers([config.engine.name])
    runs = list_runs(config, folder)
    with show_progress(runs=len(runs)) as watch:
        train_runs(runs, resume, watch.observe)
    if config.records.evaluate_on == "holdout":
        print_text(
            f"{folder}: only hold-out rows were scored; metrics.jsonl has the scores that clients share", soft_wrap=True
        )
        return
    from fedmutual.config.methods import find_method
    from fedmutual.report.terminal import make_headline_tables
    from fedmutual.results.comparison import make_comparisons
    from fedmutual.results.frame import read_runs

    out.print(make_headline_tables(make_comparisons(read_runs([*runs]))))
    method = config.algorithm["name"]
    if find_method(method).role.federates:
        sets = [word for text in set or () if text.partition("=")[0].strip() != "algorithm.name" for word in ("--set", text)]
        command = shlex.join(("fedmutual", "compare", str(file), "--methods", f"{method},{LOCAL_ONLY}", *sets))
        print_text(f"`{command}` shows the gain over training alone", soft_wrap=True)
    command = shlex.join(("fedmutual", "report", str(folder), "-o", "report.html"))
    print_text(f"{folder}: `{command}` makes its page", soft_wrap=True)


def compare(
    file: File,
    methods: Methods = None,
    seeds: Seeds = 3,
    tune: Tune = None,
    random: Annotated[
        bool,
        typer.Option(
            "--random", help="With --tune: draw the settings at random, also from ranges such as `{uniform=[0.1,0.9]}`."
        ),
    ] = False,
    halving: Halving = False,
    jobs: Jobs = None,
    join: Annotated[
        str | None, typer.Option(metavar="NAME", help="What does this participant gain by joining, and in which coalition?")
    ] = None,
    runs: Runs = MOST_COALITION_RUNS,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/NAME-compare.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Does a federation improve my models? Compare methods with local-only training over several seeds, and write a page.

    Runs: OUT/METHOD/SEED, page: OUT/report.html. `--set algorithm.KEY=VALUE` applies to the methods that have KEY.
    `--tune 8` lets each method try 8 settings on hold-out rows first; keys that `--set` names are not tuned. With --random
    or --halving the settings are drawn: equal learning rates for all methods.
    `--join NAME` trains coalitions of one participant by the file's algorithm instead; page: OUT/join.html.
    """
    from fedmutual.config.grid import format_value, is_range
    from fedmutual.rundir.logs import format_holdout_scores
    from fedmutual.studies import compare as comparing
    from fedmutual.studies.study import list_runs

    if join is not None:
        if methods is not None or tune is not None or random or halving:
            raise ConfigError(
                "--join trains the file's algorithm as it is; leave out --methods and --tune, and choose with --set"
            )
        config = read_config(file, set)
        folder = out_folder or Path("runs") / f"{config.name}-join"
        trained = _train_coalitions(config, folder, resume, jobs, seeds=seeds, most=runs, joining=join)
        conclude.print_worth(trained, folder, joining=join)
        return
    overrides = parse_settings(set)
    ranges = {key: overrides.pop(key) for key in [*overrides] if is_range(overrides[key])}
    if tune is None and (random or halving or ranges):
        what = "--random" if random else "--halving" if halving else f"the range of {next(iter(ranges))!r}"
        raise ConfigError(f"{what} is for the trials of --tune: say how many each method has, for example --tune 9")
    if tune is not None and tune > MOST_TRIALS and not (random or halving or ranges):
        raise ConfigError(
            f"--tune {tune}: there are at most {MOST_TRIALS} settings to try; --random draws as many as you like"
        )
    search: comparing.Search | None = "halving" if halving else "random" if random or ranges else None
    config, names, method_settings = _choose_methods(file, methods, overrides)
    expect_workers([config.engine.name], jobs)
    folder = out_folder or Path("runs") / f"{config.name}-compare"
    tuned = None
    if tune is not None:
        each = "" if len(list_runs(config, folder)) == 1 else " in each fold"
        print_text(
            f"tune: each of {len(names)} methods tries at most {tune} settings{each} for {config.rounds} rounds with seed "
            f"{config.seed}; rows held out of the clients' training data choose",
            soft_wrap=True,
        )
        with show_progress(format_holdout_scores) as watch:
            tuned = comparing.tune(
                config, names, tune, folder, resume, watch.observe, method_settings, overrides.keys(), jobs, search, ranges
            )
        for key, choice in tuned.items():
            method = comparing.format_tuned(key)
            values = ", ".join(f"{key} = {format_value(value)}" for key, value in choice.values.items())
            cost = f"; {conclude.format_cost(choice.cost)}" if choice.cost else ""
            tried = f"({choice.tried} tried{cost})"
            print_text(f"tuned: {method}: {values or f'as configured, because {choice.failure}'} {tried}", soft_wrap=True)
        if at_end := [comparing.format_tuned(key) for key, choice in tuned.items() if choice.is_rate_at_end]:
            print_text(
                f"warning: the learning rate of {join_words(at_end)} is the smallest or the largest that was tried, so "
                f"another rate may be better; raise --tune {tune}, or set optimizer.lr nearer to the best rate",
                soft_wrap=True,
            )
    with show_progress(runs=len(names) * seeds * len(list_runs(config, folder))) as watch:
        done = comparing.compare(config, names, seeds, folder, resume, watch.observe, method_settings, tuned, jobs)
    conclude.print_comparison([(config.name, [run.folder for run in done])], folder / "report.html")


def worth(
    place: Annotated[
        Path,
        typer.Argument(metavar="FILE.toml|FOLDER", help="The experiment, or a folder of finished runs.", show_default=False),
    ],
    seeds: Seeds = 3,
    left_out: Annotated[
        bool, typer.Option("--left-out", help="Leave out one participant at a time: fewer runs, no Shapley values.")
    ] = False,
    runs: Runs = MOST_COALITION_RUNS,
    precision: Annotated[
        float, typer.Option(min=0, help="For more than 6 participants: stop when half of each interval is at most this.")
    ] = 0.01,
    jobs: Jobs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, for scripts.")] = False,
    set: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/NAME-worth.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Who helps whom? Train coalitions of the participants, and print what each one gains from each other one.

    Runs: OUT/COALITION/SEED; OUT/worth.json, page: OUT/worth.html. Shapley values are exact up to 6 participants (63
    coalitions), else estimated from random orders of joining. With a folder of finished runs nothing is trained.
    """
    from fedmutual.results.frame import find_runs

    if place.is_dir():
        conclude.print_worth(find_runs(place), out_folder or place, as_json)
        return
    config = read_config(place, set)
    folder = out_folder or Path("runs") / f"{config.name}-worth"
    trained = _train_coalitions(config, folder, resume, jobs, precision, seeds=seeds, most=runs, only_left_out=left_out)
    conclude.print_worth(trained, folder, as_json)


def _train_coalitions(
    config: "Config", folder: Path, resume: bool, jobs: int | None, precision: float = 0.0, **options: Any
) -> list[Path]:
    """Print how many runs there are, train them, and return their folders. options: of `plan_worth`."""
    from fedmutual.studies.worth import plan_worth, train_worth

    plan = plan_worth(config, folder, **options)
    expect_workers([config.engine.name], jobs)
    err.print(plan.cost, highlight=False, markup=False, soft_wrap=True)
    with show_progress(runs=len(plan.folders)) as watch:
        return train_worth(plan, resume, watch.observe, jobs, precision)


def _choose_methods(
    file: Path, methods: str | None, overrides: dict[str, Any]
) -> "tuple[Config, tuple[str, ...], dict[str, Any]]":
    """Read `--methods`; return (configuration, methods, the settings of the methods that the file does not configure).

    methods: as on the command line; None: the file's algorithm with the default methods.
    """
    from fedmutual.config import load_compared, read_algorithm_name
    from fedmutual.studies.compare import ALL, expand_methods, find_unfit_methods

    names = None if methods is None else parse_names(methods)
    algorithm = read_algorithm_name(file, overrides)
    expanded = expand_methods(names, algorithm)
    config, method_settings = load_compared(file, expanded, overrides)
    if names is None or ALL not in names:
        if algorithm is not None and algorithm not in expanded:
            print_text(f"left out: {algorithm}: --methods does not name the algorithm of {file}", soft_wrap=True)
        return config, expanded, method_settings
    unfit = find_unfit_methods(config, expanded, [*names, config.algorithm["name"]], method_settings)
    for method, reason in unfit.items():
        print_text(f"left out: {method}: {reason}", soft_wrap=True)
    fitting = tuple(method for method in expanded if method not in unfit)
    config, method_settings = load_compared(file, fitting, overrides)
    return config, fitting, method_settings


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
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Random search: how many settings are drawn, instead of all combinations.", show_default=False
        ),
    ] = None,
    halving: Halving = False,
    jobs: Jobs = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/NAME-sweep.")] = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
) -> None:
    """Which setting is best? Train every combination of values; choose by data held out of training, never by test data.

    Example: `fedmutual sweep mnist.toml --set optimizer.lr=0.003,0.01,0.03 --set rounds=10`. Of many settings `--trials 20`
    draws 20, and `--halving` ends the worse ones early.

    The best setting has the best score after the last round, because `run` ends with that model. A warning names settings
    whose personal models are worse than after local-only training. Runs: OUT/SETTING/SEED, all results: OUT/sweep.json.
    """
    from fedmutual.config.grid import read_grid
    from fedmutual.rundir.logs import format_holdout_scores
    from fedmutual.studies.sweep import plan_sweep, train_sweep

    plan = plan_sweep(file, read_grid(set or []), seeds, by.value if by else None, out_folder, trials, halving)
    expect_workers([setting.config.engine.name for setting in plan.combinations], jobs)
    with show_progress(format_holdout_scores, runs=plan.most_trainings) as watch:
        result = train_sweep(plan, resume, watch.observe, jobs)
    conclude.print_sweep(result, file)


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
    page, runs = folder / "report.html", seeds * sum(len(methods) for methods, _ in EXPERIMENTS.values())
    if page.is_file() and not resume:  # it is written last
        other = next(path for n in count(2) if not (path := folder.parent / f"{folder.name or 'demo'}-{n}").exists())
        command = shlex.join(("fedmutual", "demo", "--seeds", str(seeds), "--out", str(other)))
        print_text(f"An earlier demo ended; its page is {page}. To run the demo again: `{command}`", soft_wrap=True)
        return
    print_text(
        f"The demo trains {runs} runs on handwritten digits: {len(EXPERIMENTS)} experiments, several methods each, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}. It takes about {max(1, round(runs * _SECONDS_PER_RUN / 60))} min on "
        f"two cores and ends with a page, {page}. PyTorch is imported first.",
        soft_wrap=True,
    )
    for name, (_, expectation) in EXPERIMENTS.items():
        print_text(f"{name}: {expectation}", soft_wrap=True)
    start_fork_server_early()  # its imports, which take seconds, run beside those below
    from fedmutual.studies.compare import list_variants
    from fedmutual.studies.study import Study, list_seeds, train_runs

    studies = {}
    for name, (methods, _) in EXPERIMENTS.items():
        with as_file(files("fedmutual") / "demo" / f"{name}.toml") as file:
            config = fedmutual.load_config(file)
        studies[name] = Study(list_variants(config, methods), list_seeds(config, seeds), folder / name)
    queue = {k: v for study in studies.values() for k, v in study.runs.items()}  # one, so that no core waits between studies
    with show_progress(runs=runs) as watch:
        train_runs(queue, resume, watch.observe, jobs, seconds=_SECONDS_PER_RUN)
    conclude.print_comparison([(name, [*study.runs]) for name, study in studies.items()], page)
