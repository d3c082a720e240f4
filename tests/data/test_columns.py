"""Tables of several clients: a network takes columns by position, so they are held to one order by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmutual import data
from fedmutual.config import parse_config
from fedmutual.errors import ConfigError, DataError
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from own_data import config

NAMES = ["age", "pulse", "heat"]
LATER = {"shared": "mlp", "part": "features.fc2", "adaptor": "rest"}


def table(path: Path, columns: list[str], seed: int) -> str:
    x = np.random.default_rng(seed).normal(size=(30, len(columns)))
    rows = "".join(",".join(f"{v:.3f}" for v in row) + f",{'ill' if row[0] > 0 else 'well'}\n" for row in x)
    path.write_text(",".join([*columns, "label"]) + "\n" + rows)
    return str(path)


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Experiment]:
    """The experiment of two clients, the second with these columns."""

    def make_experiment(columns: list[str], **further_tables: Any) -> Experiment:
        files = {"a": table(tmp_path / "a.csv", NAMES, 0), "b": table(tmp_path / "b.csv", columns, 1)}
        clients = {i: {"data": {"name": "csv", "root": file}} for i, file in files.items()}
        tables = {"rounds": 1, "model": {"shared": "mlp"}, "clients": clients, "data": {"classes": ["well", "ill"]}}
        return build.build(parse_config(tables | further_tables))

    return make_experiment


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (NAMES[::-1], "client 'b' has the same columns in another order ('heat', 'pulse', 'age'), and client 'a' 'age',"),
        (
            ["age", "pulse", "salt"],
            "client 'b' has other columns ('salt'), and client 'a' 'age', 'pulse', 'heat'; the shared part",
        ),
    ],
)
def test_columns_that_differ_are_refused_where_what_is_shared_takes_them(
    make_pair: Any, columns: list[str], words: str
) -> None:
    for model in ({"shared": "mlp"}, {"shared": "mlp", "part": "features"}):
        with pytest.raises(ConfigError) as caught:
            make_pair(columns, model=model)
        assert str(caught.value).startswith(words)
        assert "model.part = 'features.fc2', with model.adaptor = 'rest'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"^the public set \(split.public\) is for all clients, but client 'b' has "):
        make_pair(columns, algorithm={"name": "fedh2l", "public_batch": 2}, split={"public": 0.2})


def test_columns_may_differ_if_no_client_uses_a_shared_first_layer(make_pair: Any) -> None:
    assert make_pair(NAMES, model={"shared": "mlp"}).nets.complete
    for columns in (NAMES[::-1], ["salt", "height"]):
        make_pair(columns, model=LATER)
        make_pair(columns, algorithm={"name": "independent"})


def test_more_columns_are_refused_with_what_helps(make_pair: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"differs in shape .* share another part \(of network 'mlp': model.part = 'features"
    ):
        make_pair([*NAMES, "salt"])


def test_columns_that_are_not_features_are_left_out_by_name(tmp_path: Path) -> None:
    rows = "".join(f"{900 + i},x{i},{i % 9},{'ill' if i % 2 else 'well'}\n" for i in range(60))
    (tmp_path / "a.csv").write_text(f"id,name,age,label\n{rows}")
    about = {"name": "csv", "root": str(tmp_path / "a.csv")}
    with pytest.raises(DataError, match="column 'name' holds 'x0' in line 2"):
        data.load(config(data=about))
    loaded = data.load(config(data=about | {"drop": ["name"]}))
    assert loaded.space.columns == ("id", "age")
    assert any("a.csv: 'id' holds a different whole number in every row, as identifiers do" in note for note in loaded.notes)
    assert any("some of them large (column 'id' is about 93" in note for note in loaded.notes)
    loaded = data.load(config(data=about | {"drop": ["name", "id"]}))
    assert loaded.space.columns == ("age",)
    assert not any("identifiers" in note or "large" in note for note in loaded.notes)
    (tmp_path / "t.csv").write_text("age,label\n3,ill\n5,well\n")  # of a test file they may be gone already
    data.load(config(data=about | {"drop": ["name", "id"], "test": str(tmp_path / "t.csv")}))
    with pytest.raises(ConfigError, match=r"key 'data.drop' has no effect with data.name = 'digits'"):
        data.load(config(data={"name": "digits", "drop": ["id"]}))
    with pytest.raises(
        DataError, match=r"there is no column 'nam', which data.drop names; it has 'id', 'name', 'age', 'label'"
    ):
        data.load(config(data=about | {"drop": ["nam"]}))
