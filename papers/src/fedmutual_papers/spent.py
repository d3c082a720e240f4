"""The training work of an arm: gradient steps, examples and bytes of a client, stored, or counted from the configuration."""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from fedmutual.algorithms.agree import Agree, Compare
from fedmutual.algorithms.fedh2l import Local, Mutual
from fedmutual.algorithms.fedmd import Announce, Digest, Revisit, Transfer
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.config import Config, is_pooled, make_algorithm
from fedmutual.core import Phase
from fedmutual.federation.networks import POOLED
from fedmutual.report.cells import PageTable, TableCell
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.plan import make_arm_config
from fedmutual_papers.prose import name_arm
from fedmutual_papers.store import Result
from fedmutual_papers.tables import tabulate

Work = np.ndarray[Any, np.dtype[np.float64]]
"""[2]: the number of gradient steps, and the number of examples in these steps."""

KEYS = ["setting", "method", "rounds"]
HEADS = {
    "steps": "Gradient steps",
    "examples": "Examples seen",
    "up": "Bytes sent",
    "down": "Bytes received",
    "public": "Public examples sent, bytes",
}
CAPTION = "For one client over the complete run, mean over clients and seeds"


def count_budget(config: Config, private: Mapping[str, int], public: Mapping[str, int]) -> tuple[float, float] | None:
    """Return the gradient steps of a client's model and the examples in these steps: the means over clients.

    private, public: client id -> number of rows. A step that trains two networks, as in FML, counts once. Return None if
    the algorithm has a phase with an unknown number of steps, such as a phase of the user's algorithm.
    """
    algorithm = make_algorithm(config)
    if is_pooled(config):
        private, public = {POOLED: sum(private.values()) + sum(public.values())}, {}
    parts = {*algorithm.trains_on} - ({"own public"} if "public" in algorithm.trains_on else set())  # public has its own
    taking_part = max(1, round(config.engine.participation * len(private))) / len(private) if private else 0.0
    known: list[Work] = []
    for client, rows in private.items():
        of_all = sum(public.values())
        trained = sum({"private": rows, "own public": public.get(client, 0), "public": of_all}[part] for part in parts)
        start = [_count_phase_work(phase, trained, of_all, len(private), True) for phase in algorithm.start]
        rounds = [_count_phase_work(phase, trained, of_all, len(private), False) for phase in algorithm.phases]
        if any(work is None for work in (*start, *rounds)):
            return None
        starts, a_round = (sum((work for work in works if work is not None), np.zeros(2)) for works in (start, rounds))
        known.append(starts + a_round * (config.rounds * taking_part))
    return (fmean(work[0] for work in known), fmean(work[1] for work in known)) if known else None


def _count_phase_work(phase: Phase, private: int, public: int, clients: int, start: bool) -> Work | None:
    """Return the work of a client in one execution of a phase; None if it is unknown."""

    def take(steps: float, batch: int, rows: int) -> Work:
        return np.array([steps, steps * min(batch, rows)], dtype=float)

    def take_passes(epochs: int, batch: int, rows: int) -> Work:
        leaves_one_row = rows > batch > 1 and rows % batch == 1  # a single row joins the batch before it
        return np.array([epochs * (math.ceil(rows / batch) - leaves_one_row), epochs * rows], dtype=float)

    match phase:
        case Mutual() if clients > 1:
            pairs = min(math.ceil(phase.pairs * clients - 1e-9), clients // 2)
            partners, share = (clients - 1, 1.0) if phase.peers == "all" else (1, 2 * pairs / clients)
            return np.array([1.0, partners * phase.public_batch]) * share
        case Local():
            return take(phase.local_steps, phase.batch_size, private)
        case Transfer():
            return take_passes(phase.transfer_epochs, phase.batch_size, public)
        case Revisit() if start:
            return take_passes(phase.transfer_epochs, phase.batch_size, private)
        case Digest():
            return np.array([phase.digest_steps, phase.digest_steps * phase.public_batch], dtype=float)
        case Mutual() | Agree() | Compare() | Announce():
            return np.zeros(2)
        case LocalEpochs() if phase.local_steps is not None:
            return take(phase.local_steps, phase.batch_size, private)
        case LocalEpochs():
            return take_passes(phase.local_epochs, phase.batch_size, private)
    return None


def find_budget(measured: MeasuredCell, arm: str, result: Result) -> Mapping[str, float | None]:
    """Return a run's stored budget, else "steps" and "examples" counted from its configuration and its clients' rows.

    {}: as `count_budget` returns None.
    """
    if result.budget:
        return result.budget
    config = make_arm_config(measured.cell, arm, result.seed, measured.scale)
    private = {i: client.examples for i, client in result.clients.items()}
    public_share, private_share = config.split.public, config.split.private or 1 - config.split.public
    public = {i: round(n * public_share / private_share) for i, n in private.items()} if public_share else {}
    return dict(zip(("steps", "examples"), count_budget(config, private, public) or (), strict=False))


def make_spent_frame(measured_cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """Return a row for each arm with results, for one client over a run; numbers are means over clients and seeds, or NaN.

    Columns: "setting", "method", "rounds" (text), gradient "steps", "examples" in these steps, and in bytes "up", "down" and
    "public" (public examples).
    """
    rows = []
    for measured, arm in ((of_cell, arm) for of_cell in measured_cells for arm in of_cell.results):
        ran, planned = measured.scale.count_rounds(measured.cell, arm)
        rounds = f"{ran:,} of {planned:,}" if ran < planned else f"{planned:,}"
        method = name_arm(arm, measured.cell.shown[arm])
        for result in measured.list_finished(arm).values():
            budget, clients = find_budget(measured, arm, result), len(result.clients) or 1
            traffic = {"seed": 0, **result.traffic} if result.traffic else {}
            moved = [traffic[way] / clients if traffic else None for way in ("up", "down", "seed")]
            rows.append((measured.cell.title, method, rounds, budget.get("steps"), budget.get("examples"), *moved))
    frame = pd.DataFrame(rows, columns=[*KEYS, *HEADS])
    return frame.groupby(KEYS, sort=False)[list(HEADS)].mean().reset_index()


def make_spent_table(measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return the frame as a report table; None if nothing was run."""
    means = make_spent_frame(measured_cells)
    if means.empty:
        return None
    missing = TableCell("n/a", note="n/a: not counted in this run")
    rows = [
        (*row[:3], *(missing if pd.isna(number) else f"{number:,.0f}" for number in row[3:]))
        for row in means.itertuples(index=False)
    ]
    return tabulate("spent", CAPTION, ("Setting", "Method"), ("Rounds", *HEADS.values()), rows)


def list_spent(measured_cells: Sequence[MeasuredCell]) -> list[dict[str, Any]]:
    """Return the rows of the frame for JSON."""
    records: list[dict[str, Any]] = json.loads(make_spent_frame(measured_cells).to_json(orient="records"))
    return records
