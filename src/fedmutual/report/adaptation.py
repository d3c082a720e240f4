"""What `adapt` made: a newcomer that adapts a shared model by mutual learning, trains from scratch, or fine-tunes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import Field
from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.errors import RunError
from fedmutual.files import read_json
from fedmutual.metric import Metric
from fedmutual.report.answer import Verdict
from fedmutual.report.cells import format_spread
from fedmutual.report.findings import Finding, describe_finding
from fedmutual.report.html import write_page
from fedmutual.report.measures import SEEDS
from fedmutual.report.verdicts import judge
from fedmutual.results.comparison import Method, RunComparison
from fedmutual.results.estimate import SAME, Estimate, Missing, estimate, get_limit
from fedmutual.results.gains import Gains, pair_clients
from fedmutual.results.scale import PERCENT, MetricScale
from fedmutual.role import Role
from fedmutual.rundir.file_names import ADAPT, FINE_TUNE, SCRATCH
from fedmutual.rundir.record_files import check_record
from fedmutual.rundir.recorded_run import EARLIER_METHODS, RecordedRun, read_run
from fedmutual.rundir.schema import Record, RecordedMetric


class Shared(Record):
    """A shared model that was taken on."""

    run: str
    algorithm: str
    title: str | None = None  # of the algorithm; earlier versions did not write the title
    model: str
    round: int

    @property
    def label(self) -> str:
        """The title of the model's algorithm."""
        earlier_title, *_ = EARLIER_METHODS.get(self.algorithm, (self.algorithm,))
        return self.title or earlier_title


class Counts(Record):
    """The newcomer's examples at one size."""

    training: int
    validation: int


class Adaptation(Record):
    """The content of adapt.json. Sizes are "50" or "all"; seeds are text, because they are keys in JSON."""

    name: str
    source: Shared = Field(alias="from")
    tuned: Shared = Field(alias="fine-tuned")
    rounds: int
    networks: dict[str, str]  # way -> the network that it trains
    metric: RecordedMetric | None = None  # the main metric; None: accuracy
    values: dict[str, dict[str, dict[str, float]]]  # way -> size -> seed -> the personal model's, after the last round
    examples: dict[str, Counts]
    as_it_is: dict[str, dict[str, float]] | None = Field(alias="as it is")

    @cached_property
    def scale(self) -> MetricScale:
        """The main metric, and how its values are written."""
        return PERCENT if self.metric is None else MetricScale(metric=Metric(**self.metric.model_dump()))

    @property
    def sign(self) -> int:
        """Return 1 if a higher value is better, else -1."""
        return 1 if self.scale.metric.is_higher_better else -1

    @property
    def ways(self) -> tuple[str, str, str]:
        """Return the ways to adapt as they are shown: the newcomer's algorithm, then those that it is compared with."""
        algorithm = next(way for way in self.values if way not in (FINE_TUNE, SCRATCH))
        return algorithm, FINE_TUNE, SCRATCH

    def estimate(self, way: str, size: str) -> Estimate:
        """Return the mean of the main metric of a way to adapt over its seeds."""
        return self.average([*self.values[way][size].values()])

    def average(self, values: Sequence[float], grain: float = 0.0) -> Estimate:
        """Return the mean of values of the main metric over seeds. grain: as in `Estimate`."""
        return estimate(values, SEEDS, grain, get_limit(self.scale.metric))

    def format_examples(self, size: str) -> str:
        """Return "50 examples"; where the newcomer uses all its data, "all 412 examples"."""
        return f"{'all ' if size == 'all' else ''}{self.examples[size].training:,} examples"


@dataclass(frozen=True)
class WayGain:
    """The gain of adapting over another way."""

    rival: str  # "scratch", "fine-tune", or "unchanged": the shared model as it came
    title: str  # of the algorithm whose shared model is fine-tuned
    gain: Estimate | Missing  # of the main metric; positive where adapting is better

    @property
    def has_doubt(self) -> bool:
        """Whether chance may be the reason for the difference, or for its absence."""
        return isinstance(self.gain, Estimate) and (abs(self.gain.mean) > SAME or self.gain.is_few)


@dataclass(frozen=True)
class BetterFork:
    """The newcomer's fork of the shared model, where the fork is better than its personal model."""

    value: float  # of the main metric, the mean over seeds
    contest: WayGain


def _find(macro: str, **values: object) -> Finding:
    """Return a fact about an adaptation, which templates/adaptation.j2 words."""
    return Finding(template="adaptation.j2", macro=macro, **values)


def read_adaptation(out: Path) -> Adaptation:
    """Return the result of `adapt` from its folder.

    Raises:
        RunError: there is none, it is unfinished, or a file is damaged.
    """
    content = read_json(out / ADAPT)
    key = "values" if "metric" in content else "accuracy"
    if key not in content:
        raise RunError(f"{out}: the adaptation there is not finished; resume it with --resume")
    return check_record(out / ADAPT, Adaptation, {**content, "values": content[key]})


def summarise_adaptation(out: Path) -> tuple[Table, list[str]]:
    """Return the table for the terminal, ways by sizes, and for each size a sentence: does adapting pay?

    Raises:
        RunError: as `read_adaptation`.
    """
    adaptation = read_adaptation(out)
    comparisons = _make_comparisons(out, adaptation)
    return _make_table(comparisons, adaptation), [_judge(c, adaptation).lead for c in comparisons]


def write_adaptation(out: Path, page: Path) -> None:
    """Write the page: the curves and the numbers of every size.

    Raises:
        RunError: as `read_adaptation`; the page cannot be written.
    """
    adaptation = read_adaptation(out)
    write_page(_make_comparisons(out, adaptation), page, lambda comparison: _judge(comparison, adaptation))


def _make_table(comparisons: Sequence[RunComparison], adaptation: Adaptation) -> Table:
    validation_counts = [c.validation for c in adaptation.examples.values()]
    seeds = len(next(iter(adaptation.values[FINE_TUNE].values())))
    ends = (min(validation_counts), max(validation_counts))
    caption = _find("caption", examples=ends, rounds=adaptation.rounds, seeds=seeds)
    table = Table(
        caption=describe_finding(caption, adaptation.scale),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("newcomer's model", overflow="fold")
    for size in adaptation.examples:
        table.add_column("\n".join(adaptation.format_examples(size).rsplit(" ", 1)), justify="right", no_wrap=True)
    if adaptation.as_it_is is not None:
        label = f"{adaptation.source.label}'s shared model as it is ({adaptation.source.model})"
        unchanged = (adaptation.average([*s.values()]) for s in adaptation.as_it_is.values())
        table.add_row(escape(label), *(_format_cell(e, adaptation.scale) for e in unchanged))
    titles = [method.label for method in comparisons[0].methods]
    for way, title in reversed([*zip(adaptation.ways, titles, strict=True)]):
        cells = (_format_cell(adaptation.estimate(way, size), adaptation.scale) for size in adaptation.examples)
        table.add_row(escape(f"{title} ({adaptation.networks[way]})"), *cells)
    forks = [_find_fork_score(comparison.methods[0].runs, adaptation) for comparison in comparisons]
    if all(forks):
        label = f"{titles[0]}'s fork of the shared model ({adaptation.source.model})"
        table.add_row(escape(label), *(_format_cell(fork, adaptation.scale) for fork in forks if fork))
    return table


def _find_fork_name(runs: Sequence[RecordedRun]) -> str | None:
    """What the scores call the newcomer's other model, its fork of the shared one; None where it is not scored."""
    return next((m for run in runs for m in run.models if m != run.serves), None)


def _find_fork_score(runs: Sequence[RecordedRun], adaptation: Adaptation) -> Estimate | None:
    """Return the score of the newcomer's fork of the shared model; None where it is not scored."""
    model = _find_fork_name(runs)
    scores = [s.value for run in runs for s in run.get_scores(run.last, model).values()] if model else []
    return adaptation.average(scores) if scores else None


def _format_cell(e: Estimate, scale: MetricScale) -> str:
    return f"{scale.format_value(e.mean)} {format_spread(e, scale)}".rstrip()


def _make_comparisons(out: Path, adaptation: Adaptation) -> list[RunComparison]:
    """A comparison a size, whose local-only training is that from scratch."""
    return [
        RunComparison(
            f"{adaptation.name}, {adaptation.format_examples(size)}",
            tuple(_make_method(out, adaptation, way, size) for way in adaptation.ways),
            tuple(describe_finding(f, adaptation.scale) for f in _find_unchanged_model(adaptation, size)),
        )
        for size in adaptation.examples
    ]


def _make_method(out: Path, adaptation: Adaptation, way: str, size: str) -> Method:
    """Return a way to adapt as a method. Fine-tuning counts as federated, because it begins with a federation's model."""
    runs = tuple(read_run(out / way / size / seed) for seed in adaptation.values[way][size])
    first = runs[0]
    if way == FINE_TUNE:
        return Method(FINE_TUNE, (), f"Fine-tuned {adaptation.tuned.label}", runs, Role())
    label = "From scratch" if way == SCRATCH else first.method.title
    return Method(first.algorithm, (), label, runs, first.method.role)


def _find_unchanged_model(adaptation: Adaptation, size: str) -> Iterator[Finding]:
    if adaptation.as_it_is is not None:
        value = adaptation.average([*adaptation.as_it_is[size].values()]).mean
        yield _find("unchanged_model", run=adaptation.source.run, round=adaptation.source.round, value=value)


def _judge(comparison: RunComparison, adaptation: Adaptation) -> Verdict:
    """Return the verdict at one size: does adapting pay?"""
    lead = describe_finding(_find_answer(comparison, adaptation), comparison.scale)
    return replace(judge(comparison), question="Does adapting help this newcomer?", lead=lead)


def _find_answer(comparison: RunComparison, adaptation: Adaptation) -> Finding:
    adapted, tuned, scratch = comparison.methods
    size, title = adapted.runs[0].folder.parent.name, adaptation.tuned.label
    contests = [
        WayGain(SCRATCH, title, _get_gain(pair_clients(adapted.counted, scratch.counted))),
        WayGain(FINE_TUNE, title, _get_gain(pair_clients(adapted.counted, tuned.counted))),
    ]
    if adaptation.as_it_is is not None:
        values, sign = adaptation.values[adaptation.ways[0]][size], adaptation.sign
        ahead = [sign * (values[seed] - score) for seed, score in adaptation.as_it_is[size].items()]
        gain = adaptation.average(ahead, 1 / adaptation.examples[size].validation if adaptation.metric is None else 0.0)
        contests.append(WayGain("unchanged", title, gain))
    fork = _find_better_fork(comparison, adaptation, size)
    return _find("answer", examples=adaptation.format_examples(size), contests=tuple(contests), fork=fork)


def _get_gain(gains: Gains | Missing) -> Estimate | Missing:
    return gains if isinstance(gains, Missing) else gains.estimate


def _find_better_fork(comparison: RunComparison, adaptation: Adaptation, size: str) -> BetterFork | None:
    """Return the newcomer's fork of the shared model where the fork is better than its personal model."""
    adapted, tuned, _ = comparison.methods
    fork, model = _find_fork_score(adapted.counted, adaptation), _find_fork_name(adapted.counted)
    gains = pair_clients(adapted.counted, tuned.counted, model) if model else Missing("")
    if fork is None or isinstance(gains, Missing):
        return None
    if adaptation.sign * (fork.mean - adaptation.estimate(adaptation.ways[0], size).mean) <= 0:
        return None
    return BetterFork(fork.mean, WayGain(FINE_TUNE, adaptation.tuned.label, gains.estimate))
