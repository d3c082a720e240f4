"""docs/scale.md says what the benchmarks measured."""

import json
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()


def read_results(section):
    return json.loads((ROOT / "benchmarks" / "results" / f"{section}.json").read_text())["results"]


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("scale")


def test_the_tables_are_those_of_the_results(scale):
    tables = scale.render_tables(read_results("scale"))
    assert scale.insert_tables(PAGE, tables) == PAGE
    assert tables in PAGE


def test_the_model_is_the_fit_of_the_measurements(scale):
    results = read_results("scale")
    settings = [scale.Setting(*(row[k] for k in scale.Setting._fields)) for row in results["measured"]]
    again = scale.summarise(results["measured"], settings, len(results["models"]["memory_mib"]["errors_fitted"]))
    for name, model in results["models"].items():
        assert again["models"][name]["predicted"] == pytest.approx(model["predicted"], rel=1e-3)


def test_the_fit_finds_weights_that_are_known(scale):
    features = [{"a": 1.0, "b": b, "c": c} for b, c in ((1.0, 5.0), (2.0, 1.0), (3.0, 4.0), (7.0, 2.0))]
    values = [2 * f["a"] + 0.5 * f["b"] for f in features]
    assert scale.fit(features, values) == pytest.approx([2, 0.5, 0])
