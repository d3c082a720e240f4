"""Different data, models and objectives in one federation: what is averaged, what stays, and that every engine agrees."""

import json

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import fedmutual
from fedmutual.core import At
from fedmutual.engines.base import participate
from fedmutual.federation.build import build
from fedmutual.stepping import work
from kills import same, trial, whole_run
from objectives import CODE, CONFIG, LABELS, NUMBERS, write
from toy import difference, weights


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path, NUMBERS + LABELS)


def test_averaging_touches_the_shared_part_alone(path):
    experiment = build(fedmutual.load_config(path))
    (phase,) = experiment.algorithm.phases
    clients = {i: experiment.build_client(i) for i in experiment.clients}
    shared = tuple(k for k in clients["north"].nets["meme"].state_dict() if k.startswith("features."))
    server, at = experiment.make_server_state(), At(0, 0, 3)
    assert tuple(server) == shared == experiment.nets.crossing
    replies = {i: participate(client, phase, server, phase.leaves(server), at).message for i, client in clients.items()}
    assert all(tuple(reply) == shared for reply in replies.values())
    after = {i: (weights(c.nets["meme"]), weights(c.nets["personal"])) for i, c in clients.items()}
    assert len({after[i][0]["features.conv1.weight"].sum().item() for i in clients}) == len(clients)
    server = phase.receive(server, replies, at)
    for k in shared:
        torch.testing.assert_close(server[k], torch.stack([replies[i][k] for i in clients]).mean(0))
    for i, client in clients.items():
        phase.begin(client, server, At(0, 1, 3))
        meme = client.nets["meme"].state_dict()
        home = [k for k in meme if k not in shared]
        assert all(torch.equal(meme[k], server[k]) for k in shared), "equal at all clients after the fork"
        assert home == ["adaptor.fc.weight", "adaptor.fc.bias"]
        assert all(torch.equal(meme[k], after[i][0][k]) for k in home), "an adaptor keeps its weights from round to round"
        assert all(torch.equal(v, after[i][1][k]) for k, v in client.nets["personal"].state_dict().items())


def test_an_adaptor_is_trained(path):
    experiment = build(fedmutual.load_config(path))
    client = experiment.build_client("seven")
    before = weights(client.nets["meme"])
    work(experiment.algorithm.phases[0], client, experiment.make_server_state(), At(0, 0, 3))
    assert not torch.equal(before["adaptor.fc.weight"], client.nets["meme"].state_dict()["adaptor.fc.weight"])


def test_a_whole_run_with_no_global_model(path, cli):
    slower = ("--set", "clients.light.optimizer.lr=0.0005")  # with 0.002 R2 swings from round to round
    code, out, err = cli("run", path, "--set", "rounds=16", *slower, "--out", "run")
    assert code == 0, err
    run = fedmutual.Run("run")
    summary = run.summary
    assert summary["global"]["test_accuracy"] is None
    last = summary["personal"]["val_accuracy"]["last"]
    assert last["per_client"].keys() == {"north", "south", "seven"}
    assert last["mean"] > 0.5
    light = summary["personal"]["other_tasks"]["last"]["light"]
    assert light.keys() == {"examples", "loss", "mean_absolute_error", "r2"}
    assert light["r2"] > 0.5
    marks = summary["personal"]["other_tasks"]["last"]["marks"]
    assert marks.keys() == {"examples", "loss", "auroc", "f1", "label_auroc"}
    assert marks["auroc"] > 0.75
    assert len(marks["label_auroc"]) == 3
    assert set(summary["leaves"]["fml"]) == {f"features.conv{n}.{k}" for n in (1, 2) for k in ("weight", "bias")}
    scores = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])["scores"]
    assert {s["model"] for s in scores} == {"personal", "meme"}, "the meme stands in on each client's own rows"
    assert run.personal_model("seven")(torch.zeros(2, 1, 16, 16)).shape == (2, 7)
    meme = run.meme("seven")
    assert meme(torch.zeros(2, 1, 16, 16)).shape == (2, 7)
    assert torch.equal(meme.state_dict()["features.conv1.bias"], run.meme("light").state_dict()["features.conv1.bias"])
    with pytest.raises(fedmutual.UserError, match="no complete global model"):
        run.global_model()
    assert "n/a" in out
    code, out, err = cli("report", "run", "-o", "page.html")
    assert code == 0, err
    for command in ("show", "check"):
        code, out, err = cli("data", command, path)
        assert code == 0, err


def test_stacked_clients_agree_with_clients_one_after_the_other(path, tmp_path):
    """Other engines are compared to the bit below."""
    configs = (fedmutual.load_config(path, **{"engine.name": name, "rounds": 2}) for name in ("inprocess", "stacked"))
    plain, stacked = (fedmutual.run(config, tmp_path / config.engine.name) for config in configs)
    for client in ("north", "south", "seven", "light", "marks"):
        a, b = (run.personal_model(client).state_dict() for run in (plain, stacked))
        assert difference(a, b) < 1e-5


def killable(folder, engine):
    """The experiment, long enough to be killed, as text; its code in the folder."""
    (folder / "own_objectives.py").write_text(CODE)
    records = "[records]\ncheckpoint_every = 2\nevaluate_every = 3\n\n[clients.north]"
    text = CONFIG.replace("rounds = 3", "rounds = 12").replace("[clients.north]", records, 1)
    return text.replace("threads = 1", f'name = "{engine}", workers = 2, threads = 1')


@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    """The run in one process that nobody touched: what other engines' must equal to the bit."""
    folder = tmp_path_factory.mktemp("untouched")
    (folder / "config.toml").write_text(killable(folder, "inprocess"))
    return whole_run(folder)


@pytest.mark.process
@pytest.mark.parametrize("engine", ["inprocess", "processes", "stacked"])
def test_a_kill_costs_nothing_on_any_engine(tmp_path, engine, untouched):
    """A cluster restores clients in test_cluster.py, and what a killed command leaves of Ray is in test_orphans.py."""
    reference = None if engine == "stacked" else untouched
    assert len(trial(tmp_path, kills=1, seed=1, config=killable(tmp_path, engine), uninterrupted=reference).kills) == 1


WHOLE = 'part = "features"\nadaptor = "linear"\n', ""


def test_clients_may_share_a_whole_model_where_their_classes_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    path.write_text(path.read_text().replace(*WHOLE))
    config = fedmutual.load_config(path, **{"data.classes": [str(i) for i in range(10)], "rounds": 2})
    run = fedmutual.run(config, "run")
    assert run.summary["global"]["test_accuracy"]["last"] > 0
    assert run.personal_model("seven")(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    shares, test = build(config).data.clients.values(), build(config).data.test
    assert len(test) == sum(len(s.validation) for s in shares), "each validates on its whole test set"
    x, y = zip(*test.rows(torch.arange(len(test)).split(50)), strict=True)
    assert torch.equal(torch.cat(y), torch.cat([torch.from_numpy(s.validation.labels) for s in shares]))
    assert len(torch.cat(x)) == len(test)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('"features"', '"featurs"', "'featurs' matches nothing in network 'cnn1'; did you mean 'features'?"),
        ('"features"', '"features.conv2"', "key 'model.adaptor': an adaptor beside 'features.conv2' of network 'cnn1'"),
        (*WHOLE, "client 'seven' has 7 classes ('0', '1', '2' and 4 more) and client 'north' 10"),
        ("own_objectives:Wide", "own_objectives:ten", "gives outputs [2, 10] for 2 examples of 7 classes, not [2, 7]"),
        ('"own_objectives:seven"', '"own_objectives:seven", size = [8, 8]', "'features.fc1.weight' of network 'mlp'"),
        (WHOLE[0], 'part = "classifier.fc2"\nadaptor = "rest"\n', "'classifier.fc2"),
        ('part = "features"', 'part = "classifier"', "their networks 10 and 7 outputs"),
        ('data = { name = "own_objectives:seven" }', "", "client 'seven' has no data of its own, and others have"),
        ("rounds = 3", "rounds = 3\npartition = { clients = 4 }", "key 'partition.clients' has no effect"),
        ('name = "fml"', 'name = "centralised"', "pools one data set"),
        ('adaptor = "linear"', 'start = "server"', "model.start = 'server' needs a complete shared model"),
        ('part = "features"\nadaptor = "linear"', 'adaptor = "rest"', "key 'model.adaptor' has no effect without"),
        ('size = [16, 16]', 'size = [16, 16], clases = ["a"]', "unknown key 'data.clases'; did you mean 'data.classes'?"),
        ('"own_objectives:seven"', '"own_objectives:seven", sze = [8, 8]', "did you mean 'clients.seven.data.size'?"),
    ],
)  # fmt: skip
def test_an_unshareable_part_is_an_error_before_anything_is_written(tmp_path, monkeypatch, cli, before, after, sentence):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    text = path.read_text()
    assert before in text
    text = text.replace("cnn1", "mlp") if "size = [8, 8]" in after else text  # whose first layer depends on the shape
    path.write_text(text.replace(before, after))
    code, _, err = cli("run", path, "--set", "rounds=1")
    assert code == 2, err
    assert sentence in err
    assert not (tmp_path / "runs").exists()


def write_pixels(folder, monkeypatch, **keys):
    monkeypatch.chdir(folder)
    images = load_digits().images[:120] / 16
    np.savez("rows.npz", x=images.astype("float32"), y=(images > 0.4).astype("int64"))
    (folder / "pixels.toml").write_text(PIXELS)
    return lambda **more: fedmutual.load_config("pixels.toml", **keys, **more)


PIXELS = """
name = "pixels"
rounds = 2
data = { name = "npz", root = "rows.npz", classes = ["paper", "ink"] }
partition = { clients = 3 }
algorithm = { name = "fml" }
model = { shared = "unet" }
training = { task = "segmentation", local_epochs = 1, batch_size = 16 }
optimizer = { name = "adam", lr = 0.003 }
engine = { threads = 1 }
"""


def test_a_segmentation_on_any_engine(tmp_path, monkeypatch):
    make_config = write_pixels(tmp_path, monkeypatch)
    for engine in ("inprocess", "processes", "stacked"):
        fedmutual.run(make_config(**{"engine.name": engine}), tmp_path / engine)
    assert same(tmp_path / "inprocess", tmp_path / "processes") == []
    a, b = (fedmutual.Run(tmp_path / name).global_model().state_dict() for name in ("inprocess", "stacked"))
    assert difference(a, b) < 1e-4
    run = fedmutual.Run(tmp_path / "inprocess")
    assert "Dice: " in repr(run)
    assert run.personal_model("0")(torch.zeros(2, 1, 8, 8)).shape == (2, 2, 8, 8)
    scores = run.summary["personal"]["other_tasks"]["last"]["0"]
    assert scores.keys() == {"examples", "loss", "dice", "pixel_accuracy", "class_dice"}


def test_a_segmentation_learns(tmp_path, monkeypatch):
    make_config = write_pixels(tmp_path, monkeypatch, **{"optimizer.lr": 0.01, "training.local_epochs": 5})
    run = fedmutual.run(make_config(), tmp_path / "run")
    masks = run.summary["personal"]["other_tasks"]["last"]
    assert min(of["dice"] for of in masks.values()) > 0.7, "a network that answers paper everywhere has 0.4"


def test_a_segmentation_may_share_a_part_of_its_network(tmp_path, monkeypatch):
    settings = {"model.part": "features", "model.adaptor": "rest"}
    run = fedmutual.run(write_pixels(tmp_path, monkeypatch, **settings)(), tmp_path / "run")
    assert run.meme("1")(torch.zeros(2, 1, 8, 8)).shape == (2, 2, 8, 8)
    assert all(name.startswith("features.") for name in run.summary["leaves"]["fml"])
