"""The decisions behind the sentences, from gains given by hand; and the text of every template once."""

import re
from functools import partial

import pytest

from fedmutual.report.rendering import render_facts, render_macro
from fedmutual.report.verdicts import FEDERATING, JOINING, count_clients, count_nodes, decide, find_doubts, render
from fedmutual.results.estimate import Estimate
from fedmutual.results.gains import Gains
from fedmutual.results.scale import PERCENT
from run_folders import Made, alone, list_findings, make_comparison, plus, write_all

CERTAIN = Estimate(0.1, 0.02, 5, "seeds")
OPEN = Estimate(-0.01, 0.03, 5, "seeds")
decide_by = partial(decide, FEDERATING, 3)


def pairs(*gains_by_seed):
    """gains_by_seed: of each seed client -> gain over an accuracy of 0.5."""
    rows = [(seed, c, 1, 0.5 + gain, 0.5, 100) for seed, gains in enumerate(gains_by_seed) for c, gain in gains.items()]
    return Gains(rows)


def by_seed(*gains, clients=("a",)):
    return pairs(*(dict.fromkeys(clients, gain) for gain in gains))


def test_clients_count_once_in_each_seed():
    effects = count_clients(pairs({"a": 0.1, "b": -0.02}, {"a": 0.0, "b": -0.05}))
    assert [effects[key] for key in ("total", "gained", "equal", "seeds")] == [4, 1, 1, 2]
    harmed = [(harm["client"], harm["seed"], harm["loss"]) for harm in effects["harmed"]]
    assert harmed == [("b", 1, pytest.approx(0.05)), ("b", 0, pytest.approx(0.02))]
    assert effects["named"] == effects["harmed"]


def test_of_many_harmed_clients_the_most_harmed_one_is_named():
    effects = count_clients(pairs({"a": -0.01, "b": -0.04, "c": -0.02, "d": -0.03}))
    assert [harm["client"] for harm in effects["named"]] == ["b"]
    assert [harm["seed"] for harm in effects["harmed"]] == [None] * 4  # one seed: no need to name it


def test_nodes_count_by_their_means_over_seeds():
    """Node a loses in the mean, certain of nothing; node b gains; node c is equal: the mean of its floats is -2e-17."""
    gains = {"a": -0.02, "b": 0.3, "c": 0.1}, {"a": -0.02, "b": -0.1, "c": 0.2}, {"a": 0.01, "b": -0.1, "c": -0.3}
    effects = count_nodes(pairs(*gains))
    assert [effects[key] for key in ("total", "gained", "equal", "seeds", "may_all_be_chance")] == [3, 1, 1, 1, True]
    assert effects["harmed"] == [{"client": "a", "seed": None, "loss": pytest.approx(0.01), "may_be_chance": True}]


def test_an_accuracy_is_the_mean_over_clients_then_over_seeds():
    """Seed 0 has clients of 0.9 and 0.7, seed 1 one of 0.5: 0.65, where the mean over the three pairs would be 0.7."""
    gains = pairs({"a": 0.4, "b": 0.2}, {"a": 0.0})
    assert gains.means == (pytest.approx(0.65), pytest.approx(0.5))
    assert gains.means[0] - gains.means[1] == pytest.approx(gains.estimate.mean)


def test_without_a_reference_the_first_method_is_compared_with_the_others(tmp_path):
    fedavg = Made("fedavg", plus(0, 0, 0))
    fedprox = Made("fedprox", plus(-0.1, -0.1, -0.1))
    [rivalry] = [s for s in list_findings(write_all(tmp_path, [fedprox, fedavg, alone], [0, 1, 2])) if "Against" in s]
    assert rivalry.startswith("Against FedProx: on the clients' own validation data FedAvg wins by 10.0 points")


@pytest.mark.parametrize(
    ("seeds", "estimates", "doubts"),
    [
        ([0, 1], [Estimate(0.1, 0.5, 2, "seeds")], ["Two seeds cannot exclude chance; more seeds may decide"]),
        ([0, 1, 2], [CERTAIN, Estimate(0.1, 0.5, 3, "seeds")], ["An interval over 3 seeds is wide; more seeds may decide"]),
        ([0, 1], [Estimate(0.1, 0.02, 3, "seeds")], []),  # certain
        ([0, 1], [Estimate(0.0, 0.0, 3, "seeds")], []),  # three seeds agree
        ([0], [Estimate(0.1, 0.5, 3, "clients")], ["There is only one seed"]),
    ],
)
def test_what_few_seeds_leave_open(tmp_path, seeds, estimates, doubts):
    folders = write_all(tmp_path, [Made("fml", plus(0, 0, 0)), alone], seeds)
    comparison = make_comparison(folders)
    assert [re.split(r": ", sentence)[0] for sentence in find_doubts(comparison, estimates)] == doubts


@pytest.mark.parametrize(
    ("gains", "leaning", "doubt"),
    [
        ((0.1, 0.2, -0.3), 0, ""),  # the sum of these floats is not 0
        ((0.3, -0.1, 0.0), 1, ", which may be chance"),
        ((-0.3, 0.1), -1, ", and two seeds cannot exclude chance"),
    ],
)
def test_an_uncertain_result_has_the_direction_of_its_mean(gains, leaning, doubt):
    made = decide_by({"FML": by_seed(*gains)})
    assert (made.pays, made.costs, made.uncertain, made.leanings) == ([], [], ["FML"], {leaning: ["FML"]})
    words = {0: "as well as alone with FML", 1: "better with FML", -1: "worse with FML"}[leaning]
    assert render(made, "lead") == f"Whether federating pays is not certain here: on average clients do {words}{doubt}."


def test_each_way_is_in_one_of_three_groups():
    ways = {"FML": (0.2, 0.21, 0.2), "FedAvg": (-0.2, -0.21, -0.2), "FedProx": (0.1, -0.1, 0.05)}
    answer = decide_by({label: by_seed(*gains) for label, gains in ways.items()})
    assert (answer.pays, answer.costs, answer.uncertain) == (["FML"], ["FedAvg"], ["FedProx"])
    assert (answer.best, answer.most_harmful) == ("FML", "FedAvg")
    assert render(answer, "lead") == (
        "Federating pays with FML: clients do better on their own data than alone; with FedAvg they do worse; "
        "with FedProx no difference is certain."
    )


def test_the_way_that_harms_most_is_named_with_its_worst_client():
    answer = decide_by({"FML": by_seed(0.2, clients="abc"), "FedAvg": pairs({"a": 0.1, "b": -0.02, "c": -0.05})})
    # 10, -2, -5: mean 1, s = 7.9373, half = 4.302653 * s / sqrt(3) = 19.717
    assert render(answer, "harm") == (
        "FedAvg: +1.0 points (95 % interval −18.7 to +20.7 over the clients); "
        "2 of 3 clients are harmed, client c the most, by 5.0 points."
    )
    assert render(answer, "best") == "FML: +20.0 points (equal for all 3 clients); 3 of 3 clients gain."


@pytest.mark.parametrize(
    ("participants", "question", "title"),
    [
        (5, FEDERATING, "Does federating help these 5 clients?"),
        (1, FEDERATING, "Does federating help this client?"),
        (4, JOINING, "Does joining help these 4 nodes?"),
    ],
)
def test_the_question_names_how_many(participants, question, title):
    assert render(decide(question, participants, {}), "question") == title


def test_the_possible_gain_is_stated_with_the_clients_data():
    ways = {"FML": by_seed(0.1, 0.2)}  # alone 0.5
    held = {"examples": (36, 40), "classes": (10, 10), "scored_classes": 10, "all_classes": 10}
    assert render(decide_by(ways, held), "data") == (
        "Each client trains on 36 to 40 examples of 10 of 10 classes. Trained alone, it scores 50.0 %: "
        "50.0 points are left to gain."
    )
    four = {"examples": (60, 60), "classes": (4, 4), "scored_classes": 4, "all_classes": 10}
    assert render(decide_by(ways, four), "data").endswith("and knowing the other 6 classes gains nothing there.")
    assert "nothing" not in render(decide(JOINING, 3, ways, four), "data")  # scored on all domains
    assert render(decide_by(ways), "data") == ""  # sites that do not disclose what they hold


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


ONE_HARMED = count_nodes(pairs({"a": -0.05, "b": 0.02}, {"a": -0.05, "b": 0.02})) | {"total": 1, "gained": 0, "equal": 0}
GAIN = {"label": "FML", "is_pooled": False, "model": "personal", "data": "validation", "accuracy": 0.8}
PROSE = [
    (
        "not_compared",
        {"label": "FedAvg", "reason": "nothing was evaluated yet"},
        "FedAvg cannot be compared with local-only: nothing was evaluated yet.",
    ),
    (
        "method_gain",
        GAIN | {"is_pooled": True, "data": "test", "estimate": CERTAIN, "effects": count_nodes(pairs({"a": 0.1}))},
        "FML (an upper bound: all data in one place): over all domains (ACC) nodes score 80.0 %, 10.0 points "
        "above local-only (95 % interval 8.0 to 12.0, 5 seeds). The only node gains.",
    ),
    (
        "method_gain",
        GAIN | {"data": "test.own", "estimate": OPEN, "effects": ONE_HARMED},
        "FML, on a node's own domain (BWT): a cost of joining is not certain; 80.0 %, 1.0 points below local-only "
        "(95 % interval 4.0 below to 2.0 above, 5 seeds). The only node is harmed: node a by 5.0 points, which may "
        "be chance.",
    ),
    (
        "compared_after",
        {"label": "FML", "rounds": (2, 1000)},
        "FML is compared with local-only after round 2 and 1,000, the last evaluated round after equal training of both.",
    ),
    (
        "rivalry",
        {"rival": "FedAvg", "contests": [("validation", "FML", CERTAIN), ("test.others", "FML", OPEN)], "steps": None},
        "Against FedAvg: on the clients' own validation data FML wins by 10.0 points (95 % interval 8.0 to 12.0, 5 "
        "seeds); on the other domains (FWT) FML is 1.0 points behind, which may be chance (95 % interval 4.0 "
        "behind to 2.0 ahead, 5 seeds).",
    ),
    (
        "rivalry",
        {"rival": "FedAvg", "contests": [("validation", "FML", CERTAIN)], "steps": (1200.4, 1199.6)},  # means over seeds
        "Against FedAvg: on the clients' own validation data FML wins by 10.0 points (95 % interval 8.0 to 12.0, 5 seeds).",
    ),
    (
        "few_seeds",
        {"seeds": 2, "is_too_few": True, "source": "adapt"},
        "Two seeds cannot exclude chance; more seeds may decide: `fedmutual adapt RUN --seeds 5`.",
    ),
    (
        "one_seed",
        {"source": "sites"},
        "There is only one seed: intervals over clients show how clients differ, not the result of another seed; "
        "submitting the federation under another name with sites.seeds = 3 gives more.",
    ),
    (
        "unequal_steps",
        {"most": "FedRep", "most_steps": 924.0, "fewest": "Local-only", "fewest_steps": 84.0},
        "The methods take unequal numbers of gradient steps: FedRep 924 and Local-only 84. More steps alone can raise "
        "accuracy; compare at equal steps.",
    ),
]


@pytest.mark.parametrize(("macro", "facts", "text"), PROSE)
def test_the_sentences_that_no_made_run_leads_to(macro, facts, text):
    assert render_facts("findings.j2", PERCENT, macro, **facts) == text
