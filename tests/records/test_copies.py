"""`records.copies`: a client's copy of the shared model, scored as it was trained, before it is averaged."""

import pytest

import fedmutual
from fedmutual.rundir.file_names import METRICS
from log_lines import read_lines


def read_accuracies(run, round, model):
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
    assert read_accuracies(fedavg, 1, "copy") == pytest.approx(read_accuracies(independent, 1, "personal"))
    assert read_accuracies(fedavg, 1, "copy") != read_accuracies(fedavg, 1, "global")
    assert read_accuracies(fedavg, 2, "copy") != read_accuracies(independent, 2, "personal")


def test_recording_copies_changes_no_other_result(small):
    changed = {"rounds": 2, "algorithm.name": "fedavg"}
    plain = fedmutual.run(fedmutual.load_config(small, **changed), "plain")
    with_copies = fedmutual.run(fedmutual.load_config(small, **changed, **{"records.copies": True}), "more")
    assert read_accuracies(plain, 2, "copy") == {}
    assert read_accuracies(plain, 2, "global") == read_accuracies(with_copies, 2, "global")
    assert plain.summary["personal"] == with_copies.summary["personal"]


def test_a_client_that_shares_no_scores_shares_no_scores_of_its_copy(small):
    config = fedmutual.load_config(
        small, **{"rounds": 1, "algorithm.name": "fedavg", "records.copies": True, "clients.1.share": {"metrics": "none"}}
    )
    run = fedmutual.run(config, "quiet")
    assert read_accuracies(run, 1, "copy").keys() == {"0", "2"}
    lines = read_lines(run.folder / "clients" / "1" / METRICS)
    assert [s["model"] for s in lines[0]["scores"]] == ["copy", "global"]
