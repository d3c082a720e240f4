"""The findings of a comparison: small decisions, each of which a template renders as sentences.

A finding holds names and numbers only. Its macro in templates/findings.j2 says which.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace
from typing import Literal

from fedmutual.report.rendering import render_macro
from fedmutual.results.comparison import RunComparison
from fedmutual.results.estimate import Estimate
from fedmutual.results.gains import Gains
from fedmutual.results.scale import MetricScale
from fedmutual.rundir.file_names import FINE_TUNE

_NAMED_PAIRS = 3  # harmed clients of single seeds that are named; of more, the one that is harmed most
_NAMED_NODES = 5  # harmed nodes that are named
_WANTED_SEEDS = 5  # an interval over fewer seeds is wide
_UNEQUAL = 1.5  # times as many gradient steps as another method: more steps alone can raise accuracy


class Finding(SimpleNamespace):
    """A fact that a page or the terminal states in one or two sentences: a macro of a template, and the values in it."""

    template = "findings.j2"
    macro: str


@dataclass(frozen=True)
class Harm:
    """A client or node that a method harms."""

    client: str
    seed: int | None  # None for a mean over seeds, and where there is one seed
    loss: float  # of accuracy, as a fraction
    may_be_chance: bool = False


@dataclass(frozen=True)
class Effects:
    """The number of clients or nodes that gain, and the harmed ones, the most harmed first."""

    participant: str  # "client", "node"
    total: int
    gained: int
    harmed: tuple[Harm, ...]
    most_named: int  # of the harmed ones
    seeds: int = 1  # over which clients are counted: a client counts once in each seed

    @property
    def equal(self) -> int:
        """How many neither gain nor are harmed."""
        return self.total - self.gained - len(self.harmed)

    @property
    def harms_to_name(self) -> tuple[Harm, ...]:
        """The harms that a sentence names."""
        return self.harmed[: self.most_named]

    @property
    def may_all_be_chance(self) -> bool:
        """Whether some are harmed and no harm is certain."""
        return bool(self.harmed) and all(harm.may_be_chance for harm in self.harmed)


@dataclass(frozen=True)
class Contest:
    """How far a method is ahead of a rival on one kind of rows."""

    data: str  # the rows as in metrics.jsonl; "shared": those of the test set, by the shared model
    name: str  # of the method, with its model where there are several
    estimate: Estimate


Source = Literal["sites", "adapt", "compare"]  # of further seeds


def describe_finding(finding: Finding, scale: MetricScale) -> str:
    """Return the sentences of a finding. scale: of the main metric."""
    return render_macro(finding.template, finding.macro, finding, scale)


def count_clients(gains: Gains) -> Effects:
    """Return how many clients gain and which are harmed; a client counts once in each seed."""
    seeds = len(gains.seeds)
    harmed = tuple(Harm(p.client, p.seed if seeds > 1 else None, -p.gain) for p in gains.harmed)
    named = len(harmed) if len(harmed) <= _NAMED_PAIRS else 1
    return Effects("client", len(gains.pairs), len(gains.gained), harmed, named, seeds)


def count_nodes(gains: Gains) -> Effects:
    """Return how many nodes gain and which are harmed, by a node's mean over seeds."""
    estimates = gains.by_client
    harmed = sorted((item for item in estimates.items() if item[1].mean < 0), key=lambda item: item[1].mean)
    harms = tuple(Harm(node, None, -e.mean, e.half is not None and not e.sign) for node, e in harmed)
    return Effects("node", len(estimates), sum(e.mean > 0 for e in estimates.values()), harms, _NAMED_NODES)


def find_doubts(comparison: RunComparison, estimates: Sequence[Estimate]) -> Iterator[Finding]:
    """Return what few seeds leave open. estimates: the gains that the answer rests on."""
    source = _find_source(comparison)
    open_estimates = [e for e in estimates if e.sign == 0 and e.unit == "seeds" and (e.is_few or not e.tied)]
    fewest = min(open_estimates, key=lambda e: e.n, default=None)
    if fewest and fewest.n < _WANTED_SEEDS:
        yield Finding(macro="few_seeds", seeds=fewest.n, is_too_few=fewest.is_few, source=source)
    if comparison.federated and all(len(m.counted) == 1 for m in comparison.methods if m.counted):
        yield Finding(macro="one_seed", source=source)
    if source == "compare":
        yield from find_unequal_steps(comparison)


def find_unequal_steps(comparison: RunComparison) -> Iterator[Finding]:
    """Yield a finding if a method takes over 1.5 times as many gradient steps as another. Uncounted steps are left out."""
    counts = {m.label: [run.ledger.steps for run in m.counted] for m in comparison.methods if m.counted}
    means = {label: fmean(n for n in steps if n) for label, steps in counts.items() if all(steps)}
    if means:
        most, fewest = max(means, key=lambda m: means[m]), min(means, key=lambda m: means[m])
        if means[most] > _UNEQUAL * means[fewest]:
            pace = {"most": most, "most_steps": means[most], "fewest": fewest, "fewest_steps": means[fewest]}
            yield Finding(macro="unequal_steps", **pace)


def _find_source(comparison: RunComparison) -> Source:
    if comparison.at_sites:
        return "sites"
    return "adapt" if any(m.algorithm == FINE_TUNE for m in comparison.methods) else "compare"
