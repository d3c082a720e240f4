"""`records.copies`: a client's copy of the shared model, scored as it was trained, before it is averaged."""

import pytest

import fedmutual
from fedmutual.rundir.file_names import METRICS
from fedmutual.rundir.logs import read_lines


def own(run, round, model):
    """Client -> accuracy of a model on its own validation data."""
    line = next(line for line in read_lines(run.folder / METRICS) if line["round"] == round)
    return {s["client"]: s["accuracy"] for s in line["scores"] if (s["model"], s["data"]) == (model, "validation")}


@pytest.mark.parametrize("engine", ["inprocess", "stacked", "processes"])
def test_a_copy_is_what_training_alone_makes_of_the_server_s_model(small, engine):
    """In round 1 FedAvg's client does what training alone does that starts from the server's weights: the same batches."""
    settings = {"rounds": 2, "model.start": "server", "engine.name": engine, "engine.workers": 2}
    copies = fedmutual.load_config(small, **settings, **{"algorithm.name": "fedavg", "records.copies": True})
    alone = fedmutual.load_config(small, **settings, **{"algorithm.name": "independent"})
    fedavg, independent = fedmutual.run(copies, "copies"), fedmutual.run(alone, "alone")
    assert own(fedavg, 1, "copy") == pytest.approx(own(independent, 1, "personal"))
    assert own(fedavg, 1, "copy") != own(fedavg, 1, "global")
    assert own(fedavg, 2, "copy") != own(independent, 2, "personal")


def test_it_changes_nothing_else(small):
    changed = {"rounds": 2, "algorithm.name": "fedavg"}
    plain = fedmutual.run(fedmutual.load_config(small, **changed), "plain")
    more = fedmutual.run(fedmutual.load_config(small, **changed, **{"records.copies": True}), "more")
    assert own(plain, 2, "copy") == {}
    assert own(plain, 2, "global") == own(more, 2, "global")
    assert plain.summary["personal"] == more.summary["personal"]


def test_who_shares_no_scores_shares_none_of_its_copy(small):
    config = fedmutual.load_config(
        small,
        **{"rounds": 1, "algorithm.name": "fedavg", "records.copies": True, "clients.1.share": {"metrics": "none"}},
    )
    run = fedmutual.run(config, "quiet")
    assert own(run, 1, "copy").keys() == {"0", "2"}
    lines = read_lines(run.folder / "clients" / "1" / METRICS)
    assert [s["model"] for s in lines[0]["scores"]] == ["copy", "global"]
