"""Where clients are domains: does joining pay over all of them, and does it cost a node its own domain?"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from fedmutual.report import classes, measures
from fedmutual.report.answer import JOINING, conclude, decide
from fedmutual.report.comparison import POOLED, Comparison, Method
from fedmutual.report.domains import ACC, BWT, MEASURES, Measure
from fedmutual.report.statistics import Estimate, Gains, Missing, pair_clients
from fedmutual.report.text import count, listed, percent
from fedmutual.report.wording import Verdict, away, score

_HELD_AGAINST = ("fedh2l", "fml")  # the methods of this package's papers: said beside every other way to join
_NAMED = 5  # harmed nodes that are named
_COST = {
    1: "joining costs nothing: nodes gain there too",
    0: "no cost of joining is certain",
    -1: "joining costs accuracy there",
}


def judge(comparison: Comparison) -> Verdict:
    """The verdict on one comparison."""
    gains = {m: measures.gains(comparison, m.uses[0], ACC.data) for m in comparison.methods}
    sentences = [s for m, found in gains.items() for s in _method(comparison, m, found)]
    ours = {m.algorithm: m for m in reversed(comparison.methods) if m.algorithm in _HELD_AGAINST}  # of variants the first
    sentences += [s for m in reversed(ours.values()) for s in _rivals(comparison, m)]
    sentences += classes.sentences(comparison, ACC.data)
    estimates = [g.estimate for m in comparison.federated if isinstance(g := gains[m], Gains)]
    decision = decide(comparison, {m.label: gains[m] for m in comparison.federated}, JOINING)
    return conclude(comparison, decision, sentences, estimates)


def _method(comparison: Comparison, method: Method, found: Gains | Missing) -> Iterator[str]:
    """A sentence on all domains, and one on a node's own: how nodes fare against training alone."""
    if isinstance(found, Missing):
        if method.federated and comparison.alone(method):
            yield f"{method.label} cannot be held against local-only: {found.why}."
        return
    ceiling = " (the ceiling: all data in one place)" if method.algorithm == POOLED else ""
    yield f"{method.label}{ceiling}: over all domains (ACC) nodes score {_far(comparison, found)}. {_who(comparison, found)}"
    own = measures.gains(comparison, method.uses[0], BWT.data)
    if isinstance(own, Gains):
        cost = _COST[own.estimate.sign]
        yield (f"{method.label}, on a node's own domain (BWT): {cost}; {_far(comparison, own)}. {_who(comparison, own)}")
    rounds = {p.round for p in found.pairs}
    if rounds != {r.reached for r in method.counted}:
        at = listed([f"{r:,}" for r in sorted(rounds)])
        yield f"{method.label} is held against local-only after round {at}, the last after which both had trained as much."


def _far(comparison: Comparison, found: Gains) -> str:
    """ "89.1 %, 20.7 points above local-only (95 % interval 19.8 to 21.6, 5 seeds)"."""
    decimals = comparison.decimals
    words = ("above local-only", "below local-only", "level with local-only")
    return f"{percent(fmean(p.ours for p in found.pairs), decimals)} %, {away(found.estimate, decimals, words)}"


def _who(comparison: Comparison, found: Gains) -> str:
    """How many nodes gain, and which are harmed: by their means over seeds."""
    nodes = found.by_client
    harmed = sorted((i for i, e in nodes.items() if e.mean < 0), key=lambda i: nodes[i].mean)
    gained = sum(e.mean > 0 for e in nodes.values())
    n, equal = len(nodes), len(nodes) - gained - len(harmed)
    of = f"Of {count(n, 'node')}"
    if gained == n:
        return f"{of} {'all gain' if n > 1 else 'it gains'}."
    names = f": {_named(harmed, nodes, comparison.decimals)}" if harmed else ""
    if len(harmed) == n:
        return f"{of} {'all are' if n > 1 else 'it is'} harmed{names}."
    parts = [f"{gained or 'none'} {'gain' if gained > 1 else 'gains'}"]
    parts += [f"{equal} {'stays' if equal == 1 else 'stay'} equal"] if equal else []
    parts.append(f"{len(harmed) or 'none'} {'are' if len(harmed) > 1 else 'is'} harmed")
    return f"{of} {listed(parts)}{names}."


def _named(harmed: Sequence[str], nodes: Mapping[str, Estimate], decimals: int) -> str:
    """ "node 60 by 4.0 points and node 0 by 0.4 (may be chance)": those that are harmed, the most first."""
    open_ = {i for i in harmed if nodes[i].half is not None and not nodes[i].sign}
    all_open = len(open_) == len(harmed)
    told: list[str] = []
    for i in harmed[:_NAMED]:
        much = f"node {i} by {percent(-nodes[i].mean, decimals)}{'' if told else ' points'}"
        told.append(f"{much} (may be chance)" if i in open_ and not all_open else much)
    told += [f"{len(harmed) - _NAMED} more by less"] if len(harmed) > _NAMED else []
    each = "which" if len(harmed) == 1 else "each of which"
    return listed(told) + (f", {each} may be chance" if all_open else "")


def _rivals(comparison: Comparison, ours: Method) -> Iterator[str]:
    """A method beside every other way to join, on all domains, on a node's own and on the others: won or lost."""
    for other in comparison.federated:
        if other is ours:
            continue
        found = [(m, pair_clients(ours.counted, other.counted, data=m.data)) for m in MEASURES]
        parts = [_won(comparison, ours, measure, gains) for measure, gains in found if isinstance(gains, Gains)]
        if parts:
            yield f"Against {other.label}: {'; '.join(parts)}."


def _won(comparison: Comparison, ours: Method, measure: Measure, gains: Gains) -> str:
    return f"on {measure.rows} ({measure.name}) {score(ours.label, gains.estimate, comparison)}"
