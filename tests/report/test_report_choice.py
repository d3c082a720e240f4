"""The best setting by hold-out scores, from made run folders: means, ties, edges, harm, by hand."""

import json
from dataclasses import replace

import pytest

from fedmutual.report.choice import (
    EndOfValues,
    Harmful,
    ScoredTrial,
    SettingNotCompared,
    Tie,
    Uncounted,
    describe_choice,
    find_edges,
    find_harm,
    find_tie,
    pick_best,
)
from fedmutual.results.estimate import Missing, estimate
from fedmutual.results.gains import Gains
from run_folders import Made, write

SEEDS = (0, 1)


def make_setting(
    folder, label, score, values=None, alone=None, diverged=None, algorithm="fml", shared=None, by=None, seeds=SEEDS
):
    """A setting whose clients' models score so on their own rows: score(seed, round, client)."""
    run = Made(algorithm, own_score=score, shared_own=shared)
    folders = {s: write(folder / label / str(s), replace(run, seed=s)) for s in seeds}
    return ScoredTrial(values or {"optimizer.lr": 0.1}, label, folders, diverged or {}, by, alone)


def flat(value):
    return lambda seed, round, client: value


def test_the_mean_over_clients_then_over_seeds(tmp_path):
    """Clients 0, 1, 2 score 0.5, 0.6, 0.7 in seed 0 and 0.1 more in seed 1: means 0.6 and 0.7; half = t(1) s / sqrt 2."""
    one = make_setting(tmp_path, "a", lambda seed, round, client: 0.5 + 0.1 * int(client) + 0.1 * seed)
    assert one.last.mean == pytest.approx(0.65)
    assert one.last.half == pytest.approx(12.706 * 0.05, rel=1e-3)
    assert one.model == "personal"
    assert one.examples == 2 * 3 * 50


def test_the_last_round_chooses_and_the_best_is_shown(tmp_path):
    peak = make_setting(tmp_path, "peak", lambda seed, round, client: 0.9 if round == 1 else 0.5)
    slow = make_setting(tmp_path, "slow", lambda seed, round, client: 0.6)
    assert (peak.last.mean, peak.best.mean, peak.best_rounds) == (0.5, 0.9, (1, 1))
    assert slow.best_rounds == (1, 1)  # of equal rounds the first
    assert pick_best([peak, slow]) == (slow,)


def test_by_which_model(tmp_path):
    """FML's personal models score 0.9, its shared one 0.4; FedAvg has a shared one only."""
    personal = make_setting(tmp_path / "p", "fml", flat(0.9))
    assert (personal.model, personal.last.mean) == ("personal", pytest.approx(0.9))
    assert make_setting(tmp_path / "g", "fedavg", flat(0.4), algorithm="fedavg").model == "global"
    assert make_setting(tmp_path / "n", "fedavg", flat(0.4), algorithm="fedavg", by="personal").last is None


def test_equal_settings_are_a_tie_and_the_first_given_is_first(tmp_path):
    """Three clients' 0.1, 0.2, 0.3 in any order: floats sum to unlike means, examples do not."""
    a = make_setting(tmp_path, "a", lambda seed, round, client: (0.1, 0.2, 0.3)[int(client)])
    b = make_setting(tmp_path, "b", lambda seed, round, client: (0.3, 0.2, 0.1)[int(client)])
    c = make_setting(tmp_path, "c", flat(0.1))
    assert pick_best([c, a, b]) == (a, b)
    assert find_tie(pick_best([c, a, b])) == Tie(("a", "b"))
    assert find_tie((a,)) is None
    assert pick_best([]) == ()


def test_what_diverged_in_one_seed_is_not_chosen(tmp_path):
    high = make_setting(tmp_path, "high", flat(0.9), diverged={1: "client '0' diverged"})
    low = make_setting(tmp_path, "low", flat(0.2))
    assert (high.last, high.best, high.best_rounds) == (None, None, ())
    assert pick_best([high, low]) == (low,)
    assert pick_best([high]) == ()


def write_local_only(folder, value, seeds=SEEDS):
    return make_setting(folder, "alone", flat(value), algorithm="independent", seeds=seeds).folders


def test_harm_by_hand(tmp_path):
    """0.1, 0.2 and 0.3 below local-only in seeds 0 to 2: mean -20 points, half 4.302653 * 10 / sqrt 3 = 24.84 points."""
    three = (0, 1, 2)
    beside = write_local_only(tmp_path, 0.8, three)
    worse = make_setting(tmp_path, "worse", lambda seed, round, client: 0.7 - 0.1 * seed, alone=beside, seeds=three)
    assert isinstance(worse.gain, Gains)
    harm = find_harm(worse)
    assert (harm.estimate.mean, harm.estimate.half) == pytest.approx((-0.2, 0.2484), abs=1e-4)
    assert (harm.label, harm.estimate.sign) == ("worse", 0)
    far = make_setting(tmp_path, "far", lambda seed, round, client: 0.3 + 0.001 * seed, alone=beside, seeds=three)
    assert find_harm(far).estimate.sign == -1
    equal = make_setting(tmp_path, "equal", flat(0.3), alone=beside, seeds=three)
    assert find_harm(equal).estimate.tied
    two = make_setting(tmp_path, "two", flat(0.3), alone=beside)
    assert find_harm(two).estimate.is_few
    near = make_setting(tmp_path, "near", flat(0.79999), alone=beside)
    assert find_harm(near).estimate.mean == pytest.approx(-1e-5)
    better = make_setting(tmp_path, "better", flat(0.9), alone=beside)
    assert find_harm(better) is None
    assert find_harm(make_setting(tmp_path, "same", flat(0.8), alone=beside)) is None
    assert find_harm(make_setting(tmp_path, "none", flat(0.1))) is None, "there is nothing to hold it against"


def test_one_seed_has_its_interval_over_clients(tmp_path):
    beside = write_local_only(tmp_path, 0.8, seeds=(0,))
    worse = make_setting(tmp_path, "w", lambda seed, round, client: 0.7 - 0.01 * int(client), alone=beside, seeds=(0,))
    harm = find_harm(worse)
    assert (harm.estimate.n, harm.estimate.unit) == (3, "clients")
    assert worse.last.half is None


def test_the_shared_model_chooses_and_the_personal_ones_are_held_against_local_only(tmp_path):
    beside = write_local_only(tmp_path, 0.8)
    one = make_setting(tmp_path, "one", flat(0.7), alone=beside, by="personal")
    assert find_harm(one).estimate.mean == pytest.approx(-0.1)


def test_diverged_local_only_training_is_reported(tmp_path):
    folder = write(tmp_path / "alone" / "0", Made("independent", own_score=flat(0.5), reached=1))
    one = make_setting(tmp_path, "one", flat(0.7), alone={0: folder}, seeds=(0,))
    assert isinstance(one.gain, Missing)
    assert find_harm(one) == SettingNotCompared("one", "local-only training diverged with these settings")


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (Harmful("a", estimate([-0.1, -0.2, -0.3], "seeds")), "20.00 points worse … over 3 seeds … which contains 0)"),
        (Harmful("a", estimate([-0.5, -0.501, -0.502], "seeds")), "50.10 points worse … which excludes 0)"),
        (Harmful("a", estimate([-0.5] * 3, "seeds")), "50.00 points worse … (equal over 3 seeds)"),
        (Harmful("a", estimate([-0.5] * 2, "seeds")), "two seeds cannot exclude chance"),
        (Harmful("a", estimate([-0.5], "seeds")), "one seed, so no interval"),
        (Harmful("a", estimate([-0.00001] * 3, "seeds")), "less than 0.01 points worse"),
        (SettingNotCompared("a", "it diverged"), "a: not compared with local-only training: it diverged"),
        (Tie(("a", "b")), "a and b have equal scores"),
        (Uncounted(("x",)), "'x': its task has"),
        (Uncounted(("x", "y")), "'x' and 'y': their tasks have"),
        (EndOfValues("rate", "0.1", is_largest=True), "rate, 0.1, is the largest … larger ones"),
        (EndOfValues("rate", "0.1", is_largest=False), "the smallest … smaller ones"),
    ],
)
def test_the_sentence_of_a_finding(finding, words):
    sentence = describe_choice(finding)
    assert all(part.strip() in sentence for part in words.split("…")), sentence


def test_edges(tmp_path):
    tried = [
        make_setting(tmp_path, f"{lr} {alpha}", flat(0.5), {"optimizer.lr": lr, "algorithm.alpha": alpha, "rounds": 5})
        for lr in (0.1, 0.01, 1)
        for alpha in (0.5, {"start": 0.9, "end": 0.1}, 0.3)
    ]
    by = {(t.values["optimizer.lr"], str(t.values["algorithm.alpha"])): t for t in tried}
    assert find_edges(tried, by[1, "0.5"]) == [("optimizer.lr", 1, 0.1), ("algorithm.alpha", 0.5, 0.3)]
    assert find_edges(tried, by[0.01, "0.3"]) == [("optimizer.lr", 0.01, 0.1), ("algorithm.alpha", 0.3, 0.5)]
    assert find_edges(tried, by[0.1, "{'start': 0.9, 'end': 0.1}"]) == []


def test_no_number_of_test_or_validation_data_is_read(tmp_path):
    """Hold-out scores alone decide: the others are taken out of the files, and nothing changes."""
    tried = [make_setting(tmp_path, name, flat(value)) for name, value in (("a", 0.4), ("b", 0.6))]
    before = [(t.last, t.best) for t in tried]
    for path in tmp_path.rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["scores"] = [s for s in line["scores"] if s["data"] == "holdout"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = [ScoredTrial(t.values, t.label, t.folders, {}, None) for t in tried]
    assert [(t.last, t.best) for t in again] == before
    assert pick_best(again)[0].label == "b"
