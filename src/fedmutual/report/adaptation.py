"""What `adapt` made: a newcomer that adapts a shared model by mutual learning, trains from scratch, or fine-tunes."""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import Field

from fedmutual.errors import RunError
from fedmutual.files import read_json
from fedmutual.metric import ACCURACY, Metric
from fedmutual.report.cells import Column, PageTable, TableCell, make_share_cell, make_table
from fedmutual.report.html import write_page
from fedmutual.report.measures import SEEDS
from fedmutual.report.rendering import render_facts
from fedmutual.report.verdicts import Verdict, judge
from fedmutual.results.comparison import Line, RunComparison, make_lines
from fedmutual.results.estimate import Estimate, estimate
from fedmutual.results.frame import EARLIER_METHODS, read_run
from fedmutual.results.gains import Gains, pair_clients
from fedmutual.results.scale import MetricScale
from fedmutual.role import Role
from fedmutual.rundir.file_names import ADAPT, FINE_TUNE, SCRATCH
from fedmutual.rundir.record_files import check_record
from fedmutual.rundir.schema import Record


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
        earlier = EARLIER_METHODS.get(self.algorithm)
        return self.title or (earlier.title if earlier else self.algorithm)


class Adaptation(Record):
    """The content of adapt.json. Sizes are "50" or "all"; seeds are text, because they are keys in JSON."""

    name: str
    source: Shared = Field(alias="from")
    tuned: Shared = Field(alias="fine-tuned")
    rounds: int
    networks: dict[str, str]  # way -> the network that it trains
    metric: Metric = ACCURACY
    values: dict[str, dict[str, dict[str, float]]]  # way -> size -> seed -> the personal model's, after the last round
    examples: dict[str, dict[str, int]]  # size -> how many examples the newcomer has: training, validation
    as_it_is: dict[str, dict[str, float]] | None = Field(None, alias="as it is")

    @cached_property
    def scale(self) -> MetricScale:
        """The main metric, and how its values are written."""
        return MetricScale(metric=self.metric)

    @property
    def ways(self) -> tuple[str, str, str]:
        """Return the ways to adapt as they are shown: the newcomer's algorithm, then those that it is compared with."""
        algorithm = next(way for way in self.values if way not in (FINE_TUNE, SCRATCH))
        return algorithm, FINE_TUNE, SCRATCH

    def average(self, values: Sequence[float], grain: float = 0.0) -> Estimate:
        """Return the mean of values of the main metric over seeds. grain: as in `Estimate`."""
        return estimate(values, SEEDS, grain, self.metric.limit)

    def format_examples(self, size: str) -> str:
        """Return "50 examples"; where the newcomer uses all its data, "all 412 examples"."""
        return f"{'all ' if size == 'all' else ''}{self.examples[size]['training']:,} examples"


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


def summarise_adaptation(out: Path) -> tuple[PageTable, list[str]]:
    """Return the table of ways by sizes, and for each size a sentence: does adapting pay?

    Raises:
        RunError: as `read_adaptation`.
    """
    adaptation = read_adaptation(out)
    comparisons = _make_comparisons(out, adaptation)
    return _make_table(comparisons, adaptation), [_judge(adaptation, c).lead for c in comparisons]


def write_adaptation(out: Path, page: Path) -> None:
    """Write the page: the curves and the numbers of every size.

    Raises:
        RunError: as `read_adaptation`; the page cannot be written.
    """
    adaptation = read_adaptation(out)
    write_page(_make_comparisons(out, adaptation), page, partial(_judge, adaptation))


def _make_table(comparisons: Sequence[RunComparison], adaptation: Adaptation) -> PageTable:
    validation_counts = [counts["validation"] for counts in adaptation.examples.values()]
    caption = render_facts(
        "adaptation.j2",
        adaptation.scale,
        "caption",
        examples=(min(validation_counts), max(validation_counts)),
        rounds=adaptation.rounds,
        seeds=len(next(iter(adaptation.values[FINE_TUNE].values()))),
    )
    source, titles = adaptation.source, [method.method for method in comparisons[0].methods]
    ways = [
        (title, adaptation.networks[way], adaptation.values[way]) for title, way in zip(titles, adaptation.ways, strict=True)
    ]
    if adaptation.as_it_is is not None:
        ways.append((f"{source.label}'s shared model as it is", source.model, adaptation.as_it_is))
    lines = [
        (label, network, [adaptation.average([*by_size[size].values()]) for size in adaptation.examples])
        for label, network, by_size in reversed(ways)
    ]
    forks = [fork[1] for comparison in comparisons if (fork := _find_fork(comparison.lines, adaptation))]
    if len(forks) == len(comparisons):
        lines.append((f"{titles[0]}'s fork of the shared model", source.model, forks))
    share = partial(make_share_cell, scale=adaptation.scale)
    columns = [Column("newcomer's model", numeric=False, form=lambda line: TableCell(f"{line[0]} ({line[1]})"))]
    for number, size in enumerate(adaptation.examples):
        head = "\n".join(adaptation.format_examples(size).rsplit(" ", 1))
        columns.append(Column(head, read=partial(lambda number, line: line[2][number], number), form=share))
    return make_table("adaptation", caption, columns, lines)


def _find_fork(lines: Sequence[Line], adaptation: Adaptation) -> tuple[Line, Estimate] | None:
    """Return the newcomer's other model, its fork of the shared one, with its mean score; None where it is not scored."""
    fork = next((line for line in lines if line.method == lines[0].method and line is not lines[0]), None)
    scores = fork.select_last("validation")["value"].tolist() if fork else []
    return (fork, adaptation.average(scores)) if fork and scores else None


def _make_comparisons(out: Path, adaptation: Adaptation) -> list[RunComparison]:
    """Return a comparison a size, whose local-only training is that from scratch."""
    return [
        RunComparison(
            f"{adaptation.name}, {adaptation.format_examples(size)}",
            tuple(line for way in adaptation.ways for line in _read_way(out, adaptation, way, size)),
            _describe_unchanged_model(adaptation, size),
        )
        for size in adaptation.examples
    ]


def _read_way(out: Path, adaptation: Adaptation, way: str, size: str) -> list[Line]:
    """Return a way to adapt as a method. Fine-tuning counts as federated, because it begins with a federation's model."""
    runs = [read_run(out / way / size / seed) for seed in adaptation.values[way][size]]
    if way == FINE_TUNE:
        return make_lines(f"Fine-tuned {adaptation.tuned.label}", runs, FINE_TUNE, Role())
    return make_lines("From scratch" if way == SCRATCH else runs[0].method.title, runs)


def _describe_unchanged_model(adaptation: Adaptation, size: str) -> tuple[str, ...]:
    if adaptation.as_it_is is None:
        return ()
    value = adaptation.average([*adaptation.as_it_is[size].values()]).mean
    facts: dict[str, Any] = {"run": adaptation.source.run, "round": adaptation.source.round, "value": value}
    return (render_facts("adaptation.j2", adaptation.scale, "unchanged_model", **facts),)


def _judge(adaptation: Adaptation, comparison: RunComparison) -> Verdict:
    """Return the verdict at one size: does adapting pay?"""
    lead = _find_answer(comparison, adaptation)
    return judge(comparison)._replace(question="Does adapting help this newcomer?", lead=lead)


def _find_answer(comparison: RunComparison, adaptation: Adaptation) -> str:
    adapted, tuned, scratch = comparison.methods
    size = adapted.runs[0].folder.parent.name
    gains = [(rival, pair_clients(adapted.counted, m.counted)) for rival, m in ((SCRATCH, scratch), (FINE_TUNE, tuned))]
    contests = [(rival, g.estimate if isinstance(g, Gains) else g) for rival, g in gains]
    values = adaptation.values[adaptation.ways[0]][size]
    if adaptation.as_it_is is not None:
        ahead = [adaptation.metric.sign * (values[seed] - score) for seed, score in adaptation.as_it_is[size].items()]
        grain = 1 / adaptation.examples[size]["validation"] if adaptation.metric == ACCURACY else 0.0
        contests.append(("unchanged", adaptation.average(ahead, grain)))
    better_fork = None  # (the fork's value, its contest with fine-tuning), where it is better than the personal model
    fork = _find_fork(comparison.lines, adaptation)
    if fork and adaptation.metric.sign * (fork[1].mean - adaptation.average([*values.values()]).mean) > 0:
        fork_gains = pair_clients(adapted.counted, tuned.counted, fork[0].model)
        if isinstance(fork_gains, Gains):
            better_fork = fork[1].mean, (FINE_TUNE, fork_gains.estimate)
    facts: dict[str, Any] = {"examples": adaptation.format_examples(size), "contests": contests, "fork": better_fork}
    return render_facts("adaptation.j2", comparison.scale, "answer", tuned=adaptation.tuned.label, **facts)
