"""The training work of an arm: gradient steps, examples and bytes of a client, stored, or counted from the configuration."""

import json
import math
from collections.abc import Mapping, Sequence
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

Work = tuple[float, float]
"""The number of gradient steps, and the number of examples in these steps; NaN: unknown."""

KEYS = ["setting", "method", "rounds"]
HEADS = {
    "steps": "Gradient steps",
    "examples": "Examples seen",
    "up": "Bytes sent",
    "down": "Bytes received",
    "public": "Public examples sent, bytes",
}
CAPTION = "For one client over the complete run, mean over clients and seeds"


def count_budget(config: Config, private: Mapping[str, int], public: Mapping[str, int]) -> Work | None:
    """Return the gradient steps of a client's model and the examples in these steps: the means over clients.

    private, public: client id -> number of rows. A step that trains two networks, as in FML, counts once. Return None if
    the algorithm has a phase with an unknown number of steps, such as a phase of the user's algorithm.
    """
    algorithm = make_algorithm(config)
    if is_pooled(config):
        private, public = {POOLED: sum(private.values()) + sum(public.values())}, {}
    parts = {*algorithm.trains_on} - ({"own public"} if "public" in algorithm.trains_on else set())  # public has its own
    taking_part = max(1, round(config.engine.participation * len(private))) / len(private) if private else 0.0
    of_all, works = sum(public.values()), list[Any]()
    for client, rows in private.items():
        trained = sum({"private": rows, "own public": public.get(client, 0), "public": of_all}[part] for part in parts)
        starts = [_count_phase_work(phase, trained, of_all, len(private), True) for phase in algorithm.start]
        rounds = [_count_phase_work(phase, trained, of_all, len(private), False) for phase in algorithm.phases]
        works.append(np.sum([(0, 0), *starts], 0) + np.sum(rounds, 0) * (config.rounds * taking_part))
    steps, examples = np.mean(works, 0).tolist() if works else (math.nan, math.nan)
    return None if math.isnan(steps) else (steps, examples)


def _count_phase_work(phase: Phase, private: int, public: int, clients: int, start: bool) -> Work:
    """Return the work of a client in one execution of a phase."""

    def take(steps: float, batch: int, rows: int) -> Work:
        return steps, steps * min(batch, rows)

    def take_passes(epochs: int, batch: int, rows: int) -> Work:
        leaves_one_row = rows > batch > 1 and rows % batch == 1  # a single row joins the batch before it
        return epochs * (math.ceil(rows / batch) - leaves_one_row), epochs * rows

    match phase:
        case Mutual() if clients > 1:
            pairs = min(math.ceil(phase.pairs * clients - 1e-9), clients // 2)
            partners, share = (clients - 1, 1.0) if phase.peers == "all" else (1, 2 * pairs / clients)
            return share, partners * phase.public_batch * share
        case Transfer():
            return take_passes(phase.transfer_epochs, phase.batch_size, public)
        case Revisit() if start:
            return take_passes(phase.transfer_epochs, phase.batch_size, private)
        case Digest():
            return phase.digest_steps, phase.digest_steps * phase.public_batch
        case Mutual() | Agree() | Compare() | Announce():
            return 0, 0
        case Local() | LocalEpochs() if phase.local_steps is not None:
            return take(phase.local_steps, phase.batch_size, private)
        case LocalEpochs():
            return take_passes(phase.local_epochs, phase.batch_size, private)
    return math.nan, math.nan


def find_budget(measured: MeasuredCell, arm: str, result: Result) -> Mapping[Any, float | None]:
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
        place = measured.cell.title, name_arm(arm, measured.cell.shown[arm]), rounds
        for result in measured.list_finished(arm).values():
            budget, traffic = find_budget(measured, arm, result), result.traffic and {"seed": 0, **result.traffic}
            moved = (traffic[way] / (len(result.clients) or 1) if traffic else None for way in ("up", "down", "seed"))
            rows.append((*place, budget.get("steps"), budget.get("examples"), *moved))
    frame = pd.DataFrame(rows, columns=[*KEYS, *HEADS])
    return frame.groupby(KEYS, sort=False)[list(HEADS)].mean().reset_index()


def make_spent_table(measured_cells: Sequence[MeasuredCell]) -> PageTable | None:
    """Return the frame as a report table; None if nothing was run."""
    means = make_spent_frame(measured_cells)
    missing = TableCell("n/a", note="n/a: not counted in this run")
    rows = [
        (*row[:3], *(missing if pd.isna(number) else f"{number:,.0f}" for number in row[3:]))
        for row in means.itertuples(index=False)
    ]
    numbers = ("Rounds", *HEADS.values())
    return tabulate("spent", CAPTION, ("Setting", "Method"), numbers, rows) if rows else None


def list_spent(measured_cells: Sequence[MeasuredCell]) -> list[dict[str, Any]]:
    """Return the rows of the frame for JSON."""
    records: list[dict[str, Any]] = json.loads(make_spent_frame(measured_cells).to_json(orient="records"))
    return records
