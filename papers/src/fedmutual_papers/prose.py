"""Write sentences about results: the verdict of a claim, how much was run, on which hardware, in what time."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config.methods import find_method
from fedmutual.errors import format_count, join_words
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import format_number, format_percent_number
from fedmutual.rundir.text import format_duration
from fedmutual_papers.claims import DECIDED, DIVERGED, NOT_RUN, TOO_SHORT, DivergedRuns, Judgement
from fedmutual_papers.experiment_files import Arm
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.store import Result

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


def name_arm(key: str, arm: Arm) -> str:
    """Return the display name of an arm. key: the arm's key in the cell."""
    return arm.title or (find_method(key).title if key in ALGORITHMS else key)


def capitalize(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def format_value(value: Estimate, unit: str, decimals: int) -> tuple[str, str]:
    """Return (the mean as text, "± " with half of the interval's width as text); the second is "" without an interval."""

    def format_one(number: float) -> str:
        if unit in ("%", "points"):
            return format_percent_number(number, decimals)
        if unit == "bytes":
            return f"{number:,.0f}"
        return format_number(number, 1 if unit in ("rounds", "times", "clients") else 3)

    is_certain = value.half is None or (unit == "bytes" and value.half < 0.5)
    return format_one(value.mean), "" if is_certain or value.half is None else f"± {format_one(value.half)}"


def format_p_value(p: float | None) -> str:
    """Return "0.012" or "< 0.001"; "" for None."""
    return "" if p is None else "< 0.001" if p < 0.001 else format_number(p, 3)


def describe_seeds(seeds: int) -> str:
    """Return "1 seed", "3 seeds"."""
    return f"{seeds} seed" + ("s" if seeds > 1 else "")


def describe_mixed_versions(versions: Iterable[int]) -> str:
    """Return "made by numerics versions 1 and 2"; "" if all results have one numerics version."""
    several = sorted(set(versions))
    return f"made by numerics versions {join_words([str(v) for v in several])}" if len(several) > 1 else ""


def describe_divergence(diverged: DivergedRuns) -> str:
    """Return "fml diverged in 2 of 4 runs"; "" if no run diverged."""
    return join_words([f"{arm} diverged in {n} of {format_count(of, 'run')}" for arm, (n, of) in diverged.items()])


def describe_verdict(judged: Judgement, decimals: int) -> str:
    """Return "supported, shortened: +1.20 points (95 % interval +0.40 to +2.00, 3 seeds), mean over 4 of 24 cells"."""
    divergence, short = describe_divergence(judged.diverged), ""
    ran = {line.scale.removeprefix("shortened: ") for line in judged.run}
    if judged.verdict != TOO_SHORT:
        short = ", shortened" if any(line.scale for line in judged.judged_lines) else ""
    elif len(ran) == 1:
        short = f" ({ran.pop()})"
    if judged.verdict in (NOT_RUN, DIVERGED):
        return f"{judged.verdict}{short}: {divergence}" if divergence else judged.verdict
    remarks = "".join(f"; {remark}" for remark in (describe_mixed_versions(judged.numerics), divergence) if remark)
    if judged.overall is None:
        return f"{judged.verdict}: no seed of the runs has the numbers{remarks}"
    difference = _describe_difference(judged.unit, judged.overall, decimals)
    return f"{judged.verdict}{short}: {difference}{_describe_pool(judged)}{remarks}"


def _describe_difference(unit: str, e: Estimate, decimals: int) -> str:
    """Return "+1.20 points (95 % interval +0.40 to +2.00, 3 seeds)"."""

    def format_one(value: float) -> str:
        if unit == "times":
            return f"{value:,.1f}"
        number, digits = (100 * value, decimals) if unit == "points" else (value, {"rounds": 1, "bytes": 0}.get(unit, 3))
        text = format_number(number, digits)
        return f"+{text}" if value > 0 and text.strip("0.") else text

    mean = f"{format_one(e.mean)} {'of ' if unit in ('loss', 'score') else ''}{unit}"
    if e.half is None:
        return f"{mean} (one seed, so no interval)"
    return f"{mean} (95 % interval {format_one(e.low)} to {format_one(e.high)}, {e.n} seeds)"


def _describe_pool(judged: Judgement) -> str:
    if len(judged.lines) == 1:
        return ""
    noun, pooled = judged.claim.per, len(judged.run) - len(judged.unpaired) - len(judged.other_lengths)
    text = f"{pooled} of {len(judged.lines)} {noun}s"
    if noun == "client" and len(judged.run) < len(judged.lines):  # the clients of a cell without numbers are not known
        text = format_count(pooled, noun)
    if len(judged.run) == 1:
        return f", only in {judged.run[0].title}, {text}"
    counted = Counter(line.verdict for line in judged.run)
    against = ", which contradict each other" if judged.claim.scope == "mean" and set(DECIDED) <= counted.keys() else ""
    for titles, why in ((judged.unpaired, "no common seeds"), (judged.other_lengths, "another number of rounds")):
        if titles:
            text += f", without {'; '.join(titles) if len(titles) < NAMED else f'{len(titles)} others'} ({why})"
    return f", mean over {text}: {join_words([f'{n} {word}' for word, n in counted.most_common()])}{against}"


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
    claim, unit = judged.claim, judged.unit
    where = {"mean": "", "every": f"in every {claim.per} ", "most": f"in more than half of all {claim.per}s "}[claim.scope]
    subject = "each client's" if (claim.per, claim.scope) == ("client", "every") else f"{where}the"
    if claim.times is not None:
        side = f"{where}the ratio's interval lies {'above' if claim.sign == 'more' else 'below'} {claim.times:,.0f}"
    elif claim.sign == "same":
        margin = format_percent_number(claim.margin, 1) if unit == "points" else f"{claim.margin:g}"
        side = f"{subject} interval lies within ± {margin} {unit}"
    else:
        side = f"{subject} interval lies {'above' if claim.sign == 'more' else 'below'} 0"
    if claim.scope == "mean" and len(judged.lines) > 1:
        side += f" for the mean and for at least one {claim.per}, and no {claim.per} contradicts the claim"
    return f"{describe_comparison(judged)}; supported if {side}"


def describe_question(readings: Sequence[Judgement]) -> str:
    """Return the comparison and condition of the first reading, then the comparisons of the other readings."""
    others = (f" {capitalize(j.reading)}: {describe_comparison(j)}." for j in readings[1:])
    return f"{describe_condition(readings[0])}.{''.join(others)}"


def describe_state(measured_cells: Sequence[MeasuredCell]) -> str:
    """Return how many cells were run, with how many seeds."""
    run = [measured for measured in measured_cells if measured.run]
    if not run:
        return "Not run yet."
    seeds = sorted({len(measured.seeds) for measured in run})
    incomplete = sum(not all(measured.results.values()) for measured in run)
    partly = f", {incomplete} of them not with every method" if incomplete else ""
    were = f"{len(run)} of {format_count(len(measured_cells), 'cell')} (settings) {'was' if len(run) == 1 else 'were'} run"
    numbers = f"{join_words([str(n) for n in seeds], 'or')} {'seed' if seeds == [1] else 'seeds'}"
    short = sum(bool(measured.words) for measured in run)
    shortened = f" {format_count(short, 'cell')} {'is' if short == 1 else 'are'} **shortened**." if short else ""
    return f"{were}{partly}, with {numbers}.{shortened}"


def describe_shortening(measured_cells: Sequence[MeasuredCell]) -> Iterator[str]:
    """Yield one sentence for each way in which cells are shortened, and for each kind of non-random initial weights."""
    ways: dict[str, list[str]] = {}
    for measured in measured_cells:
        if measured.words:
            ways.setdefault(measured.words.removeprefix("shortened: "), []).append(measured.cell.name)
    for way, names in ways.items():
        yield f"Shortened, {way}: {join_words(names) if len(names) < 7 else f'{len(names)} cells'}."
    for weights in dict.fromkeys(r.made.weights for r in _list_results(measured_cells) if r.made.weights):
        yield f"Initial weights of the networks: {'; '.join(weights)}."


def describe_origins(measured_cells: Sequence[MeasuredCell]) -> Iterator[str]:
    """Yield one line with hardware, versions and time for each set-up that made results."""
    groups: dict[str, list[Result]] = {}
    for result in _list_results(measured_cells):
        made = result.made
        together = "" if made.together == 1 else f", {made.together} runs at once (each run has the seconds of all)"
        origin = (
            f"{made.device}, {format_count(made.cpus, 'core')}, {made.platform}; Python {made.python}, torch {made.torch}, "
            f"torchvision {made.torchvision}, fedmutual {result.version}; engine {made.engine}, "
            f"{format_count(made.threads, 'thread')}{together}"
        )
        groups.setdefault(origin, []).append(result)
    for origin, group in groups.items():
        timed = [r for r in group if r.seconds]
        pace = f"; {format_duration(sum(r.seconds for r in timed))} in all" if timed and timed[0].made.together == 1 else ""
        pace += f", {median(r.seconds / r.rounds for r in timed):.1f} s a round (median)" if timed else ""
        yield f"{origin}: {format_count(len(group), 'run')}{pace}."


def list_commands(measured_cells: Sequence[MeasuredCell]) -> list[str]:
    """Return the commands that made the results, each once, with the present place of the experiments."""
    commands = (r.made.command for r in _list_results(measured_cells))
    return list(dict.fromkeys(command.replace(" experiments/", " papers/experiments/") for command in commands))


def _list_results(measured_cells: Sequence[MeasuredCell]) -> list[Result]:
    """Return all shown results; a run that several cells share comes once."""
    return list({r.fingerprint: r for measured in measured_cells for r in measured.all_results}.values())
