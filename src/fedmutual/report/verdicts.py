"""Does federating pay here, for which clients, and where does it lose? The answer, and the findings for and against it.

Decisions and findings are numbers and names; the macros of templates/answer.j2 and templates/findings.j2 word them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

from fedmutual.report import measures
from fedmutual.report.rendering import render_facts, render_macro
from fedmutual.results.comparison import Line, RunComparison
from fedmutual.results.estimate import SAME, Estimate, Missing
from fedmutual.results.gains import Gains, PairRow, average_steps, match_rows, pair_clients, pair_global
from fedmutual.results.scale import PERCENT, MetricScale
from fedmutual.rundir.file_names import FINE_TUNE
from fedmutual.rundir.schema import TRANSFER_DATA

HIGHLIGHTS = 3  # sentences below the answer, at most
_CLEAR = 0.05  # a difference of recall that the report names even if the difference is not certain
_NAMED_PAIRS = 3  # harmed clients of single seeds that are named; of more, the one that is harmed most
_NAMED_NODES = 5  # harmed nodes that are named
_WANTED_SEEDS = 5  # an interval over fewer seeds is wide
_UNEQUAL = 1.5  # times as many gradient steps as another method: more steps alone can raise accuracy

FEDERATING = {"act": "federating", "participant": "client", "where": "on their own data", "scores_own_rows": True}
JOINING = {"act": "joining", "participant": "node", "where": "over all domains", "scores_own_rows": False}
"""What is asked of the methods: the act, the participants, the rows of a gain, and whether these are of own classes only."""


class Verdict(NamedTuple):
    """The question of a comparison, the answer in a sentence, its most important reasons, and all sentences.

    sentences: every fact for the answer and against it; a page folds them.
    """

    question: str
    lead: str
    highlights: tuple[str, ...]
    sentences: tuple[str, ...]


def find_answers(compared: Sequence[RunComparison]) -> list[str]:
    """Return the answer in one sentence for each comparison: does federating pay."""
    return [f"{c.name}: {judge(c).lead}" if len(compared) > 1 else judge(c).lead for c in compared]


def judge(comparison: RunComparison) -> Verdict:
    """Return the verdict on one comparison: whether federating pays, the sentences of the page, and the findings.

    The highlights are at most `HIGHLIGHTS` sentences: on the best method, on the most harmful method, and on an uncertain
    gain, or else on the clients' data.
    """
    scale, domains = comparison.scale, comparison.domains
    data = TRANSFER_DATA["acc"] if domains else "validation"
    gains = {method.method: measures.measure_gains(comparison, method, data) for method in comparison.federated}
    ways = gains if domains else _find_ways(comparison)
    clients = {i for g in ways.values() if isinstance(g, Gains) for i in g.table["client"]}
    sites = comparison.first.environment.clients if comparison.at_sites else {}
    decision = decide(
        JOINING if domains else FEDERATING,
        len(clients | {*comparison.first.partition.clients, *sites}),
        ways,
        _read_holdings(comparison),
        is_federated=bool(comparison.federated),
    )
    doubts = [*find_doubts(comparison, [g.estimate for g in gains.values() if isinstance(g, Gains)])]
    question, lead, best, harm, facts = (render(decision, m, scale) for m in ("question", "lead", "best", "harm", "data"))
    if len(comparison.methods) == 2 and len({(m.federated, m.is_pooled) for m in comparison.methods}) == 1:
        first, second = comparison.methods
        gains_over_other = pair_clients(first.counted, second.counted)
        decision.rivals = first.method, second.method
        decision.of_one = first.runs[0].method.title if first.algorithm == second.algorithm else ""
        decision.apart = gains_over_other.why if isinstance(gains_over_other, Missing) else ""
        question, apart = (render(decision, macro, scale) for macro in ("which_is_better", "not_paired"))
        best, lead = lead, next(_compare_with_rivals(comparison, first, [second]), apart)
    highlights = [sentence for sentence in (best, harm, *(doubts[:1] or [facts])) if sentence]
    sentences = (*find_findings(comparison), *doubts, *comparison.remarks)
    return Verdict(question, lead, tuple(highlights[:HIGHLIGHTS]), sentences)


def decide(
    question: Mapping[str, Any],
    participants: int,
    gains: Mapping[str, Gains | Missing],
    holdings: Mapping[str, Any] | None = None,
    is_federated: bool = True,
) -> SimpleNamespace:
    """Return whether federating pays, by the sign of each gain's interval, as the macros of answer.j2 take it.

    question: `FEDERATING` or `JOINING`. gains: label of a method or model (a way to federate) -> its gains over local-only
    training. holdings: what the clients train on, as `_read_holdings` returns it.
    """
    ways = {label: value for label, value in gains.items() if isinstance(value, Gains)}
    means, signs = ({label: getattr(g.estimate, name) for label, g in ways.items()} for name in ("mean", "sign"))
    uncertain = [label for label in ways if not signs[label]]
    leanings = {way: [label for label in uncertain if ways[label].estimate.direction == way] for way in (1, -1, 0)}
    doubts = [g.estimate for g in ways.values() if g.estimate.may_be_chance]
    best = max(ways, key=means.__getitem__, default=None)
    harmful = [label for label in ways if label != best and ways[label].harmed]
    return SimpleNamespace(
        question=question,
        participants=participants,
        is_federated=is_federated,
        ways=ways,
        reasons=[*dict.fromkeys(value.why for value in gains.values() if isinstance(value, Missing))],
        pays=[label for label in ways if signs[label] > 0],
        costs=[label for label in ways if signs[label] < 0],
        uncertain=uncertain,
        leanings={way: labels for way, labels in leanings.items() if labels},  # direction of the mean gain -> labels
        doubt=min(doubts, key=lambda e: e.n, default=None),  # over the fewest units, of those that chance may explain
        is_one_seed=bool(ways) and all(g.estimate.unit == "clients" for g in ways.values()),
        best=best,
        most_harmful=min(harmful, key=means.__getitem__, default=None),  # of the ways without the best one
        holdings=holdings,
        local_value=ways[best].means[1] if best is not None else None,  # of local-only training on a gain's rows
    )


def render(decision: SimpleNamespace, macro: str, scale: MetricScale = PERCENT) -> str:
    """Return the text of the macro `macro` in `templates/answer.j2` for a decision. scale: how a metric is printed."""
    return render_macro("answer.j2", macro, decision, scale)


def _read_holdings(comparison: RunComparison) -> dict[str, Any] | None:
    """Return what a client trains on and is scored on, over all clients and seeds; None where no run discloses it.

    The lowest and the highest number of examples and of classes in training, the highest number of classes among a client's
    own validation examples, and the number of all classes.
    """
    runs = {run.seed: run for method in comparison.methods for run in method.counted}.values()
    held = [client for run in runs for client in run.partition.clients.values()]
    if not held:
        return None
    examples, total = [sum(client.training) for client in held], len(comparison.classes)
    classes = [sum(n > 0 for n in client.training[:total]) for client in held]
    scored = [sum(n > 0 for n in client.counts.get("validation", (1,) * total)[:total]) for client in held]
    return {
        "examples": (min(examples), max(examples)),
        "classes": (min(classes), max(classes)),
        "scored_classes": max(scored),
        "all_classes": total,
    }


def _find_ways(comparison: RunComparison) -> dict[str, Gains | Missing]:
    """Return the gains of each federating method; of each of its models, where another model than the first is better."""
    ways: dict[str, Gains | Missing] = {}
    for method in comparison.federated:
        lines = [line for line in comparison.lines if line.method == method.method]
        gains = {line: measures.measure_gains(comparison, line) for line in lines}
        signs = [g.estimate.sign for g in gains.values() if isinstance(g, Gains)]
        is_split = bool(signs) and max(signs) > signs[0]
        ways |= {_name_line(line): g for line, g in gains.items()} if is_split else {method.method: gains[lines[0]]}
    return ways


def _name_line(line: Line) -> str:
    """Return the method's label, with the model if the method has several: "FML (shared model)"."""
    return f"{line.method} ({line.model_name})" if len(line.models) > 1 else line.method


def find_findings(comparison: RunComparison) -> Iterator[str]:
    """Yield the findings of a comparison, in the order of the page."""
    say = partial(render_facts, "findings.j2", comparison.scale)
    if comparison.domains:  # what a reader wants to know of domains: the gain over all, and the loss of a node on its own
        acc, bwt = TRANSFER_DATA["acc"], TRANSFER_DATA["bwt"]
        for method in comparison.methods:
            yield from _compare_with_local_only(comparison, method, acc, bwt)
        first_variants = {method.algorithm: method for method in reversed(comparison.references)}
        for method in reversed(first_variants.values()):
            yield from _compare_with_rivals(comparison, method, [m for m in comparison.federated if m is not method])
        yield from _find_worst_classes(comparison, acc)
        return
    for method in comparison.methods:
        yield from _compare_with_local_only(comparison, method, "validation")
        yield from _compare_models(comparison, method)
    for method in comparison.references:
        rivals = [m for m in comparison.federated if m.algorithm != method.algorithm]
        yield from _compare_with_rivals(comparison, method, rivals)
    for method in comparison.methods:
        shared_line = next(line for line in reversed(comparison.lines) if line.method == method.method)
        personal = measures.average_scores(method.select_last("test", model="personal"), "")
        shared = measures.average_global_last(shared_line)
        if isinstance(personal, Estimate) and isinstance(shared, Estimate):
            yield say("all_classes", label=method.method, personal=personal.mean, shared=shared.mean)
    frequent = measures.average_scores(comparison.methods[0].select_last("validation", "majority"), "")
    if isinstance(frequent, Estimate):
        yield say("frequent_class", accuracy=frequent.mean)
    yield from _find_worst_classes(comparison, "validation")


def _compare_models(comparison: RunComparison, method: Line) -> Iterator[str]:
    for line in comparison.lines:
        if line.method != method.method or line is method:
            continue
        gains = pair_clients(method.counted, method.counted, line.model, method.model)
        if isinstance(gains, Gains):
            is_ahead = gains.estimate.mean > 0
            yield render_facts(
                "findings.j2",
                comparison.scale,
                "two_models",
                estimate=gains.estimate,
                label=method.method,
                model=line.model_name,
                better=(line if is_ahead else method).model_name,
                worse=(method if is_ahead else line).model_name,
                wins=gains.gained if is_ahead else len(gains.harmed),
                total=len(gains),
                seeds=gains.seeds,
            )


def _compare_with_rivals(comparison: RunComparison, method: Line, rivals: Sequence[Line]) -> Iterator[str]:
    """Yield a sentence for each rival: how far the method is ahead on each kind of rows, and the steps where they differ.

    The rows are named as in metrics.jsonl; "shared": the test set, by the shared model.
    """
    for rival in rivals:
        data = TRANSFER_DATA.values() if comparison.domains else ("validation",)
        gains = {rows: pair_clients(method.counted, rival.counted, data=rows) for rows in data}
        name = method.method if comparison.domains else _name_line(method)
        contests = [(rows, name, g.estimate) for rows, g in gains.items() if isinstance(g, Gains)]
        shared = None if comparison.domains else pair_global(method.counted, rival.counted)
        contests += [("shared", method.method, shared)] if shared else []
        if contests:
            facts = {"method": method.method, "rival": rival.method, "contests": contests}
            steps = average_steps(method.counted, rival.counted)
            yield render_facts("findings.j2", comparison.scale, "rivalry", **facts, steps=steps)


def _compare_with_local_only(comparison: RunComparison, method: Line, *data: str) -> Iterator[str]:
    """Yield a method's gain on each kind of rows, and the rounds after which it is compared.

    data: kinds of rows: "validation" (own rows), of nodes "test" (all domains) or "test.own". Without gain on the first
    kind, only the reason is returned.
    """
    say = partial(render_facts, "findings.j2", comparison.scale, label=method.method)
    gains = [measures.measure_gains(comparison, method, rows) for rows in data]
    if isinstance(gains[0], Missing):
        if method.federated and comparison.find_local_only(method):
            yield say("not_compared", reason=gains[0].why)
        return
    for rows, gain in zip(data, gains, strict=True):
        if isinstance(gain, Gains):
            yield say(
                "method_gain",
                is_pooled=method.is_pooled,
                model=method.model or "personal",
                data=rows,
                accuracy=gain.means[0],
                estimate=gain.estimate,
                effects=count_clients(gain) if rows == "validation" else count_nodes(gain),
            )
    rounds = {int(round) for round in gains[0].table["round"]}
    if rounds != {run.reached for run in method.counted}:
        yield say("compared_after", rounds=sorted(rounds))


def count_clients(gains: Gains) -> dict[str, Any]:
    """Return how many clients gain and which are harmed, as findings.j2 takes it; a client counts once in each seed."""
    harmed = [
        {"client": p.client, "seed": p.seed if gains.seeds > 1 else None, "loss": -p.gain, "may_be_chance": False}
        for p in gains.harmed
    ]
    named = len(harmed) if len(harmed) <= _NAMED_PAIRS else 1
    return _count("client", len(gains), gains.gained, harmed, named, gains.seeds)


def count_nodes(gains: Gains) -> dict[str, Any]:
    """Return how many nodes gain and which are harmed, by a node's mean over seeds, as `count_clients`."""
    estimates = sorted(gains.by_client.items(), key=lambda item: item[1].mean)
    harmed = [
        {"client": node, "seed": None, "loss": -e.mean, "may_be_chance": e.half is not None and not e.sign}
        for node, e in estimates
        if e.direction < 0
    ]
    return _count("node", len(estimates), sum(e.direction > 0 for _, e in estimates), harmed, _NAMED_NODES)


def _count(participant: str, total: int, gained: int, harmed: list[Any], named: int, seeds: int = 1) -> dict[str, Any]:
    return {
        "participant": participant,
        "total": total,
        "gained": gained,
        "harmed": harmed,  # the most harmed first; "seed" is None for a mean over seeds, and for one seed
        "named": harmed[:named],  # in the sentence
        "equal": total - gained - len(harmed),
        "may_all_be_chance": bool(harmed) and all(harm["may_be_chance"] for harm in harmed),
        "seeds": seeds,  # over which participants are counted
    }


def _find_worst_classes(comparison: RunComparison, data: str) -> Iterator[str]:
    """Yield each federating method's worst class, where its recall on the clients' rows clearly differs from local-only.

    The worst class has the lowest sum of the recall under the method and the recall under local-only training. If the
    method's recall alone chose the class, this recall would tend to be too low (selection bias).
    """
    for method in comparison.federated:
        local_only = comparison.find_local_only(method)
        gains = _pair_by_class(comparison, method, local_only, data) if local_only and len(comparison.classes) > 1 else {}
        if not gains:
            continue
        recalls = {name: class_gains.means for name, class_gains in gains.items()}
        worst = min(recalls, key=lambda name: sum(recalls[name]))
        estimate = gains[worst].estimate
        if estimate.sign or abs(estimate.mean) > _CLEAR - SAME:
            recall, local_recall = recalls[worst]
            ends = {"recall": recall, "local_recall": local_recall, "estimate": estimate}
            yield render_facts("findings.j2", comparison.scale, "worst_class", name=worst, label=method.method, **ends)


def _pair_by_class(comparison: RunComparison, method: Line, local_only: Line, data: str) -> dict[str, Gains]:
    """Return class -> each client's recall under both methods, where both have one."""
    pairs: dict[str, list[PairRow]] = {}
    for run, client, round, *rows in match_rows(method.counted, local_only.counted, method.model, local_only.model, data):
        recalls = [row.values.get("recall") or () for row in rows]
        holding = run.partition.clients.get(client)
        counts = holding.counts.get("validation") if holding and data == "validation" else None
        for number, (name, recall, local) in enumerate(zip(comparison.classes, *recalls, strict=False)):
            if recall is not None and local is not None:
                examples = counts[number] if counts else None
                pairs.setdefault(name, []).append((run.seed, client, round, recall, local, examples))
    return {name: Gains(class_pairs) for name, class_pairs in pairs.items()}


def find_doubts(comparison: RunComparison, estimates: Sequence[Estimate]) -> Iterator[str]:
    """Yield what few seeds leave open. estimates: the gains that the answer rests on."""
    say = partial(render_facts, "findings.j2", comparison.scale)
    adapted = any(m.algorithm == FINE_TUNE for m in comparison.methods)
    is_real = comparison.at_sites or comparison.is_of_one_site
    source = "sites" if is_real else "adapt" if adapted else "compare"  # of further seeds
    open_estimates = [e for e in estimates if e.sign == 0 and e.unit == "seeds" and (e.is_few or not e.tied)]
    fewest = min(open_estimates, key=lambda e: e.n, default=None)
    if fewest and fewest.n < _WANTED_SEEDS:
        yield say("few_seeds", seeds=fewest.n, is_too_few=fewest.is_few, source=source)
    if comparison.federated and all(len(m.counted) == 1 for m in comparison.methods if m.counted):
        yield say("one_seed", source=source)
    if source == "compare" or comparison.is_of_one_site:
        yield from find_unequal_steps(comparison)


def find_unequal_steps(comparison: RunComparison) -> Iterator[str]:
    """Yield a sentence if a method takes over 1.5 times as many gradient steps as another. Uncounted steps are left out."""
    counts = {m.method: [run.totals["steps"] for run in m.counted] for m in comparison.methods if m.counted}
    means = {label: fmean(n for n in steps if n) for label, steps in counts.items() if all(steps)}
    if means:
        most, fewest = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        if means[most] > _UNEQUAL * means[fewest]:
            pace = {"most": most, "most_steps": means[most], "fewest": fewest, "fewest_steps": means[fewest]}
            yield render_facts("findings.j2", comparison.scale, "unequal_steps", **pace)
