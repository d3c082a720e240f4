"""Participants of odd kinds: untrained, badly taught, with a task of their own, and federations that begin with another's
model."""

import shutil
from html import unescape

import numpy as np
import pytest
import torch

import fedmutual
from fedmutual.config import dump_config, load_config
from fedmutual.federation.build import build
from fedmutual.files import read_json
from fedmutual.results.frame import read_run
from log_lines import read_lines
from objectives import NUMBERS, write


def weights(run, client):
    return run.personal_model(client).state_dict()


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
@pytest.mark.parametrize("algorithm", ["fml", "independent"])
def test_a_frozen_network_stays_as_it_began_and_others_learn(small, engine, algorithm):
    small.write_text(small.read_text().replace('name = "fml", alpha = 0.4, beta = 0.6', f'name = "{algorithm}"'))
    config = load_config(small, **{"clients.1.model.frozen": True, "engine.name": engine})
    first = build(config).build_client("1").nets["personal"].state_dict()
    run = fedmutual.run(config, "run")
    assert same(weights(run, "1"), first)
    assert not same(weights(run, "0"), build(config).build_client("0").nets["personal"].state_dict())
    up = [line["up"] for line in read_lines(run.folder / "ledger.jsonl") if line["client"] == "1"]
    assert all(up) == (algorithm == "fml"), "its meme goes on learning, and is sent"


def test_shuffled_labels_are_the_same_ones_elsewhere_and_of_training_only(small):
    plain, bad = (build(load_config(small, **changes)).data for changes in ({}, {"clients.1.training.shuffled": 1.0}))
    before, after = (data.clients["1"].private.labels for data in (plain, bad))
    assert not np.array_equal(before, after)
    assert np.array_equal(np.sort(before), np.sort(after))
    (x, _), (x2, y2) = (next(iter(d.clients["1"].private.rows([torch.arange(40)]))) for d in (plain, bad))
    assert torch.equal(x, x2)
    assert torch.equal(y2, torch.from_numpy(after))
    for client, kind in (("1", "validation"), ("0", "private"), ("2", "private")):
        a, b = (getattr(data.clients[client], kind).labels for data in (plain, bad))
        assert np.array_equal(a, b), (client, kind)
    half = build(load_config(small, **{"clients.1.training.shuffled": 0.5})).data.clients["1"].private.labels
    assert 0 < (half != before).sum() <= len(before) / 2


def test_a_federation_begins_with_another_runs_model(small):
    first = fedmutual.run(load_config(small), "first")
    files = {p: p.read_bytes() for p in first.folder.rglob("*") if p.is_file()}
    config = load_config(small, **{"model.weights": "first", "seed": 5, "engine.name": "inprocess"})
    shared = first.global_model().state_dict()
    assert same(build(config).make_server_state(), shared)
    assert same(build(config).build_client("0").nets["meme"].state_dict(), shared)
    assert not same(build(config).build_client("0").nets["personal"].state_dict(), shared)
    started_config = load_config(small, **{"model.weights": "first", "model.start": "server", "seed": 5})
    assert same(build(started_config).build_client("0").nets["personal"].state_dict(), shared)
    fedmutual.run(
        started_config, "second"
    )  # equal beginnings with unequal alpha and beta: nothing is refused at the boundary
    assert {p: p.read_bytes() for p in first.folder.rglob("*") if p.is_file()} == files
    assert load_config("second/config.toml") == started_config


def test_the_pooled_model_begins_with_another_runs_too(small):
    first = fedmutual.run(load_config(small, rounds=1), "first")
    small.write_text(small.read_text().replace('name = "fml", alpha = 0.4, beta = 0.6', 'name = "centralised"'))
    config = load_config(small, **{"model.weights": "first", "seed": 5})
    shared = first.global_model().state_dict()
    assert same(build(config).build_client("pooled").nets["personal"].state_dict(), shared)
    trained = fedmutual.run(config, "pool").global_model().state_dict()
    assert not same(trained, shared)
    assert same(fedmutual.Run("first").global_model().state_dict(), shared)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.weights=nowhere"], "nowhere: there is no run with a saved round in this folder"),
        (["model.weights=first", "model.shared=cnn1"], "key 'model.weights': first shares another network"),
        (["model.weights=alone"], "alone: its algorithm shares no model"),
        (["model.weights=first", "algorithm.name=independent"], "key 'model.weights' has no effect"),
        (["training.task=regresion"], "key 'training.task': there is no task 'regresion'; did you mean 'regression'?"),
        (["clients.0.training.task=nowhere:Task"], "key 'clients.0.training.task'"),
        (["clients.0.training.shuffled=2"], "key 'clients.0.training.shuffled' must be less than or equal to 1"),
    ],
)
def test_bad_settings_are_one_sentence(small, cli, settings, sentence):
    fedmutual.run(load_config(small, rounds=1), "first")
    with pytest.warns(UserWarning, match="dropped"):
        fedmutual.run(load_config(small, **{"rounds": 1, "algorithm.name": "independent"}), "alone")
    assert sentence in cli.fail("run", small, *(x for s in settings for x in ("--set", s)))
    assert not (small.parent / "runs").exists()


TABLE = """
name = "prices"
rounds = 8
data = { name = "csv", root = "prices.csv", label = "price" }
partition = { clients = 3 }
algorithm = { name = "fml" }
training = { local_epochs = 2, batch_size = 16, task = "regression" }
optimizer = { lr = 0.02 }
engine = { device = "cpu" }
"""


@pytest.fixture
def prices(tmp_path, monkeypatch):
    """A table of numbers to be learned: 2 a - b + 0.5."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0).normal(size=(300, 2)).round(3)
    rows = [f"{a},{b},{2 * a - b + 0.5:.4f}" for a, b in draws]
    (tmp_path / "prices.csv").write_text("\n".join(["a,b,price", *rows]) + "\n")
    path = tmp_path / "prices.toml"
    path.write_text(TABLE)
    return path


def test_numbers_are_learned_from_a_table(prices, cli):
    _, err = cli.run("run", prices, "--out", "run")
    assert "shared mean_absolute_error 0." in err
    summary = fedmutual.Run("run").summary
    assert summary["global"]["test_accuracy"] is None
    assert summary["personal"]["val_accuracy"] is None
    assert min(scores["r2"] for scores in summary["personal"]["other_tasks"]["last"].values()) > 0.8
    assert fedmutual.Run("run").global_model()(torch.zeros(4, 2)).shape == (4, 1)
    cli.run("compare", prices, "--seeds", "1", "--set", "rounds=2", "--out", "all")
    cli.run("data", "check", prices)


def test_a_whole_model_learns_one_number_from_columns_of_any_name(prices):
    """A column's name is its site's own: a network has one output for it, whatever it is called."""
    head, *rows = (prices.parent / "prices.csv").read_text().splitlines()
    for label, mine in (("price", rows[::2]), ("preis", rows[1::2])):
        (prices.parent / f"{label}.csv").write_text("\n".join([head.replace("price", label), *mine]) + "\n")
    sites = "".join(f'\n[clients.{i}]\ndata = {{ root = "{i}.csv", label = "{i}" }}\n' for i in ("price", "preis"))
    common = TABLE.replace(', root = "prices.csv", label = "price"', "").replace("partition = { clients = 3 }\n", "")
    prices.write_text(common + sites)
    run = fedmutual.run(load_config(prices), "run")
    assert run.complete
    (test,) = [s for s in read_lines(run.folder / "metrics.jsonl")[-1]["scores"] if s["client"] is None]
    assert test["examples"] == 60, "the test rows of both"
    assert test["r2"] > 0.9
    assert run.global_model()(torch.zeros(4, 2)).shape == (4, 1)


@pytest.mark.parametrize(
    ("line", "settings", "sentence"),
    [
        ("1,2,much", [], "line 302 of prices.csv: its target 'much' is not a finite number; fix it, or set training.task"),
        ("1,2,3.5", ["training.task=classification"], "labels must be whole numbers or names"),
        (
            "1,2,3.5",
            ['data.classes=["a","b"]'],
            "has 2 names, but targets have one number; name each number once, or remove the key",
        ),
    ],
)
def test_targets_that_are_not_numbers_are_an_error(prices, cli, line, settings, sentence):
    with open("prices.csv", "a") as file:
        file.write(line + "\n")
    assert sentence in cli.fail("run", prices, *(x for s in settings for x in ("--set", s)))


def test_a_task_of_ones_own(tmp_path, in_tmp_path, cli):
    path = write(tmp_path, NUMBERS.replace('"regression"', '"own_objectives:Absolute"'))
    _, err = cli.run("run", path, "--out", "run", "--set", "rounds=2")
    assert fedmutual.Run("run").summary["personal"]["other_tasks"]["last"]["light"].keys() == {"examples", "mae"}
    assert "personal of light mae " in err


def test_a_regression_client_inherits_no_classes(tmp_path, in_tmp_path):
    names = ["zero", *"123456789"]
    common = {"data.classes": names, "data.labels": {"0": "zero"}}
    spaces = build(load_config(write(tmp_path, NUMBERS), **common)).data.spaces
    assert (spaces["light"].classes, spaces["light"].outputs) == (("y",), 1)
    assert spaces["seven"].classes == tuple(names)
    for changes, sentence in (
        ({"clients.light.data.classes": names}, "client 'light': key 'data.classes' has 10 names, .*remove the key"),
        ({"training.task": "regression"}, "key 'data.labels' is for classes, .*remove the key"),
    ):
        with pytest.raises(fedmutual.UserError, match=sentence):
            build(load_config(write(tmp_path, NUMBERS), **(common | changes)))


def test_own_data_are_kept_in_the_run_folder(tmp_path, in_tmp_path):
    config = load_config(write(tmp_path))
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config
    fedmutual.run(config.model_copy(update={"rounds": 1}), "run")
    about = read_json(tmp_path / "run" / "environment.json")["clients"]["seven"]
    assert about["classes"] == list("0123456")
    assert (about["input"], about["outputs"], about["scaling"]["size"]) == ([1, 16, 16], 7, [16, 16])
    partition = read_json(tmp_path / "run" / "partition.json")
    assert partition["classes"] == list("0123456789")
    assert partition["clients"]["seven"]["counts"]["private"][7:] == [0, 0, 0]
    assert partition["clients"]["seven"]["classes"] == list("0123456")
    shutil.rmtree("run")


def test_the_report_shows_scores_other_than_accuracy(tmp_path, in_tmp_path, cli):
    path = write(tmp_path, NUMBERS)
    cli.run("compare", path, "--methods", "fml,independent", "--seeds", "2", "--set", "rounds=2", "--out", "all")
    losses = {
        (method, model): np.mean([
            next(
                s["loss"]
                for s in read_lines(tmp_path / "all" / method / seed / "metrics.jsonl")[-1]["scores"]
                if (s["client"], s["model"], s["data"]) == ("light", model, "validation")
            )
            for seed in ("0", "1")
        ])
        for method, model in (("fml", "personal"), ("fml", "meme"), ("independent", "personal"))
    }  # fmt: skip
    numbers = [f"{loss:.4g}" for loss in losses.values()]
    page = unescape((tmp_path / "all" / "report.html").read_text())
    assert all(f">{number}" in page for number in numbers)
    assert "Clients with another task: scores on their own validation data" in page
    assert page.count("mean_absolute_error") >= 1


@pytest.mark.parametrize("name", ["../../evil", "x/../north", "x/y", "..", "a\\\\b"])
def test_a_client_is_called_what_a_folder_can_be(tmp_path, in_tmp_path, cli, name):
    path = write(tmp_path)
    path.write_text(path.read_text().replace("[clients.seven]", f'[clients."{name}"]'))
    assert "cannot name a client, because the name is also a folder name" in cli.fail(
        "run", path, "--set", "rounds=1", "--out", "here/run"
    )
    assert not (tmp_path / "here").exists()


def share_whole_model(path):
    """The experiment with a whole shared model and all ten classes."""
    text = path.read_text().replace('part = "features"\nadaptor = "linear"\n', "")
    path.write_text(text)
    return {"data.classes": [str(i) for i in range(10)], "rounds": 1}


def test_scores_that_a_client_does_not_share_count_nowhere_else(tmp_path, in_tmp_path):
    path = write(tmp_path)
    config = load_config(path, **share_whole_model(path), **{"clients.seven.share.metrics": "none"})
    run = fedmutual.run(config, "run")
    lines = read_lines(run.folder / "metrics.jsonl")
    (test,) = [s for s in lines[-1]["scores"] if s["client"] is None]
    counted = {i: sum(c["counts"]["validation"]) for i, c in read_json(run.folder / "partition.json")["clients"].items()}
    assert test["examples"] == counted["north"] + counted["south"]
    assert {s["data"] for s in lines[-1]["scores"] if s["client"] is not None} == {"validation"}
    assert set(build(config).build_client("north").data) == {"private", "validation"}


@pytest.mark.parametrize(
    ("common_task", "client_task"), [("classification", "regression"), ("regression", "classification")]
)
def test_a_task_of_other_targets_needs_other_data(small, cli, common_task, client_task):
    small.write_text(small.read_text().replace('kind = "shards", clients = 3, classes_per_client = 4', "clients = 3"))
    settings = (f"training.task={common_task}", f"clients.0.training.task={client_task}")
    assert f"key 'clients.0.training.task': '{client_task}' learns other targets than '{common_task}'" in cli.fail(
        "run", small, *(x for s in settings for x in ("--set", s))
    )


def test_the_shared_model_is_judged_by_the_task_that_all_learn(tmp_path, in_tmp_path):
    path = write(tmp_path)
    text = path.read_text().replace('part = "features"\nadaptor = "linear"\n', "")
    for name in ("north", "south", "seven"):
        text = text.replace(f"own_objectives:{name}", "own_objectives:brightness")
    path.write_text(text)
    tasks = {f"clients.{name}.training.task": "regression" for name in ("north", "south", "seven")}
    run = fedmutual.run(load_config(path, rounds=1, **tasks, **{"optimizer.lr": 0.001}), "run")
    scores = read_lines(run.folder / "metrics.jsonl")[-1]["scores"]
    assert [s["client"] for s in scores if "r2" in s].count(None) == 1
    unlike = tasks | {"clients.seven.training.task": "own_objectives:Absolute"}
    run = fedmutual.run(load_config(path, rounds=1, **unlike, **{"optimizer.lr": 0.001}), "two tasks")
    assert None not in [s["client"] for s in read_lines(run.folder / "metrics.jsonl")[-1]["scores"]]


@pytest.mark.parametrize(
    "changes", [{"records.copies": True, "engine.participation": 0.5, "rounds": 5}, {"model.weights": "first"}], ids=str
)
def test_a_resumed_run_has_the_same_bits(small, changes):
    """With copies of the drawn clients, and without the run whose model the federation began with."""
    fedmutual.run(load_config(small, rounds=1), "first")
    config = load_config(small, **changes)
    uninterrupted = fedmutual.run(config, "whole").folder
    fedmutual.run(config.model_copy(update={"rounds": 2}), "part")
    shutil.rmtree("first")
    part = fedmutual.run(config, "part", resume=True).folder
    assert (uninterrupted / "metrics.jsonl").read_bytes() == (part / "metrics.jsonl").read_bytes()


def test_the_pool_has_the_labels_that_clients_have(small):
    small.write_text(small.read_text().replace('name = "fml", alpha = 0.4, beta = 0.6', 'name = "centralised"'))
    bad = build(load_config(small, **{"clients.1.training.shuffled": 1.0, "clients.2.training.shuffled": 1.0})).data
    pooled = bad.pool_clients().private
    label_by_row = dict(zip(pooled.index.tolist(), pooled.labels.tolist(), strict=True))
    for shares in bad.clients.values():
        assert [label_by_row[i] for i in shares.private.index.tolist()] == shares.private.labels.tolist()


def test_data_check_ignores_classes_of_other_clients(tmp_path, in_tmp_path, cli):
    path = write(tmp_path)
    share_whole_model(path)
    out, _ = cli.run("data", "check", path, "--set", "data.classes=['0','1','2','3','4','5','6','7','8','9']")
    assert "no model learns" not in out
    assert "client 'seven': it has no training examples of 3 of 10 classes" in out


def test_a_missing_score_is_not_an_accuracy(tmp_path, in_tmp_path, cli):
    path = write(tmp_path, NUMBERS.replace('"regression"', '"odd_task:Odd"'))
    (tmp_path / "odd_task.py").write_text(
        "from dataclasses import dataclass\nfrom own_objectives import Absolute\n\n\n"
        "@dataclass(frozen=True)\nclass Odd(Absolute):\n    tells: tuple = ('accuracy', 'mae')\n\n"
        "    def score(self, output, target):\n"
        "        return {'accuracy': None, 'mae': super().score(output, target)['mae']}\n"
    )
    cli.run("run", path, "--set", "rounds=1", "--out", "run")
    assert fedmutual.Run("run").summary["personal"]["other_tasks"]["last"]["light"].keys() == {"accuracy", "mae"}
    cli.run("report", "run", "-o", "page.html")


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 9, 9), (3, 9, 9), (81,)])
def test_image_shapes_that_do_not_fit_the_shared_part_are_an_error(tmp_path, in_tmp_path, cli, shape):
    for client, own_shape in (("a", (1, 8, 8)), ("b", shape)):
        np.savez(f"{client}.npz", x=np.zeros((20, *own_shape), "float32"), y=np.arange(20) % 2)
    both = "".join(f'[clients.{i}]\ndata = {{ name = "npz", root = "{i}.npz" }}\n' for i in "ab")
    model = 'model = { shared = "mlp", part = "features", personal = "mlp" }\nsplit = { test = 0.5 }\n'
    (tmp_path / "f.toml").write_text(f'name = "f"\nrounds = 1\n{model}{both}')
    err = cli.fail("run", "f.toml", "--out", "f")
    assert f"the shapes [1, 8, 8] and {[*shape]}, " in err
    assert "('data.size')" in err
    assert not (tmp_path / "f").exists()


def test_who_takes_part_changes_nothing_else(small):
    """The rows and first weights of a client are equal whoever else takes part; partition.json stays that of all."""
    networks = {"model.personal": ["mlp", "cnn1", "mlp"], "split.public": 0.2, "clients.1.training.shuffled": 1.0}
    whole, part = (build(load_config(small, **networks, **who)) for who in ({}, {"participants": ["2", "1"]}))
    assert part.clients == ("1", "2")
    assert part.data.partition == whole.data.partition
    assert [*part.data.public.owners] == ["1", "2"], "an absent client gives no public rows"
    for i in part.clients:
        for kind in ("private", "validation", "public"):
            a, b = (getattr(e.data.clients[i], kind) for e in (whole, part))
            assert np.array_equal(a.index, b.index)
            assert np.array_equal(a.labels, b.labels)
        for a, b in zip(whole.build_networks(i).values(), part.build_networks(i).values(), strict=True):
            assert same(a.state_dict(), b.state_dict())
    federated = {"data.mean": "federated", "data.std": "federated"}
    means = [build(load_config(small, **federated, **who)).data.statistics for who in ({}, {"participants": ["0"]})]
    assert means[0].record() != means[1].record(), "nor sums over its rows"
    run = fedmutual.run(load_config(small, rounds=1, participants=["0", "2"]), "run")
    assert [*read_run(run.folder).partition.clients] == ["0", "2"]
