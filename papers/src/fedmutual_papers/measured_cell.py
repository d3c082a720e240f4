"""Read the stored results of a cell at one scale."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from fedmutual.errors import ConfigError
from fedmutual.results.estimate import Estimate, estimate
from fedmutual_papers import measures
from fedmutual_papers.experiment_files import Cell, PaperExperiment
from fedmutual_papers.measures import End
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.store import Result, ResultStore

WINDOW = 25  # rounds
FLAT = 0.005  # the largest difference of the means of two windows at a plateau


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
    def has_all_arms(self) -> bool:
        """Return whether each arm has a result."""
        return all(self.results.values())

    @property
    def words(self) -> str:
        """Return how the cell is shortened; "" for a full-length cell and for a cell without results."""
        return self.scale.describe(self.cell) if self.run else ""

    def describe_arm(self, arm: str) -> str:
        """Return how the arm is shortened; "" for a full-length arm and for an arm without results."""
        return self.scale.describe(self.cell, arm) if self.results.get(arm) else ""

    @property
    def seeds(self) -> list[int]:
        """Return the seeds that have a result, sorted."""
        return sorted({seed for by_seed in self.results.values() for seed in by_seed})

    @property
    def all_results(self) -> list[Result]:
        """Return the results of all arms and seeds."""
        return [result for by_seed in self.results.values() for result in by_seed.values()]

    @property
    def networks(self) -> dict[str, str]:
        """Return client id -> network name, over all stored runs."""
        return {i: client.network for result in self.all_results for i, client in result.clients.items()}

    def list_finished(self, arm: str) -> dict[int, Result]:
        """Return seed -> result of the arm's runs that have numbers: no client diverged."""
        return {seed: result for seed, result in self.results.get(arm, {}).items() if not result.failed}

    def is_level(self, arm: str) -> bool:
        """Return whether each curve of an arm, the mean over seeds, has reached its plateau.

        The mean of its last 25 rounds differs by at most 0.5 points from the mean of the 25 rounds before.
        """
        runs = list(self.list_finished(arm).values())

        def list_scores(curve: str, window: int) -> list[float]:
            scores = ((run.rounds - n, v) for run in runs for n, v in zip(run.evaluated, run.get_curve(curve), strict=False))
            return [value for before_end, value in scores if before_end // WINDOW == window]

        windows = [(list_scores(name, 0), list_scores(name, 1)) for name in {name for run in runs for name in run.curves}]
        is_long = bool(runs) and all(run.rounds >= 2 * WINDOW for run in runs)
        return is_long and all(last and before and abs(fmean(last) - fmean(before)) <= FLAT for last, before in windows)

    def list_numerics(self, arm: str, seeds: Collection[int] | None = None) -> set[int]:
        """Return the numerics versions of the arm's runs. seeds: count only the runs of these seeds."""
        return {r.numerics for s, r in self.results.get(arm, {}).items() if seeds is None or s in seeds}

    def read_numbers(self, measure: str, arm: str, at: End = "mean") -> dict[str | None, dict[int, float]]:
        """Return client -> seed -> a measure of the runs that have the measure; client None: the value of the run."""
        numbers: dict[str | None, dict[int, float]] = {}
        for seed, result in self.list_finished(arm).items():
            beside = {other: by_seed[seed] for other, by_seed in self.results.items() if seed in by_seed}
            for client, number in measures.read_values(measure, result, at, beside, self.cell.target).items():
                numbers.setdefault(client, {})[seed] = number
        return numbers

    def estimate_all(self, measure: str, arm: str, at: End = "mean") -> dict[str | None, Estimate]:
        """Return client -> estimate of a measure over the arm's seeds; client None: of the values of the runs."""
        numbers = self.read_numbers(measure, arm, at)
        return {client: estimate(list(values.values()), "seeds") for client, values in numbers.items()}

    def estimate(self, measure: str, arm: str, at: End = "mean") -> Estimate | None:
        """Return the estimate of a measure over the arm's seeds; None if every run lacks the measure."""
        return self.estimate_all(measure, arm, at).get(None)


def is_incomplete(cell: Cell, result: Result) -> bool:
    """Return whether a finished run lacks something that the cell asks for, from the final weights or about each client."""
    about = cell.about
    has_noise = "global_test" not in result.curves or {f"{d:g}" for d in about.noise} <= result.noise.keys()
    has_client_curves = not about.each or all(client.curve for client in result.clients.values())
    has_node_analysis = about.node is None or (result.closeup is not None and result.closeup.client == about.node)
    return not ((has_noise and has_client_curves and has_node_analysis) or result.failed)


def read_measured_cells(
    experiment: PaperExperiment, store: ResultStore, wanted: Scale | None = None, seeds: int | None = None
) -> list[MeasuredCell]:
    """Return one `MeasuredCell` for each cell: at the wanted scale if there are results, else at the most complete scale.

    seeds: limit the results at the wanted scale to so many seeds of each cell; None: all its seeds.
    """
    return [_read_measured(cell, store, wanted, seeds) for cell in experiment.cells]


def _read_measured(cell: Cell, store: ResultStore, wanted: Scale | None, seeds: int | None) -> MeasuredCell:
    """Return the results of a cell. The scales of all stored runs are candidates, because cells share runs."""
    stored = (*store.list_results(cell.id), *store.list_all_results())
    scales = (Scale(limit, tuple(result.changed.items())) for result in stored for limit in (result.limit, result.rounds))
    asked, candidates = _fit(wanted, cell), list[MeasuredCell]()
    for scale in _list_distinct(_fit(scale, cell) for scale in _list_distinct([wanted, *scales])):
        if scale is None:
            continue
        rounds = {cell.limit_rounds(arm, scale.rounds) for arm in cell.arms}
        of_cell = cell.list_seeds(seeds) if scale == asked and seeds is not None else cell.list_seeds()
        known = {result.seed for result in store.list_all_results() if result.rounds in rounds and result.seed in of_cell}
        results: dict[str, dict[int, Result]] = {arm: {} for arm in cell.shown}
        for job in list_jobs(cell, sorted(known), scale):
            if job.arm in results and (result := job.find_result(store)) is not None:
                results[job.arm][job.seed] = result
        candidates.append(MeasuredCell(cell, scale, results))
        if scale == asked and candidates[-1].run:
            return candidates[-1]
    without_results = MeasuredCell(cell, Scale(), {arm: {} for arm in cell.shown})
    return max([*candidates, without_results], key=_rank_completeness)


def _list_distinct(scales: Iterable[Scale | None]) -> list[Scale | None]:
    distinct = list[Scale | None]()
    for scale in scales:  # the value of a changed key may be a table, which has no hash
        distinct += [] if scale in distinct else [scale]
    return distinct


def _fit(scale: Scale | None, cell: Cell) -> Scale | None:
    """Return the scale for one cell; None if an arm of the cell cannot have one of the changed keys."""
    with suppress(ConfigError):
        return scale and scale.fit_to(cell)
    return None


def _rank_completeness(measured: MeasuredCell) -> tuple[int, int, int, int]:
    """Return a sort key: first more arms, then fewer changed keys, then more rounds, then more seeds."""
    arms = sum(bool(by_seed) for by_seed in measured.results.values())
    rounds = measured.scale.rounds or measured.cell.most_rounds
    return arms, -len(measured.scale.changed), rounds, len(measured.all_results)
