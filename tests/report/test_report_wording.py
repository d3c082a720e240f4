"""Answers from gains given by hand."""

import pytest

from fedmutual.report.answer import FEDERATING, JOINING, Decision, Holdings, Way, render
from fedmutual.results.gains import Gains, Pair


def gains(*by_seed, clients=("a",)):
    return Gains(tuple(Pair(seed, c, 1, 0.5 + gain, 0.5, 100) for seed, gain in enumerate(by_seed) for c in clients))


def decision(holdings=None, participants=3, question=FEDERATING, **ways):
    compared_ways = tuple(Way(label, way_gains) for label, way_gains in ways.items())
    return Decision(question, participants, True, compared_ways, (), holdings)


@pytest.mark.parametrize(
    ("by_seed", "leaning", "doubt"),
    [
        ((0.1, 0.2, -0.3), 0, None),  # the sum of these floats is not 0
        ((0.3, -0.1, 0.0), 1, "which may be chance"),
        ((-0.3, 0.1), -1, "and two seeds cannot exclude chance"),
    ],
)
def test_an_uncertain_result_has_the_direction_of_its_mean(by_seed, leaning, doubt):
    made = decision(FML=gains(*by_seed))
    assert (made.pays, made.costs, made.uncertain, made.leanings) == ([], [], ["FML"], {leaning: ["FML"]})
    words = {0: "as well as alone with FML", 1: "better with FML", -1: "worse with FML"}[leaning]
    lead = f"Whether federating pays is not certain here: on average clients do {words}{f', {doubt}' if doubt else ''}."
    assert render(made, "lead") == lead


def test_each_way_is_in_one_of_three_groups():
    answer = decision(FML=gains(0.2, 0.21, 0.2), FedAvg=gains(-0.2, -0.21, -0.2), FedProx=gains(0.1, -0.1, 0.05))
    assert (answer.pays, answer.costs, answer.uncertain) == (["FML"], ["FedAvg"], ["FedProx"])
    assert render(answer, "lead") == (
        "Federating pays with FML: clients do better on their own data than alone; with FedAvg they do worse; "
        "with FedProx no difference is certain."
    )
    assert (answer.best.label, answer.most_harmful.label) == ("FML", "FedAvg")


def test_the_way_that_harms_most_is_named_with_its_worst_client():
    ours = Gains(tuple(Pair(0, c, 1, 0.5 + gain, 0.5, 100) for c, gain in {"a": 0.1, "b": -0.02, "c": -0.05}.items()))
    answer = decision(FML=gains(0.2, clients="abc"), FedAvg=ours)
    assert answer.most_harmful.worst.client == "c"
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
    assert render(decision(participants=participants, question=question), "question") == title


def test_the_possible_gain_is_stated_with_the_clients_data():
    two_gains = gains(0.1, 0.2)  # alone 0.5
    all_classes = decision(Holdings((36, 40), (10, 10), 10, 10), FML=two_gains)
    assert all_classes.local_value == pytest.approx(0.5)
    assert render(all_classes, "data") == (
        "Each client trains on 36 to 40 examples of 10 of 10 classes. Trained alone, it scores 50.0 %: "
        "50.0 points are left to gain."
    )
    four_classes = Holdings((60, 60), (4, 4), 4, 10)
    assert render(decision(four_classes, FML=two_gains), "data").endswith(
        "and knowing the other 6 classes gains nothing there."
    )
    assert "nothing" not in render(decision(four_classes, question=JOINING, FML=two_gains), "data")  # scored on all domains
    assert render(decision(FML=two_gains), "data") == ""  # sites that do not disclose what they hold
