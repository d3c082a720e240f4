"""A run folder from somebody else: what it names as module:name runs here only where the user trusts it."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedmutual
from fedmutual import models
from fedmutual.config import read_tables
from fedmutual.core import At
from fedmutual.errors import ConfigError
from fedmutual.user_code import plugins, recorded_code
from fedmutual.user_code.recorded_code import set_trust

pytestmark = pytest.mark.run

NET = """
from pathlib import Path

from torch import nn

Path({mark!r}).touch()


def Net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
NEWCOMER = """
name = "new"
rounds = 1
data = { name = "digits" }
split = { test = 0.5 }
training = { local_epochs = 1, batch_size = 16 }
engine = { device = "cpu" }
"""


@pytest.fixture
def user_folder(small, monkeypatch):
    """The user's folder: my_net.py leaves a mark whenever it is imported, and three.png is an image to predict."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_net(small.parent)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("three.png")
    (small.parent / "new.toml").write_text(NEWCOMER)
    yield small.parent
    forget()


def write_net(folder: Path, more: str = "") -> None:
    (folder / "my_net.py").write_text(NET.format(mark=str(folder / "mark")) + more)


def forget() -> None:
    """As in a new process."""
    sys.modules.pop("my_net", None)


def was_imported(folder: Path) -> bool:
    """Whether the module was imported since the last call."""
    is_imported = (folder / "mark").exists()
    (folder / "mark").unlink(missing_ok=True)
    forget()
    return is_imported


def run_own(cli, *more) -> None:
    """Train with the user's own network for all clients, and forget the module."""
    cli.run("run", "small.toml", "--set", "model.personal=my_net:Net", "--set", "rounds=1", "--out", "r", *more)
    assert was_imported(Path.cwd())


def rename(folder: Path, **names: str) -> None:
    """Make a run folder name other code, as whoever made it can."""
    config = tomllib.loads((folder / "config.toml").read_text())
    environment = json.loads((folder / "environment.json").read_text())
    for key, name in names.items():
        if key == "environment":
            for network in environment["models"]["personal"].values():
                network["name"] = name
        else:
            table, _, inner = key.partition("_")
            config[table][inner] = [name] if inner == "personal" else name
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    (folder / "environment.json").write_text(json.dumps(environment))


def refusal(answer: tuple[int, str, str]) -> str:
    """The one sentence by which a command refuses."""
    code, _, err = answer
    assert code == 2, err
    (line,) = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert "--trust-code" in line
    return line


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (("predict", "r", "three.png", "--client", "0"), {"model_personal": "my_net:Net", "environment": "my_net:Net"}),
        (("predict", "r", "three.png", "--client", "0"), {"environment": "my_net:Net"}),
        (("predict", "r", "three.png"), {"model_shared": "my_net:Net"}),
        (("export", "r", "--to", "model"), {"model_shared": "my_net:Net"}),
        (("adapt", "r", "--data", "new.toml", "--examples", "20", "--seeds", "1"), {"model_shared": "my_net:Net"}),
        (("run", "r/config.toml", "--out", "r", "--resume"), {"model_shared": "my_net:Net"}),
        (("run", "r/config.toml", "--out", "r", "--resume"), {"algorithm_name": "my_net:Net"}),
        (("run", "r/config.toml", "--out", "again"), {"training_task": "my_net:Net"}),
        (("compare", "r/config.toml", "--methods", "fml", "--out", "again"), {"data_name": "my_net:Net"}),
        (("sweep", "r/config.toml", "--set", "rounds=1,2", "--out", "again"), {"model_shared": "my_net:Net"}),
        (("audit", "r"), {"model_shared": "my_net:Net"}),
        (("audit", "r"), {"algorithm_name": "my_net:Net"}),
        (("data", "check", "r/config.toml"), {"data_name": "my_net:Net"}),
    ],
)
def test_code_that_a_run_folder_names_is_not_imported(user_folder, cli, command, names):
    """The module lies where the command runs, and the run never recorded it."""
    cli.run("run", "small.toml", "--set", "rounds=1", "--out", "r")
    rename(user_folder / "r", **names)
    message = refusal(cli(*command))
    assert not was_imported(user_folder)
    assert "'my_net'" in message
    assert "was not recorded by this run" in message


def test_a_run_that_is_gone_on_with_takes_no_name_from_its_folder(user_folder, cli):
    """The user's own file is another configuration, which is found out without importing anything."""
    cli.run("run", "small.toml", "--set", "rounds=1", "--out", "r")
    rename(user_folder / "r", algorithm_name="my_net:Net")
    assert "was started with another 'algorithm.name'" in cli.fail(
        "run", "small.toml", "--set", "rounds=1", "--out", "r", "--resume"
    )
    assert not was_imported(user_folder)


def test_a_run_is_read_in_python_without_its_code(user_folder, cli):
    """Whose models need that code are refused, and the user may trust it."""
    run_own(cli)
    rename(user_folder / "r", algorithm_name="my_net:Net")
    (user_folder / "my_net.py").write_text((user_folder / "my_net.py").read_text() + "# changed\n")
    run = fedmutual.Run("r")
    assert run.summary["rounds"] == run.config.rounds == 1
    assert not was_imported(user_folder)
    with pytest.raises(ConfigError, match="has changed since this run recorded it"):
        run.personal_model("0")
    assert not was_imported(user_folder)
    assert fedmutual.Run("r", trust_code=True).personal_model("0")(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert was_imported(user_folder)


def test_the_users_own_module_is_taken_while_it_is_as_recorded(user_folder, cli, tmp_path_factory, monkeypatch):
    """Only out of the folder where the user runs the command, and not once it has changed."""
    run_own(cli)
    ask = ("predict", user_folder / "r", user_folder / "three.png", "--client", "0")
    cli.run(*ask)
    assert was_imported(user_folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(user_folder)])
    assert f"is not in the folder {elsewhere} where you run this" in refusal(cli(*ask))
    monkeypatch.chdir(user_folder)
    write_net(user_folder, "# changed\n")
    assert "has changed since this run recorded it" in refusal(cli(*ask))
    assert not was_imported(user_folder)
    cli.run(*ask, "--trust-code")
    assert was_imported(user_folder)


def test_a_module_inside_the_run_folder_is_the_run_folders(user_folder, cli, monkeypatch):
    """Whoever made the folder chose its digest, too."""
    run_own(cli)
    shutil.move("my_net.py", "r/my_net.py")
    monkeypatch.chdir(user_folder / "r")
    assert "which is part of the run folder itself" in refusal(cli("predict", ".", "../three.png", "--client", "0"))
    assert not was_imported(user_folder)


@pytest.mark.parametrize(
    "name", ["json:loads", "os:system", "torch.hub:load", "no_such_module:Net", "..my_net:Net", "r.my_net:Net"]
)
def test_installed_code_is_not_taken_by_its_digest(user_folder, cli, name):
    """Everybody can compute the digests of Python and of published packages."""
    cli.run("run", "small.toml", "--set", "rounds=1", "--out", "r")
    shutil.copy("my_net.py", "r/my_net.py")
    rename(user_folder / "r", model_shared=name)
    environment = json.loads(Path("r/environment.json").read_text())
    digests = {"json": plugins.digest(plugins.find_spec_on_path("json"))}
    Path("r/environment.json").write_text(json.dumps(environment | {"modules": digests}))
    assert "is not in the folder" in refusal(cli("predict", "r", "three.png"))


def test_a_name_of_torchvision_is_a_network_or_nothing():
    """Otherwise any function of torchvision could be called."""
    with pytest.raises(ConfigError, match="there is no network 'torchvision:set_image_backend'"):
        models.build("torchvision:set_image_backend", (3, 32, 32), 10, At(0, -1, 1).rng("any"))


@pytest.mark.parametrize(
    "command",
    [
        ("run", "small.toml", "--set", "rounds=1"),
        ("compare", "small.toml", "--methods", "fml", "--seeds", "1", "--set", "rounds=1"),
        ("compare", "small.toml", "--methods", "fml", "--seeds", "2", "--set", "engine.name=stacked"),
        ("sweep", "small.toml", "--set", "rounds=1", "--set", "optimizer.lr=0.1,0.2"),
    ],
)
def test_a_run_goes_on_with_the_code_that_it_was_begun_with(user_folder, cli, command):
    command = (*command, "--set", "model.personal=my_net:Net", "--out", "o")
    cli.run(*command)
    cli.run(*command, "--resume")
    write_net(user_folder, "# changed\n")
    assert was_imported(user_folder)
    message = refusal(cli(*command, "--resume"))
    assert "key 'model.personal': the code of the module 'my_net' has changed since this run recorded it" in message
    cli.run(*command, "--resume", "--trust-code")


def test_a_run_without_recorded_code_is_gone_on_with_by_trust_alone(user_folder, cli):
    """As an older version wrote it."""
    run_own(cli)
    environment = json.loads(Path("r/environment.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", environment.pop("modules")["my_net"])
    Path("r/environment.json").write_text(json.dumps(environment))
    more = ("--set", "model.personal=my_net:Net", "--set", "rounds=2", "--out", "r", "--resume")
    assert "was not recorded by this run" in refusal(cli("run", "small.toml", *more))
    cli.run("run", "small.toml", *more, "--trust-code")
    assert "my_net" in json.loads(Path("r/environment.json").read_text())["modules"]


def test_a_report_imports_nothing(user_folder, cli):
    run_own(cli)
    rename(user_folder / "r", algorithm_name="my_net:Net", data_name="my_net:Net", model_shared="my_net:Net")
    cli.run("report", "r", "-o", "page.html")
    assert Path("page.html").is_file()
    assert not was_imported(user_folder)


def test_the_digest_is_of_all_files_of_a_package(user_folder, cli):
    package = user_folder / "my_nets"
    package.mkdir()
    (package / "__init__.py").write_text("from my_nets.inner import Net\n")
    (package / "inner.py").write_text((user_folder / "my_net.py").read_text())
    digest = recorded_code.compute_digests({"model": {"shared": "my_nets:Net"}})
    assert digest == recorded_code.compute_digests({"model": {"personal": ["mlp", "my_nets.inner:Net"]}})
    (package / "inner.py").write_text("# changed\n")
    assert digest.keys() == {"my_nets"}
    assert digest != recorded_code.compute_digests({"model": {"shared": "my_nets:Net"}})


def test_what_names_code_in_a_configuration():
    tables = {
        "algorithm": {"name": "a.b:A"},
        "data": {"name": "digits", "root": "c:/data"},
        "training": {"task": "t:T"},
        "model": {"shared": "torchvision:resnet18", "personal": ["mlp", "n:Net"], "adaptor": "h:head"},
        "clients": {"1": {"data": {"name": "d:load"}, "model": {"personal": "o:Net"}, "training": {"task": "u:T"}}},
    }
    assert recorded_code.list_named_modules(tables) == {
        "a.b": "algorithm.name",
        "t": "training.task",
        "n": "model.personal",
        "h": "model.adaptor",
        "d": "clients.1.data.name",
        "o": "clients.1.model.personal",
        "u": "clients.1.training.task",
    }


@pytest.mark.process
def test_a_run_folder_names_no_cluster_to_join(tmp_path):
    """The owner of a Ray cluster can run code in every process that joins the cluster."""
    (tmp_path / "config.toml").write_text('[engine]\nname = "cluster"\naddress = "192.0.2.1:6379"\n')
    (tmp_path / "environment.json").write_text('{"format": 1}')
    with pytest.raises(ConfigError, match=r"key 'engine\.address' names the Ray cluster '192\.0\.2\.1:6379'.*--trust-code"):
        read_tables(tmp_path / "config.toml")
    with set_trust(True):
        assert read_tables(tmp_path / "config.toml")["engine"]["address"] == "192.0.2.1:6379"


def declare(**changes):
    """Return a function that declares other sizes for each client in the environment.json of a folder."""

    def change(folder: Path) -> None:
        environment = json.loads((folder / "environment.json").read_text())
        for participant in environment["clients"].values():
            participant.update(changes)
        (folder / "environment.json").write_text(json.dumps(environment))

    return change


def read_scaling(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "environment.json").read_text())["clients"]["0"]["scaling"]


def save_others(change_tensors):
    """Return a function that writes other tensors into the weight files of a folder."""

    def change(folder: Path) -> None:
        for path in folder.glob("*/**/round-*.safetensors"):
            with safe_open(path, "pt") as file:
                about = file.metadata()
            save_file(change_tensors(load_file(path)), path, metadata=about)

    return change


OTHER_SIZES = {
    "an input of 10^10 values": (declare(input=[1, 100_000, 100_000]), "has more than 134,217,728 values"),
    "a layer of 5 * 10^9 weights": (declare(input=[1, 5000, 5000]), "and network 'mlp' has float32 [200, 25000000]"),
    "no values": (declare(input=[1, -8, 8]), "should be greater than 0"),
    "outputs": (declare(outputs=10**9), "10 classes have 1,000,000,000 outputs"),
    "outputs of a small layer": (declare(outputs=60_000), "and network 'mlp' has float32 [60000, 200]"),
    "a size of 60000 x 60000": (
        lambda folder: declare(scaling=read_scaling(folder) | {"size": [60_000, 60_000]})(folder),
        "are resized to [60000, 60000]",
    ),
    "a network": (lambda folder: rename(folder, environment="cnn2", model_shared="cnn2"), "and network 'cnn2' has"),
    "shapes": (save_others(lambda tensors: {k: torch.zeros(7, 7) for k in tensors}), "is float32 [7, 7], and network 'mlp'"),
    "types": (save_others(lambda tensors: {k: v.double() for k, v in tensors.items()}), "is float64 [200, 64]"),
    "another tensor": (save_others(lambda tensors: tensors | {"personal.x": torch.zeros(3)}), "'x' is float32 [3]"),
    "no tensors": (save_others(lambda _: {"personal.x": torch.zeros(3)}), "is none, and network 'mlp' has"),
}


@pytest.mark.parametrize(("change", "words"), OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_a_folder_with_other_sizes_than_its_weights_is_refused_before_memory_is_allocated(user_folder, cli, change, words):
    cli.run("run", "small.toml", "--set", "rounds=1", "--set", "model.personal=mlp", "--out", "r")
    change(user_folder / "r")
    for command in (("predict", "r", "three.png", "--client", "0"), ("export", "r", "--client", "0", "--to", "m.pt2")):
        err = cli.fail(*command)
        (line,) = err.splitlines()
        assert words in line


def test_networks_that_cannot_be_made_without_memory_are_compared_too(user_folder, cli):
    """torchvision's regnets compute their widths, so they cannot be made on the meta device."""
    cli.run("run", "small.toml", "--set", "rounds=1", "--out", "r")
    rename(user_folder / "r", environment="torchvision:regnet_x_400mf")
    declare(input=[3, 8, 8])(user_folder / "r")
    assert "and network 'torchvision:regnet_x_400mf' has" in cli.fail("predict", "r", "three.png", "--client", "0")
