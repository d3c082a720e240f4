"""Runs logged to MLflow and to Weights & Biases: numbers, settings, artifacts, resume, and failures."""

import shutil

import numpy as np
import pytest

import fedmutual

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """The file of a database of MLflow without runs. Its tables take seconds to make, and each test has a copy of them."""
    package = pytest.importorskip("mlflow", reason="the extra is not installed")
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    package.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow(empty_database, tmp_path, monkeypatch):
    """MLflow's client, with a database of its own."""
    import mlflow as package

    shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    return package.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")


def list_runs(client):
    return client.search_runs([client.get_experiment_by_name("fedmutual").experiment_id])


def test_mlflow_has_the_numbers_settings_and_files_of_the_run_without_the_clients_folders(small, cli, mlflow):
    cli.run("run", small, "--set", "records.trackers=['mlflow']", "--out", "r")
    (run,) = list_runs(mlflow)
    summary = fedmutual.Run("r").summary
    assert run.data.metrics["accuracy/global/test"] == pytest.approx(summary["global"]["test_accuracy"]["last"])
    assert run.data.params["algorithm.name"] == "fml"
    assert run.info.status == "FINISHED"
    names = {file.path for file in mlflow.list_artifacts(run.info.run_id, "run")}
    assert {"run/summary.json", "run/config.toml", "run/ledger.jsonl"} <= names
    assert "run/clients" not in names


def test_a_resumed_run_goes_on_with_its_run_of_mlflow(small, cli, mlflow):
    cli("run", small, "--set", "records.trackers=['mlflow']", "--set", "rounds=1", "--out", "r")
    cli("run", small, "--set", "records.trackers=['mlflow']", "--set", "rounds=2", "--out", "r", "--resume")
    (run,) = list_runs(mlflow)
    history = mlflow.get_metric_history(run.info.run_id, "accuracy/global/test")
    assert sorted({metric.step for metric in history}) == [1, 2]


def test_a_link_in_the_folder_is_not_followed(small, cli, mlflow, tmp_path):
    (tmp_path / "secret").write_text("a key")
    cli("run", small, "--set", "records.trackers=['mlflow']", "--set", "rounds=1", "--out", "r")
    (tmp_path / "r" / "link").symlink_to(tmp_path / "secret")
    cli("run", small, "--set", "records.trackers=['mlflow']", "--set", "rounds=2", "--out", "r", "--resume")
    (run,) = list_runs(mlflow)
    assert "run/link" not in {file.path for file in mlflow.list_artifacts(run.info.run_id, "run")}


def test_scores_that_clients_keep_are_not_sent(small, cli, mlflow):
    cli("run", small, "--set", "records.trackers=['mlflow']", "--set", "share.metrics=none", "--out", "r")
    (run,) = list_runs(mlflow)
    assert not [name for name in run.data.metrics if "personal" in name or name.startswith("train/")]


def test_clients_keep_separate_metrics_of_mlflow_and_names_that_mlflow_accepts(mlflow):
    names = ["北京", "上海", "Zürich", "Zörich", "ward 1", "ward_1", "ward+1", "ward(1"]
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    sites = {name: fedmutual.Site(train=(x[k:], np.arange(40)[k:] % 2), model="mlp") for k, name in enumerate(names)}
    settings = {"records.trackers": ["mlflow"]}
    fedmutual.federate(sites, "independent", rounds=1, device="cpu", progress=False, settings=settings, out="r")
    (run,) = list_runs(mlflow)
    stem = "loss/personal/validation/"
    found = {key.removeprefix(stem): value for key, value in run.data.metrics.items() if key.startswith(stem)}
    losses = fedmutual.Run("r").history().query("metric == 'loss' and data == 'validation'").set_index("client")["value"]
    assert sorted(found.values()) == pytest.approx(sorted(losses))
    assert {name: found[name] for name in names[:6]} == pytest.approx({name: losses[name] for name in names[:6]})


def test_an_unreachable_tracker_is_refused_before_the_run(small, cli, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    err = cli.fail("run", small, "--set", "records.trackers=['mlflow']", "--out", "r")
    assert err.count("\n") == 1
    assert "records.trackers" in err


def test_a_tracker_that_fails_later_does_not_stop_the_run(small, cli, mlflow, monkeypatch):
    monkeypatch.setattr("fedmutual.rundir.trackers.MLflowRun.log", lambda *_: 1 / 0)
    _, err = cli.run("run", small, "--set", "records.trackers=['mlflow']", "--out", "r")
    assert "mlflow failed" in err
    assert fedmutual.Run("r").finished


def test_wandb_has_the_numbers_and_settings_of_the_run_offline(small, cli, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    cli.run("run", small, "--set", "records.trackers=['wandb']", "--out", "r")
    wandb.teardown()  # waits for wandb's own process, as the end of a command does: until then the file may be incomplete
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()  # records of a log, whose texts are not compressed
    accuracy = fedmutual.Run("r").summary["global"]["test_accuracy"]["last"]
    assert all(text in content for text in (b"accuracy/global/test", repr(accuracy).encode(), b"algorithm.alpha"))
    assert b"summary.json" in content
    assert b"clients/0" not in content


def test_a_missing_package_is_named_with_its_extra(small, cli, monkeypatch):
    monkeypatch.setattr("fedmutual.rundir.trackers.find_spec", lambda name: None)
    assert "fedmutual[wandb]" in cli.fail("run", small, "--set", "records.trackers=['wandb']")
