"""The best setting by hold-out scores, from made run folders: means, ties, edges, harm, by hand."""

import json
from dataclasses import replace

import pytest

from fedmutual.report.choice import ScoredTrial, describe_choice, find_edges, pick_best
from fedmutual.report.rendering import render_facts
from fedmutual.results.estimate import estimate
from fedmutual.results.scale import MetricScale
from run_folders import Made, write

SEEDS = (0, 1)


def make_setting(folder, label, score, values=None, alone=None, diverged=None, algorithm="fml", by=None, seeds=SEEDS):
    """A setting whose clients' models score so on their own rows: score(seed, round, client), or one number."""
    own_score = score if callable(score) else lambda seed, round, client: score
    run = Made(algorithm, own_score=own_score)
    folders = {s: write(folder / label / str(s), replace(run, seed=s)) for s in seeds}
    return ScoredTrial(values or {"optimizer.lr": 0.1}, label, folders, diverged or {}, by, alone)


def write_local_only(folder, value, seeds=SEEDS):
    return make_setting(folder, "alone", value, algorithm="independent", seeds=seeds).folders


def test_the_mean_over_clients_then_over_seeds(tmp_path):
    """Clients 0, 1, 2 score 0.5, 0.6, 0.7 in seed 0 and 0.1 more in seed 1: means 0.6 and 0.7; half = t(1) s / sqrt 2."""
    one = make_setting(tmp_path, "a", lambda seed, round, client: 0.5 + 0.1 * int(client) + 0.1 * seed)
    assert (one.last.mean, one.last.half) == (pytest.approx(0.65), pytest.approx(12.706 * 0.05, rel=1e-3))
    assert (one.model, one.examples) == ("personal", 2 * 3 * 50)


def test_the_last_round_chooses_and_the_best_is_shown(tmp_path):
    peak = make_setting(tmp_path, "peak", lambda seed, round, client: 0.9 if round == 1 else 0.5)
    slow = make_setting(tmp_path, "slow", 0.6)
    assert (peak.last.mean, peak.best.mean, peak.best_rounds) == (0.5, 0.9, (1, 1))
    assert slow.best_rounds == (1, 1)  # of equal rounds the first
    assert pick_best([peak, slow]) == (slow,)


def test_by_which_model(tmp_path):
    assert make_setting(tmp_path / "p", "fml", 0.9).model == "personal"
    assert make_setting(tmp_path / "g", "fedavg", 0.4, algorithm="fedavg").model == "global"
    assert make_setting(tmp_path / "n", "fedavg", 0.4, algorithm="fedavg", by="personal").last is None


def test_equal_settings_are_a_tie_and_the_first_given_is_first(tmp_path):
    """Three clients' 0.1, 0.2, 0.3 in any order: floats sum to unlike means, examples do not."""
    a = make_setting(tmp_path, "a", lambda seed, round, client: (0.1, 0.2, 0.3)[int(client)])
    b = make_setting(tmp_path, "b", lambda seed, round, client: (0.3, 0.2, 0.1)[int(client)])
    c = make_setting(tmp_path, "c", 0.1)
    assert pick_best([c, a, b]) == (a, b)
    assert describe_choice([c, a, b], (a, b)) == ["a and b have equal scores on hold-out data; the first of them is chosen"]
    assert describe_choice([c, a, b], (a,)) == []
    assert pick_best([]) == ()


def test_what_diverged_in_one_seed_is_not_chosen(tmp_path):
    high = make_setting(tmp_path, "high", 0.9, diverged={1: "client '0' diverged"})
    low = make_setting(tmp_path, "low", 0.2)
    assert (high.last, high.best, high.best_rounds) == (None, None, ())
    assert pick_best([high, low]) == (low,)
    assert pick_best([high]) == ()


def test_harm_by_hand(tmp_path):
    """0.1, 0.2 and 0.3 below local-only in seeds 0 to 2: mean -20 points, half 4.302653 * 10 / sqrt 3 = 24.84 points."""
    three = (0, 1, 2)
    beside = write_local_only(tmp_path, 0.8, three)
    worse = make_setting(tmp_path, "worse", lambda s, r, c: 0.7 - 0.1 * s, alone=beside, seeds=three)
    assert (worse.gain.estimate.mean, worse.gain.estimate.half) == pytest.approx((-0.2, 0.2484), abs=1e-4)
    far = make_setting(tmp_path, "far", lambda s, r, c: 0.3 + 0.001 * s, alone=beside, seeds=three)
    equal = make_setting(tmp_path, "equal", 0.3, alone=beside, seeds=three)
    two = make_setting(tmp_path, "two", 0.3, alone=beside)
    near = make_setting(tmp_path, "near", 0.79999, alone=beside)
    better = make_setting(tmp_path, "better", 0.9, alone=beside)
    same = make_setting(tmp_path, "same", 0.8, alone=beside)
    no_other = make_setting(tmp_path, "none", 0.1)
    tried = [worse, far, equal, two, near, better, same, no_other]
    harms = [sentence.partition(":")[::2] for sentence in describe_choice(tried, (better,))]
    assert [label for label, _ in harms] == ["worse", "far", "equal", "two", "near"]
    for (_, text), words in zip(harms, ("contains 0", "excludes 0", "equal", "two seeds", "less than 0.01"), strict=True):
        assert words in text


def test_one_seed_has_its_interval_over_clients(tmp_path):
    beside = write_local_only(tmp_path, 0.8, seeds=(0,))
    worse = make_setting(tmp_path, "w", lambda s, r, c: 0.7 - 0.01 * int(c), alone=beside, seeds=(0,), by="personal")
    assert (worse.gain.estimate.n, worse.gain.estimate.unit) == (3, "clients")
    assert worse.last.half is None


def test_diverged_local_only_training_is_reported(tmp_path):
    folder = write(tmp_path / "alone" / "0", Made("independent", own_score=lambda s, r, c: 0.5, reached=1))
    one = make_setting(tmp_path, "one", 0.7, alone={0: folder}, seeds=(0,))
    (sentence,) = describe_choice([one], (one,))
    assert sentence == "one: not compared with local-only training: local-only training diverged with these settings"


@pytest.mark.parametrize(
    ("macro", "facts", "words"),
    [
        ("harmful", [-0.1, -0.2, -0.3], "20.00 points worse … over 3 seeds … which contains 0)"),
        ("harmful", [-0.5, -0.501, -0.502], "50.10 points worse … which excludes 0)"),
        ("harmful", [-0.5] * 3, "50.00 points worse … (equal over 3 seeds)"),
        ("harmful", [-0.5] * 2, "two seeds cannot exclude chance"),
        ("harmful", [-0.5], "one seed, so no interval"),
        ("uncounted", {"clients": ["x"]}, "'x', which has"),
        ("uncounted", {"clients": ["x", "y"]}, "'x' and 'y', which have"),
        ("end_of_values", {"key": "rate", "value": "0.1", "is_largest": True}, "rate, 0.1, is the largest … larger ones"),
        ("end_of_values", {"key": "rate", "value": "0.1", "is_largest": False}, "the smallest … smaller ones"),
    ],
)
def test_the_sentence_of_a_finding(macro, facts, words):
    facts = facts if isinstance(facts, dict) else {"label": "a", "estimate": estimate(facts, "seeds")}
    sentence = render_facts("choice.j2", MetricScale(2), macro, **facts)
    assert all(part.strip() in sentence for part in words.split("…")), sentence


def test_edges(tmp_path):
    tried = [
        make_setting(tmp_path, f"{lr} {alpha}", 0.5, {"optimizer.lr": lr, "algorithm.alpha": alpha, "rounds": 5})
        for lr in (0.1, 0.01, 1)
        for alpha in (0.5, {"start": 0.9, "end": 0.1}, 0.3)
    ]
    by = {(t.values["optimizer.lr"], str(t.values["algorithm.alpha"])): t for t in tried}
    assert find_edges(tried, by[1, "0.5"]) == [("optimizer.lr", 1, 0.1), ("algorithm.alpha", 0.5, 0.3)]
    assert find_edges(tried, by[0.01, "0.3"]) == [("optimizer.lr", 0.01, 0.1), ("algorithm.alpha", 0.3, 0.5)]
    assert find_edges(tried, by[0.1, "{'start': 0.9, 'end': 0.1}"]) == []


def test_no_number_of_test_or_validation_data_is_read(tmp_path):
    """Hold-out scores alone decide: the others are taken out of the files, and nothing changes."""
    tried = [make_setting(tmp_path, name, value) for name, value in (("a", 0.4), ("b", 0.6))]
    before = [(t.last, t.best) for t in tried]
    for path in tmp_path.rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["scores"] = [s for s in line["scores"] if s["data"] == "holdout"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = [ScoredTrial(t.values, t.label, t.folders, {}, None) for t in tried]
    assert [(t.last, t.best) for t in again] == before
    assert pick_best(again)[0].label == "b"
