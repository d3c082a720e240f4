"""The summary's last and best, by hand, from made lines."""

import pytest

from fedmutual.config import parse_config
from run_folders import summarise_lines as summarise


def line(round, *scores):
    keys = ("model", "client", "data", "accuracy")
    return {"round": round, "train": {}, "scores": [dict(zip(keys, s, strict=True)) for s in scores]}


def fml(round, test, validation, holdout=None):
    scores = [("global", None, "test", test)]
    for client, value in enumerate(validation):
        scores.append(("personal", str(client), "validation", value))
        scores.append(("global", str(client), "validation", value / 2))
        if holdout is not None:
            scores.append(("personal", str(client), "holdout", holdout[client]))
            scores.append(("global", str(client), "holdout", holdout[client] / 2))
    return line(round, *scores)


def sent(round, phase, client, up, down):
    return {"round": round, "phase": phase, "client": client, "down": down, "up": up}


LEDGER = [sent(1, "fml", "0", 3, 5), sent(1, "fml", "1", 4, 6)]


def test_best_on_test_is_the_first_of_the_greatest_and_says_so():
    lines = [fml(1, 0.5, [0.6, 0.8]), fml(2, 0.7, [0.9, 0.7]), fml(3, 0.7, [0.5, 0.9])]
    summary = summarise(parse_config({}), lines, LEDGER)
    assert summary["global"]["test_accuracy"] == {"last": 0.7, "best": 0.7, "best_round": 2, "best_by": "test"}
    personal = summary["personal"]
    assert personal["model"] == "personal"
    last, best = personal["val_accuracy"]["last"], personal["val_accuracy"]["best"]
    assert last["mean"] == pytest.approx(0.7)
    assert (last["worst"], last["per_client"]) == (0.5, {"0": 0.5, "1": 0.9})
    assert best["mean"] == pytest.approx(0.8)
    assert (best["worst"], best["best_round"], best["best_by"]) == (0.7, 2, "validation")
    assert summary["bytes"] == {"up": 7, "down": 11, "seed": 0}
    assert (summary["transfer"], summary["projected"]) == (None, None)


@pytest.mark.parametrize("config", [{"split": {"holdout": 0.1}}, {"partition": {"kind": "file", "file": "p.json"}}])
def test_best_by_holdout_reports_the_round_that_the_holdout_chose_not_the_greatest(config):
    lines = [fml(1, 0.5, [0.6, 0.8], [0.9, 0.9]), fml(2, 0.7, [0.9, 0.7], [0.2, 0.3])]
    summary = summarise(parse_config(config), lines, LEDGER)
    assert summary["global"]["test_accuracy"] == {"last": 0.7, "best": 0.5, "best_round": 1, "best_by": "holdout"}
    best = summary["personal"]["val_accuracy"]["best"]
    assert (best["best_round"], best["best_by"]) == (1, "holdout")
    assert best["mean"] == pytest.approx(0.7)


def test_the_configured_choice_overrides():
    lines = [fml(1, 0.5, [0.9, 0.9], [0.1, 0.1]), fml(2, 0.7, [0.2, 0.3], [0.9, 0.9])]
    config = parse_config({"split": {"holdout": 0.1}, "records": {"best_by": "validation"}})
    summary = summarise(config, lines, LEDGER)
    assert summary["global"]["test_accuracy"]["best_round"] == 1
    assert summary["personal"]["val_accuracy"]["best"]["best_by"] == "validation"


def test_fedavg_serves_clients_with_the_global_model():
    lines = [line(1, ("global", None, "test", 0.4), ("global", "0", "validation", 0.3), ("global", "1", "validation", 0.5))]
    summary = summarise(parse_config({"algorithm": {"name": "fedavg"}}), lines, [])
    assert summary["personal"]["model"] == "global"
    assert summary["personal"]["val_accuracy"]["last"]["per_client"] == {"0": 0.3, "1": 0.5}


def test_local_only_has_no_global_model_and_no_shared_metrics_no_personal_scores():
    alone = [line(1, ("personal", "0", "validation", 0.3), ("personal", "0", "test", 0.1))]
    summary = summarise(parse_config({"algorithm": {"name": "independent"}}), alone, [])
    assert summary["global"]["test_accuracy"] is None
    closed = [line(1, ("global", None, "test", 0.4))]
    summary = summarise(parse_config({}), closed, [])
    assert summary["personal"]["val_accuracy"] is None
    assert summary["global"]["test_accuracy"]["last"] == 0.4


def test_without_a_complete_global_model_clients_without_a_personal_model_use_the_meme():
    lines = [line(1, ("meme", "0", "validation", 0.3), ("meme", "1", "validation", 0.5))]
    summary = summarise(parse_config({"algorithm": {"name": "fedavg"}}), lines, [])
    assert summary["global"]["test_accuracy"] is None
    assert summary["personal"]["model"] == "meme"
    assert summary["personal"]["val_accuracy"]["last"]["mean"] == 0.4


def test_the_seed_set_is_counted_once_and_apart():
    start = [sent(0, "agree", "a", 16, 48), sent(0, "seed", "a", 1000, 300), sent(0, "seed", "b", 2000, 700)]
    rounds = [sent(1, "local", "a", 10, 0), sent(1, "mutual", "a", 0, 30), sent(2, "seed", "a", 1, 2)]
    summary = summarise(parse_config({}), [line(1, ("personal", "a", "validation", 0.5))], [*start, *rounds])
    # up: 16 + 10 + 1, for only round 0's phase of that name is the seed set's; down: 48 + 30 + 2
    assert summary["bytes"] == {"up": 27, "down": 80, "seed": 3000}
