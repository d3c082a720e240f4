"""Compare the training work of the arms with their results: rounds, gradient steps, examples and bytes of a client."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual_papers.budget import count_budget
from fedmutual_papers.entries import name_arm
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.plan import make_arm_config
from fedmutual_papers.result import Budget, Result

KEYS = ("setting", "method", "rounds")
NUMBERS = ("steps", "examples", "up", "down", "public")
HEADS = (
    Column("Rounds"),
    Column("Gradient steps"),
    Column("Examples seen"),
    Column("Bytes sent"),
    Column("Bytes received"),
    Column("Public examples sent, bytes"),
)
CAPTION = "For one client over the complete run, mean over clients and seeds"


def make_spent_frame(measured_cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """Return a row for each arm with results, for one client over a run; numbers are means over clients and seeds, or NaN.

    Columns: "setting", "method", "rounds" (text), gradient "steps", "examples" in these steps, and in bytes "up", "down" and
    "public" (public examples).
    """
    frame = pd.DataFrame(_list_rows(measured_cells), columns=[*KEYS, *NUMBERS])
    return frame.groupby(list(KEYS), sort=False)[list(NUMBERS)].mean().reset_index()


def make_spent_table(measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return the frame as a report table; None if nothing was run."""
    means = make_spent_frame(measured_cells)
    if means.empty:
        return None
    rows = [
        (
            TableCell(row.setting),
            TableCell(row.method),
            TableCell(row.rounds),
            *(_format_number(getattr(row, key)) for key in NUMBERS),
        )
        for row in means.itertuples()
    ]
    csv = format_csv(list(means.columns), means.astype(object).where(means.notna(), None).to_numpy().tolist())
    return PageTable(
        "spent", CAPTION, (Column("Setting", numeric=False), Column("Method", numeric=False), *HEADS), tuple(rows), csv
    )


def _format_number(value: float) -> TableCell:
    return TableCell("n/a", note="n/a: not counted in this run") if pd.isna(value) else TableCell(f"{value:,.0f}")


def _list_rows(measured_cells: Sequence[MeasuredCell]) -> Iterator[dict[str, Any]]:
    for measured in measured_cells:
        for arm, results in measured.results.items():
            ran, planned = measured.scale.count_rounds(measured.cell, arm)
            for result in results.values():
                if not result.failed:
                    budget, traffic, clients = find_budget(measured, arm, result), result.traffic, len(result.clients) or 1
                    yield {
                        "setting": measured.cell.title,
                        "method": name_arm(arm, measured.cell.shown[arm]),
                        "rounds": f"{ran:,} of {planned:,}" if ran < planned else f"{planned:,}",
                        "steps": budget.steps if budget else None,
                        "examples": budget.examples if budget else None,
                        "up": traffic.up / clients if traffic else None,
                        "down": traffic.down / clients if traffic else None,
                        "public": traffic.seed / clients if traffic else None,
                    }


def find_budget(measured: MeasuredCell, arm: str, result: Result) -> Budget | None:
    """Return a run's stored budget, else the budget counted from its configuration and its clients' rows.

    None: as `count_budget`.
    """
    if result.budget is not None:
        return result.budget
    config = make_arm_config(measured.cell, arm, result.seed, measured.scale)
    private = {i: client.examples for i, client in result.clients.items()}
    public_share, private_share = config.split.public, config.split.private or 1 - config.split.public
    public = {i: round(n * public_share / private_share) for i, n in private.items()} if public_share else {}
    return count_budget(config, private, public)
