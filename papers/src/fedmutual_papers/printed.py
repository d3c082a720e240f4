"""Count the papers' printed numbers by state: measured at full length, measured shortened, or not measured."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual_papers.claims import NOT_RUN
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.measured_cell import MeasuredCell

FULL, SHORTENED = "full", "shortened"
STATES = (FULL, SHORTENED, NOT_RUN)  # the fullest first
ALL = "all"
NUMBER = ["cell", "arm", "measure", "node"]  # what a printed number is known by


def make_printed_frame(experiments: Sequence[tuple[PaperExperiment, Sequence[MeasuredCell]]]) -> pd.DataFrame:
    """Return a table with a row for each printed number; without printed numbers it has no rows.

    Columns: "experiment", "cell", "arm", "measure", "node", "value" (in the paper's unit), and "state" (one of STATES).
    A cell that repeats the paper's numbers of another cell (`printed_in`) counts for that cell if that cell has the arm; the
    most complete state counts.
    """
    frame = pd.DataFrame(
        (row for experiment, measured_cells in experiments for row in _list_rows(experiment, measured_cells)),
        columns=["experiment", "again", *NUMBER, "value", "state"],
    ).astype({"again": bool})
    frame["state"] = pd.Categorical(frame["state"], STATES, ordered=True)
    printed = frame[~frame["again"]].drop(columns="state")
    return printed.merge(frame.groupby(NUMBER)["state"].min().reset_index(), on=NUMBER).drop(columns="again")


def _list_rows(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> Iterator[dict[str, Any]]:
    for measured in measured_cells:
        again = measured.cell.about.printed_in
        about = {"experiment": experiment.id, "cell": again or measured.cell.id, "again": bool(again)}
        for arm, method in measured.cell.shown.items():
            state = NOT_RUN if not measured.results.get(arm) else SHORTENED if measured.describe_arm(arm) else FULL
            for measure, node, value in method.list_printed(experiment.index.measures[0]):
                yield {**about, "arm": arm, "measure": measure, "node": node, "value": value, "state": state}


def count_printed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the counts of printed numbers: a row for each experiment and the sum last, a column for each state."""
    counts = frame.groupby(["experiment", "state"], sort=False, observed=False).size().unstack(fill_value=0)
    counts = counts.reindex(columns=list(STATES), fill_value=0)
    counts = counts.loc[frame["experiment"].drop_duplicates()]
    counts.loc[ALL] = counts.sum()
    return counts


def make_printed_table(counts: pd.DataFrame) -> PageTable:
    """Return the counts as a report table, with a link to the page of each experiment."""
    rows = [
        (
            TableCell(f"[{name}]({name}.md)" if name != ALL else "**all**"),
            *(TableCell(f"{n:,}") for n in (numbers.sum(), *numbers)),
        )
        for name, numbers in counts.iterrows()
    ]
    heads = (Column("Experiment", numeric=False), *map(Column, ("Printed numbers", *STATES)))
    csv = format_csv(["experiment", *STATES], counts.reset_index().to_numpy().tolist())
    return PageTable("printed", "", heads, tuple(rows), csv)
