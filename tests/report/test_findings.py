"""The decisions behind the sentences, from gains given by hand; and the text of every template once."""

import re
from importlib.resources import files

import pytest

from fedmutual.report import verdicts
from fedmutual.report.findings import (
    Contest,
    Effects,
    Finding,
    Harm,
    count_clients,
    count_nodes,
    describe_finding,
    find_doubts,
)
from fedmutual.report.rendering import render_macro
from fedmutual.results.comparison import make_comparisons
from fedmutual.results.estimate import Estimate
from fedmutual.results.gains import Gains, Pair
from fedmutual.results.scale import PERCENT
from fedmutual.rundir.recorded_run import read_runs
from run_folders import Made, write_all

CERTAIN = Estimate(0.1, 0.02, 5, "seeds")
OPEN = Estimate(-0.01, 0.03, 5, "seeds")
ALONE = {"0": 0.8, "1": 0.7, "2": 0.6}
alone = Made("independent", lambda seed, round, client: ALONE[client])


def pairs(*gains_by_seed):
    """gains_by_seed: of each seed client -> gain over an accuracy of 0.5."""
    return Gains(
        tuple(
            Pair(seed, c, 1, 0.5 + gain, 0.5, 100) for seed, gains in enumerate(gains_by_seed) for c, gain in gains.items()
        )
    )


def find(kind, folders):
    [comparison] = make_comparisons(read_runs(folders))
    return [finding for finding in verdicts.find_findings(comparison) if finding.macro == kind]


def test_clients_count_once_in_each_seed():
    effects = count_clients(pairs({"a": 0.1, "b": -0.02}, {"a": 0.0, "b": -0.05}))
    assert (effects.total, effects.gained, effects.equal, effects.seeds) == (4, 1, 1, 2)
    assert [(harm.client, harm.seed, harm.loss) for harm in effects.harmed] == [
        ("b", 1, pytest.approx(0.05)),
        ("b", 0, pytest.approx(0.02)),
    ]
    assert effects.harms_to_name == effects.harmed


def test_of_many_harmed_clients_the_most_harmed_one_is_named():
    effects = count_clients(pairs({"a": -0.01, "b": -0.04, "c": -0.02, "d": -0.03}))
    assert [harm.client for harm in effects.harms_to_name] == ["b"]
    assert [harm.seed for harm in effects.harmed] == [None] * 4  # one seed: no need to name it


def test_nodes_count_by_their_means_over_seeds():
    """Node a: -0.02 and -0.02 from two seeds, certain of nothing; node b gains in the mean; node c is equal."""
    effects = count_nodes(pairs({"a": -0.02, "b": 0.3, "c": 0.1}, {"a": -0.02, "b": -0.1, "c": -0.1}))
    assert (effects.total, effects.gained, effects.equal, effects.seeds) == (3, 1, 1, 1)
    assert effects.harmed == (Harm("a", None, pytest.approx(0.02), may_be_chance=True),)
    assert effects.may_all_be_chance


def test_an_accuracy_is_the_mean_over_clients_then_over_seeds():
    """Seed 0 has clients of 0.9 and 0.7, seed 1 one of 0.5: 0.65, where the mean over the three pairs would be 0.7."""
    gains = pairs({"a": 0.4, "b": 0.2}, {"a": 0.0})
    assert gains.means == (pytest.approx(0.65), pytest.approx(0.5))
    assert gains.means[0] - gains.means[1] == pytest.approx(gains.estimate.mean)


def test_a_method_is_compared_with_local_only_and_with_its_rivals(tmp_path):
    fml = Made("fml", lambda s, r, c: ALONE[c] + 0.1, lambda s, r: 0.7)
    fedavg = Made("fedavg", lambda s, r, c: ALONE[c] - 0.05 * int(c), lambda s, r: 0.75)
    folders = write_all(tmp_path, [fml, fedavg, alone], [0, 1, 2])
    gains = {gain.label: gain for gain in find("method_gain", folders)}
    assert gains.keys() == {"FML", "FedAvg"}
    assert (gains["FML"].accuracy, gains["FML"].estimate.sign, gains["FML"].effects.gained) == (pytest.approx(0.8), 1, 9)
    effects = gains["FedAvg"].effects  # client 1 loses 5 points and client 2 ten, in each seed
    assert (gains["FedAvg"].estimate.sign, effects.equal, len(effects.harmed)) == (-1, 3, 6)
    assert (effects.harms_to_name[0].client, effects.harms_to_name[0].loss) == ("2", pytest.approx(0.1))
    [rivalry] = find("rivalry", folders)
    assert [(c.data, c.estimate.mean) for c in rivalry.contests] == [
        ("validation", pytest.approx(0.15)),
        ("shared", pytest.approx(-0.05)),
    ]
    [both] = find("all_classes", folders)
    assert (both.label, both.personal, both.shared) == ("FML", pytest.approx(0.4), pytest.approx(0.7))


def test_without_a_reference_the_first_method_is_compared_with_the_others(tmp_path):
    fedavg = Made("fedavg", lambda s, r, c: ALONE[c])
    fedprox = Made("fedprox", lambda s, r, c: ALONE[c] - 0.1)
    [rivalry] = find("rivalry", write_all(tmp_path, [fedprox, fedavg, alone], [0, 1, 2]))
    [contest] = rivalry.contests
    assert (rivalry.rival, contest.name, contest.estimate.mean) == ("FedProx", "FedAvg", pytest.approx(0.1))


@pytest.mark.parametrize(
    ("shared", "sign", "better", "wins"), [(0.1, 1, "shared model", 9), (-0.1, -1, "personal models", 9)]
)
def test_the_better_of_two_models(tmp_path, shared, sign, better, wins):
    fml = Made("fml", lambda s, r, c: ALONE[c], lambda s, r: 0.7, shared_own=lambda s, r, c: ALONE[c] + shared)
    [finding] = find("two_models", write_all(tmp_path, [fml, alone], [0, 1, 2]))
    assert (finding.estimate.sign, finding.better, finding.wins, finding.total, finding.seeds) == (sign, better, wins, 9, 3)


def test_the_worst_class_has_the_lowest_recall_of_both(tmp_path):
    """Class 2's recall is half of the accuracy: 0.35 alone, 0.25 with FML."""
    fml = Made("fml", lambda s, r, c: ALONE[c] - 0.2)
    [worst] = find("worst_class", write_all(tmp_path, [fml, alone], [0, 1, 2]))
    assert (worst.name, worst.estimate.sign) == ("2", -1)
    assert (worst.recall, worst.local_recall) == (pytest.approx(0.25), pytest.approx(0.35))


@pytest.mark.parametrize(
    ("seeds", "estimates", "doubts"),
    [
        ([0, 1], [Estimate(0.1, 0.5, 2, "seeds")], [Finding(macro="few_seeds", seeds=2, is_too_few=True, source="compare")]),
        (
            [0, 1, 2],
            [CERTAIN, Estimate(0.1, 0.5, 3, "seeds")],
            [Finding(macro="few_seeds", seeds=3, is_too_few=False, source="compare")],
        ),
        ([0, 1], [Estimate(0.1, 0.02, 3, "seeds")], []),  # certain
        ([0, 1], [Estimate(0.0, 0.0, 3, "seeds")], []),  # three seeds agree
        ([0], [Estimate(0.1, 0.5, 3, "clients")], [Finding(macro="one_seed", source="compare")]),
    ],
)
def test_what_few_seeds_leave_open(tmp_path, seeds, estimates, doubts):
    folders = write_all(tmp_path, [Made("fml", lambda s, r, c: ALONE[c]), alone], seeds)
    [comparison] = make_comparisons(read_runs(folders))
    assert list(find_doubts(comparison, estimates)) == doubts


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(0.013, 0.009, 3, "seeds"), "1.3 points above (95 % interval 0.4 to 2.2, 3 seeds)"),
        (Estimate(-0.013, 0.009, 3, "seeds"), "1.3 points below (95 % interval 0.4 to 2.2, 3 seeds)"),
        (Estimate(-0.5, 0.9, 3, "clients"), "50.0 points below (95 % interval 100.0 below to 40.0 above, 3 clients)"),
        (Estimate(0.0, 0.01, 3, "seeds"), "level (95 % interval 1.0 below to 1.0 above, 3 seeds)"),
        (Estimate(0.02, 0.0, 2, "seeds"), "2.0 points above (equal in both seeds)"),
        (Estimate(0.02, None, 1, "clients"), "2.0 points above (one client, so no interval)"),
    ],
)
def test_a_difference_in_words(estimate, text):
    assert render_macro("wording.j2", "difference", estimate, PERCENT, "above", "below", "level") == text


HARMED = Effects("client", 4, 1, (Harm("a", None, 0.05), Harm("b", None, 0.01)), 2)
ONE_HARMED = Effects("node", 1, 0, (Harm("a", None, 0.01, True),), 5)
PROSE = [
    (
        Finding(macro="not_compared", label="FedAvg", reason="nothing was evaluated yet"),
        "FedAvg cannot be compared with local-only: nothing was evaluated yet.",
    ),
    (
        Finding(
            macro="method_gain",
            label="FML",
            is_pooled=False,
            model="personal",
            data="validation",
            accuracy=0.8,
            estimate=CERTAIN,
            effects=HARMED,
        ),
        "FML: personal models score 80.0 % on the clients' own validation data, 10.0 points above local-only (95 % "
        "interval 8.0 to 12.0, 5 seeds). Of 4 clients, 1 gains, 1 stays equal and 2 are harmed: client a by 5.0 "
        "points and client b by 1.0.",
    ),
    (
        Finding(
            macro="method_gain",
            label="Centralised",
            is_pooled=True,
            model="global",
            data="test",
            accuracy=0.8,
            estimate=CERTAIN,
            effects=Effects("node", 1, 1, (), 5),
        ),
        "Centralised (an upper bound: all data in one place): over all domains (ACC) nodes score 80.0 %, 10.0 points "
        "above local-only (95 % interval 8.0 to 12.0, 5 seeds). The only node gains.",
    ),
    (
        Finding(
            macro="method_gain",
            label="FedH2L",
            is_pooled=False,
            model="personal",
            data="test.own",
            accuracy=0.8,
            estimate=OPEN,
            effects=ONE_HARMED,
        ),
        "FedH2L, on a node's own domain (BWT): a cost of joining is not certain; 80.0 %, 1.0 points below local-only "
        "(95 % interval 4.0 below to 2.0 above, 5 seeds). The only node is harmed: node a by 1.0 points, which may "
        "be chance.",
    ),
    (
        Finding(macro="compared_after", label="FML", rounds=(2, 1000)),
        "FML is compared with local-only after round 2 and 1,000, the last evaluated round after equal training of both.",
    ),
    (
        Finding(
            macro="two_models",
            label="FML",
            model="shared model",
            better="shared model",
            worse="personal models",
            estimate=CERTAIN,
            wins=6,
            total=9,
            seeds=3,
        ),
        "With FML, the shared model does better on the clients' own validation data than the personal models: by "
        "10.0 points (95 % interval 8.0 to 12.0, 5 seeds), for 6 of 9 clients over 3 seeds.",
    ),
    (
        Finding(
            macro="two_models",
            label="FML",
            model="clients' forks",
            better="personal models",
            worse="clients' forks",
            estimate=OPEN,
            wins=6,
            total=9,
            seeds=3,
        ),
        "It is not certain which model of FML is better on the clients' own validation data: the "
        "clients' forks are 1.0 points behind (95 % interval 4.0 behind to 2.0 ahead, 5 seeds).",
    ),
    (
        Finding(
            macro="rivalry",
            rival="FedAvg",
            contests=(Contest("validation", "FML", CERTAIN), Contest("test.others", "FML", OPEN)),
        ),
        "Against FedAvg: on the clients' own validation data FML wins by 10.0 points (95 % interval 8.0 to 12.0, 5 "
        "seeds); on the other domains (FWT) FML is 1.0 points behind, which may be chance (95 % interval 4.0 "
        "behind to 2.0 ahead, 5 seeds).",
    ),
    (
        Finding(macro="all_classes", label="FML", personal=0.4, shared=0.7),
        "On all classes (the test set) FML's personal models score 40.0 %, its shared model 70.0 %.",
    ),
    (
        Finding(macro="frequent_class", accuracy=0.5),
        "A model that always predicts a client's most frequent class would score 50.0 % on its validation data.",
    ),
    (
        Finding(macro="worst_class", name="cat", label="FML", recall=0.3, local_recall=0.31, estimate=OPEN),
        "Class cat has the lowest recall of FML and local-only combined: 30.0 %, alone 31.0 %: 1.0 points below, "
        "which may be chance (95 % interval 4.0 below to 2.0 above, 5 seeds).",
    ),
    (
        Finding(macro="other_task", client="light", score="mae", values=(("FML, personal", 0.12345), ("Local-only", 2.0))),
        "Client 'light' has a task without accuracy: its mae on its own validation data is 0.1235 with FML, "
        "personal and 2 with Local-only.",
    ),
    (Finding(macro="more_tasks", clients=2), "2 more clients have a task without accuracy; the page has a table of all."),
    (
        Finding(macro="few_seeds", seeds=2, is_too_few=True, source="adapt"),
        "Two seeds cannot exclude chance; more seeds may decide: `fedmutual adapt RUN --seeds 5`.",
    ),
    (
        Finding(macro="one_seed", source="sites"),
        "There is only one seed: intervals over clients show how clients differ, not the result of another seed; "
        "submitting the federation with another seed and another name gives more.",
    ),
    (
        Finding(macro="unequal_steps", most="FedRep", most_steps=924.0, fewest="Local-only", fewest_steps=84.0),
        "The methods take unequal numbers of gradient steps: FedRep 924 and Local-only 84. More steps alone can raise "
        "accuracy; compare at equal steps.",
    ),
]


@pytest.mark.parametrize(("finding", "text"), PROSE)
def test_the_sentences_of_every_finding(finding, text):
    assert describe_finding(finding, PERCENT) == text


def test_every_macro_of_a_finding_has_a_sentence_here():
    template = (files("fedmutual.report") / "templates" / Finding.template).read_text(encoding="utf-8")
    assert {finding.macro for finding, _ in PROSE} == set(re.findall(r"macro (\w+)\(f, scale\)", template))
