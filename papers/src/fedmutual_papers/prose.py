"""Write sentences about results: the verdict of a claim, how much was run, on which hardware, in what time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from fedmutual.errors import format_count, join_words
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import format_number, format_percent_number
from fedmutual.rundir.text import format_duration
from fedmutual_papers.claims import DECIDED, DIVERGED, NOT_RUN, TOO_SHORT, Judgement
from fedmutual_papers.entries import describe_divergence, describe_mixed_versions, get_unit
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.result import Result

P_VALUES = (
    "p is two-sided, from Student's t over seeds. For a claim about every cell or most cells, p combines the p-values of "
    "the cells (partial conjunction). Holm's adjustment makes p larger, because all verdicts of a page, or of all pages, "
    "are judged together. The verdict uses the interval without adjustment: if the adjusted p is above 0.05, the verdict "
    "may be chance."
)
BUDGETS = (
    "Gradient steps are those of a client's own model, or of the client's copy of the shared model; FML takes each step "
    "with two networks. An example counts once for each step that uses the example."
)
NAMED = 4  # so many cells left out of a mean are counted, fewer are named
_WHERE = {"mean": "", "every": "in every {} ", "most": "in more than half of all {}s "}
_SIGNS = {"more": "above 0", "less": "below 0"}


def describe_verdict(judged: Judgement, decimals: int) -> str:
    """Return "supported, shortened: +1.20 points (95 % interval +0.40 to +2.00, 3 seeds), mean over 4 of 24 cells"."""
    divergence, short = (
        describe_divergence(judged.diverged),
        ", shortened" if judged.shortened and judged.verdict != TOO_SHORT else "",
    )
    if judged.verdict == TOO_SHORT and len(ran := {line.scale.removeprefix("shortened: ") for line in judged.run}) == 1:
        short = f" ({ran.pop()})"
    if judged.verdict in (NOT_RUN, DIVERGED):
        return f"{judged.verdict}{short}: {divergence}" if divergence else judged.verdict
    divergence = "".join(f"; {remark}" for remark in (describe_mixed_versions(judged.numerics), divergence) if remark)
    if judged.overall is None:
        return f"{judged.verdict}: no seed of the runs has the numbers{divergence}"
    return (
        f"{judged.verdict}{short}: {describe_difference(judged, judged.overall, decimals)}{_format_pool(judged)}{divergence}"
    )


def describe_difference(judged: Judgement, e: Estimate, decimals: int) -> str:
    """Return "+1.20 points (95 % interval +0.40 to +2.00, 3 seeds)"."""
    kind = get_unit(judged)

    def format_value(value: float) -> str:
        if kind == "times":
            return f"{value:,.1f}"
        text = (
            format_percent_number(value, decimals)
            if kind == "points"
            else format_number(value, {"rounds": 1, "bytes": 0}.get(kind, 3))
        )
        return f"+{text}" if value > 0 and text.strip("0.") else text

    words = {"loss": "of loss", "score": "of score"}.get(kind, kind)
    if e.half is None:
        return f"{format_value(e.mean)} {words} (one seed, so no interval)"
    return f"{format_value(e.mean)} {words} (95 % interval {format_value(e.low)} to {format_value(e.high)}, {e.n} seeds)"


def _format_pool(judged: Judgement) -> str:
    if len(judged.lines) == 1:
        return ""
    pooled, noun = judged.pooled, judged.claim.per
    pooled_text = f"{pooled} of {len(judged.lines)} {noun}s"
    if noun == "client" and len(judged.run) < len(judged.lines):  # the clients of a cell without numbers are not known
        pooled_text = format_count(pooled, noun)
    if len(judged.run) == 1:
        return f", only in {judged.run[0].title}, {pooled_text}"
    counted = Counter(line.verdict for line in judged.run)
    has_both_verdicts = judged.claim.scope == "mean" and set(DECIDED) <= counted.keys()
    against = ", which contradict each other" if has_both_verdicts else ""
    for titles, why in ((judged.unpaired, "no common seeds"), (judged.other_lengths, "another number of rounds")):
        if titles:
            pooled_text += f", without {'; '.join(titles) if len(titles) < NAMED else f'{len(titles)} others'} ({why})"
    return f", mean over {pooled_text}: {join_words([f'{n} {word}' for word, n in counted.most_common()])}{against}"


def format_p_value(p: float | None) -> str:
    """Return "0.012" or "< 0.001"; "" for None."""
    return "" if p is None else "< 0.001" if p < 0.001 else format_number(p, 3)


def describe_comparison(judged: Judgement) -> str:
    """Return the comparison of a claim: "fml minus fedavg", "fedavg divided by fedh2l"."""
    claim, (than, elsewhere) = judged.claim, judged.claim.other
    if claim.times is not None:
        return f"{claim.arm} divided by {than}"
    comparison = f"{claim.arm} minus {than}" + (f" in {elsewhere}" if elsewhere else "") if than else claim.arm
    comparison += f", minus this number in {claim.less}" if claim.less else ""
    best = [arm for arm, at in ((claim.arm, claim.at), (than, claim.than_at)) if at == "best"]
    return comparison + (f", with the best round of {join_words(best)}" if best else "")


def describe_condition(judged: Judgement) -> str:
    """Return the comparison of a claim and the condition under which the claim is supported."""
    claim = judged.claim
    where = _WHERE[claim.scope].format(claim.per)
    by_mean = claim.scope == "mean" and len(judged.lines) > 1
    line_condition = (
        f" for the mean and for at least one {claim.per}, and no {claim.per} contradicts the claim" if by_mean else ""
    )
    subject = "each client's" if (claim.per, claim.scope) == ("client", "every") else f"{where}the"
    if claim.times is not None:
        way = "above" if claim.sign == "more" else "below"
        side = f"{where}the ratio's interval lies {way} {claim.times:,.0f}"
    elif claim.sign == "same":
        margin = format_percent_number(claim.margin, 1) if get_unit(judged) == "points" else f"{claim.margin:g}"
        side = f"{subject} interval lies within ± {margin} {get_unit(judged)}"
    else:
        side = f"{subject} interval lies {_SIGNS[claim.sign]}"
    return f"{describe_comparison(judged)}; supported if {side}{line_condition}"


def describe_state(measured_cells: Sequence[MeasuredCell]) -> str:
    """Return how many cells were run, with how many seeds."""
    run = [measured for measured in measured_cells if measured.run]
    if not run:
        return "Not run yet."
    seeds = sorted({len(measured.seeds) for measured in run})
    noun = "seed" if seeds == [1] else "seeds"
    incomplete = sum(not all(measured.results.values()) for measured in run)
    partly = f", {incomplete} of them not with every method" if incomplete else ""
    cells, numbers = format_count(len(measured_cells), "cell"), join_words([str(n) for n in seeds], "or")
    summary = f"{len(run)} of {cells} (settings) {'was' if len(run) == 1 else 'were'} run{partly}, with {numbers} {noun}."
    shortened_cells = [measured for measured in run if measured.words]
    is_are = "is" if len(shortened_cells) == 1 else "are"
    return summary + (f" {format_count(len(shortened_cells), 'cell')} {is_are} **shortened**." if shortened_cells else "")


def describe_shortening(measured_cells: Sequence[MeasuredCell]) -> Iterator[str]:
    """Yield one sentence for each way in which cells are shortened."""
    ways: dict[str, list[str]] = {}
    for measured in measured_cells:
        if measured.words:
            ways.setdefault(measured.words.removeprefix("shortened: "), []).append(measured.cell.name)
    for way, names in ways.items():
        yield f"Shortened, {way}: {join_words(names) if len(names) < 7 else f'{len(names)} cells'}."


def describe_initial_weights(measured_cells: Sequence[MeasuredCell]) -> Iterator[str]:
    """Yield one sentence for each kind of non-random initial weights."""
    for weights in dict.fromkeys(r.made.weights for r in list_measured_results(measured_cells) if r.made.weights):
        yield f"Initial weights of the networks: {'; '.join(weights)}."


def describe_origins(measured_cells: Sequence[MeasuredCell]) -> Iterator[str]:
    """Yield one line with hardware, versions and time for each set-up that made results."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in list_measured_results(measured_cells):
        origin = result.made
        machine = f"{origin.device}, {format_count(origin.cpus, 'core')}, {origin.platform}"
        versions = (
            f"Python {origin.python}, torch {origin.torch}, torchvision {origin.torchvision}, fedmutual {result.version}"
        )
        together_text = "" if origin.together == 1 else f", {origin.together} runs at once (each run has the seconds of all)"
        groups.setdefault(
            (machine, versions, f"engine {origin.engine}, {format_count(origin.threads, 'thread')}{together_text}"), []
        ).append(result)
    for key, group in groups.items():
        timed = [r for r in group if r.seconds]
        pace = f"; {format_duration(sum(r.seconds for r in timed))} in all" if timed and timed[0].made.together == 1 else ""
        pace += f", {median(r.seconds / r.rounds for r in timed):.1f} s a round (median)" if timed else ""
        yield f"{'; '.join(key)}: {format_count(len(group), 'run')}{pace}."


def list_commands(measured_cells: Sequence[MeasuredCell]) -> list[str]:
    """Return the commands that made the results, each once."""
    return list(dict.fromkeys(r.made.command for r in list_measured_results(measured_cells)))


def list_measured_results(measured_cells: Sequence[MeasuredCell]) -> list[Result]:
    """Return all shown results; a run that several cells share comes once."""
    shown = {
        r.fingerprint: r for measured in measured_cells for by_seed in measured.results.values() for r in by_seed.values()
    }
    return list(shown.values())


def make_command(experiment: PaperExperiment) -> str:
    """Return the command that runs the experiment: "fedmutual reproduce ID"."""
    return f"fedmutual reproduce {experiment.id}"
