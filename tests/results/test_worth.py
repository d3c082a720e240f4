"""Shapley values, overlaps and orders against their definitions, and what runs with artificial scores give."""

import itertools
import json
import math
import random
import tomllib
from statistics import fmean

import pytest
import tomli_w

from fedmutual.errors import RunError
from fedmutual.report.worth import describe_worth, find_joining, find_worth, make_worth_tables
from fedmutual.results.estimate import Missing
from fedmutual.results.frame import read_runs
from fedmutual.results.worth import (
    Worth,
    compute_overlap,
    compute_shapley,
    draw_order,
    list_steps,
    spread_ratio,
    weigh_gains,
)
from run_folders import Made, write

NAMES = ("a", "b", "c", "d", "e")


def list_coalitions(names):
    return [frozenset(c) for k in range(1, len(names) + 1) for c in itertools.combinations(names, k)]


def draw_scores(names):
    draw = random.Random(len(names))
    return {c: {i: draw.random() for i in c} for c in list_coalitions(names)}


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_shapley_values_are_the_mean_over_all_orders_in_which_others_join(number):
    names = NAMES[:number]
    scores = draw_scores(names)
    for one in names:
        others = [i for i in names if i != one]
        added = {i: [] for i in others}
        for order in itertools.permutations(others):
            for k, other in enumerate(order):
                before = (one, *order[:k])
                added[other].append(scores[frozenset((*before, other))][one] - scores[frozenset(before)][one])
        values = compute_shapley(scores, one, others)
        assert values == pytest.approx({i: math.fsum(a) / len(a) for i, a in added.items()}, abs=1e-12, rel=0)
        gain = scores[frozenset(names)][one] - scores[frozenset([one])][one]
        assert math.fsum(values.values()) == pytest.approx(gain, abs=1e-12)


@pytest.mark.parametrize("number", [3, 4, 5])
def test_an_overlap_is_the_mean_over_orders_in_which_the_two_join_together(number):
    one, first, second, *rest = NAMES[:number]
    scores = draw_scores(NAMES[:number])
    of_orders = []
    for order in itertools.permutations([*rest, None]):
        before = (one, *order[: order.index(None)])
        both, a, b, none = (scores[frozenset((*before, *m))][one] for m in ((first, second), (first,), (second,), ()))
        of_orders.append(both - a - b + none)
    assert compute_overlap(scores, one, (first, second), rest) == pytest.approx(fmean(of_orders), abs=1e-12)


@pytest.mark.parametrize("number", [3, 4, 5])
def test_the_gains_of_all_orders_of_all_participants_give_the_shapley_values_of_each(number):
    names = NAMES[:number]
    scores, sums = draw_scores(names), dict.fromkeys(itertools.permutations(names, 2), 0.0)
    for order in itertools.permutations(names):
        for pair, weight, gain in weigh_gains(scores, order):
            sums[pair] += weight * gain / math.factorial(number)
    for one in names:
        for other, value in compute_shapley(scores, one, [i for i in names if i != one]).items():
            assert sums[one, other] == pytest.approx(value, abs=1e-12)


def test_equal_gains_have_no_spread_whatever_their_weights():
    assert spread_ratio({0: (8.0, 0.25), 1: (1.0, 0.25)}) == {0: 0.25, 1: 0.25}
    numbers = spread_ratio({0: (3.0, 0.5), 1: (1.0, 0.1)})
    assert fmean(numbers.values()) == pytest.approx((3 * 0.5 + 0.1) / 4)


def score(coalition, one, seed):
    """`a` has rows that others lack, `b` and `c` have the same rows, and `d` has wrong labels."""
    have = coalition - {one}
    kinds = {"bc" if i in "bc" else i for i in have} - {"bc" if one in "bc" else one}
    return (
        0.5 + 0.01 * seed + 0.2 * ("a" in kinds) + 0.1 * ("bc" in kinds) - 0.15 * ("d" in kinds) - 0.001 * seed * len(have)
    )


def write_coalitions(folder, names, coalitions, seeds=(0, 1, 2, 3), algorithm="fedavg", **more):
    for seed in seeds:
        for c in coalitions:
            own = {i: score(c, i, seed) for i in names}
            tables = {"participants": sorted(c), **more}
            made = Made(algorithm, lambda s, r, i, own=own: own[i], clients=names, seed=seed, config=tables)
            write(folder / algorithm / "".join(sorted(c)) / str(seed), made)
    return sorted(path.parent for path in folder.rglob("config.toml"))


def test_planted_participants_are_found(tmp_path):
    names = NAMES[:4]
    worth = Worth(read_runs(write_coalitions(tmp_path, names, list_coalitions(names))))
    assert (worth.participants, worth.runs, worth.shapley.unit) == (names, 60, "seeds")
    gains = {i: worth.shapley.measure_given(i) for i in names}
    assert {i: e.sign for i, e in gains.items()} == {"a": 1, "b": 1, "c": 1, "d": -1}
    assert gains["a"].mean == pytest.approx(0.2, abs=0.01)
    assert worth.shapley.measure([("b", "c")]).mean == pytest.approx(0, abs=0.01), "a copy adds nothing to its original"
    assert worth.shapley.measure([("a", "b")]).mean == pytest.approx(0.05, abs=0.01), "each counts half"
    assert worth.left_out.measure([("a", "b")]).sign <= 0, "its copy is still there"
    assert {pair: e.sign for pair, e in worth.overlaps.items() if e.sign} == {("b", "c"): -1}
    assert worth.shapley.measure_received("d").mean == pytest.approx(0.3, abs=0.01)
    lead, *sentences = find_worth(worth)
    assert lead == "The others gain from a, b and c and lose by d."
    assert [s.split(":")[0] for s in sentences if s.startswith("b and")] == ["b and c may give the same, at least in part"]
    assert sum("is left out, no loss of the others is certain" in s for s in sentences) == 2
    matrix, without = make_worth_tables(worth)
    assert [cell.tone for cell in matrix.rows[0]] == ["", "", "gain", "gain", "harm", "harm"]
    assert matrix.csv.count("\n") == without.csv.count("\n") == 13
    record = json.loads(json.dumps(describe_worth(worth)))
    assert record["pairs"][0]["shapley"] == worth.shapley.measure([("a", "b")]).mean
    assert record["overlaps"][3]["overlap"] == worth.overlaps["b", "c"].mean


def test_some_orders_estimate_the_values_of_all_coalitions(tmp_path):
    names = NAMES[:5]
    steps = {seed: list_steps(draw_order(names, seed)) for seed in range(12)}
    for seed, coalitions in steps.items():
        assert len(coalitions) == 2 * len(names) - 1
        write_coalitions(tmp_path / str(seed), names, coalitions, [seed])
    worth = Worth(read_runs([p.parent for p in tmp_path.rglob("config.toml")]))
    assert worth.shapley.unit == "orders"
    for pair in itertools.permutations("abd", 2):
        estimate, exact = worth.shapley.measure([pair]), {"a": 0.2, "b": 0.05, "d": -0.15}[pair[1]]
        assert estimate.n == 12
        assert estimate.low - 0.02 < exact < estimate.high + 0.02
    assert worth.overlaps == {}
    assert worth.shapley.widest < 0.1
    assert "12 random orders" in find_worth(worth)[-1]


def test_a_participant_without_known_scores_leaves_the_orders_of_the_others(tmp_path):
    names = NAMES[:5]
    for seed in range(6):
        write_coalitions(tmp_path / str(seed), names, list_steps(draw_order(names, seed)), [seed])
    runs = read_runs([p.parent for p in tmp_path.rglob("config.toml")])
    complete, worth = Worth(runs), Worth(runs)
    worth.scores = {
        s: {c: {i: v for i, v in of.items() if i != "e"} for c, of in m.items()} for s, m in worth.scores.items()
    }
    for pair in itertools.permutations(names, 2):
        value, expected = worth.shapley.measure([pair]), complete.shapley.measure([pair])
        assert isinstance(value, Missing) if pair[0] == "e" else value == expected
    assert worth.shapley.measure_given("e").n == 6
    assert isinstance(worth.shapley.measure_received("e"), Missing)
    assert worth.shapley.widest < 0.3, "so that a precision can end the orders"
    assert "6 random orders" in find_worth(worth)[-1]


def test_a_participant_without_known_scores_leaves_the_overlaps_of_the_others(tmp_path):
    names = NAMES[:4]
    worth = Worth(read_runs(write_coalitions(tmp_path, names, list_coalitions(names))))
    scores = {s: dict(m) for s, m in worth.scores.items()}
    worth.scores = {s: {c: {i: v for i, v in of.items() if i != "d"} for c, of in m.items()} for s, m in scores.items()}
    of_a = [compute_overlap(m, "a", ("b", "c"), ["d"]) for m in scores.values()]
    assert worth.overlaps["b", "c"].mean == pytest.approx(fmean(of_a))
    assert len(worth.overlaps) == 6


def test_of_participants_left_out_there_are_no_shapley_values(tmp_path):
    names = NAMES[:4]
    coalitions = [c for c in list_coalitions(names) if len(c) > 2]
    worth = Worth(read_runs(write_coalitions(tmp_path, names, coalitions)))
    assert not any(worth.shapley.numbers.values())
    assert worth.left_out.measure([("b", "a")]).mean == pytest.approx(0.2, abs=0.01)
    assert len(make_worth_tables(worth)) == 1
    assert "losses if one participant is left out" in find_worth(worth)[-1]


def test_the_best_coalition_is_chosen_by_other_seeds(tmp_path):
    names = NAMES[:4]
    coalitions = [c for c in list_coalitions(names) if "b" in c and len(c) > 1]
    write_coalitions(tmp_path, names, coalitions)
    runs = read_runs(write_coalitions(tmp_path, names, [frozenset("b")], algorithm="independent"))
    gains, chosen = Worth(runs).judge_joining("b", [run for run in runs if not run.role.federates])
    assert {c for c, e in gains.items() if e.mean == max(g.mean for g in gains.values())} == {frozenset("ab")}
    assert gains[frozenset("abcd")].mean == pytest.approx(0.05 - 0.0045)
    assert chosen.mean == pytest.approx(0.15 + 0.001 * 2 * 1.5)
    lead, best = find_joining(Worth(runs), "b", gains, chosen)
    assert lead.startswith("Joining all pays for b: +4.5 points")
    assert "Of 7 coalitions, the one with a has the highest mean" in best


def test_other_runs_are_refused(tmp_path):
    names = NAMES[:3]
    alone = write_coalitions(tmp_path / "x", names, [frozenset("a")])
    for folders, sentence in (
        (alone, "there is no finished run of several participants"),
        (
            [
                *write_coalitions(tmp_path / "y", names, [frozenset("abc")]),
                *write_coalitions(tmp_path / "z", names, [frozenset("ab")], optimizer={"name": "sgd", "lr": 0.5}),
            ],
            "differ in optimizer.lr, not only in who takes part",
        ),
    ):
        with pytest.raises(RunError, match=sentence):
            Worth(read_runs(folders))


def test_results_of_real_sites_are_read_from_what_their_server_knows(tmp_path):
    """A federation for each coalition, with no record of rows, and of one site without its scores."""
    names, about = NAMES[:3], {"input": [4], "outputs": 2, "classes": ["0", "1"], "scaling": {}, "task": "classification"}
    folders = write_coalitions(tmp_path, names, list_coalitions(names))
    for folder in folders:
        members = sorted(folder.parent.name)
        for file, change in (
            ("partition.json", {"kind": "sites", "clients": {}, "fingerprint": "1"}),
            ("environment.json", {"clients": dict.fromkeys(members, about)}),
        ):
            (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["scores"] = [s for s in line["scores"] if s["client"] in members and s["client"] != "c"]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        tables = tomllib.loads((folder / "config.toml").read_text())
        del tables["participants"]
        (folder / "config.toml").write_text(tomli_w.dumps(tables))
    worth = Worth(read_runs(folders))
    assert worth.at_sites
    assert worth.shapley.measure([("b", "a")]).mean == pytest.approx(0.2, abs=0.01)
    assert isinstance(worth.shapley.measure([("c", "a")]), Missing)
    assert worth.shapley.measure_given("a").mean == pytest.approx(0.2, abs=0.01)
    assert "scores that the sites disclosed" in find_worth(worth)[-1]
    assert make_worth_tables(worth)[0].rows[2][1].text == "n/a"
