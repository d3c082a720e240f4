"""Does federating pay here, for whom, and where does it lose? Said in plain sentences, for it and against it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from fedmutual.report import classes, joining, measures, other_tasks
from fedmutual.report.answer import FEDERATING, conclude, decide
from fedmutual.report.comparison import POOLED, Comparison, Method, Use, comparisons
from fedmutual.report.statistics import Estimate, Gains, Missing, Pair, pair_clients, pair_global
from fedmutual.report.text import listed, percent
from fedmutual.report.wording import Verdict, away, clients, score
from fedmutual.rundir.recorded_run import RecordedRun, read_runs


def verdict(runs: Sequence[Path | RecordedRun]) -> list[str]:
    """The answer about run folders in one sentence a comparison: did federating pay.

    Raises:
        RunError: a folder is no run's, or damaged.
    """
    found = comparisons(read_runs(runs))
    return [f"{c.name}: {judge(c).lead}" if len(found) > 1 else judge(c).lead for c in found]


def judge(comparison: Comparison) -> Verdict:
    """The verdict on one comparison."""
    if comparison.domains:
        return joining.judge(comparison)
    sentences = [s for m in comparison.methods for s in (*_method(comparison, m), *_models(comparison, m))]
    sentences += [s for m in comparison.methods if m.algorithm == "fml" for s in _rivals(comparison, m)]
    sentences += other_tasks.sentences(comparison)
    sentences += _beside(comparison)
    found = [g.estimate for m in comparison.federated if isinstance(g := measures.gains(comparison, m.uses[0]), Gains)]
    return conclude(comparison, decide(comparison, _ways(comparison), FEDERATING), sentences, found)


def _ways(comparison: Comparison) -> dict[str, Gains | Missing]:
    """The federating methods' gains over local-only: of each model by itself where another than the first fares better."""
    ways: dict[str, Gains | Missing] = {}
    for method in comparison.federated:
        found = {use: measures.gains(comparison, use) for use in method.uses}
        signs = [g.estimate.sign for g in found.values() if isinstance(g, Gains)]
        apart = bool(signs) and max(signs) > signs[0]
        ways |= {_named(use): g for use, g in found.items()} if apart else {method.label: found[method.uses[0]]}
    return ways


def _named(use: Use) -> str:
    """ "FML (shared model)": a method, with the model where there are several."""
    return f"{use.method.label} ({use.name})" if len(use.method.uses) > 1 else use.method.label


def _method(comparison: Comparison, method: Method) -> Iterator[str]:
    """How a method's clients fare against training alone."""
    use = method.uses[0]
    found = measures.gains(comparison, use)
    if not isinstance(found, Gains):
        if method.federated and comparison.alone(method):
            yield f"{method.label} cannot be held against local-only: {found.why}."
        return
    decimals = comparison.decimals
    who = {"personal": "personal models score", "meme": "the clients' forks score"}.get(
        use.model or "personal", "the shared model scores"
    )
    who = "the one model scores" if method.algorithm == POOLED else who
    ceiling = " (the ceiling: all data in one place)" if method.algorithm == POOLED else ""
    ours = percent(fmean(p.ours for p in found.pairs), decimals)
    far = away(found.estimate, decimals, ("above local-only", "below local-only", "level with local-only"))
    yield f"{method.label}{ceiling}: {who} {ours} % on the clients' own validation data, {far}. {_who(found, decimals)}"
    rounds = {p.round for p in found.pairs}
    if rounds != {r.reached for r in method.counted}:
        at = listed([str(r) for r in sorted(rounds)])
        yield f"{method.label} is held against local-only after round {at}, the last that both have."


def _models(comparison: Comparison, method: Method) -> Iterator[str]:
    """Where clients end with two models: which of them is the better one on their own data."""
    for use in method.uses[1:]:
        found = pair_clients(method.counted, method.counted, use.model, method.uses[0].model)
        if isinstance(found, Gains):
            yield _better(comparison, use, found)


def _better(comparison: Comparison, use: Use, found: Gains) -> str:
    """A model against the one that the method's clients would use, in pairs."""
    label, e, decimals, where = use.method.label, found.estimate, comparison.decimals, "on the clients' own validation data"
    other = use.method.uses[0]
    if not e.sign:
        ahead = away(e, decimals, ("ahead", "behind", "level"))
        verb = "is" if use.model == "global" else "are"
        return f"Of the two models of {label} neither is certain to be better {where}: the {use.name} {verb} {ahead}."
    better, worse, wins = (use, other, found.gained) if e.sign > 0 else (other, use, found.harmed)
    verb = "does" if better.model == "global" else "do"
    by = f"by {away(e, decimals, ('', '', ''))}, for {len(wins)} of {clients(found)}"
    return f"With {label}, the {better.name} {verb} better {where} than the {worse.name}: {by}."


def _who(found: Gains, decimals: int) -> str:
    """How many gain and who is harmed."""
    n, gained, harmed, seeds = len(found.pairs), len(found.gained), found.harmed, len(found.seeds)
    of = f"Of {clients(found)}"
    if gained == n:
        return f"{of}, {'all gain' if n > 1 else 'it gains'}."
    if len(harmed) == n:
        worst = _harm(harmed[0], seeds > 1, decimals)
        return f"{of}, all are harmed, most of all {worst}." if n > 1 else f"The only client is harmed: {worst}."
    parts = [f"{gained or 'none'} {'gain' if gained > 1 else 'gains'}"]
    if found.equal:
        parts.append(f"{found.equal} {'stays' if found.equal == 1 else 'stay'} equal")
    parts.append(f"{len(harmed) or 'none'} {'are' if len(harmed) > 1 else 'is'} harmed")
    names = [_harm(p, seeds > 1, decimals) for p in (harmed if len(harmed) <= 3 else harmed[:1])]
    told = f": {listed(names)}" if 0 < len(harmed) <= 3 else f", most of all {names[0]}" if harmed else ""
    return f"{of}, {listed(parts)}{told}."


def _harm(pair: Pair, several: bool, decimals: int) -> str:
    of = f" in seed {pair.seed}" if several else ""
    return f"client {pair.client}{of} by {percent(-pair.gain, decimals)} points"


def _rivals(comparison: Comparison, fml: Method) -> Iterator[str]:
    """FML beside every other way to federate, on the clients' own work and as a shared model: won or lost."""
    for other in comparison.federated:
        if other.algorithm == fml.algorithm:
            continue
        own = pair_clients(fml.counted, other.counted)
        shared = pair_global(fml.counted, other.counted)
        parts = (
            [f"on the clients' own validation data {score(_named(fml.uses[0]), own.estimate, comparison)}"]
            if isinstance(own, Gains)
            else []
        )
        parts += [f"as one shared model on the test set {score(fml.label, shared, comparison)}"] if shared else []
        if parts:
            yield f"Against {other.label}: {'; '.join(parts)}."


def _beside(comparison: Comparison) -> Iterator[str]:
    """What the numbers above do not say."""
    decimals = comparison.decimals
    for m in comparison.methods:
        everything = measures.over_seeds(
            m.counted, lambda r: measures.mean_of(list(r.own(r.last, data="test").values()), "accuracy"), ""
        )
        shared = measures.global_last(m.uses[-1])
        if m.algorithm == "fml" and isinstance(everything, Estimate) and isinstance(shared, Estimate):
            yield (
                f"On all classes (the test set) {m.label}'s personal models score {percent(everything.mean, decimals)} %, "
                f"its shared model {percent(shared.mean, decimals)} %."
            )
    first = comparison.methods[0]
    always = measures.over_seeds(first.counted, lambda r: measures.mean_of(list(r.own(r.last).values()), "majority"), "")
    if isinstance(always, Estimate):
        score = percent(always.mean, decimals)
        yield f"Always naming a client's most frequent class would score {score} % on its validation data."
    yield from classes.sentences(comparison)
