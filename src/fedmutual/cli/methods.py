"""`compare --methods` and `--tune`: which methods are trained, with which settings, and one line on each decision."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmutual.cli.arguments import parse_names
from fedmutual.cli.terminal import print_text, show_progress
from fedmutual.config import Config, load_compared, parse_override, read_algorithm_name
from fedmutual.config.grid import format_value
from fedmutual.errors import join_words
from fedmutual.rundir.text import format_holdout_scores
from fedmutual.studies.compare import ALL, Tuned, expand_methods, find_unfit_methods
from fedmutual.studies.tune import tune


def choose_methods(
    file: Path, methods: str | None, overrides: Mapping[str, Any]
) -> tuple[Config, tuple[str, ...], dict[str, Any]]:
    """Read `--methods`; return (configuration, methods, the settings of the methods that the file does not configure).

    methods: as on the command line; None: the file's algorithm with the default methods.

    Raises:
        UserError: the file, or a method that the file or `--methods` names, cannot be used.
    """
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


def tune_methods(
    config: Config,
    methods: Sequence[str],
    trials: int,
    folder: Path,
    resume: bool,
    command: str,
    method_settings: Mapping[str, Any],
    settings: Sequence[str],
    jobs: int | None,
) -> dict[str, Tuned]:
    """Tune each method, print the budget and the chosen settings, and return method -> the choice.

    command: resumes after a stop. settings: the `--set` arguments, whose keys are not tuned. jobs: as for `compare`.

    Raises:
        UserError: as `tune`.
    """
    print_text(
        f"tune: each of {len(methods)} methods tries at most {trials} settings for {config.rounds} rounds with seed "
        f"{config.seed}; rows held out of the clients' training data choose",
        soft_wrap=True,
    )
    fixed = {parse_override(text)[0] for text in settings}
    with show_progress(command, format_holdout_scores) as watch:
        tuned = tune(config, methods, trials, folder, resume, watch.observe, method_settings, fixed, jobs)
    for method, choice in tuned.items():
        values = ", ".join(f"{key} = {format_value(value)}" for key, value in choice.values.items())
        reason = "every trial diverged" if choice.tried else "no setting is left to tune"
        print_text(f"tuned: {method}: {values or f'as configured, for {reason}'} ({choice.tried} tried)", soft_wrap=True)
    at_end = [method for method, choice in tuned.items() if choice.is_rate_at_end]
    if at_end:
        print_text(
            f"warning: the learning rate of {join_words(at_end)} is the smallest or the largest that was tried, so another "
            f"rate may be better; raise --tune {trials}, or set optimizer.lr nearer to the best rate",
            soft_wrap=True,
        )
    return tuned
