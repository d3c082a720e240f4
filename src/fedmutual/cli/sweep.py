"""What `fedmutual sweep` says: a table of what was tried, what to know of it, and the command for the best setting."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.config.grid import format_value
from fedmutual.report.cells import spread
from fedmutual.report.choice import Tried
from fedmutual.report.comparison import MODELS
from fedmutual.report.statistics import Gains
from fedmutual.report.text import percent, points
from fedmutual.studies.sweep import RESULT, Sweep


def make_sweep_table(found: Sweep) -> Table:
    """Every setting in a line: percent on hold-out rows, with 95 % intervals over seeds."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column("setting", overflow="fold")
    for name in ("hold-out, %\nlast round", "hold-out, %\nbest round"):
        made.add_column(name, justify="right", no_wrap=True)
    if any(tried.alone for tried in found.tried):
        made.add_column("personal models over\nlocal-only, points", justify="right", no_wrap=True)
    for tried in found.tried:
        chosen = tried is found.chosen
        made.add_row(escape(tried.label) + (" *" if chosen else ""), *_cells(tried), style="bold" if chosen else "")
    return made


def print_conclusion(found: Sweep, file: Path) -> Iterator[str]:
    """What the numbers are, what to know of them, the command for the best setting, and where scripts find all this."""
    yield _about(found)
    yield from (f"warning: {warning}" for warning in found.warnings)
    for tried in found.tried:
        yield from (f"{tried.label}, seed {seed}: {how}" for seed, how in tried.diverged.items())
    if found.chosen:
        sets = (word for key, value in found.chosen.values.items() for word in ("--set", f"{key}={format_value(value)}"))
        yield f"chosen: {found.chosen.label}; run it: {shlex.join(('fedmutual', 'run', str(file), *sets))}"
    yield f"all of it: {found.folder / RESULT}"


def _cells(tried: Tried) -> Iterator[str]:
    if tried.last is None or tried.best is None:
        seeds = "" if len(tried.folders) == 1 else f" ({len(tried.diverged)} of {len(tried.folders)} seeds)"
        yield f"diverged{seeds}"
        return
    decimals = 2 if tried.examples >= 5000 else 1  # where an example weighs 0.02 % or less
    yield f"{percent(tried.last.mean, decimals)} {spread(tried.last, decimals)}".rstrip()
    rounds = sorted(set(tried.best_rounds))
    which = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    yield f"{f'{percent(tried.best.mean, decimals)} {spread(tried.best, decimals)}'.rstrip()} ({which})"
    if isinstance(tried.gain, Gains):
        yield f"{points(tried.gain.estimate.mean, decimals)} {spread(tried.gain.estimate, decimals)}".rstrip()


def _about(found: Sweep) -> str:
    models = " or ".join(dict.fromkeys(MODELS[t.model] for t in found.tried if t.model))
    if found.chosen is None:
        return "Nothing can be chosen."
    seeds = len(found.chosen.folders)
    over = f"clients, then over {seeds} seeds with its 95 % interval" if seeds > 1 else "clients"
    return (
        f"* is best after the last round. Accuracy of the {models} on rows held out of the clients' training data "
        f"({found.chosen.examples:,} in all), mean over {over}; in brackets the best round."
    )
