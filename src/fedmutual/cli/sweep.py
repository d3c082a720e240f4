"""The output of `fedmutual sweep`: a table of the settings, warnings, and the command that runs the best setting."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.config.grid import format_value
from fedmutual.metric import ACCURACY, Metric
from fedmutual.report.cells import format_spread
from fedmutual.report.choice import ScoredTrial
from fedmutual.results.comparison import MODELS
from fedmutual.results.gains import Gains
from fedmutual.results.scale import MetricScale
from fedmutual.studies.sweep import RESULT, Sweep


def make_sweep_table(result: Sweep) -> Table:
    """Return a table with one line for each setting: the main metric on hold-out rows, with 95 % intervals over seeds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("setting", overflow="fold")
    scale = MetricScale(metric=_get_metric(result))
    for name in ("last", "best"):
        table.add_column(f"hold-out{scale.head}\n{name} round", justify="right", no_wrap=True)
    if any(tried.local_only for tried in result.tried):
        table.add_column(f"personal models over\nlocal-only{scale.difference_head}", justify="right", no_wrap=True)
    for tried in result.tried:
        chosen = tried is result.chosen
        table.add_row(escape(tried.label) + (" *" if chosen else ""), *_make_cells(tried), style="bold" if chosen else "")
    return table


def format_conclusion(result: Sweep, file: Path) -> Iterator[str]:
    """Yield lines: the meaning of the numbers, warnings, the command for the best setting, the path of the result file."""
    yield _describe_numbers(result)
    yield from (f"warning: {warning}" for warning in result.warnings)
    for tried in result.tried:
        yield from (f"{tried.label}, seed {seed}: {how}" for seed, how in tried.diverged.items())
    if result.chosen:
        sets = (word for key, value in result.chosen.values.items() for word in ("--set", f"{key}={format_value(value)}"))
        yield f"chosen: {result.chosen.label}; run it: {shlex.join(('fedmutual', 'run', str(file), *sets))}"
    yield f"all results: {result.folder / RESULT}"


def _make_cells(tried: ScoredTrial) -> Iterator[str]:
    if tried.last is None or tried.best is None:
        seeds = "" if len(tried.folders) == 1 else f" ({len(tried.diverged)} of {len(tried.folders)} seeds)"
        yield f"diverged{seeds}"
        return
    scale = MetricScale(2 if tried.examples >= 5000 else 1, tried.metric)  # 2: where an example weighs 0.02 % or less
    yield f"{scale.format_value(tried.last.mean)} {format_spread(tried.last, scale)}".rstrip()
    rounds = sorted(set(tried.best_rounds))
    which = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    yield f"{f'{scale.format_value(tried.best.mean)} {format_spread(tried.best, scale)}'.rstrip()} ({which})"
    if isinstance(tried.gain, Gains):
        yield f"{scale.format_gain(tried.gain.estimate.mean)} {format_spread(tried.gain.estimate, scale)}".rstrip()


def _get_metric(result: Sweep) -> Metric:
    return next((tried.metric for tried in result.tried if tried.runs), ACCURACY)


def _describe_numbers(result: Sweep) -> str:
    models = " or ".join(dict.fromkeys(MODELS[t.model] for t in result.tried if t.model))
    if result.chosen is None:
        return "Nothing can be chosen."
    seeds = len(result.chosen.folders)
    title = _get_metric(result).heading
    over = f"clients, then over {seeds} seeds with its 95 % interval" if seeds > 1 else "clients"
    return (
        f"* is best after the last round. {title} of the {models} on rows held out of the clients' training data "
        f"({result.chosen.examples:,} in all), mean over {over}; in brackets the best round."
    )
