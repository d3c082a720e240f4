"""What a notebook trained is exported and scored there, and by another process that gives the networks."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedmutual
from fedmutual import Site

pytestmark = pytest.mark.run

RNG = np.random.default_rng(0)
TABLE = pd.DataFrame(RNG.normal(size=(90, 3)).astype(np.float32), columns=["pulse", "age", "dose"])
TABLE["ill"] = np.where(TABLE["pulse"] > 0, "yes", "no")


def make(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedmutual.Run:
    sites = {
        name: Site(train=TABLE.iloc[k::3], label="ill", model=make) for k, name in enumerate(("north", "south", "west"))
    }
    settings = {"algorithm.alpha": 0.7, "optimizer.lr": 0.2}
    sites["south"] = Site(train=TABLE.iloc[1::3], label="ill", model="mlp", settings=settings)
    folder = tmp_path_factory.mktemp("runs") / "r"
    with pytest.warns(fedmutual.RemarkWarning):
        return fedmutual.federate(sites, "fml", make, rounds=1, lr=0.05, settings={"algorithm.alpha": 0.5}, out=folder)


def test_a_run_of_objects_is_scored_on_objects_and_says_which_rows_it_was_trained_on(run: fedmutual.Run) -> None:
    shuffled = TABLE[["ill", "dose", "age", "pulse"]].iloc[:30]
    with pytest.warns(fedmutual.RemarkWarning, match="are in the training data of client 'north'"):
        score = run.score(shuffled, client="north", label="ill")
    right = (run.predict(shuffled, client="north").idxmax(axis=1).to_numpy() == shuffled["ill"].to_numpy()).mean()
    assert score.values["accuracy"] == pytest.approx(right)
    assert 0 < (score.training_rows or 0) <= 10  # a third of these rows are the client's, and some of them are held out
    new = RNG.normal(size=(20, 3)).astype(np.float32), np.repeat(["no", "yes"], 10)
    assert run.score(new).training_rows == 0


@pytest.mark.parametrize(("label", "sentence"), [(None, "are a DataFrame; name"), ("sick", "have no column 'sick'; name")])
def test_a_table_to_score_without_its_labels(run: fedmutual.Run, label: str | None, sentence: str) -> None:
    with pytest.raises(fedmutual.UserError, match=sentence):
        run.score(TABLE.rename(columns={"ill": "diagnosis"}), label=label)


def test_another_process_exports_with_the_functions_that_make_the_networks(run: fedmutual.Run, tmp_path: Path) -> None:
    other = fedmutual.Run(run.folder)
    with pytest.raises(fedmutual.UserError, match=re.escape("Run(FOLDER, models={'north': make})")):
        other.export(tmp_path / "m", client="north")
    fedmutual.Run(run.folder, models={"north": make}).export(tmp_path / "m", client="north")
    program = torch.export.load(str(tmp_path / "m" / "model.pt2")).module()
    x = TABLE[["pulse", "age", "dose"]].iloc[:5]
    np.testing.assert_allclose(program(torch.tensor(x.to_numpy())), run.predict(x, client="north"), atol=1e-6)


def test_the_card_tells_the_settings_of_the_client_and_of_all_clients_where_they_differ(
    run: fedmutual.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmutual.studies.export.find_spec", lambda name: None)  # without ONNX, which takes a second
    cards = {}
    for client in ("south", "north", None):
        run.export(tmp_path / str(client), client=client)
        cards[client] = (tmp_path / str(client) / "README.md").read_text()
    for client, told in (
        ("south", ("alpha = 0.7", "- Learning rate: 0.2.", "- Network: mlp.")),
        ("north", ("alpha = 0.5", "- Learning rate: 0.05.", "- Network: model.north.")),
    ):
        assert [words for words in told if words not in cards[client]] == []
    differ = next(line for line in cards[None].splitlines() if "differ between clients" in line)
    assert "algorithm.alpha = 0.5 (2 clients), 0.7 (1 client)" in differ
    assert "optimizer.lr = 0.05 (2 clients), 0.2 (1 client)" in differ
    assert "model.personal = of its own (2 clients), mlp (1 client)" in differ
    assert [name for name in ("north", "south", "west") if name in cards[None]] == []
