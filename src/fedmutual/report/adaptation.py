"""What `adapt` made: a newcomer that adapts a shared model by mutual learning, trains from scratch, or fine-tunes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field
from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.errors import RunError
from fedmutual.files import read_json
from fedmutual.report.cells import spread
from fedmutual.report.comparison import TUNED, Method, RunComparison
from fedmutual.report.html import write_page
from fedmutual.report.measures import SEEDS
from fedmutual.report.statistics import SAME, Estimate, Missing, estimate, pair_clients
from fedmutual.report.text import count, percent
from fedmutual.report.verdicts import judge
from fedmutual.report.wording import Verdict, describe_chance, describe_difference
from fedmutual.role import Role
from fedmutual.rundir.record_files import check_record
from fedmutual.rundir.recorded_run import EARLIER_METHODS, RecordedRun, read_run
from fedmutual.rundir.schema import Record

_ARMS = ("fml", TUNED, "scratch")  # as they are shown; the first is held against the others


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
    """adapt.json, once all is trained. Sizes are called "50", "all"; seeds are text, as JSON has them."""

    name: str
    source: Shared = Field(alias="from")
    tuned: Shared = Field(alias="fine-tuned")
    rounds: int
    networks: dict[str, str]  # way -> the network that it trains
    accuracy: dict[str, dict[str, dict[str, float]]]  # way -> size -> seed -> the personal model's, after the last round
    examples: dict[str, Counts]
    as_it_is: dict[str, dict[str, float]] | None = Field(alias="as it is")

    def estimate(self, arm: str, size: str) -> Estimate:
        """Return the mean accuracy of a way to adapt over its seeds."""
        return estimate([*self.accuracy[arm][size].values()], SEEDS)

    def said(self, arm: str) -> str:
        """Return the title of a way to adapt."""
        return {"fml": "FML", TUNED: f"Fine-tuned {self.tuned.label}", "scratch": "From scratch"}[arm]


def read_adaptation(out: Path) -> Adaptation:
    """Return the result of `adapt` from its folder.

    Raises:
        RunError: there is none, it is unfinished, or a file is damaged.
    """
    content = read_json(out / "adapt.json")
    if "accuracy" not in content:
        raise RunError(f"{out}: what is to be adapted there is not finished; go on with it by --resume")
    return check_record(out / "adapt.json", Adaptation, content)


def adapted(out: Path) -> tuple[Table, list[str]]:
    """Return the table for the terminal, ways by sizes, and for each size a sentence: does adapting pay?

    Raises:
        RunError: as `read_adaptation`.
    """
    adaptation = read_adaptation(out)
    return _table(out, adaptation), [_lead(c, adaptation).lead for c in _comparisons(out, adaptation)]


def write_adaptation(out: Path, page: Path) -> None:
    """Write the page: the curves and the numbers of every size.

    Raises:
        RunError: as `read_adaptation`; the page cannot be written.
    """
    adaptation = read_adaptation(out)
    write_page(_comparisons(out, adaptation), page, lambda comparison: _lead(comparison, adaptation))


def _table(out: Path, adaptation: Adaptation) -> Table:
    validation_counts = sorted({c.validation for c in adaptation.examples.values()})
    rows = (
        f"{validation_counts[0]:,}"
        if len(validation_counts) == 1
        else f"{validation_counts[0]:,} to {validation_counts[-1]:,}"
    )
    seeds = len(next(iter(adaptation.accuracy["fml"].values())))
    table = Table(
        caption=f"Accuracy on the newcomer's {rows} validation examples, %, after {count(adaptation.rounds, 'round')}; "
        + ("one seed." if seeds == 1 else f"mean ± 95 % interval over {seeds} seeds."),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("newcomer's model", overflow="fold")
    for size, counts in adaptation.examples.items():
        table.add_column(f"{'all ' if size == 'all' else ''}{counts.training:,}\nexamples", justify="right", no_wrap=True)
    if adaptation.as_it_is is not None:
        label = f"{adaptation.source.label}'s shared model as it is ({adaptation.source.model})"
        table.add_row(escape(label), *(_cell(estimate([*s.values()], SEEDS)) for s in adaptation.as_it_is.values()))
    for arm in reversed(_ARMS):
        cells = (_cell(adaptation.estimate(arm, size)) for size in adaptation.examples)
        table.add_row(escape(f"{adaptation.said(arm)} ({adaptation.networks[arm]})"), *cells)
    forks = [_fork(_runs(out, adaptation, "fml", size)) for size in adaptation.examples]
    if all(forks):
        table.add_row(escape(f"FML's fork of the shared model ({adaptation.source.model})"), *(_cell(f) for f in forks if f))
    return table


def _runs(out: Path, adaptation: Adaptation, arm: str, size: str) -> tuple[RecordedRun, ...]:
    return tuple(read_run(out / arm / size / seed) for seed in adaptation.accuracy[arm][size])


def _forked(runs: Sequence[RecordedRun]) -> str | None:
    """What the scores call the newcomer's other model, its fork of the shared one; None where it is not scored."""
    return next((m for run in runs for m in run.models if m != run.serves), None)


def _fork(runs: Sequence[RecordedRun]) -> Estimate | None:
    """The accuracy of the newcomer's fork of the shared model; None where it is not scored."""
    model = _forked(runs)
    scores = [s.accuracy for run in runs for s in run.own(run.last, model).values()] if model else []
    return estimate(scores, SEEDS) if scores else None


def _cell(e: Estimate) -> str:
    return f"{percent(e.mean)} {spread(e)}".rstrip()


def _comparisons(out: Path, adaptation: Adaptation) -> list[RunComparison]:
    """A comparison a size, whose local-only training is that from scratch."""
    return [
        RunComparison(
            f"{adaptation.name}, {'all ' if size == 'all' else ''}{counts.training:,} examples",
            tuple(_make_method(adaptation, arm, _runs(out, adaptation, arm, size)) for arm in _ARMS),
            tuple(_untouched(adaptation, size)),
        )
        for size, counts in adaptation.examples.items()
    ]


def _make_method(adaptation: Adaptation, arm: str, runs: tuple[RecordedRun, ...]) -> Method:
    """Return a way to adapt as a method. Fine-tuning counts as federated, because it begins with a federation's model."""
    is_tuned, first = arm == TUNED, runs[0]
    role = Role() if is_tuned else first.method.role
    return Method(TUNED if is_tuned else first.algorithm, (), adaptation.said(arm), runs, role)


def _untouched(adaptation: Adaptation, size: str) -> Iterator[str]:
    if adaptation.as_it_is is not None:
        score = percent(estimate([*adaptation.as_it_is[size].values()], SEEDS).mean)
        source = f"{adaptation.source.run}, round {adaptation.source.round}"
        yield f"The shared model as it came ({source}) scores {score} % on these data."


def _lead(comparison: RunComparison, adaptation: Adaptation) -> Verdict:
    """Does adapting pay at this size?"""
    fml, tuned, scratch = comparison.methods
    size = fml.runs[0].folder.parent.name
    parts = []
    for other, name in ((scratch, "training from scratch"), (tuned, f"fine-tuning {adaptation.tuned.label}'s shared model")):
        gains = pair_clients(fml.counted, other.counted)
        parts.append(
            f"against {name} it cannot be said: {gains.why}"
            if isinstance(gains, Missing)
            else _against(name, gains.estimate, comparison)
        )
    if adaptation.as_it_is is not None:
        ours = adaptation.accuracy["fml"][size]
        ahead = [ours[seed] - score for seed, score in adaptation.as_it_is[size].items()]
        gain = estimate(ahead, SEEDS, 1 / adaptation.examples[size].validation)
        parts.append(_against("the shared model as it came", gain, comparison))
    examples = comparison.name.removeprefix(f"{adaptation.name}, ")
    lead = f"Adapting by mutual learning with {examples}: {'; '.join(parts)}."
    lead += _other(comparison, adaptation, size)
    return replace(judge(comparison), question="Does adapting help this newcomer?", lead=lead)


def _other(comparison: RunComparison, adaptation: Adaptation, size: str) -> str:
    """That the newcomer ends with two models, and the one that was not held against the others is the better one."""
    fml, tuned, _ = comparison.methods
    fork, model = _fork(fml.counted), _forked(fml.counted)
    gains = pair_clients(fml.counted, tuned.counted, model) if model else Missing("")
    if fork is None or isinstance(gains, Missing) or fork.mean <= adaptation.estimate("fml", size).mean:
        return ""
    against = _against(f"fine-tuning {adaptation.tuned.label}'s shared model", gains.estimate, comparison)
    score = percent(fork.mean, comparison.decimals)
    return f" That is its personal model; its fork of the shared model, which it may use too, scores {score} %: {against}."


def _against(name: str, gain: Estimate, comparison: RunComparison) -> str:
    difference = describe_difference(gain, comparison.decimals, "ahead", "behind", "level")
    if gain.sign:
        return f"against {name} it {'pays' if gain.sign > 0 else 'does not pay'}: {difference}"
    doubt = describe_chance(gain) if abs(gain.mean) > SAME or gain.is_few else ""
    return f"against {name} it is {difference}{doubt}"
