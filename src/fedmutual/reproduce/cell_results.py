"""A cell as it is shown: one scale of it, with the results that there are."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from fedmutual.errors import ConfigError
from fedmutual.report.statistics import Estimate, estimate
from fedmutual.reproduce import measures
from fedmutual.reproduce.cells import Cell, Experiment
from fedmutual.reproduce.plan import Scale, jobs
from fedmutual.reproduce.result import Result
from fedmutual.reproduce.results import Store
from fedmutual.reproduce.schema import End


@dataclass(frozen=True)
class Look:
    """What is known of a cell at one scale."""

    cell: Cell
    scale: Scale
    results: Mapping[str, Mapping[int, Result]]  # arm -> seed -> result; of shown arms only

    @property
    def run(self) -> bool:
        """Whether anything was run."""
        return any(self.results.values())

    @property
    def words(self) -> str:
        """How it is shortened; "" where it is whole, or where nothing was run."""
        return self.scale.words(self.cell) if self.run else ""

    def arm_words(self, arm: str) -> str:
        """How one arm is shortened; "" where it is whole, or was not run."""
        return self.scale.words(self.cell, arm) if self.results.get(arm) else ""

    def share(self, arm: str) -> float:
        """The share of its own rounds that an arm ran for, 0 to 1."""
        rounds, own = self.scale.trained(self.cell, arm)
        return rounds / own

    @property
    def seeds(self) -> list[int]:
        """The seeds of which something was run."""
        return sorted({seed for found in self.results.values() for seed in found})

    @property
    def networks(self) -> dict[str, str]:
        """Client -> its network, in the runs that there are."""
        return {i: c.network for found in self.results.values() for r in found.values() for i, c in r.clients.items()}

    def good(self, arm: str, seed: int) -> bool:
        """Whether a run has numbers."""
        result = self.results.get(arm, {}).get(seed)
        return result is not None and not result.failed

    def diverged(self, arm: str) -> tuple[int, int]:
        """(in how many runs of an arm a client diverged, of how many)."""
        found = self.results.get(arm, {}).values()
        return sum(bool(r.failed) for r in found), len(found)

    def numerics(self, arm: str, seeds: Collection[int] | None = None) -> set[int]:
        """The numerics versions of the runs of an arm, of all seeds or of some."""
        return {r.numerics for s, r in self.results.get(arm, {}).items() if seeds is None or s in seeds}

    def number(self, measure: str, arm: str, seed: int, at: End = "last") -> float | None:
        """A measure of a run after its last or its best round."""
        if not self.good(arm, seed):
            return None
        kind, argument = measures.find(measure)
        beside = {other: found[seed] for other, found in self.results.items() if seed in found}
        reading = kind.read(self.results[arm][seed], beside, argument)
        return reading.last if at == "last" else reading.best

    def value(self, measure: str, arm: str, at: End = "last") -> Estimate | None:
        """The same over seeds; None where no run has it."""
        found = [v for seed in self.results.get(arm, {}) if (v := self.number(measure, arm, seed, at)) is not None]
        return estimate(found, "seeds") if found else None

    def nodes(self, measure: str, arm: str, at: End) -> dict[str, Estimate]:
        """The same of each client; {} where no run has it."""
        of = measures.find(measure)[0].nodes
        runs = [of(result, at) for result in self.results.get(arm, {}).values() if not result.failed] if of else []
        clients = dict.fromkeys(i for run in runs for i in run)
        return {i: estimate([run[i] for run in runs if i in run], "seeds") for i in clients}


def lacks(cell: Cell, result: Result) -> bool:
    """Whether a cell asks for more than is known of a finished run: of the weights that it ended with, or of its clients."""
    about = cell.about
    shaken = not about.noise or "global_test" not in result.curves or {f"{d:g}" for d in about.noise} <= result.noise.keys()
    each = not about.each or all(client.curve for client in result.clients.values())
    close = about.node is None or (result.closeup is not None and result.closeup.client == about.node)
    return not ((shaken and each and close) or result.failed)


def looks(
    experiment: Experiment, store: Store, wanted: Scale | None = None, seeds: Iterable[int] | None = None
) -> list[Look]:
    """Every cell at the wanted scale where it was run at that, else at the fullest there is.

    seeds: those shown at the wanted scale; all that there are, where they are not named.
    """
    return [_look(cell, store, _of(wanted, cell) if wanted is not None else None, seeds) for cell in experiment.cells]


def _of(way: Scale, cell: Cell) -> Scale | None:
    """For one cell; None where it cannot have a key of that, which another can."""
    with suppress(ConfigError):
        return way.of(cell)
    return None


def _look(cell: Cell, store: Store, wanted: Scale | None, seeds: Iterable[int] | None) -> Look:
    scales, found = [] if wanted is None else [wanted], []
    for way in store.ways(cell.id):
        if (scale := _of(way, cell)) is not None and scale not in scales:
            scales.append(scale)
    for scale in scales:
        known = _known(cell, store, scale)
        chosen = known & set(seeds) if scale == wanted and seeds is not None else known
        look = Look(cell, scale, _results(cell, store, scale, chosen))
        if look.run and scale == wanted:
            return look
        found.append(look)
    return max(found, key=_fullness, default=Look(cell, Scale(), {arm: {} for arm in cell.shown}))


def _known(cell: Cell, store: Store, scale: Scale) -> set[int]:
    """The seeds of runs, of whichever cell, that are as long as one of this cell's."""
    rounds = {cell.rounds(arm) if scale.rounds is None else cell.within(arm, scale.rounds) for arm in cell.arms}
    return {result.seed for result in store.all() if result.rounds in rounds}


def _results(cell: Cell, store: Store, scale: Scale, seeds: Iterable[int]) -> dict[str, dict[int, Result]]:
    found: dict[str, dict[int, Result]] = {arm: {} for arm in cell.shown}
    for job in jobs(cell, sorted(seeds), scale):
        if job.arm in found and (result := store.find(job)) is not None:
            found[job.arm][job.seed] = result
    return found


def _fullness(look: Look) -> tuple[int, int, int, int]:
    """All arms before some, nothing changed before something, then more rounds, then more seeds."""
    arms = sum(bool(found) for found in look.results.values())
    rounds = look.scale.rounds or max(map(look.cell.rounds, look.cell.arms))
    return arms, -len(look.scale.changed), rounds, sum(map(len, look.results.values()))
