"""ACC, BWT and FWT by hand, from made lines: last, and after each node's own best round."""

import pytest

from fedmutual.config import parse_config
from run_folders import summarise_lines

DATA = ("test", "test.own", "test.others", "validation", "validation.all", "holdout")


def node(client, values, model="personal"):
    """A node's accuracies on as many of DATA as are given; None leaves one out."""
    values_by_data = zip(DATA, values, strict=False)
    return [{"model": model, "client": client, "data": d, "accuracy": v} for d, v in values_by_data if v is not None]


def line(round, *nodes, train=None):
    return {"round": round, "train": train or {}, "scores": [s for node_scores in nodes for s in node_scores]}


# node a is best after round 1 by its own validation data and after round 2 by everybody's, node b the other way round
LINES = [
    line(1, node("a", (0.50, 0.90, 0.40, 0.95, 0.5)), node("b", (0.60, 0.80, 0.55, 0.6, 0.7))),
    line(2, node("a", (0.70, 0.85, 0.65, 0.85, 0.8)), node("b", (0.40, 0.70, 0.30, 0.8, 0.6))),
    line(3, node("a", (0.60, 0.80, 0.50, 0.75, 0.8)), node("b", (0.50, 0.75, 0.45, 0.7, 0.6))),
]


def summed(lines, **tables):
    return summarise_lines(parse_config(tables), lines, [])


def test_last_and_best_by_the_validation_data_of_all_nodes():
    summary = summed(LINES, records={"best_by": "validation"})["transfer"]
    assert (summary["best_by"], summary["best_rounds"]) == (
        "validation.all",
        {"a": 2, "b": 1},
    )  # 2 is the first of equal ones
    assert summary["acc"]["last"] == {"mean": pytest.approx(0.55), "worst": 0.5, "per_client": {"a": 0.6, "b": 0.5}}
    assert summary["acc"]["best"] == {"mean": pytest.approx(0.65), "worst": 0.6, "per_client": {"a": 0.7, "b": 0.6}}
    assert summary["bwt"]["best"] == {"mean": pytest.approx(0.825), "worst": 0.8, "per_client": {"a": 0.85, "b": 0.8}}
    assert summary["fwt"]["best"] == {"mean": pytest.approx(0.6), "worst": 0.55, "per_client": {"a": 0.65, "b": 0.55}}
    assert summary["fwt"]["last"]["per_client"] == {"a": 0.5, "b": 0.45}


def test_without_pooled_validation_data_each_node_chooses_by_its_own():
    lines = [line(n["round"], [s for s in n["scores"] if s["data"] != "validation.all"]) for n in LINES]
    summary = summed(lines, records={"best_by": "validation"})["transfer"]
    assert (summary["best_by"], summary["best_rounds"]) == ("validation", {"a": 1, "b": 2})
    assert summary["acc"]["best"]["per_client"] == {"a": 0.5, "b": 0.4}


def test_the_clients_own_validation_accuracy_keeps_its_meaning():
    summary = summed(LINES, records={"best_by": "validation"})["personal"]["val_accuracy"]
    assert summary["last"]["per_client"] == {"a": 0.75, "b": 0.7}
    assert (summary["best"]["best_round"], summary["best"]["best_by"]) == (2, "validation")  # 0.775, 0.825, 0.725


@pytest.mark.parametrize(("by", "rounds"), [("holdout", {"a": 3, "b": 2}), ("test", {"a": 2, "b": 1})])
def test_it_is_chosen_by_what_was_asked_for(by, rounds):
    held = {"a": (0.1, 0.2, 0.3), "b": (0.1, 0.9, 0.3)}
    lines = [
        line(n["round"], n["scores"], *(node(i, (None,) * 5 + (v[n["round"] - 1],)) for i, v in held.items())) for n in LINES
    ]
    summary = summed(lines, records={"best_by": by}, split={"holdout": 0.1})["transfer"]
    assert (summary["best_by"], summary["best_rounds"]) == (by, rounds)


def test_by_default_hold_out_rows_choose_and_otherwise_validation_rows():
    assert summed(LINES)["transfer"]["best_by"] == "validation.all"
    held = [line(n["round"], n["scores"], *(node(i, (None,) * 5 + (0.5,)) for i in "ab")) for n in LINES]
    assert summed(held, split={"holdout": 0.1})["transfer"]["best_by"] == "holdout"


def test_a_shared_model_is_every_node_s():
    shared = [line(n["round"], [{**s, "model": "global"} for s in n["scores"]]) for n in LINES]
    summary = summed(shared, algorithm={"name": "fedavg"})
    assert summary["transfer"]["bwt"]["last"]["per_client"] == {"a": 0.8, "b": 0.75}
    assert summary["global"]["test_accuracy"]["last"] == pytest.approx(0.55)


def test_a_node_that_shares_no_scores_is_not_there():
    summary = summed([line(n["round"], [s for s in n["scores"] if s["client"] == "a"]) for n in LINES])["transfer"]
    assert summary["best_rounds"] == {"a": 2}
    assert summary["acc"]["last"] == {"mean": 0.6, "worst": 0.6, "per_client": {"a": 0.6}}


def test_a_single_node_has_no_others():
    summary = summed([line(1, node("a", (0.5, 0.5, None, 0.5)))])["transfer"]
    assert summary["acc"]["last"]["mean"] == 0.5
    assert summary["fwt"] is None


def test_without_domains_there_is_no_transfer():
    plain = [line(1, node("a", (0.5, None, None, 0.5)))]
    assert summed(plain)["transfer"] is None


def test_the_share_of_projected_steps_is_the_last_of_each_node():
    """A node without a partner in the last exchange reported its share in an earlier exchange."""
    lines = [
        line(1, train={"a": {"local": 1.0, "projected": 0.5}, "b": {"local": 1.0, "projected": 0.1}}),
        line(2, train={"a": {"local": 1.0, "projected": 0.3}, "b": {"local": 1.0}}),
    ]
    assert summed(lines)["projected"] == {"mean": pytest.approx(0.2), "per_client": {"a": 0.3, "b": 0.1}}
