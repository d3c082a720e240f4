"""The findings of a comparison: small decisions, each of which a template renders as sentences.

A finding holds names and numbers only. Its class names the template and the macro.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, Literal

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


@dataclass(frozen=True)
class Finding:
    """A fact that a page or the terminal states in one or two sentences."""

    template: ClassVar[str] = "findings.j2"
    macro: ClassVar[str]


@dataclass(frozen=True)
class NotCompared(Finding):
    """A method that cannot be compared with local-only training."""

    macro = "not_compared"
    label: str
    reason: str


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
class MethodGain(Finding):
    """A method's accuracy and gain over local-only training on one kind of rows."""

    macro = "method_gain"
    label: str
    is_pooled: bool  # whether one model is trained on all data
    model: str  # "personal", "ensemble", "global", "meme"
    data: str  # "validation": own rows; of nodes "test": all domains, "test.own": their own domain
    accuracy: float  # the mean over clients, then seeds
    estimate: Estimate
    effects: Effects


@dataclass(frozen=True)
class ComparedAfter(Finding):
    """The rounds after which a method is compared with local-only training, where these are not its last."""

    macro = "compared_after"
    label: str
    rounds: tuple[int, ...]


@dataclass(frozen=True)
class TwoModels(Finding):
    """The difference between two models of a method on the clients' own rows."""

    macro = "two_models"
    label: str
    model: str  # the name of the model
    other: str  # the name of the model that the clients would use
    estimate: Estimate  # of model - other
    wins: int  # pairs of a client and a seed in which the better model wins
    total: int
    seeds: int

    @property
    def better(self) -> str:
        """The name of the better model by the mean."""
        return self.model if self.estimate.mean > 0 else self.other

    @property
    def worse(self) -> str:
        """The name of the worse model by the mean."""
        return self.other if self.estimate.mean > 0 else self.model


@dataclass(frozen=True)
class Contest:
    """How far a method is ahead of a rival on one kind of rows."""

    data: str  # as in `MethodGain`, "test.others": the other nodes' domains, "shared": the shared model on the test set
    name: str  # of the method, with its model where there are several
    estimate: Estimate


@dataclass(frozen=True)
class Rivalry(Finding):
    """A method beside one other method that federates."""

    macro = "rivalry"
    rival: str
    contests: tuple[Contest, ...]


@dataclass(frozen=True)
class AllClasses(Finding):
    """Two mean accuracies on the test set of all classes: of a method's personal models, and of its shared model."""

    macro = "all_classes"
    label: str
    personal: float
    shared: float


@dataclass(frozen=True)
class FrequentClass(Finding):
    """The accuracy of a model that always answers a client's most frequent class."""

    macro = "frequent_class"
    accuracy: float


@dataclass(frozen=True)
class WorstClass(Finding):
    """The class with the lowest recall of a method and local-only training together."""

    macro = "worst_class"
    name: str
    label: str
    recall: float
    local_recall: float
    estimate: Estimate


@dataclass(frozen=True)
class OtherTask(Finding):
    """A client whose task has no accuracy metric, with one of its scores under each model."""

    macro = "other_task"
    client: str
    score: str
    values: tuple[tuple[str, float], ...]  # (label of the model, mean over seeds)


@dataclass(frozen=True)
class MoreTasks(Finding):
    """How many further clients have a task without accuracy."""

    macro = "more_tasks"
    clients: int


Source = Literal["sites", "adapt", "compare"]  # of further seeds


@dataclass(frozen=True)
class FewSeeds(Finding):
    """A difference that is open because there are few seeds."""

    macro = "few_seeds"
    seeds: int
    is_too_few: bool  # to exclude chance
    source: Source


@dataclass(frozen=True)
class OneSeed(Finding):
    """All methods have one seed only."""

    macro = "one_seed"
    source: Source


@dataclass(frozen=True)
class UnequalSteps(Finding):
    """The methods take different numbers of gradient steps, means over seeds of all clients together."""

    macro = "unequal_steps"
    most: str
    most_steps: float
    fewest: str
    fewest_steps: float


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
        yield FewSeeds(fewest.n, fewest.is_few, source)
    if comparison.federated and all(len(m.counted) == 1 for m in comparison.methods if m.counted):
        yield OneSeed(source)
    if source == "compare":
        yield from find_unequal_steps(comparison)


def find_unequal_steps(comparison: RunComparison) -> Iterator[UnequalSteps]:
    """Yield a finding if a method takes over 1.5 times as many gradient steps as another. Uncounted steps are left out."""
    counts = {m.label: [run.ledger.steps for run in m.counted] for m in comparison.methods if m.counted}
    means = {label: fmean(n for n in steps if n) for label, steps in counts.items() if all(steps)}
    if means:
        most, fewest = max(means, key=lambda m: means[m]), min(means, key=lambda m: means[m])
        if means[most] > _UNEQUAL * means[fewest]:
            yield UnequalSteps(most, means[most], fewest, means[fewest])


def _find_source(comparison: RunComparison) -> Source:
    if comparison.at_sites:
        return "sites"
    return "adapt" if any(m.algorithm == FINE_TUNE for m in comparison.methods) else "compare"
