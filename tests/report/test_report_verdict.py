"""The verdict: for it, against it, uncertain, impossible. All numbers follow from the made runs."""

from dataclasses import replace

import pytest

from fedmutual.report import verdicts
from fedmutual.report.verdicts import find_answers
from fedmutual.results.comparison import find_differences
from run_folders import (
    ALONE,
    Made,
    alone,
    compare_folders,
    list_findings,
    make_comparison,
    make_two_models,
    plus,
    write,
    write_all,
)

SAME_FOR_ALL = (0.1, 0.1, 0.1)
WORSE_FOR_ALL = (-0.1, -0.1, -0.1)
NONE = (0, 0, 0)
CASES = {  # name -> (methods beside local-only training, seeds, what the findings say: place and words)
    "it pays with one method and costs with another": (
        # FML: every seed's mean gain is 0.1; FedAvg: (-0.3 + 0 - 0.1) / 3 = -0.1333; no spread over seeds
        # local-only's mean is 0.7, so FML's 0.8 and FedAvg's 0.5667, 0.2333 apart; 0.05 on the test set
        # a client's recall of class 2 is half its accuracy, so its loss is half of that; one of 5 examples is 20 / 3 points
        [Made("fml", plus(*SAME_FOR_ALL), lambda s, r: 0.7), Made("fedavg", plus(-0.3, 0, -0.1), lambda s, r: 0.75)],
        3,
        [
            "0 Federating pays with FML: clients do better on their own data than alone; with FedAvg they do worse.",
            "1 FML: personal models score 80.0 % on the clients' own validation data, 10.0 points above local-only "
            "(equal in all 3 seeds). Of 9 clients over 3 seeds, all gain.",
            "2 FedAvg: the shared model scores 56.7 % on the clients' own validation data, 13.3 points below local-"
            "only (equal in all 3 seeds). Of 9 clients over 3 seeds, none gains, 3 stay equal and 6 are harmed: "
            "client 0 in seed 0 by 30.0 points and 5 others, each by no more.",
            "3 Against FedAvg: on the clients' own validation data FML wins by 23.3 points (equal in all 3 seeds); as"
            " one shared model on the test set FML loses by 5.0 points (equal in all 3 seeds).",
            "4 On all classes (the test set) FML's personal models score 40.0 %, its shared model 70.0 %.",
            "5 A model that always predicts a client's most frequent class would score 50.0 % on its validation data.",
            "6 Class 2 has the lowest recall of FML and local-only combined: 40.0 %, alone 35.0 %: 5.0 points above, "
            "which may be chance (equal in all 3 seeds).",
            "7 Class 2 has the lowest recall of FedAvg and local-only combined: 28.3 %, alone 35.0 %: 6.7 points "
            "below, which may be chance (equal in all 3 seeds).",
        ],
    ),
    "a worst class that may be chance is reported if it differs much": (
        [Made("fml", plus(*WORSE_FOR_ALL))],
        2,
        [
            "* Class 2 has the lowest recall of FML and local-only combined: 30.0 %, alone 35.0 %: 5.0 points below, "
            "and two seeds cannot exclude chance (equal in both seeds)."
        ],
    ),
    "a worst class that is certain": (
        [Made("fml", plus(-0.2, -0.2, -0.2))],
        3,
        [
            "* Class 2 has the lowest recall of FML and local-only combined: 25.0 %, alone 35.0 %: 10.0 points below "
            "(equal in all 3 seeds)."
        ],
    ),
    "a worst class that is equally good alone is not reported": (
        [Made("fml", lambda s, r, c: ALONE[c] - 0.01 * s)],
        3,
        ["- Class 2 has the lowest recall"],
    ),
    "it does not pay": (
        [Made("fml", plus(*WORSE_FOR_ALL))],
        3,
        [
            "0 Federating does not pay: with FML clients do worse on their own data than alone.",
            "1 …Of 9 clients over 3 seeds, all are harmed: client",
        ],
    ),
    "it may be chance": (
        # -0.08 and 0.1: mean 0.01, s = 0.18 / sqrt(2), half = 12.706205 * 0.18 / 2 = 1.14: beyond what accuracy allows
        [Made("fml", lambda s, r, c: ALONE[c] + (0.1 if s else -0.08))],
        2,
        [
            "0 Whether federating pays is not certain here: on average clients do better with FML, and two seeds "
            "cannot exclude chance.",
            "1 …1.0 points above local-only (95 % interval 100.0 below to 100.0 above, 2 seeds)",
            "-1 Two seeds cannot exclude chance; more seeds may decide: `fedmutual compare FILE.toml --seeds 5`.",
        ],
    ),
    "two seeds that agree are certain of nothing": (
        # accuracies move in whole examples, so two seeds may tie: their interval of no width excludes no chance
        [make_two_models(WORSE_FOR_ALL, SAME_FOR_ALL), Made("fedavg", plus(*NONE))],
        2,
        [
            "0 Whether federating pays is not certain here: on average clients do worse with FML, as well as alone "
            "with FedAvg, and two seeds cannot exclude chance.",
            "1 …10.0 points below local-only (equal in both seeds).",
            "-1 …Two seeds cannot exclude chance; more seeds may decide",
            "- wins by",
            "- loses by",
        ],
    ),
    "a method that is local-only in every seed": (
        [Made("fml", plus(*NONE))],
        3,
        [
            "0 Whether federating pays is not certain here: on average clients do as well as alone with FML.",
            "1 …level with local-only (equal in all 3 seeds). Of 9 clients over 3 seeds, none gains, 9 stay equal",
            "- more seeds",
        ],
    ),
    "seeds that agree on one example are not certain": (
        # one of a client's 50 examples, in the mean of three clients 0.02 / 3
        [Made("fml", plus(0, 0, -0.02))],
        3,
        ["0 …on average clients do worse with FML, which may be chance."],
    ),
    "one seed": (
        # 0.1, 0.2, 0.15: mean 0.15, s = 0.05, half = 4.302653 * 0.05 / sqrt(3) = 0.1242
        [Made("fml", plus(0.1, 0.2, 0.15))],
        1,
        [
            "0 …In this one seed, federating pays with FML",
            "1 …(95 % interval 2.6 to 27.4, 3 clients). Of 3 clients, all gain.",
            "-1 …only one seed",
            "-1 …--seeds 3",
        ],
    ),
    "of two models the shared one is better": (
        # shared less personal: 0.1, 0.1, -0.05 in every seed: 0.05 in the mean
        [make_two_models((0.05, 0.05, 0.05), (0.15, 0.15, 0))],
        3,
        [
            "0 Federating pays with FML: clients do better on their own data than alone.",
            "1 …FML: personal models score 75.0 % on the clients' own validation data, 5.0 points above",
            "2 With FML, the shared model does better on the clients' own validation data than the personal models: "
            "by 5.0 points (equal in all 3 seeds), for 6 of 9 clients over 3 seeds.",
        ],
    ),
    "of two models the personal ones are better": (
        [make_two_models(SAME_FOR_ALL, (0.05, 0.05, 0.05))],
        1,
        [
            "2 With FML, the personal models do better on the clients' own validation data than the shared model: by "
            "5.0 points (equal for all 3 clients), for 3 of 3 clients."
        ],
    ),
    "of two models neither may be better": (
        # shared less personal: 0.1, 0, -0.04: mean 0.02, s = 0.072111, half = 4.302653 * s / sqrt(3) = 0.179134
        [make_two_models((0, 0, 0.04), (0.1, 0, 0))],
        1,
        [
            "2 It is not certain which model of FML is better on the clients' own validation data: the shared model "
            "is 2.0 points ahead (95 % interval 15.9 behind to 19.9 ahead, 3 clients)."
        ],
    ),
    "forks are not a shared model": (
        [make_two_models(NONE, SAME_FOR_ALL, lambda s, r: None)],
        3,
        ["2 …With FML, the clients' forks do better on the clients' own validation data than the personal"],
    ),
    "a model is not compared with itself": (
        [Made("fml", plus(*SAME_FOR_ALL)), Made("fedavg", plus(*NONE))],
        3,
        ["- With FML", "- It is not certain which model"],
    ),
    "models with different outcomes are named separately in the lead": (
        [make_two_models(WORSE_FOR_ALL, SAME_FOR_ALL)],
        3,
        [
            "0 Federating pays with FML (shared model): clients do better on their own data than alone; with FML "
            "(personal models) they do worse."
        ],
    ),
    "a shared model that serves nobody's own data is no harm to those who have a personal one": (
        [make_two_models(SAME_FOR_ALL, WORSE_FOR_ALL)],
        3,
        ["0 Federating pays with FML: clients do better on their own data than alone."],
    ),
    "a rival is compared with the personal models": (
        [make_two_models(SAME_FOR_ALL, (0.2, 0.2, 0.2)), Made("fedavg", plus(*NONE))],
        3,
        ["4 …on the clients' own validation data FML (personal models) wins by 10.0 points"],
    ),
    "harmed clients are named": (
        [Made("fml", plus(0.1, 0, -0.02))],
        1,
        ["1 …Of 3 clients, 1 gains, 1 stays equal and 1 is harmed: client 2 by 2.0 points."],
    ),
    "nothing federated": ([], 1, ["0 …Nothing was federated"]),
    "clients that share nothing": (
        [Made("fml", plus(*NONE), lambda s, r: 0.8, tells=False)],
        1,
        ["0 …no client shares its accuracy: share.metrics"],
    ),
    "pooled training is called the ceiling and not a federation": (
        [Made("centralised", plus(*SAME_FOR_ALL))],
        1,
        ["0 …Nothing was federated", "1 …Centralised (an upper bound: all data in one place): the one model scores 80.0 %"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_findings_of(case, tmp_path):
    """The words are a whole sentence, or after "…" a part of it. Place "*": any sentence; "-": no sentence has the words."""
    methods, seeds, expected = CASES[case]
    sentences = list_findings(write_all(tmp_path, [*methods, alone], range(seeds)))
    for place, _, words in (line.partition(" ") for line in expected):
        if place == "-":
            assert not [s for s in sentences if words in s]
        elif place == "*":
            assert words in sentences
        else:
            sentence = sentences[int(place)]
            assert words[1:] in sentence if words[0] == "…" else words == sentence


def test_without_local_only_it_says_what_is_missing_and_how_to_get_it(tmp_path):
    methods = [make_two_models(NONE, SAME_FOR_ALL), Made("fedavg", plus(*NONE)), Made("fedprox", plus(*NONE))]
    sentences = list_findings(write_all(tmp_path, methods, [0, 1, 2]))
    assert sentences[0] == (
        "These runs cannot say whether federating pays: local-only training (independent) is not among these runs; "
        "`fedmutual compare FILE.toml --methods fml,independent` makes it."
    )
    assert "by 10.0 points (equal in all 3 seeds), for 9 of 9 clients over 3 seeds." in sentences[1]
    assert any(s.startswith("Against FedAvg: on the clients' own validation data FML") for s in sentences)


def test_two_runs_without_local_only_are_compared_with_each_other(tmp_path):
    folders = write_all(tmp_path, [Made("fml", plus(0.1, 0.2, 0.3)), Made("fedavg", plus(*NONE))], [0])
    comparison = make_comparison(folders)
    verdict = verdicts.judge(comparison)
    assert verdict.question == "Is FML better than FedAvg?"
    assert verdict.lead.startswith("Against FedAvg: on the clients' own validation data FML is 20.0 points ahead")
    assert verdict.highlights[0].startswith("These runs cannot say whether federating pays")
    apart = write_all(tmp_path / "apart", [Made("fml", plus(0.1, 0.2, 0.3))], [0])
    apart += write_all(tmp_path / "apart", [Made("fedavg", plus(*NONE))], [1])
    comparison = make_comparison(apart)
    assert verdicts.judge(comparison).lead == (
        "FML and FedAvg cannot be compared: no run of the other method has the same seed and the same partition."
    )


def test_settings_with_unequal_steps_are_compared_with_their_budgets(tmp_path):
    """Both are compared after round 2 of 3 and 2: three clients with 20 and 4 steps a round."""
    long, short = {"local_epochs": 5}, {"local_epochs": 1}
    folders = [
        write(tmp_path / "long", Made("fml", plus(0.1, 0.2, 0.3), rounds=3, steps=20, config={"training": long})),
        write(tmp_path / "short", Made("fml", plus(*NONE), steps=4, config={"training": short})),
    ]
    comparison = make_comparison(folders)
    assert verdicts.judge(comparison).lead.startswith(
        "Against FML, rounds = 2, local_epochs = 1, whose clients took 24 gradient steps in total (FML, "
        "rounds = 3, local_epochs = 5: 120): on the clients' own validation data"
    )


def test_local_only_training_on_another_partition_is_not_a_baseline(tmp_path):
    other = replace(alone, counts=lambda k, s: [1, 1, 1])
    sentences = list_findings(write_all(tmp_path, [Made("fml", plus(0, 0, 0)), other], [0]))
    assert "no run of the other method has the same seed and the same partition" in sentences[0]


def test_an_unfinished_run_is_remarked_and_left_out(tmp_path):
    folders = write_all(tmp_path, [Made("fml", plus(0.1, 0.1, 0.1)), alone], [0, 1])
    folders.append(write(tmp_path / "fml" / "2", Made("fml", plus(-0.5, -0.5, -0.5), seed=2, rounds=2, reached=1)))
    sentences = list_findings(folders)
    assert "FML, seed 2, is unfinished: round 1 of 2. Its numbers are left out." in sentences
    assert "10.0 points above local-only (equal in both seeds)" in sentences[1]


def test_a_diverged_run_is_called_so(tmp_path):
    """A diverged run cannot be finished, so it is not unfinished. Its seed and partition are those of the other run."""
    folders = write_all(tmp_path, [Made("fml", plus(0.1, 0.1, 0.1), rounds=2, reached=0), alone], [0])
    log = "2026-11-22T20:00:00+00:00  stopped in round 1: Diverged: client '0' diverged in round 1 at batch 1"
    (folders[0] / "log.txt").write_text(f"2026-11-22T19:59:59+00:00  started, 2 rounds, clients 0, 1, 2\n{log}\n")
    sentences = list_findings(folders)
    assert "FML, seed 0 diverged in round 1 of 2. It has no numbers." in sentences
    assert not any("no run of the other method has the same seed" in s for s in sentences)
    assert any("one of the two has no run with numbers" in s for s in sentences)
    (folders[0] / "log.txt").write_text(f"{log}\n2026-11-22T20:01:00+00:00  resumed, going on with round 1 of 2\n")
    assert "FML, seed 0, is unfinished: round 0 of 2. It has no numbers yet." in list_findings(folders)


def test_a_diverged_run_says_of_which_round_its_numbers_are(tmp_path, cli):
    folders = write_all(tmp_path, [Made("fml", plus(0.1, 0.1, 0.1), rounds=3, reached=1), alone], [0])
    log = "2026-11-22T20:00:00+00:00  stopped in round 2: Diverged: client '0' diverged in round 2 at batch 1"
    (folders[0] / "log.txt").write_text(f"{log}\n")
    assert "FML, rounds = 3, seed 0 diverged in round 2 of 3. Its numbers are from round 1." in list_findings(folders)
    _, out, _ = cli("report", *folders, "-o", tmp_path / "page.html")
    assert "(diverged)" in out
    assert "unfinished" not in out
    others = write_all(tmp_path / "others", [Made("fml", plus(0.1, 0.1, 0.1)), alone], [1, 2])
    (others[0] / "log.txt").write_text(f"{log}\n")
    (others[0] / "summary.json").unlink()
    assert "(1 of 2 seeds diverged)" in cli("report", *others, "-o", tmp_path / "page.html")[1]  # which no mean counts


def test_an_unfinished_run_alone_is_used_and_compared_at_its_round(tmp_path):
    late = Made("independent", lambda s, r, c: ALONE[c] if r == 1 else 0.1, rounds=2)
    sentences = list_findings(write_all(tmp_path, [Made("fml", plus(0.1, 0.1, 0.1), rounds=2, reached=1), late], [0]))
    assert "FML, seed 0, is unfinished: round 1 of 2. Its numbers are from that round." in sentences
    assert "10.0 points above local-only" in sentences[1]


def test_runs_of_different_length_are_compared_at_the_last_common_round(tmp_path):
    short = write(tmp_path / "alone", replace(alone, rounds=2))
    long = write(tmp_path / "fml", Made("fml", lambda s, r, c: ALONE[c] + 0.1 * (r > 2), rounds=4))
    compared = make_comparison([long, short])
    gain, after = list(verdicts.find_findings(compared))[:2]
    assert gain.startswith("FML, rounds = 4: personal models score 70.0 % on the clients' own validation data, level")
    assert after.startswith("FML, rounds = 4 is compared with local-only after round 2,")


def test_a_seed_that_is_there_twice_counts_once(tmp_path):
    folders = write_all(tmp_path, [Made("fml", plus(0.1, 0.1, 0.1)), alone], [0, 1, 2])
    twice = write(tmp_path / "again", Made("fml", plus(0.2, 0.2, 0.2)))
    sentences = list_findings([*folders, twice])
    assert f"FML: seed 0 is there twice; {twice} is left out." in sentences
    assert "10.0 points above local-only" in sentences[1]


def test_of_two_local_runs_the_one_with_the_same_settings_is_the_measure(tmp_path):
    slow, fast = ({"optimizer": {"name": "sgd", "lr": lr}} for lr in (0.01, 0.1))
    folders = [
        write(tmp_path / "a", replace(alone, config=slow)),
        write(tmp_path / "b", Made("independent", plus(0.1, 0.1, 0.1), config=fast)),
        write(tmp_path / "c", Made("fml", plus(0.1, 0.1, 0.1), config=fast)),
    ]
    compared = make_comparison(folders)
    fml = compared.methods[0]
    assert fml.method == "FML, optimizer.lr = 0.1"
    assert compared.find_local_only(fml).method == "Local-only, optimizer.lr = 0.1"


def test_other_data_are_another_comparison(tmp_path):
    iid_config = {"partition": {"kind": "iid", "clients": 3}}
    a = write_all(
        tmp_path / "a", [Made("fml", plus(0.1, 0.1, 0.1), name="shards"), replace(alone, name="shards")], [0, 1, 2]
    )
    b = write_all(
        tmp_path / "b",
        [
            Made("fml", plus(-0.1, -0.1, -0.1), name="dealt", config=iid_config),
            replace(alone, name="dealt", config=iid_config),
        ],
        [0, 1, 2],
    )
    assert find_answers(compare_folders([*a, *b])) == [
        "shards: Federating pays with FML: clients do better on their own data than alone.",
        "dealt: Federating does not pay: with FML clients do worse on their own data than alone.",
    ]
    compared = compare_folders([*a, *b])
    assert find_differences(compared) == [
        ("partition.kind", ["shards", "iid"]),
        ("partition.classes_per_client", ["2", "not set"]),
    ]


def test_all_keys_in_which_comparisons_differ_are_found_but_not_those_of_their_methods(tmp_path):
    small = {"data": {"name": "digits", "size": [8, 8]}, "model": {"shared": "mlp"}}
    large = {
        "data": {"name": "digits", "size": [16, 16]},
        "model": {"shared": "cnn1", "personal": ["mlp", "cnn1"]},
        "optimizer": {"name": "sgd", "lr": 0.02},
    }
    slow = replace(alone, config=large | {"optimizer": {"name": "sgd", "lr": 0.01}})
    a = write_all(
        tmp_path / "a",
        [replace(make_two_models((0, 0, 0), (0, 0, 0)), config=small), replace(alone, config=small)],
        [0, 1, 2],
    )
    b = write_all(tmp_path / "b", [Made("fml", plus(0, 0, 0), config=large), slow], [0])
    assert find_differences(compare_folders([*a, *b])) == [
        ("data.size", ["[8, 8]", "[16, 16]"]),
        ("model.shared", ["mlp", "cnn1"]),
        ("optimizer.lr", ["0.01", "0.02; 0.01"]),
        ("model.personal", ["not set", '["mlp", "cnn1"]']),
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"engine": {"workers": 2, "address": "auto", "gpus": 0.5, "compile": True, "name": "processes", "threads": 4}},
        {"data": {"name": "digits", "workers": 1, "resident": False, "root": "/there"}, "engine": {"device": "cuda"}},
        {"clients": {"0": {"data": {"root": "/there"}}}},
    ],
)
def test_machine_settings_are_not_a_difference_between_runs(tmp_path, other):
    here = write(tmp_path / "a", Made("fml", plus(0, 0, 0)))
    again = write(tmp_path / "b", Made("fml", plus(0, 0, 0), seed=1, config=other))
    compared = make_comparison([here, again, write(tmp_path / "c", replace(alone, config=other))])
    assert [m.method for m in compared.methods] == ["FML", "Local-only"]
    assert [run.seed for run in compared.methods[0].runs] == [0, 1]


@pytest.mark.parametrize("other", [{"engine": {"precision": "bf16"}}, {"engine": {"participation": 0.5}}, {"namely": 1}])
def test_what_changes_numbers_is_a_difference(tmp_path, other):
    here = write(tmp_path / "a", Made("fml", plus(0, 0, 0)))
    compared = make_comparison([here, write(tmp_path / "b", Made("fml", plus(0, 0, 0), config=other))])
    assert len(compared.methods) == 2
