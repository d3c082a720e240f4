"""Tasks without accuracy are judged by their main metric: which methods gain, in which direction, and the page's words."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

import fedmutual
from fedmutual.config import parse_config
from fedmutual.metric import Metric
from fedmutual.report.html import render
from fedmutual.report.measures import average_global_best, average_own_best, average_own_last, measure_gains
from fedmutual.report.terminal import make_headline_tables
from fedmutual.results.scale import MetricScale
from own_data import OWN_TASK
from run_folders import compare_folders, make_comparison, summarise_lines

pytestmark = pytest.mark.long

CONFIG = parse_config({})
METHODS = ("fml", "fedavg", "independent")


def make_sites(task):
    table = load_diabetes()
    x, y = (table.data * 20).astype("float32"), table.target / 100
    labels = np.stack([y > 1, y > 1.5], 1)
    return {f"h{k}": fedmutual.Site(train=(x[k::4], (labels if task == "multilabel" else y)[k::4])) for k in range(4)}


@pytest.fixture(scope="module", params=["regression", "multilabel", "own_task:Median"])
def compared(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    (folder / "own_task.py").write_text(OWN_TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        fedmutual.compare(
            make_sites(request.param), METHODS, "mlp", task=request.param, rounds=2, batch_size=16, out=folder / "out"
        )
    paths = [folder / "out" / method / str(seed) for method in METHODS for seed in range(3)]
    comparison = make_comparison(paths)
    return request.param, comparison


def read_value(run, client, metric, model="personal"):
    history = [s for s in run.last_rows if (s.model, s.client, s.data) == (model, client, "validation")]
    return history[0].values[metric]


def test_a_gain_is_positive_where_the_metric_is_better(compared):
    task, comparison = compared
    name, sign = {"regression": ("mean_absolute_error", -1), "multilabel": ("auroc", 1)}.get(task, ("median_error", -1))
    assert (comparison.metric.name, comparison.metric.is_higher_better) == (name, sign > 0)
    fml, fedavg, alone = comparison.methods
    of_fml = measure_gains(comparison, fml)
    assert len(of_fml) == 12
    for pair in of_fml.table.itertuples():
        ours, other = (read_value(m.counted[pair.seed], pair.client, name) for m in (fml, alone))
        assert pair.gain == pytest.approx(sign * (ours - other), abs=1e-12)
    assert of_fml.gained == sum(of_fml.table["gain"] > 0)
    values = [read_value(run, client, name) for run in alone.counted for client in ("h0", "h1", "h2", "h3")]
    assert average_own_last(alone).mean == pytest.approx(np.mean(values))
    pick = min if sign > 0 else max
    assert average_own_last(alone, alone.worst).mean == pytest.approx(np.mean([pick(values[k : k + 4]) for k in (0, 4, 8)]))
    for best, _, _ in (average_own_best(fml), average_global_best(fedavg)):
        assert best.n == 3


def test_the_page_has_numbers_and_no_word_of_accuracy(compared):
    _, comparison = compared
    page = render([comparison]).lower()
    assert "accura" not in page
    assert comparison.metric.title.lower() in page
    assert "95 % interval" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert make_headline_tables(compare_folders(comparison.runs)).renderables


def test_the_best_round_is_the_one_with_the_lowest_error():
    def line(round, *errors):
        scores = [
            {"model": "personal", "client": c, "data": "validation", "mae": e} for c, e in zip("ab", errors, strict=True)
        ]
        return {"round": round, "train": {}, "scores": scores}

    metric = Metric("mae", "mean absolute error", is_fraction=False, is_higher_better=False)
    lines = [line(1, 5.0, 3.0), line(2, 2.0, 4.0), line(3, 9.0, 1.0)]
    personal = summarise_lines(CONFIG, lines, [], metric)["personal"]
    assert (personal["val_metric"]["best"]["best_round"], personal["val_metric"]["best"]["mean"]) == (2, 3.0)
    assert (personal["val_metric"]["last"]["mean"], personal["val_metric"]["last"]["worst"]) == (5.0, 9.0)
    assert personal["val_accuracy"] is None


@pytest.mark.parametrize(
    ("value", "text", "gain"),
    [
        (53.8712, "53.9", "+54"),
        (0.04567, "0.0457", "+0.046"),
        (12345.6, "12346", "+12346"),
        (999.6, "1000", "+1000"),
        (99.6, "99.6", "+100"),
    ],
)
def test_numbers_have_three_digits_and_their_unit(value, text, gain):
    scale = MetricScale(1, Metric("mae", "mean absolute error", is_fraction=False, is_higher_better=False, unit="mg/dl"))
    assert (scale.format_value(value), scale.format_gain(value)) == (text, gain)
    assert (scale.mark, scale.difference_mark, scale.head) == (" mg/dl", " mg/dl", ", mg/dl")
