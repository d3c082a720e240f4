"""What a site records for itself: the weights of its best round, and scores for trackers."""

import pytest

import fedmutual
from fedmutual.events import Score
from wards import COMMON, MLPS, TELLING, Federation, contract, refused, run_together, same, site

pytestmark = pytest.mark.sites

PRIVATE = {"share": {"metrics": "none"}}


def find_best_round(run, model):
    """Return the first round with the highest accuracy of a model on the site's own validation rows."""
    scores = run.history().query(f"metric == 'accuracy' and data == 'validation' and model == '{model}'").groupby("round")
    return int(scores["value"].mean().idxmax())


def test_a_site_keeps_its_best_round_as_one_process_does(tmp_path):
    common = COMMON | TELLING | {"rounds": 5, "optimizer": {"lr": 0.2}}  # a rate with which the last round is not the best

    def start_again(event):
        if type(event).__name__ == "RoundDone" and event.round in (2, 4):
            federation["north"].close()
            federation.restart("north")

    federation = Federation(tmp_path, common, MLPS, site_tables={"records": {"keep_best": True}})
    federation.run(start_again)
    one = run_together(tmp_path / "one", common | {"records": {"keep_best": True}}, MLPS)
    for name in MLPS:
        run = fedmutual.Run(federation[name].folder)
        assert run.best_round(name) == one.best_round(name) == find_best_round(run, "personal")
        assert same(run.personal_model(name, best=True).state_dict(), one.personal_model(name, best=True).state_dict())
        assert run.best_round() == find_best_round(run, "global")
        assert list(run.global_model(best=True).state_dict()) == list(run.global_model().state_dict())
    assert {fedmutual.Run(federation[name].folder).best_round(name) for name in MLPS} != {5}


def test_a_repeated_round_is_judged_by_its_last_try(tmp_path):
    federation = Federation(tmp_path, COMMON, MLPS, site_tables={"records": {"keep_best": True}})
    half = federation.run()["north"]
    client, evaluations = half._restore_client((3, 0)), tuple(half.experiment.list_evaluations("north"))
    half._keep_best(client, evaluations, (), {}, 0)  # as if nothing was scored before: removes the files of all rounds
    for round, accuracy in ((0, 0.5), (1, 0.9), (1, 0.3), (2, 0.4)):  # the server went back in round 2, from 1
        scores = [Score(model, "north", "validation", {"accuracy": accuracy}) for model in ("personal", "global")]
        half._keep_best(client, evaluations, scores, federation.model, round)
    run = fedmutual.Run(half.folder)
    assert (run.best_round("north"), run.best_round()) == (1, 1)


@pytest.mark.parametrize("key", ["tensorboard", "trackers"])
def test_a_tracker_of_a_site_has_the_scores_that_the_site_keeps(key, tmp_path, monkeypatch):
    logged = {}

    class Tracker:
        def __init__(self, folder, run, title, settings):
            self.log = lambda round, scalars: logged.setdefault(title, []).append((round, dict(scalars)))
            self.end = lambda *about: logged.setdefault(title, []).append(("end", *about))

    names = {"tensorboard": "tensorboard", "trackers": "mlflow"}
    monkeypatch.setitem(fedmutual.rundir.trackers._TRACKERS, names[key], Tracker)
    monkeypatch.setattr("fedmutual.rundir.trackers.find_spec", lambda name: True)
    records = {"records": {key: True if key == "tensorboard" else ["mlflow"]}}
    federation = Federation(tmp_path, COMMON | PRIVATE | records, MLPS, site_tables=records).run()
    federation["north"].close()
    north, server = logged["wards, fml, seed 0, site north"], logged["wards, fml, seed 0, server"]
    assert [line[0] for line in north] == [1, 2, 3, "end"]
    assert "accuracy/personal/validation/north" in north[0][1]
    assert north[-1][1:] == (federation["north"].folder, (), True)  # no file: the folder holds the model and the journal
    assert [line[0] for line in server] == [1, 2, 3, "end"]
    assert not [name for _, scalars in server[:3] for name in scalars]  # no site shares a score
    assert {file.name for file in server[-1][2]} == {
        "config.toml", "environment.json", "metrics.jsonl", "ledger.jsonl", "summary.json"
    }  # fmt: skip
    assert not [
        site for site in ("south", "west") if any("end" in line for line in logged[f"wards, fml, seed 0, site {site}"])
    ]


def test_a_site_takes_no_tracker_of_the_contract(tmp_path):
    federation = Federation(tmp_path, COMMON | {"records": {"tensorboard": True}}, MLPS)
    assert not federation["north"].experiment.config.records.tensorboard


def test_a_site_whose_tracker_cannot_be_reached_takes_part(tmp_path, monkeypatch):
    def fail(*_):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(fedmutual.rundir.trackers._TRACKERS, "mlflow", fail)
    monkeypatch.setattr("fedmutual.rundir.trackers.find_spec", lambda name: True)
    federation, said = Federation(tmp_path, COMMON, MLPS), []
    federation.sites["north"] |= {"records": {"trackers": ["mlflow"]}}
    federation.transport.halves["north"].close()
    federation.transport.halves["north"] = federation.start("north", said.append)
    federation.run()
    assert any("records.trackers" in line and "no route to host" in line for line in said)
    assert federation.summary["rounds"] == 3


def test_under_differential_privacy_no_round_is_chosen_by_scores(tmp_path):
    noised = COMMON | {"algorithm": {"name": "fml", "beta": 1.0}, "privacy": {"nets": "meme", "sigma": 1.0}}
    contract(tmp_path, noised, MLPS)
    site(tmp_path, "north", MLPS["north"], records={"keep_best": True}, privacy={"epsilon": 5.0})
    refused(tmp_path, "records.keep_best", "use the last round's model")
