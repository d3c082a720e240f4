"""Read the stored results of a cell at one scale."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from fedmutual.errors import ConfigError
from fedmutual.results.estimate import Estimate, estimate
from fedmutual_papers import measures
from fedmutual_papers.experiment_files import Cell, PaperExperiment
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.result import Result
from fedmutual_papers.schema import End
from fedmutual_papers.store import ResultStore


@dataclass(frozen=True)
class MeasuredCell:
    """The stored results of a cell at one scale."""

    cell: Cell
    scale: Scale
    results: Mapping[str, Mapping[int, Result]]  # arm -> seed -> result; of shown arms only

    @property
    def run(self) -> bool:
        """Return whether the cell has any result."""
        return any(self.results.values())

    @property
    def words(self) -> str:
        """Return how the cell is shortened; "" for a full-length cell and for a cell without results."""
        return self.scale.describe(self.cell) if self.run else ""

    def describe_arm(self, arm: str) -> str:
        """Return how the arm is shortened; "" for a full-length arm and for an arm without results."""
        return self.scale.describe(self.cell, arm) if self.results.get(arm) else ""

    def compute_share(self, arm: str) -> float:
        """Return the completed share of the arm's full number of rounds, from 0 to 1."""
        rounds, full_rounds = self.scale.count_rounds(self.cell, arm)
        return rounds / full_rounds

    @property
    def seeds(self) -> list[int]:
        """Return the seeds that have a result, sorted."""
        return sorted({seed for by_seed in self.results.values() for seed in by_seed})

    @property
    def networks(self) -> dict[str, str]:
        """Return client id -> network name, over all stored runs."""
        return {i: c.network for by_seed in self.results.values() for r in by_seed.values() for i, c in r.clients.items()}

    def has_numbers(self, arm: str, seed: int) -> bool:
        """Return whether the run has numbers: it is stored and no client diverged."""
        result = self.results.get(arm, {}).get(seed)
        return result is not None and not result.failed

    def count_diverged(self, arm: str) -> tuple[int, int]:
        """Return (the number of the arm's runs in which a client diverged, the number of the arm's runs)."""
        arm_results = self.results.get(arm, {}).values()
        return sum(bool(r.failed) for r in arm_results), len(arm_results)

    def list_numerics(self, arm: str, seeds: Collection[int] | None = None) -> set[int]:
        """Return the numerics versions of the arm's runs. seeds: count only the runs of these seeds."""
        return {r.numerics for s, r in self.results.get(arm, {}).items() if seeds is None or s in seeds}

    def read_number(self, measure: str, arm: str, seed: int, at: End = "last") -> float | None:
        """Return a measure of one run after the last or the best round; None if the run lacks the measure.

        A measure in % or in points is a fraction.
        """
        if not self.has_numbers(arm, seed):
            return None
        kind, argument = measures.find(measure)
        same_seed = {other: by_seed[seed] for other, by_seed in self.results.items() if seed in by_seed}
        reading = kind.read(self.results[arm][seed], same_seed, argument)
        return reading.last if at == "last" else reading.best

    def estimate(self, measure: str, arm: str, at: End = "last") -> Estimate | None:
        """Return the estimate of a measure over the arm's seeds, as `read_number`; None if every run lacks the measure."""
        values = [v for seed in self.results.get(arm, {}) if (v := self.read_number(measure, arm, seed, at)) is not None]
        return estimate(values, "seeds") if values else None

    def estimate_nodes(self, measure: str, arm: str, at: End) -> dict[str, Estimate]:
        """Return client id -> estimate of a measure over the arm's seeds; {} if every run lacks the measure."""
        read_nodes = measures.find(measure)[0].nodes
        runs = (
            [read_nodes(result, at) for result in self.results.get(arm, {}).values() if not result.failed]
            if read_nodes
            else []
        )
        clients = dict.fromkeys(i for run in runs for i in run)
        return {i: estimate([run[i] for run in runs if i in run], "seeds") for i in clients}


def is_incomplete(cell: Cell, result: Result) -> bool:
    """Return whether a finished run lacks something that the cell asks for, from the final weights or about each client."""
    about = cell.about
    has_noise = (
        not about.noise or "global_test" not in result.curves or {f"{d:g}" for d in about.noise} <= result.noise.keys()
    )
    has_client_curves = not about.each or all(client.curve for client in result.clients.values())
    has_node_analysis = about.node is None or (result.closeup is not None and result.closeup.client == about.node)
    return not ((has_noise and has_client_curves and has_node_analysis) or result.failed)


def read_measured_cells(
    experiment: PaperExperiment, store: ResultStore, wanted: Scale | None = None, seeds: Iterable[int] | None = None
) -> list[MeasuredCell]:
    """Return one `MeasuredCell` for each cell: at the wanted scale if there are results, else at the most complete scale.

    seeds: limit the results at the wanted scale to these seeds; None means all seeds.
    """
    return [
        _read_measured(cell, store, _narrow_scale(wanted, cell) if wanted is not None else None, seeds)
        for cell in experiment.cells
    ]


def _narrow_scale(scale: Scale, cell: Cell) -> Scale | None:
    """Return the scale for one cell; None if an arm of the cell cannot have one of the changed keys."""
    with suppress(ConfigError):
        return scale.fit_to(cell)
    return None


def _read_measured(cell: Cell, store: ResultStore, wanted: Scale | None, seeds: Iterable[int] | None) -> MeasuredCell:
    scales, candidates = [] if wanted is None else [wanted], []
    for stored_scale in store.list_scales(cell.id):
        if (scale := _narrow_scale(stored_scale, cell)) is not None and scale not in scales:
            scales.append(scale)
    for scale in scales:
        known_seeds = _find_seeds(cell, store, scale)
        chosen_seeds = known_seeds & set(seeds) if scale == wanted and seeds is not None else known_seeds
        measured = MeasuredCell(cell, scale, _find_results(cell, store, scale, chosen_seeds))
        if measured.run and scale == wanted:
            return measured
        candidates.append(measured)
    return max(candidates, key=_rank_completeness, default=MeasuredCell(cell, Scale(), {arm: {} for arm in cell.shown}))


def _find_seeds(cell: Cell, store: ResultStore, scale: Scale) -> set[int]:
    """Return the seeds of all stored runs, of any cell, that have as many rounds as a run of this cell at the scale."""
    rounds = {cell.get_rounds(arm) if scale.rounds is None else cell.limit_rounds(arm, scale.rounds) for arm in cell.arms}
    return {result.seed for result in store.list_all_results() if result.rounds in rounds}


def _find_results(cell: Cell, store: ResultStore, scale: Scale, seeds: Iterable[int]) -> dict[str, dict[int, Result]]:
    by_arm: dict[str, dict[int, Result]] = {arm: {} for arm in cell.shown}
    for job in list_jobs(cell, sorted(seeds), scale):
        if job.arm in by_arm and (result := store.find(job)) is not None:
            by_arm[job.arm][job.seed] = result
    return by_arm


def _rank_completeness(measured: MeasuredCell) -> tuple[int, int, int, int]:
    """Return a sort key: first more arms, then fewer changed keys, then more rounds, then more seeds."""
    arms = sum(bool(by_seed) for by_seed in measured.results.values())
    rounds = measured.scale.rounds or max(map(measured.cell.get_rounds, measured.cell.arms))
    return arms, -len(measured.scale.changed), rounds, sum(map(len, measured.results.values()))
