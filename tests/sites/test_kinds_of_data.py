"""Sites with all kinds of inputs and targets: what they train is, bit for bit, what one process trains."""

import sys

import numpy as np
import pandas as pd
import pytest

from fedmutual.errors import ConfigError
from wards import TELLING, Federation, run_together

pytestmark = pytest.mark.sites

OWN = """
import torch
from torch import nn

class Ids(nn.Module):
    "Fails for any id that is not in its table."
    def __init__(self, shape, classes):
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(20, 4, padding_idx=0), nn.Linear(4, classes)

    def forward(self, x=None, input_ids=None, attention_mask=None, table=None):
        return self.head(self.embed(input_ids if x is None else x))

class Pair(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(5, classes)

    def forward(self, kind, values):
        return self.head(torch.cat([self.embed(kind).mean(1), values], 1))

def Volume(shape, classes):
    return nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, classes))

def Masks(shape, classes):
    return nn.Conv3d(1, classes, 1)
"""
N = 30


def make_table(rng, targets, **data):
    """Rows of five numbers, with columns of targets."""
    features = pd.DataFrame(rng.normal(size=(N, 5)).astype(np.float32).round(2), columns=list("abcde"))
    return features.assign(**targets), {"label": [*targets] if len(targets) > 1 else next(iter(targets)), **data}


def make_volumes(folder, rng, masks=False):
    """Volumes of 6 voxels a side in .nii.gz, in a folder a class, or each with a mask."""
    nibabel = pytest.importorskip("nibabel")
    for k in range(N):
        path = folder / ("images" if masks else f"c{k % 2}") / f"{k:02}.nii.gz"
        volume = rng.normal(size=(6, 6, 6)).astype(np.float32)
        for place, content in ((path, volume), (folder / "masks" / path.name, (volume > 0).astype(np.uint8))):
            if masks or place == path:
                place.parent.mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(content, np.eye(4)), place)


# name -> the settings that all have in common, and `sites.input`
CASES = {
    "survival": ({"training": {"task": "survival"}, "data": {"times": [1.0, 2.0, 4.0]}}, [5]),
    "cox": ({"training": {"task": "cox"}, "data": {}}, [5]),
    "ordinal": ({"training": {"task": "ordinal"}, "data": {"classes": ["low", "mid", "high"]}}, [5]),
    "numbers": ({"training": {"task": "regression"}, "data": {"classes": ["p", "q"]}}, [5]),
    "labels": (
        {"training": {"task": "multilabel"}, "data": {"classes": ["p", "q"], "unlabelled": True, "uncertain": "ignore"}},
        [5],
    ),
    "unlabelled": ({"data": {"classes": ["0", "1"], "unlabelled": True}}, [5]),
    "ids": ({"data": {"classes": ["0", "1"]}, "model": {"shared": "own_nets:Ids"}}, {"x": {"shape": [6], "dtype": "int64"}}),
    "text": (
        {"data": {"classes": ["0", "1"], "words": 20, "length": 6}, "model": {"shared": "own_nets:Ids"}},
        {k: {"shape": [6], "dtype": "int64"} for k in ("input_ids", "attention_mask")},
    ),
    "inputs": (
        {"data": {"classes": ["0", "1"]}, "model": {"shared": "own_nets:Pair"}},
        {"kind": {"shape": [4], "dtype": "int64", "range": [0, 6]}, "values": {"shape": [2]}},
    ),
    "volumes": ({"data": {"classes": ["c0", "c1"]}, "model": {"shared": "own_nets:Volume"}}, [1, 6, 6, 6]),
    "masks": (
        {"data": {"classes": ["0", "1"]}, "training": {"task": "segmentation"}, "model": {"shared": "own_nets:Masks"}},
        [1, 6, 6, 6],
    ),
}


def write_rows(kind, folder, rng):
    """Write a site's rows, and return its table [data]."""
    x, path = rng.random(N), folder / "rows"
    y = np.arange(N) % 2
    tables = {
        "survival": {"time": x * 5, "event": y},
        "cox": {"time": x * 5, "event": y},
        "ordinal": {"stage": np.array(["low", "mid", "high"])[np.arange(N) % 3]},
        "numbers": {"p": x, "q": -x},
        "labels": {"p": np.where(x < 0.2, np.nan, y), "q": np.where(x > 0.8, -1, 1 - y)},
        "unlabelled": {"y": np.where(x < 0.4, "", y.astype(str))},
    }
    if kind in tables:
        frame, data = make_table(rng, tables[kind])
        frame.to_csv(path.with_suffix(".csv"), index=False)
        return {"name": "csv", "root": str(path.with_suffix(".csv")), **data}
    if kind == "text":
        frame = pd.DataFrame({"note": rng.choice(["all is well today", "fever and cough"], N), "y": y})
        frame.to_csv(path.with_suffix(".csv"), index=False)
        return {"name": "csv", "root": str(path.with_suffix(".csv")), "label": "y", "text": ["note"]}
    if kind in ("volumes", "masks"):
        make_volumes(path, rng, masks=kind == "masks")
        return {"name": "folder", "root": str(path)}
    arrays = {"x": rng.integers(1, 20, (N, 6))}
    if kind == "inputs":
        arrays = {"kind": rng.integers(0, 7, (N, 4)), "values": rng.normal(size=(N, 2)).astype(np.float32)}
    np.savez(path.with_suffix(".npz"), y=y, **arrays)
    return {"name": "npz", "root": str(path.with_suffix(".npz")), **({} if "x" in arrays else {"inputs": [*arrays]})}


def make_contract(kind, **more):
    """The settings that all sites have."""
    settings = CASES[kind][0]
    return {
        "name": "wards", "rounds": 2, "split": {"preset": "v1", "validation": 0.2, "test": 0.2}, "model": {"shared": "mlp"},
        "algorithm": {"name": "fml"}, "optimizer": {"lr": 0.05}, **TELLING, **settings,
        "training": {"local_epochs": 1, "batch_size": 8, **settings.get("training", {})}, **more,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def own_networks(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_nets", None)


def make_sites(kind, folder):
    """Three sites with rows of their own."""
    sites = {}
    for k, name in enumerate(("north", "south", "west")):
        (folder / name).mkdir()
        sites[name] = {"data": write_rows(kind, folder / name, np.random.default_rng(k))}
    return sites


TRUST = {"trust": {"modules": ["own_nets"]}}


@pytest.mark.parametrize("kind", CASES)
def test_sites_train_what_one_process_trains(kind, tmp_path):
    common, sites, declared = make_contract(kind), make_sites(kind, tmp_path), CASES[kind][1]
    columns = {"columns": list("abcde")} if declared == [5] else {}
    given = {"input": declared, "refuse_opposed": False, "site_tables": TRUST, **columns}
    federation, run = (
        Federation(tmp_path / "sites", common, sites, **given).run(),
        run_together(tmp_path / "one", common, sites),
    )
    assert federation.notes == []
    assert federation.equals(run)
    assert federation.summary["personal"] == run.summary["personal"]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([6], r"'x' is of type int64, .* agreed on float32 .* declare { x = { shape = \[6\], dtype = \"int64\" } }"),
        ({"x": {"shape": [6], "dtype": "int64", "range": [0, 20]}}, "'own_nets:Ids'"),
        ({"x": {"shape": [6], "dtype": "int64", "range": [0, 1e30]}}, "the least and the greatest int64"),
    ],
)
def test_ids_are_declared_and_networks_are_tried_on_both_ends_of_their_range(declared, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Federation(
            tmp_path / "sites", make_contract("ids"), make_sites("ids", tmp_path), input=declared, site_tables=TRUST
        ).run()
