"""Compare runs that were trained twice, with fewer and with more rounds: their scores of the same rounds must be equal."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pandas as pd

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual.results.scale import format_percent_number
from fedmutual_papers.result import Result
from fedmutual_papers.store import ResultStore

KEYS = ["cell", "arm", "machine"]
NUMBERS = ["pairs", "scores", "equal", "largest"]
SAME, OTHER = "the same", "another"


def make_repeats_frame(store: ResultStore) -> pd.DataFrame:
    """Return a row for each cell, arm and machine: "pairs" of runs, "scores", the "equal" scores, "largest" difference.

    The largest difference is a fraction. Scores are those of the curves, in rounds that both runs evaluated. The two runs
    of a pair have one configuration, seed and numerics version, and differ only in the rounds. Runs with equal rounds are
    no pair, because they may be one run that two cells share.
    """
    frame = pd.DataFrame(_list_rows(store), columns=[*KEYS, *NUMBERS])
    sums = {"pairs": "sum", "scores": "sum", "equal": "sum", "largest": "max"}
    return frame.groupby(KEYS, sort=False).agg(sums).reset_index()


def _list_rows(store: ResultStore) -> Iterator[dict[str, Any]]:
    alike: dict[tuple[str, int], dict[int, tuple[str, Result]]] = defaultdict(dict)  # by rounds
    for cell in store.cells:
        for result in store.list_results(cell):
            if not result.failed:
                alike[result.fingerprint.rpartition("-")[0], result.numerics].setdefault(result.rounds, (cell, result))
    for runs in alike.values():
        for (cell, first), (_, second) in combinations(runs.values(), 2):
            if differences := [abs(a - b) for a, b in _pair_scores(first, second)]:
                yield {
                    "cell": cell,
                    "arm": first.arm,
                    "machine": SAME if _identify_machine(first) == _identify_machine(second) else OTHER,
                    "pairs": 1,
                    "scores": len(differences),
                    "equal": differences.count(0.0),
                    "largest": max(differences),
                }


def _pair_scores(first: Result, second: Result) -> Iterator[tuple[float, float]]:
    """Return the pairs of scores of every curve and round that both runs have."""
    for name in first.curves.keys() & second.curves.keys():
        one, other = (dict(zip(r.evaluated, r.curves[name], strict=True)) for r in (first, second))
        yield from ((one[n], other[n]) for n in sorted(one.keys() & other.keys()))


def _identify_machine(result: Result) -> tuple[Any, ...]:
    made = result.made
    return made.platform, made.cpus, made.device, made.threads, made.python, made.torch


def make_repeats_table(frame: pd.DataFrame) -> PageTable:
    """Return the frame as a report table, with differences in points."""
    rows = []
    for row in frame.itertuples():
        numbers = f"{row.pairs:,}", f"{row.equal:,} of {row.scores:,}", format_percent_number(row.largest, 2)
        rows.append(tuple(map(TableCell, (row.cell, row.arm, row.machine, *numbers))))
    heads = [Column(head, numeric=False) for head in ("Cell", "Arm", "Machine")]
    heads += map(Column, ("Pairs of runs", "Equal scores", "Largest difference"))
    return PageTable("repeats", "", tuple(heads), tuple(rows), format_csv([*KEYS, *NUMBERS], frame.to_numpy().tolist()))
