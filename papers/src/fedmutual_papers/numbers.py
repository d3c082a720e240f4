"""List every number of an experiment's tables, unrounded, for JSON and CSV."""

from collections.abc import Iterator, Sequence
from typing import Any

from fedmutual.report.cells import format_csv
from fedmutual.results.estimate import Estimate
from fedmutual_papers import measures
from fedmutual_papers.claims import NOT_RUN
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.schema import AVERAGE, End

ENDS: tuple[End, ...] = ("last", "best")


def list_records(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> Iterator[dict[str, Any]]:
    """Yield one record for each cell, arm, measure and end (fractions, rounds, losses or bytes); also for nodes if shown."""
    for measured in measured_cells:
        for arm in measured.cell.shown:
            for measure in experiment.index.measures:
                for at in ENDS:
                    if experiment.index.view == "nodes":
                        for node, value in measured.estimate_nodes(measure, arm, at).items():
                            yield _make_record(measured, arm, measure, at, node, value)
                    mean = measured.estimate(measure, arm, at)
                    if mean is None and (at != measures.find(measure)[0].counts or measured.results[arm]):
                        continue
                    yield _make_record(measured, arm, measure, at, None, mean)


def _make_record(
    measured: MeasuredCell, arm: str, measure: str, at: End, node: str | None, value: Estimate | None
) -> dict[str, Any]:
    kind = measures.find(measure)[0]
    paper = measured.cell.shown[arm].find_printed(measure, node or AVERAGE) if at == kind.counts else None
    return {
        "cell": measured.cell.name,
        "row": measured.cell.about.row,
        "column": measured.cell.about.column,
        "arm": arm,
        "measure": measure,
        "unit": kind.unit,
        "at": at,
        "node": node,
        "mean": value.mean if value else None,
        "half": value.half if value else None,
        "seeds": value.n if value else 0,
        "paper": paper,
        "state": measured.describe_arm(arm) if measured.results[arm] else NOT_RUN,
    }


def format_records(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> str:
    """Return the records of `list_records` as CSV."""
    keys = ("cell", "arm", "measure", "at", "node", "mean", "half", "seeds", "paper", "state")
    return format_csv(keys, [[line[k] for k in keys] for line in list_records(experiment, measured_cells)])
