"""Each script of examples/ runs as a user runs it, and its result is what it is for."""

import runpy
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.docs

EXAMPLES = Path(__file__).parent.parent / "examples"


def check_hospitals(names):
    assert names["gains"]["examples"].sum() == len(names["table"])  # each row is scored once
    assert [*names["gains"].index] == ["east", "north", "south", "west"]
    assert (names["gains"][["fml", "independent"]] > names["bunch"].target.mean() + 0.1).all(None)  # the majority's share


def check_survival(names):
    scores = names["concordances"]
    assert scores["pooled, global"] == pytest.approx(scores["Cox of lifelines, pooled"], abs=0.01)


def check_notes(names):
    assert min(names["accuracies"].values()) > names["notes"]["diagnosis"].value_counts(normalize=True).max() + 0.1


def check_volumes(names):
    def find_last(run, metric):
        scores = run.history()
        return scores[(scores["metric"] == metric) & (scores["data"] == "test")]["value"].iloc[-1]

    assert find_last(names["patients"], "accuracy") > 0.6  # half are ill
    background = (names["masks"] == 0).mean()
    alone = background / (1 + background)  # Dice where every voxel is background
    assert min(find_last(names[name], "dice") for name in ("lesions", "arrays")) > alone + 0.1


def check_chest(names):
    assert names["last"]["value"].min() > 0.6  # AUROC: chance is 0.5
    assert {*dict(names["answer"].ranked)} == {*names["FINDINGS"]}


def check_moon(names):
    scores = names["comparison"].history()
    last = scores[(scores["metric"] == "accuracy") & (scores["round"] == 4)].groupby("method")["value"].mean()
    assert (last > 0.5).all()  # of ten digits
    assert last["MOON"] != last["FedAvg"]


def check_ship(names):
    np.testing.assert_allclose(names["answers"], names["expected"], atol=1e-5)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_an_example_runs(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    globals()[f"check_{script.stem}"](runpy.run_path(str(script), run_name="__main__"))
