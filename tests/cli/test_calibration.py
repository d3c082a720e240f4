"""`score --calibrate`: a temperature and thresholds, by scikit-learn's numbers, and who uses them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV, calibration_curve
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, recall_score, roc_curve

import fedmutual
from fedmutual.rundir.record_files import read_calibrations
from fedmutual.studies import calibration
from fedmutual.studies.trained_run import choose_model

pytestmark = pytest.mark.run

RNG = np.random.default_rng(0)


class Logits(ClassifierMixin, BaseEstimator):
    """A classifier whose decision function is its input."""

    def fit(self, x, y):
        self.classes_, self.n_features_in_ = np.unique(y), x.shape[1]
        return self

    def decision_function(self, x):
        return x

    def predict(self, x):
        return self.classes_[x.argmax(1)]


def draw(kind, rows=400, classes=4):
    """Return outputs and targets of a model that is too sure, with some unknown targets."""
    z = torch.from_numpy(RNG.normal(size=(rows, classes, *((3, 2) if kind == "masks" else ()))))
    if kind == "labels":
        y = torch.bernoulli(z.sigmoid(), generator=torch.Generator().manual_seed(0))
        y[:9, 0] = torch.nan
    else:
        y = (z + torch.from_numpy(RNG.gumbel(size=z.shape))).argmax(1)
        y[:9] = -1
    return 3 * z, y


@pytest.mark.parametrize("kind", ["classes", "labels", "masks"])
def test_errors_and_curves_are_those_of_scikit_learn(kind):
    z, y = draw(kind)
    p = z.sigmoid() if kind == "labels" else z.softmax(1)
    if kind == "labels":
        values, right = p[y.isfinite()].numpy(), y[y.isfinite()].numpy() > 0
    else:
        (top, predicted), known = p.max(1), y >= 0
        values, right = top[known].numpy(), (predicted == y)[known].numpy()
    frequencies, means = calibration_curve(right, values, n_bins=calibration.BINS)
    sums = calibration._sum_bins(kind, p, y)
    counts, total, hits = sums.sum(0)[sums.sum(0)[:, 0] > 0].T
    assert total / counts == pytest.approx(means, abs=1e-9)
    assert hits / counts == pytest.approx(frequencies, abs=1e-9)
    expected = (counts * np.abs(frequencies - means)).sum() / len(values)
    assert calibration.compute_error(sums) == pytest.approx(expected, abs=1e-9)


def test_the_temperature_is_that_of_scikit_learn():
    z, y = draw("classes")
    known = y >= 0
    x, t = z[known].numpy(), y[known].numpy()
    reference = CalibratedClassifierCV(FrozenEstimator(Logits().fit(x, t)), method="temperature", cv=None).fit(x, t)
    temperature, (before, after) = calibration.fit_temperature("classes", z, y)
    assert temperature == pytest.approx(3, rel=0.2)  # the outputs are three times too large
    assert before == pytest.approx(log_loss(t, z[known].softmax(1)), abs=1e-9)
    assert after == pytest.approx(log_loss(t, reference.predict_proba(x)), abs=1e-9)
    assert 1 / temperature == pytest.approx(reference.calibrated_classifiers_[0].calibrators[0].beta_, abs=1e-6)


def test_the_temperature_is_the_inverse_of_a_logistic_regression():
    """Of labels, and of two classes, it is the one coefficient of the outputs, here found by Newton's method."""
    labels, of_labels = draw("labels")
    known = of_labels.isfinite()
    classes, of_classes = draw("classes")
    two = (of_classes == 0) | (of_classes == 1)
    cases = [
        ("labels", (labels, of_labels), labels[known], of_labels[known]),
        ("classes", (classes[two, :2], of_classes[two]), classes[two, 1] - classes[two, 0], of_classes[two]),
    ]
    for kind, given, x, y in cases:
        newton = LogisticRegression(C=np.inf, fit_intercept=False, solver="newton-cholesky", tol=1e-14)
        coefficient = newton.fit(x.double().numpy()[:, None], y.numpy()).coef_.item()
        temperature, _ = calibration.fit_temperature(kind, *given)
        assert 1 / temperature == pytest.approx(coefficient, abs=1e-9)


def test_the_temperature_of_labels_has_the_smallest_loss():
    z, y = draw("labels")
    known = y.isfinite()
    temperature, (_, after) = calibration.fit_temperature("labels", z, y)
    tried = [log_loss(y[known], (z[known] / t).sigmoid()) for t in (temperature, 0.999 * temperature, 1.001 * temperature)]
    assert after == pytest.approx(min(tried), abs=1e-12)
    assert after == pytest.approx(tried[0], abs=1e-9)


def test_the_interval_of_the_error_holds_the_truth():
    """Of a calibrated model, whose error is 0 with endless rows; percentiles would lie above it."""
    answers = torch.from_numpy(np.random.default_rng(1).dirichlet([1, 1, 1], 300))
    y = torch.multinomial(answers, 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    sums = calibration._sum_bins("classes", answers, y)
    interval = calibration.compute_bootstrap_interval(
        lambda r: calibration.compute_error(sums[r]), [np.arange(300)], "basic"
    )
    assert interval[0] < 0.02 < calibration.compute_error(sums)


def test_thresholds_have_the_stated_sensitivity():
    values, truths = RNG.uniform(size=200), RNG.uniform(size=200) < 0.3
    threshold = calibration._find_threshold(values, truths, 0.9)
    ranked = np.sort(values[truths])[::-1]
    assert threshold == ranked[int(np.ceil(0.9 * len(ranked))) - 1]
    sensitivity, specificity = calibration._judge(threshold, values, truths)
    assert sensitivity[0] == pytest.approx(recall_score(truths, values >= threshold), abs=1e-9)
    rates, _, thresholds = roc_curve(truths, values, drop_intermediate=False)
    assert specificity[0] == pytest.approx(1 - rates[thresholds == threshold][0], abs=1e-9)
    assert calibration._find_threshold(values, truths & False, 0.9) is None


@pytest.fixture
def digits(small, cli):
    """The folder of a finished run on digits with hold-out rows."""
    cli.run("run", small, "--set", "rounds=2", "--set", "split.holdout=0.3", "--set", "optimizer.lr=0.3", "--out", "r")
    return small.parent / "r"


def test_predict_export_card_and_page_use_what_score_fitted(digits, cli, monkeypatch):
    monkeypatch.setattr("fedmutual.studies.export.find_spec", lambda name: None)  # no ONNX, which takes a second
    net, x = fedmutual.Run(digits).personal_model("1"), load_digits().images[:9, None].astype(np.float32)
    plain = fedmutual.Run(digits).predict(x, "1").to_numpy()
    assert np.array_equal(x, load_digits().images[:9, None])  # the caller's array stays as it was
    out, _ = cli.run("score", digits, "--client", "1", "--calibrate", "--sensitivity", "0.8", "--json")
    (fitted,) = read_calibrations(digits)
    assert (fitted.client, fitted.role, fitted.round, fitted.fitted_on) == ("1", "personal", 2, "holdout")
    assert [seen.rows for seen in fitted.seen] == ["test", "validation"]
    seen, reliability = fitted.seen[0], json.loads(out)["reliability"]
    assert reliability["error"] == pytest.approx(list(seen.error))
    assert reliability["decisions"].keys() == fitted.thresholds.keys()
    scores = json.loads(Path(digits, "metrics.jsonl").read_text().splitlines()[-1])["scores"]
    recorded = next(s for s in scores if (s["model"], s["client"], s["data"]) == ("personal", "1", "test"))
    assert json.loads(out)["accuracy"] == recorded["accuracy"]  # the same rows, as the run scored them
    powers = plain ** (1 / fitted.temperature)
    expected = powers / powers.sum(1, keepdims=True)
    assert fedmutual.Run(digits).predict(x, "1").to_numpy() == pytest.approx(expected, abs=1e-6)
    assert fedmutual.Run(digits).predict(x, "2").to_numpy() != pytest.approx(expected, abs=1e-3)
    fedmutual.Run(digits).export("model", "1")
    answers = torch.export.load("model/model.pt2").module()(torch.from_numpy(x)).numpy()
    assert answers == pytest.approx(expected, abs=1e-6)
    about = json.loads(Path("model/model.json").read_text())
    assert (about["temperature"], about["thresholds"]) == (fitted.temperature, fitted.thresholds)
    assert net.state_dict().keys() == fedmutual.Run(digits).personal_model("1").state_dict().keys()
    card = Path("model/README.md").read_text()
    assert f"temperature {fitted.temperature:.4g}" in card
    assert f"| test set | {seen.examples} | {100 * seen.error[0]:.1f} (" in card
    name, shares = next((n, d) for n, d in seen.decisions.items() if d[0] and d[1])
    row = f"| {name} | test set | {fitted.thresholds[name]:.4f} | {100 * shares[0][0]:.1f} ("
    assert row in card
    cli.run("report", digits)
    page = Path("report.html").read_text()
    assert "personal model of 1, round 2: test rows" in page
    assert 'aria-label="Frequency by mean probability; the numbers are in the table below"' in page
    assert ">client 1</text>" in page  # the curve of the test rows
    cli.run("run", "small.toml", "--resume", "--out", digits, *[
        word for key in ("rounds=3", "split.holdout=0.3", "optimizer.lr=0.3") for word in ("--set", key)
    ])  # fmt: skip
    assert choose_model(digits, "1").calibration is None  # the weights are others


def test_a_shared_model_is_calibrated_by_the_rows_of_all_and_for_one_client(small, cli):
    sets = ("split.holdout=0.3", "algorithm.name=fedavg", "partition.examples=120", "rounds=4", "optimizer.lr=0.2")
    cli.run("run", small, "--out", "avg", *(word for text in sets for word in ("--set", text)))
    common = fedmutual.Run("avg").calibrate()
    assert common.examples == sum(fedmutual.Run("avg").calibrate(client).examples for client in "012")
    temperatures = {c.client: c.temperature for c in read_calibrations(Path("avg"))}
    assert {client: choose_model(Path("avg"), client).calibration.temperature for client in (None, *"012")} == temperatures


RUN = """
name = "t"
rounds = 1
data = {{ name = "npz", root = "d.npz" }}
partition = {{ kind = "iid", clients = 2 }}
split = {{ test = 0.3, holdout = 0.3 }}
model = {{ shared = "mlp" }}
training = {{ task = "{task}", batch_size = 8 }}
engine = {{ device = "cpu" }}
"""


def train(task, cli, *sets):
    """Train a run of a task on drawn arrays; return its folder."""
    x = RNG.normal(size=(120, 4)).astype(np.float32)
    score = x[:, 0] + 0.8 * RNG.normal(size=120)
    targets = {
        "classification": score > 0,
        "ordinal": np.digitize(score, [-0.5, 0.5]),
        "multilabel": np.stack([score > 0, score > 1], 1),
        "regression": score,
        "survival": np.stack([np.exp(score), score > 0], 1),
        "segmentation": np.repeat(score > 0, 64).reshape(-1, 8, 8),
    }
    x = np.repeat(x[:, :1, None, None], 8, 2).repeat(8, 3) if task == "segmentation" else x
    y = targets[task].astype("float32" if task in ("regression", "survival") else int)
    np.savez("d.npz", x=x, y=y)
    Path("t.toml").write_text(RUN.format(task=task))
    cli.run("run", "t.toml", "--out", task, *(word for text in sets for word in ("--set", text)))
    return Path(task)


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("classification", ["0", "1"]),
        ("ordinal", ["1 or above", "2 or above"]),
        ("multilabel", ["0", "1"]),
        ("segmentation", []),
    ],
)
def test_each_task_with_probabilities_is_calibrated(task, names, in_tmp_path, cli):
    sets = ("model.shared=unet", "rounds=3", "optimizer.lr=0.1") if task == "segmentation" else ()
    folder = train(task, cli, *sets)
    out, _ = cli.run("score", folder, "--client", "1", "--calibrate", *(["--sensitivity", "0.9"] if names else []))
    (fitted,) = read_calibrations(folder)
    assert [*fitted.thresholds] == names
    assert fitted.loss[1] < fitted.loss[0]
    assert f"{100 * fitted.seen[0].error[0]:.1f} (" in out
    if names:
        assert all(name in out for name in names)
    if task == "multilabel":
        np.savez("new.npz", x=np.load("d.npz")["x"][:20])
        for p in fedmutual.predict(folder, "new.npz", "1"):
            assert set(p.labels) == {name for name, share in p.ranked if share >= fitted.thresholds[name]}


@pytest.mark.parametrize(
    ("task", "sets", "options", "sentence"),
    [
        ("regression", (), (), "the task 'regression' states no probability"),
        ("survival", (), (), "the task 'survival' states no probability"),
        ("classification", ("split.holdout=0",), (), "train with split.holdout = 0.1"),
        ("classification", ("privacy.nets=both", "privacy.sigma=1.0"), (), "epsilon does not cover"),
        ("classification", (), ("--sensitivity", "90"), "above 0 and at most 1"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_a_sentence(task, sets, options, sentence, in_tmp_path, cli):
    folder = train(task, cli, *sets)
    err = cli.fail("score", folder, "--client", "0", "--calibrate", *options)
    assert sentence in err
    assert err.count("\n") == 1
    assert not (folder / "calibration.json").exists()


@pytest.mark.parametrize("use", ['drop = ["sex"]', 'columns = { sex = { kind = "category" }, pulse = { kind = "number" } }'])
def test_own_rows_are_scored_by_a_column(use, in_tmp_path, cli):
    sexes = np.array([*"MF"])[np.arange(90) % 2]
    lines = [f"{k / 90:.3f},{'ill' if k > 45 else 'well'},{sex}" for k, sex in enumerate(sexes)]
    Path("d.csv").write_text("\n".join(["pulse,state,sex", *lines]))
    data = '"csv", root = "d.csv", label = "state", ' + use
    Path("t.toml").write_text(RUN.format(task="classification").replace('"npz", root = "d.npz"', data))
    cli.run("run", "t.toml", "--out", "t")
    scores = json.loads(cli.run("score", "t", "--by", "sex", "--json")[0])
    rows = json.loads(Path("t/partition.json").read_text())["test"]["rows"]
    assert {name: group["examples"] for name, group in scores["groups"].items()} == {
        sex: int((sexes[rows] == sex).sum()) for sex in "FM"
    }
    assert "no column 'age'" in cli.fail("score", "t", "--by", "age")


def test_a_column_that_a_run_of_objects_did_not_keep_is_refused():
    site = fedmutual.Site(train=(RNG.normal(size=(40, 2)).astype(np.float32), np.arange(40) % 2))
    run = fedmutual.federate({"a": site}, "independent", "mlp", rounds=1, progress=False)
    with pytest.raises(fedmutual.UserError, match="did not keep a column 'sex'"):
        run.score(by="sex", client="a")


def test_the_interval_of_the_error_holds_the_error(in_tmp_path, cli):
    """Where all resamples have a larger error, the basic interval lies below it."""
    model = choose_model(train("classification", cli), "0")
    seen = calibration.measure_reliability(
        model, torch.tensor([[0.0, 3.0]]).repeat(20, 1), (torch.arange(20) > 0).long(), "test"
    )
    assert seen.error[1] <= seen.error[0] <= seen.error[2]
