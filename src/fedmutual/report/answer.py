"""The answer of a comparison, as a decision: which methods pay, by how much, which clients they harm, on which data.

The decision holds numbers and names only; `templates/answer.j2` renders the sentences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedmutual.report.findings import Finding, describe_finding, find_doubts
from fedmutual.report.rendering import render_macro
from fedmutual.results.comparison import RunComparison
from fedmutual.results.estimate import SAME, Estimate, Missing
from fedmutual.results.gains import Gains, Pair
from fedmutual.results.scale import PERCENT, MetricScale
from fedmutual.rundir.recorded_run import RecordedRun

HIGHLIGHTS = 3  # sentences below the answer, at most


@dataclass(frozen=True)
class Question:
    """What is asked of the methods."""

    act: str  # "federating"
    participant: str  # "client", "node"
    where: str  # the rows of a gain
    scores_own_rows: bool  # whether these are of the participant's own classes


FEDERATING = Question("federating", "client", "on their own data", True)
JOINING = Question("joining", "node", "over all domains", False)


@dataclass(frozen=True)
class Way:
    """One way to federate, a method or one of its models, in comparison with local-only training."""

    label: str
    gains: Gains

    @property
    def estimate(self) -> Estimate:
        """The mean gain over local-only training."""
        return self.gains.estimate

    @property
    def direction(self) -> int:
        """+1 or -1 where the mean lies above or below 0, however uncertain; 0 where it is 0."""
        return (self.estimate.mean > SAME) - (self.estimate.mean < -SAME)

    @property
    def is_doubtful(self) -> bool:
        """Whether chance may be the reason for the difference, or for its absence."""
        return bool(self.direction) or self.estimate.is_few

    @property
    def worst(self) -> Pair | None:
        """The client that the method harms most; None where it harms no client."""
        return next(iter(self.gains.harmed), None)


@dataclass(frozen=True)
class Holdings:
    """What a client trains on and is scored on, over all clients and seeds."""

    examples: tuple[int, int]  # of training: the lowest and the highest number
    classes: tuple[int, int]  # among the training examples: the lowest and the highest number
    scored_classes: int  # among a client's own validation examples: the highest number
    all_classes: int


@dataclass(frozen=True)
class Decision:
    """Whether federating pays in a comparison, by the sign of each gain's interval."""

    question: Question
    participants: int
    is_federated: bool
    ways: tuple[Way, ...]
    reasons: tuple[str, ...]  # why methods have no gain
    holdings: Holdings | None  # None where sites do not disclose what they hold

    @property
    def pays(self) -> list[str]:
        """The labels of the ways whose gain is certain."""
        return [way.label for way in self.ways if way.estimate.sign > 0]

    @property
    def costs(self) -> list[str]:
        """The labels of the ways whose loss is certain."""
        return [way.label for way in self.ways if way.estimate.sign < 0]

    @property
    def uncertain(self) -> list[str]:
        """The labels of the ways that are neither: the interval of the gain contains 0."""
        return [way.label for way in self.ways if not way.estimate.sign]

    @property
    def leanings(self) -> dict[int, list[str]]:
        """Direction of the mean gain -> the labels of the uncertain ways; +1 first, 0 last."""
        uncertain = [way for way in self.ways if not way.estimate.sign]
        labels = {direction: [way.label for way in uncertain if way.direction == direction] for direction in (1, -1, 0)}
        return {direction: names for direction, names in labels.items() if names}

    @property
    def doubt(self) -> Estimate | None:
        """The estimate over the fewest units of those that chance may explain; None where chance explains none."""
        estimates = [way.estimate for way in self.ways if not way.estimate.sign and way.is_doubtful]
        return min(estimates, key=lambda estimate: estimate.n, default=None)

    @property
    def is_one_seed(self) -> bool:
        """Whether all gains are means over the clients of one seed."""
        return bool(self.ways) and all(way.estimate.unit == "clients" for way in self.ways)

    @property
    def best(self) -> Way | None:
        """The way with the highest mean gain; None without ways."""
        return max(self.ways, key=lambda way: way.estimate.mean, default=None)

    @property
    def most_harmful(self) -> Way | None:
        """Of the ways that harm a client, without the best way, the one with the lowest mean gain; else None."""
        others = [way for way in self.ways if way != self.best and way.gains.harmed]
        return min(others, key=lambda way: way.estimate.mean, default=None)

    @property
    def local_value(self) -> float | None:
        """The main metric of local-only training on a gain's rows, mean over clients, then seeds; None without ways."""
        return self.best.gains.means[1] if self.best else None


@dataclass(frozen=True)
class Verdict:
    """The question of a comparison, the answer in a sentence, its most important reasons, and all sentences.

    sentences: every fact for the answer and against it; a page folds them.
    """

    question: str
    lead: str
    highlights: tuple[str, ...]
    sentences: tuple[str, ...]


def decide(comparison: RunComparison, gains: Mapping[str, Gains | Missing], question: Question) -> Decision:
    """Return the decision on one comparison. gains: label of a method or model -> its gains over local-only training."""
    ways = tuple(Way(label, value) for label, value in gains.items() if isinstance(value, Gains))
    clients = {pair.client for way in ways for pair in way.gains.pairs} or {*comparison.first.partition.clients}
    sites = comparison.first.environment.clients if comparison.at_sites else {}
    return Decision(
        question,
        len(clients | {*sites}),
        bool(comparison.federated),
        ways,
        tuple(dict.fromkeys(value.why for value in gains.values() if isinstance(value, Missing))),
        _read_holdings([run for method in comparison.methods for run in method.counted], len(comparison.classes)),
    )


def _read_holdings(runs: Sequence[RecordedRun], all_classes: int) -> Holdings | None:
    """Return the holdings over the clients of each seed; None where no run discloses them."""
    rows = [
        (run.seed, client, training, validation)
        for run in {run.seed: run for run in runs}.values()
        for client, holding in run.partition.clients.items()
        for training, validation in zip(
            holding.counts.training, holding.counts.validation or (1,) * len(holding.counts.training), strict=True
        )
    ]
    if not rows:
        return None
    import pandas as pd  # as in Gains.means

    counts = pd.DataFrame(rows, columns=["seed", "client", "training", "validation"]).set_index(["seed", "client"])
    examples = counts["training"].groupby(level=["seed", "client"]).sum()
    classes = (counts > 0).groupby(level=["seed", "client"]).sum()
    return Holdings(
        examples=(int(examples.min()), int(examples.max())),
        classes=(int(classes["training"].min()), int(classes["training"].max())),
        scored_classes=int(classes["validation"].max()),
        all_classes=all_classes,
    )


def conclude(
    comparison: RunComparison, decision: Decision, findings: Sequence[Finding], estimates: Sequence[Estimate]
) -> Verdict:
    """Return the verdict: question, answer, highlights, and the sentences of all findings.

    estimates: the gains that may be uncertain because there are few seeds. The highlights are at most `HIGHLIGHTS`
    sentences: on the best method, on the most harmful method, and on an uncertain gain, or else on the clients' data.
    """
    scale = comparison.scale
    sentences = [describe_finding(finding, scale) for finding in findings]
    doubts = [describe_finding(finding, scale) for finding in find_doubts(comparison, estimates)]
    question, lead, best, harm, data = (render(decision, m, scale) for m in ("question", "lead", "best", "harm", "data"))
    highlights = [sentence for sentence in (best, harm, *(doubts[:1] or [data])) if sentence]
    return Verdict(question, lead, tuple(highlights[:HIGHLIGHTS]), (*sentences, *doubts, *comparison.remarks))


def render(decision: Decision, macro: str, scale: MetricScale = PERCENT) -> str:
    """Return the text of the macro `macro` in `templates/answer.j2` for a decision. scale: how a metric is printed."""
    return render_macro("answer.j2", macro, decision, scale)
