"""Ids and several inputs in files, with a user's own module: the uses of a model, real sites, and a newcomer."""

import json
from functools import partial

import numpy as np
import pytest
import torch

import fedmutual
from fedmutual import UserError
from fedmutual.data import find_problems
from fedmutual.data.federation import load
from fedmutual.sites.contract import read_contract
from fedmutual.sites.coordinator import build_server_experiment
from fedmutual.sites.site_settings import build_site, read_site_file
from fedmutual.studies.adapt import adapt
from fedmutual.user_code import plugins
from input_kinds import EMBEDDING, draw_fusion, ids
from own_data import config, npz
from wards import contract, site

pytestmark = pytest.mark.run

FUSION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape):
        super().__init__()
        assert shape["image"] == (1, 6, 6)
        self.conv, self.embed, self.head = nn.Conv2d(1, 4, 3), nn.Embedding(9, 4), nn.Linear(11, 2)

    def forward(self, image, table, ids):
        return self.head(torch.cat((self.conv(image).amax((2, 3)), table, self.embed(ids).mean(1)), 1))
"""


def make_config(tmp_path, source, x, y, rounds=2, **tables):
    """Write rows and a user's module; return the configuration that names them."""
    (tmp_path / "own_net.py").write_text(source)
    data = npz(tmp_path / "rows.npz", **x, y=y) | ({"inputs": [*x]} if len(x) > 1 else {})
    training = {"batch_size": 16, "local_epochs": 1}
    return config(rounds=rounds, data=data, model={"shared": "own_net:Net"}, training=training, **tables)


def check_uses(run, y):
    """Predict, score and export; return the predictions and the exported program."""
    path, exported = run.folder.parent / "rows.npz", run.folder.parent / "exported"
    predicted = fedmutual.predict(run.folder, path)
    accuracy = np.mean([p.label == str(label) for p, label in zip(predicted, y, strict=True)])
    assert run.score(path).values["accuracy"] == pytest.approx(accuracy)
    assert not run.export(exported).left_out
    return predicted, torch.export.load(str(exported / "model.pt2")).module()


def test_several_inputs_of_a_file_are_predicted_scored_and_exported(tmp_path, in_tmp_path):
    x, y = draw_fusion(0, n=120)
    predicted, program = check_uses(fedmutual.run(make_config(tmp_path, FUSION, x, y), tmp_path / "run"), y)
    answers = program({k: torch.tensor(v[:9]).to(torch.int64 if k == "ids" else torch.float32) for k, v in x.items()})
    np.testing.assert_allclose(answers.numpy().max(1), [p.ranked[0][1] for p in predicted[:9]], atol=1e-5)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert all(f"- Input {one}" in card for one in ("image: float32, [batch, 1, 6, 6],", "ids: int64, [batch, "))
    settings = tmp_path / "run" / "config.toml"  # of somebody else, who changed it
    settings.write_text(settings.read_text().replace('    "table",\n', ""))
    with pytest.raises(UserError, match=r"has the inputs image \[1, 6, 6\], ids \[\d\], and the model takes image"):
        fedmutual.predict(tmp_path / "run", tmp_path / "rows.npz")


def test_several_inputs_train_on_worker_processes(tmp_path, in_tmp_path):
    runs = [
        fedmutual.run(make_config(tmp_path, FUSION, *draw_fusion(0), rounds=1, engine={"name": name}), tmp_path / name)
        for name in ("inprocess", "processes")
    ]
    torch.testing.assert_close(*(dict(run.global_model().state_dict()) for run in runs))


def test_ids_of_a_file_are_predicted_scored_and_exported(tmp_path, in_tmp_path):
    """With ids in the run's record, in both programs, and in the check of the data."""
    x, y = ids(0, n=120)
    run_config = make_config(tmp_path, EMBEDDING, {"x": x}, y)
    run = fedmutual.run(run_config, tmp_path / "run")
    assert load(run_config).space.dtype == torch.int64
    assert not [sentence for sentence in find_problems(run_config) if "data.mean" in sentence]
    assert json.loads((run.folder / "environment.json").read_text())["clients"]["0"]["scaling"]["dtype"] == "int64"
    _, program = check_uses(run, y)
    about = json.loads((tmp_path / "exported" / "model.json").read_text())["input"]
    assert (about["dtype"], about["shape"]) == ("int64", [6])
    assert "- Input x: int64, [batch, 6]," in (tmp_path / "exported" / "README.md").read_text()
    onnxruntime = pytest.importorskip("onnxruntime")
    (same,) = onnxruntime.InferenceSession(str(tmp_path / "exported" / "model.onnx")).run(None, {"x": x[:9]})
    np.testing.assert_allclose(program(torch.tensor(x[:9])).numpy(), same, atol=1e-5)
    np.savez(tmp_path / "decimals.npz", x=x + 0.5, y=y)
    for use in (partial(fedmutual.predict, run.folder), run.score):
        with pytest.raises(UserError, match="whole number"):
            use(tmp_path / "decimals.npz")


@pytest.fixture
def agree(tmp_path, in_tmp_path):
    """Return a function that builds a site and the server, and returns what their examples are.

    The server has no data: it tries the network on made inputs of the shapes and types that the contract declares.
    """

    def build(source, x, y, declared, **data):
        np.savez(tmp_path / "rows.npz", **x, y=y)
        (tmp_path / "north").mkdir(exist_ok=True)
        for folder in (tmp_path, tmp_path / "north"):
            (folder / "site_net.py").write_text(source)
        common = {"name": "made", "data": {"classes": ["0", "1"], **data}, "model": {"shared": "site_net:Net"}}
        tables = {"data": {"name": "npz", "root": str(tmp_path / "rows.npz")}, "trust": {"modules": ["site_net"]}}
        agreed = read_contract(contract(tmp_path, common, {"north": tables, "south": tables}, input=declared))
        site_settings = read_site_file(site(tmp_path, "north", tables))
        with plugins.use_rule(site_settings.code):
            joined, served = build_site(agreed, site_settings), build_server_experiment(agreed)
            assert joined.build_client("north").nets
            assert served.make_server_state().keys() == joined.nets.shared.state_dict().keys()
        return joined.data.space, served.data.space

    return build


@pytest.mark.sites
def test_the_contract_declares_ids(agree):
    x, y = ids(0, n=60)
    declared = {"x": {"shape": [6], "dtype": "int64"}}
    assert [space.dtype for space in agree(EMBEDDING, {"x": x}, y, declared)] == [torch.int64, torch.int64]
    with pytest.raises(UserError, match=r"type int64.*agreed on float32.*let the lead declare"):
        agree(EMBEDDING, {"x": x}, y, [6])


@pytest.mark.sites
def test_the_contract_declares_several_inputs(agree):
    x, y = draw_fusion(0, n=60)
    declared = {"image": {"shape": [1, 6, 6]}, "table": {"shape": [3]}, "ids": {"shape": [5], "dtype": "int64"}}
    mine, served = agree(FUSION, x, y, declared, inputs=[*x])
    assert mine.shape == served.shape
    declared["table"]["shape"] = [4]
    with pytest.raises(UserError, match=r"table \[3\].*agreed on.*table \[4\]"):
        agree(FUSION, x, y, declared, inputs=[*x])


def test_a_newcomer_adapts_a_model_of_ids(tmp_path, in_tmp_path):
    (x, y), (new_x, new_y) = ids(0, n=120), ids(1, n=120)
    np.savez(tmp_path / "new.npz", x=new_x, y=new_y)
    fedmutual.run(make_config(tmp_path, EMBEDDING, {"x": x}, y, rounds=1), tmp_path / "run")
    (tmp_path / "new.toml").write_text(
        'rounds = 1\ndata = { name = "npz", root = "new.npz" }\ntraining = { batch_size = 16 }\n'
    )
    adapt(tmp_path / "run", tmp_path / "new.toml", tmp_path / "adapted", sizes=(None,), seeds=1)
    assert (tmp_path / "adapted" / "adapt.json").exists()
