"""Tables with missing values, categories and dates on the command line: `data check`, `run`, `predict`, `adapt`."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedmutual
from fedmutual.data.encoding import make_encoding
from fedmutual.errors import DataError
from fedmutual.studies.trained_run import choose_model

pytestmark = pytest.mark.run

RUN = """
name = "wards"
rounds = 1
split = { test = 0.3 }
training = { local_epochs = 1, batch_size = 8 }
engine = { device = "cpu" }
[data]
name = "csv"
classes = ["well", "ill"]
[clients.north]
data = { root = "north.csv" }
[clients.south]
data = { root = "south.csv" }
"""


@pytest.fixture
def wards(in_tmp_path):
    """Two tables with empty cells, categories and dates, their columns in different orders, and wards.toml."""
    for number, ward in enumerate(("north", "south")):
        rng = np.random.default_rng(number)
        frame = pd.DataFrame({"age": rng.integers(20, 90, 60), "sex": rng.choice(["f", "m"], 60)}).astype(object)
        frame["since"] = (pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 900, 60), unit="D")).astype(str)
        frame.loc[rng.random(60) < 0.2, ["age", "sex"]] = None
        frame["label"] = np.where(frame["age"].fillna(50).astype(float) > 50, "ill", "well")
        frame[list(frame.columns)[:: 1 - 2 * number]].to_csv(f"{ward}.csv", index=False)
    Path("wards.toml").write_text(RUN)
    return Path("wards.toml")


@pytest.fixture
def adopted_config(wards, cli):
    """wards.toml with what `data check` recommends."""
    code, output, error = cli("data", "check", wards)
    assert code == 2
    assert "6 problems" in error
    recommended = output[output.index("[data.columns]") :]
    wards.write_text(RUN + recommended)
    return wards


def test_what_data_check_recommends_is_pasted_once(adopted_config, cli):
    output, _ = cli.run("data", "check", adopted_config)
    assert "[data.columns]" not in output


def test_predict_encodes_as_the_run_did(adopted_config, cli):
    cli.run("run", adopted_config, "--out", "r")
    record = json.loads(Path("r/environment.json").read_text())["clients"]["south"]["scaling"]["columns"]
    frame = pd.DataFrame({"since": ["2024-02-01", None], "more": [1, 2], "age": [40.0, None], "sex": ["m", None]})
    frame.to_csv("new.csv", index=False)
    frame.to_parquet("new.parquet")
    days = (pd.Timestamp("2024-02-01") - pd.Timestamp("1970-01-01")).days
    by_name = {"age": [40, np.nan], "sex": [record[1]["values"].index("m"), np.nan], "since": [days, np.nan]}
    cells = torch.tensor([by_name[c["name"]] for c in record], dtype=torch.float64).T
    steps = choose_model(Path("r"), "south").takes.scaling.columns
    assert steps is not None
    with torch.no_grad():
        answers = choose_model(Path("r"), "south").net(make_encoding(steps)(cells)).softmax(1)
    for file in ("new.csv", "new.parquet"):
        predictions = fedmutual.predict("r", [file], client="south")
        for prediction, p in zip(predictions, answers, strict=True):
            assert dict(prediction.ranked) == pytest.approx({"well": float(p[0]), "ill": float(p[1])}, abs=1e-6)
    assert "--client" in cli.fail("predict", "r", "new.csv")
    np.savez("new.npz", x=np.zeros((2, 4)))
    frame.assign(sex="x").to_csv("bad.csv", index=False)
    refusals = {"new.npz": "with the columns 'age', 'sex', 'since'", "bad.csv": "column 'sex' holds 'x' in line 2"}
    for file, words in refusals.items():
        with pytest.raises(DataError, match=re.escape(words)):
            fedmutual.predict("r", [file], client="south")


def test_a_newcomer_has_the_columns_of_the_run(adopted_config, cli):
    cli.run("run", adopted_config, "--out", "r")
    pd.read_csv("south.csv").to_csv("east.csv", index=False)
    Path("n.toml").write_text('name = "east"\nrounds = 1\ndata = { name = "csv", root = "east.csv" }\n')
    _, error = cli.run("adapt", "r", "--data", "n.toml", "--out", "a", "--examples", 10, "--seeds", 1)
    assert error.count("Traceback") == 0
    Path("n.toml").write_text('data = { name = "csv", root = "east.csv", columns = { age = "number" } }\nrounds = 1\n')
    assert "the shape of the examples is [1]" in cli.fail(
        "adapt", "r", "--data", "n.toml", "--out", "b", "--examples", 10, "--seeds", 1
    )
