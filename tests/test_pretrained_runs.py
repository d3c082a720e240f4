"""Runs whose networks begin with given weights: in every process the same, kept for a resume, and said."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedmutual
from fedmutual import models
from fedmutual.errors import ConfigError, RunError
from fedmutual.federation import build
from fedmutual.rundir.folder import read_initial_weights
from fedmutual.tensor_files import write_tensors

SHAPE = (1, 8, 8)


def state(name: str, seed: int) -> dict[str, torch.Tensor]:
    return models.build(name, SHAPE, 7, torch.Generator().manual_seed(seed)).state_dict()


@pytest.fixture
def weights(small: Path) -> Path:
    """A folder with weights for two networks."""
    folder = small.parent / "weights"
    folder.mkdir()
    save_file(state("cnn1", 1), folder / "cnn1.safetensors")
    torch.save(state("mlp", 2), folder / "mlp.pth")
    return folder


MIXED = ("--set", 'model.personal=["cnn1","mlp","cnn1"]', "--set", "model.pretrained=weights")


def environment(folder: str) -> dict:
    return json.loads(Path(folder, "environment.json").read_text())["models"]


def tensors(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*.safetensors")} | {
        "scores": (root / "metrics.jsonl").read_bytes()
    }


@pytest.mark.process
def test_all_processes_begin_with_the_same_weights(small: Path, cli, weights: Path) -> None:
    assert cli("run", small, *MIXED, "--set", "engine.name=inprocess", "--out", "one")[0] == 0
    assert cli("run", small, *MIXED, "--set", "engine.name=processes", "--set", "engine.workers=2", "--out", "two")[0] == 0
    assert tensors("one") == tensors("two")
    assert cli("run", small, *MIXED[:2], "--out", "random")[0] == 0
    assert tensors("one")["scores"] != tensors("random")["scores"]


def test_clients_begin_with_them_and_the_shared_network_too(small: Path, weights: Path) -> None:
    (weights / "own.pth").write_bytes((weights / "mlp.pth").read_bytes())
    tables = {"1": {"model": {"pretrained": "weights/own.pth"}}}
    config = fedmutual.load_config(
        small, **{"model.personal": ["cnn1", "mlp", "cnn1"], "model.shared": "cnn1"}, clients=tables
    )
    experiment = build.build(config)
    cnn, mlp = state("cnn1", 1), state("mlp", 2)
    assert not torch.equal(experiment.nets.shared.features.conv1.weight, cnn["features.conv1.weight"])
    nets = experiment.build_client("1").nets
    assert torch.equal(nets["personal"].state_dict()["features.fc1.weight"], mlp["features.fc1.weight"])
    experiment = build.build(fedmutual.load_config(small, **{"model.shared": "cnn1", "model.pretrained": "weights"}))
    for net in (experiment.nets.shared, *experiment.build_client("2").nets.values()):
        assert torch.equal(net.features.conv1.weight, cnn["features.conv1.weight"])
    heads = [net.state_dict()["classifier.fc2.weight"] for net in experiment.build_client("2").nets.values()]
    assert not torch.equal(*heads)
    assert "features.conv1.weight" in experiment.build_client("2").boundary_exempt


def test_a_resume_does_not_need_them_again(small: Path, cli, weights: Path) -> None:
    assert cli("run", small, *MIXED, "--set", "rounds=4", "--out", "whole")[0] == 0
    assert cli("run", small, *MIXED, "--set", "rounds=2", "--out", "part")[0] == 0
    for file in weights.iterdir():
        file.unlink()
    weights.rmdir()
    assert "key 'model.pretrained': there is no file or folder weights; name a file of weights" in cli.fail(
        "run", small, *MIXED, "--out", "anew"
    )
    assert not Path("anew").exists()
    before = environment("part")
    assert cli("run", small, *MIXED, "--set", "rounds=4", "--out", "part", "--resume")[0] == 0
    assert tensors("part") == tensors("whole")
    assert environment("part") == before


def test_the_initial_weights_of_each_network_are_stated(small: Path, cli, weights: Path) -> None:
    small.write_text(small.read_text() + '[clients.1.model]\npretrained = "weights/cnn1.safetensors"\n')
    settings = ("--set", "model.shared=cnn1", "--set", "model.pretrained=imagenet", "--set", "rounds=1")
    assert cli("run", small, *settings, "--out", "run")[0] == 0
    random = "random weights: ImageNet's of cnn1 could not be loaded (it is none of torchvision's networks)"
    recorded = environment("run")
    assert recorded["shared"]["weights"] == recorded["personal"]["0"]["weights"] == random
    assert recorded["personal"]["1"]["weights"].startswith("weights of weights/cnn1.safetensors (sha256 ")
    assert random in Path("run/log.txt").read_text()
    assert (Path("run/clients/1/pretrained.safetensors")).is_file()
    assert cli("report", "run", "-o", "report.html")[0] == 0
    page = Path("report.html").read_text()
    assert random.replace("'", "&#39;") in page
    assert "weights of weights/cnn1.safetensors" in page


@pytest.mark.parametrize("key", ["client", "network", "weights"])
@pytest.mark.parametrize("value", [None, ["mlp"]], ids=["missing", "list"])
def test_a_file_of_weights_with_a_damaged_header_is_named(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "config.toml").touch()
    header = {"format": "1", "client": "", "network": "mlp", "weights": "weights of mlp.pth", key: value}
    path = tmp_path / "pretrained" / "mlp.safetensors"
    write_tensors(path, {"w": torch.zeros(2)}, {k: v for k, v in header.items() if v is not None})
    with pytest.raises(RunError, match=rf"mlp\.safetensors: .*{key}"):
        read_initial_weights(tmp_path)


def test_a_run_that_began_at_random_stays_so_when_weights_can_be_had_later(small: Path, cli, monkeypatch) -> None:
    settings = ("--set", "model.shared=cnn1", "--set", "model.pretrained=imagenet", "--out", "run")
    assert cli("run", small, *settings, "--set", "rounds=1")[0] == 0
    before = environment("run")
    monkeypatch.setattr(models, "find_initial_weights", lambda *_: pytest.fail("the weights were looked for again"))
    assert cli("run", small, *settings, "--set", "rounds=2", "--resume")[0] == 0
    assert environment("run") == before


def test_networks_that_began_with_random_weights_say_so(small: Path, cli) -> None:
    assert cli("run", small, "--set", "rounds=1", "--set", "algorithm.name=fedavg", "--out", "run")[0] == 0
    assert environment("run")["shared"]["weights"] == "random weights"
    assert not Path("run/pretrained").exists()


@pytest.mark.parametrize(
    ("settings", "clients", "why"),
    [
        ({"model.pretrained": "weights", "model.weights": "old"}, {}, "'model.pretrained' and 'model.weights' both set"),
        (
            {"model.start": "server"},
            {"1": {"model": {"pretrained": "weights"}}},
            "key 'clients.1.model.pretrained' has no effect with model.start = 'server'; remove it",
        ),
        ({"model.pretrained": ""}, {}, "key 'model.pretrained' "),
    ],
)
def test_settings_that_do_not_go_together(small: Path, settings, clients, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace(".", r"\.")):
        fedmutual.load_config(small, **settings, clients=clients)


def test_a_file_of_a_clients_own_that_is_not_there(small: Path) -> None:
    config = fedmutual.load_config(small, clients={"1": {"model": {"pretrained": "~/none.pth"}}})
    with pytest.raises(ConfigError) as problem:
        build.build(config)
    assert str(problem.value).startswith(
        f"key 'clients.1.model.pretrained': there is no file or folder {Path('~/none.pth').expanduser()}; "
    )
