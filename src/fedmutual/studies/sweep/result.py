"""The result of a sweep: the best setting, and warnings about its reliability."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmutual.config import dump_config, parse_config
from fedmutual.config.grid import format_value
from fedmutual.errors import ConfigError
from fedmutual.metric import ACCURACY
from fedmutual.report.choice import (
    EndOfValues,
    ScoredTrial,
    describe_choice,
    find_edges,
    find_harm,
    find_tie,
    find_uncounted,
    pick_best,
)
from fedmutual.report.findings import Finding
from fedmutual.results.estimate import Estimate
from fedmutual.results.gains import Gains
from fedmutual.studies.sweep.plan import SweepPlan

RESULT = "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """The tried settings, and the best setting by hold-out scores.

    `folder` contains sweep.json and the runs, and `tried` has all settings in the order in which they were given.
    """

    folder: Path
    tried: tuple[ScoredTrial, ...]
    best: tuple[ScoredTrial, ...]  # one, or several that score the same; none where all diverged
    warnings: tuple[str, ...]  # one sentence each

    @property
    def chosen(self) -> ScoredTrial | None:
        """The best setting, of equal ones the first given."""
        return next(iter(self.best), None)


def judge_sweep(plan: SweepPlan, out: Path, tried: Sequence[ScoredTrial]) -> Sweep:
    """Return the result of a sweep: the best setting, and warnings about this setting and others."""
    best = pick_best(tried)
    ends = _find_ends_of_values(plan, tried, best[0]) if best else ()
    findings = [find_uncounted(tried), find_tie(best), *ends, *map(find_harm, tried)]
    metric = best[0].metric if best else ACCURACY
    return Sweep(out, tuple(tried), best, tuple(describe_choice(finding, metric) for finding in findings if finding))


def _find_ends_of_values(plan: SweepPlan, tried: Sequence[ScoredTrial], chosen: ScoredTrial) -> Iterator[Finding]:
    config = next(s.config for s in plan.settings if s.label == chosen.label)
    for key, value, neighbour in find_edges(tried, chosen):
        further = value + (value - neighbour) * (1 if isinstance(value, int) else 1e-3)
        try:
            parse_config(tomllib.loads(dump_config(config)), overrides={key: further})
        except ConfigError:  # the end of what is possible, not of what was tried
            continue
        yield EndOfValues(key, format_value(value), is_largest=value > neighbour)


def make_sweep_record(plan: SweepPlan, sweep: Sweep) -> dict[str, Any]:
    """Return the content of sweep.json: the trials with their hold-out scores (accuracies as fractions), and the choice."""
    return {
        "format": 1,
        "name": plan.name,
        "seeds": list(plan.seeds),
        "by": plan.by,
        "holdout": plan.settings[0].config.split.holdout,
        "settings": [_make_setting_record(tried, sweep.folder) for tried in sweep.tried],
        "best": [tried.label for tried in sweep.best],
        "chosen": _format_settings(sweep.chosen) if sweep.chosen else None,
        "warnings": list(sweep.warnings),
    }


def _make_setting_record(tried: ScoredTrial, out: Path) -> dict[str, Any]:
    return {
        "label": tried.label,
        "set": _format_settings(tried),
        "runs": [path.relative_to(out).as_posix() for path in tried.folders.values()],
        "diverged": {str(seed): how for seed, how in tried.diverged.items()},
        "model": tried.model,
        f"holdout_{tried.metric.name}": {
            "last": _make_number(tried.last),
            "best": _make_number(tried.best),
            "best_rounds": list(tried.best_rounds),
        },
        "over_local_only": _make_number(tried.gain.estimate) if isinstance(tried.gain, Gains) else None,
    }


def _format_settings(tried: ScoredTrial) -> dict[str, str]:
    """Return key -> value in the form of `--set`."""
    return {key: format_value(value) for key, value in tried.values.items()}


def _make_number(e: Estimate | None) -> dict[str, Any] | None:
    return None if e is None else {"mean": e.mean, "half": e.half, "n": e.n, "over": e.unit}
