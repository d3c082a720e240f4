"""`federate` and `compare` with objects in memory: what a file's run gives, in every engine, and copies are trained."""

import copy
import functools
import re
import threading
import tomllib
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import fedmutual
from fedmutual import ConfigError, Site, UserError
from fedmutual.algorithms import FML, FedAvg
from fedmutual.config import dump_config, parse_config
from fedmutual.core import Diverged
from fedmutual.events import Finished
from fedmutual.files import read_json
from fedmutual.losses import Regression
from log_lines import read_lines

NAMES = ("north", "south")
QUICK = {"rounds": 2, "local_epochs": 1, "batch_size": 16, "device": "cpu", "progress": False}


class Endless(IterableDataset):
    """A Dataset without a length."""

    def __iter__(self):
        return iter([])


class Holder(nn.Module):
    """A network that stores an object, and the output of its last pass."""

    def __init__(self, value=None):
        super().__init__()
        self.fc, self.value, self.outputs = nn.Linear(6, 2), value, []

    def forward(self, x):
        self.outputs = [self.fc(x)]
        return self.outputs[0]


class Locked:
    """An object with a lock and a layer."""

    def __init__(self, layer):
        self.lock, self.layer = threading.Lock(), layer


class Complex(nn.Module):
    """A network with a tensor [6, 2], complex for example: a parameter, or a buffer."""

    def __init__(self, w, persistent=True):
        super().__init__()
        if isinstance(w, nn.Parameter):
            self.w = w
        else:
            self.register_buffer("w", w, persistent)
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        return self.fc((x.to(self.w.dtype) @ self.w).abs())


class NotFinite(nn.Module):
    """A network whose first output of the first row is a given number in eval mode."""

    def __init__(self, value):
        super().__init__()
        self.fc, self.value = nn.Linear(6, 2), value

    def forward(self, x):
        output = self.fc(x)
        if not self.training:
            output[0, 0] = self.value
        return output


@pytest.fixture
def tables():
    """Two clients' rows of scikit-learn's breast cancer table, standardised, of six features."""
    frame = load_breast_cancer(as_frame=True).frame.iloc[:, [0, 1, 2, 3, 4, 5, -1]].copy()
    features = frame.columns[:-1]
    frame[features] = (frame[features] - frame[features].mean()) / frame[features].std()
    return {name: frame.iloc[k:200:2] for k, name in enumerate(NAMES)}


@pytest.fixture
def nets():
    """A network a client, of different sizes."""
    torch.manual_seed(0)
    return {n: nn.Sequential(nn.Linear(6, 8 * (k + 1)), nn.ReLU(), nn.Linear(8 * (k + 1), 2)) for k, n in enumerate(NAMES)}


@pytest.fixture
def shared():
    torch.manual_seed(1)
    return nn.Linear(6, 2)


def arrays(table):
    return table.iloc[:, :-1].to_numpy(np.float32, copy=True), table["target"].to_numpy(copy=True)


def sites(tables, nets=None):
    return {n: Site(train=t, label="target", model=nets and nets[n]) for n, t in tables.items()}


def scores(run):
    """All scores of a run, to the bit."""
    return [line["scores"] for line in read_lines(run.folder / "metrics.jsonl")]


FILE = """
name = "file"
rounds = 2
model = {{ shared = "mlp" }}
algorithm = {{ name = "fml", alpha = 0.3 }}
training = {{ local_epochs = 1, batch_size = 16 }}
engine = {{ name = "inprocess", device = "cpu" }}
"""


def test_the_scores_are_those_of_a_file_with_the_same_rows(tables, tmp_path, in_tmp_path):
    text = FILE.format()
    for name, table in tables.items():
        x, y = arrays(table)
        np.savez(f"{name}.npz", x=x, y=y)
        text += f'[clients.{name}.data]\nname = "npz"\nroot = "{name}.npz"\n'
    (tmp_path / "f.toml").write_text(text)
    expected = scores(fedmutual.run(fedmutual.load_config("f.toml"), "f"))
    assert scores(fedmutual.federate(sites(tables), FML(alpha=0.3), "mlp", **QUICK)) == expected


@pytest.mark.parametrize(
    "convert",
    [
        arrays,
        lambda table: tuple(map(torch.as_tensor, arrays(table))),
        lambda table: (table.drop(columns="target"), table["target"]),
        lambda table: TensorDataset(*map(torch.as_tensor, arrays(table))),
    ],
    ids=["numpy", "tensors", "a pair of DataFrame and Series", "Dataset"],
)
def test_every_kind_of_data_gives_the_same_scores(tables, convert):
    expected = scores(fedmutual.federate(sites(tables), "fedavg", "mlp", **QUICK))
    own_sites = {name: Site(train=convert(table)) for name, table in tables.items()}
    assert scores(fedmutual.federate(own_sites, "fedavg", "mlp", **QUICK)) == expected


def test_copies_are_trained_and_the_callers_objects_stay(tables, nets, shared):
    before = copy.deepcopy((nets, shared))
    run = fedmutual.federate(sites(tables, nets), FML(alpha=0.4), shared, **QUICK)
    for module, original in zip((*nets.values(), shared), (*before[0].values(), before[1]), strict=True):
        assert all(torch.equal(v, original.state_dict()[k]) for k, v in module.state_dict().items())
    assert not torch.equal(run.personal_model("north")[0].weight, nets["north"][0].weight)
    assert run.config.algorithm["alpha"] == 0.4


def test_in_place_loads_the_trained_weights_into_the_callers_modules(tables, nets, shared):
    run = fedmutual.federate(sites(tables, nets), FML(), shared, in_place=True, **QUICK)
    for name in NAMES:
        trained = run.personal_model(name).state_dict()
        assert all(torch.equal(v, trained[k]) for k, v in nets[name].state_dict().items())
    assert torch.equal(shared.weight, run.global_model().weight)


def test_networks_begin_with_the_weights_that_are_given(tables, nets, shared):
    """With a learning rate of 0 they end with them."""
    run = fedmutual.federate(sites(tables, nets), "fml", shared, lr=0.0, settings={"optimizer.weight_decay": 0.0}, **QUICK)
    assert torch.equal(run.personal_model("south")[0].weight, nets["south"][0].weight)
    assert torch.equal(run.global_model().weight, shared.weight)


def test_stacked_clients_have_the_models_of_clients_in_turns(tables, shared):
    own_sites = {name: Site(train=table, label="target", model=shared) for name, table in tables.items()}
    one, other = (fedmutual.federate(own_sites, "fml", shared, engine=name, **QUICK) for name in ("inprocess", "stacked"))
    for name in NAMES:
        assert torch.allclose(one.personal_model(name).weight, other.personal_model(name).weight, atol=1e-5)


def test_a_run_tells_its_history_and_predicts_in_memory(tables, nets, shared):
    run = fedmutual.federate(sites(tables, nets), "fml", shared, **QUICK)
    history = run.history()
    assert list(history.columns) == ["round", "model", "client", "data", "metric", "value"]
    (row,) = history.query("round == 2 and model == 'personal' and client == 'north' and data == 'validation'").query(
        "metric == 'accuracy'"
    )["value"]
    assert row == read_json(run.folder / "summary.json")["personal"]["val_accuracy"]["last"]["per_client"]["north"]
    shuffled = tables["north"][tables["north"].columns[::-1]]
    p = run.predict(shuffled, client="north")
    x = torch.from_numpy(arrays(tables["north"])[0])
    assert np.allclose(p.to_numpy(), run.personal_model("north")(x).double().softmax(1).detach().numpy())
    assert list(p.columns) == ["0", "1"]
    assert "fml, 2 clients, finished, round 2 of 2" in repr(run)
    lines = {line.get_label() for line in run.plot().get_lines()}
    assert {"personal, north", "personal, south"} <= lines


def test_compare_trains_every_method_and_seed_on_the_same_objects(tables, nets, shared, tmp_path):
    methods, events = {"teach": FML(alpha=0.5), "average": FedAvg(), "alone": "independent"}, []
    compared = fedmutual.compare(
        sites(tables, nets), methods, shared, seeds=2, out=tmp_path / "c", observers=[events.append], **QUICK
    )
    assert [type(event) for event in events].count(Finished) == 6
    assert set(compared.runs) == {(method, seed) for method in methods for seed in (0, 1)} == {e.run for e in events}
    alone = fedmutual.federate(sites(tables, nets), "independent", shared, seed=1, **QUICK)
    assert scores(compared.runs["alone", 1]) == scores(alone)
    table = compared.history()
    assert set(table["method"]) == set(methods)
    assert compared.report(tmp_path / "report.html").stat().st_size > 0
    assert "average, global" in repr(compared)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"seeds": 0}, "seeds = 0"),
        ({"methods": {}}, "'methods'"),
        ({"methods": ["fml", "fml"]}, "'methods'"),
        ({"methods": "fedavg"}, r"argument 'methods' is the text 'fedavg'; give a list: methods=\['fedavg'\]"),
        ({"methods": FedAvg()}, r"argument 'methods' is FedAvg\(.*; give a list"),
        ({"methods": {1: "fedavg", "1": "fml"}}, "'methods' names 1, 1, and needs methods of different names"),
    ],
)
def test_a_comparison_without_runs_is_refused(tables, tmp_path, change, argument):
    arguments = {"methods": ["fedavg"], "shared": "mlp", "out": tmp_path / "c", **QUICK, **change}
    with pytest.raises(ConfigError, match=argument):
        fedmutual.compare(sites(tables), **arguments)
    assert not (tmp_path / "c").exists()


def test_each_run_is_in_the_folder_of_compare_whatever_its_title(tables, tmp_path):
    titles = ["../x", "a/b", "", "..", str(tmp_path / "y"), "FML: 0.5", 256 * "x"]
    compared = fedmutual.compare(sites(tables), dict.fromkeys(titles, "fedavg"), "mlp", seeds=1, out=tmp_path / "c", **QUICK)
    assert [*tmp_path.iterdir()] == [tmp_path / "c"]
    assert {run.folder.parent.parent for run in compared.runs.values()} == {tmp_path / "c"}
    assert len([*(tmp_path / "c").iterdir()]) == 7
    assert "FML: 0.5" in {run.folder.parent.name for run in compared.runs.values()}


def test_a_temporary_folder_is_gone_with_its_run(tables):
    run = fedmutual.federate(sites(tables), "fedavg", "mlp", **QUICK)
    folder = run.folder
    assert (folder / "summary.json").exists()
    del run
    assert not folder.exists()


def test_a_run_of_objects_goes_on_where_it_stopped(tables, shared, tmp_path):
    uninterrupted = fedmutual.federate(sites(tables), "fedavg", shared, out=tmp_path / "a", **QUICK)
    fedmutual.federate(sites(tables), "fedavg", shared, out=tmp_path / "b", **QUICK | {"rounds": 1})
    part = fedmutual.federate(sites(tables), "fedavg", shared, out=tmp_path / "b", resume=True, **QUICK)
    assert scores(part) == scores(uninterrupted)


def test_a_folder_of_objects_says_in_another_call_what_it_lacks(tables, shared, tmp_path):
    fedmutual.federate(sites(tables), "fedavg", shared, out=tmp_path / "a", **QUICK)
    with pytest.raises(UserError, match="was an object in the memory of another process"):
        fedmutual.Run(tmp_path / "a").global_model()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 0}, "key 'training.batch_size' must be greater than or equal to 1"),
        ({"lr": "fast"}, "key 'optimizer.lr' must be a number"),
        ({"engine": "processes"}, "argument 'engine': 'processes'"),
        ({"method": "fml2"}, "there is no algorithm 'fml2'; did you mean 'fml'"),
        ({"method": FML}, "argument 'method'"),
        ({"shared": None}, "argument 'shared'"),
        ({"shared": 3}, "argument 'shared' is int"),
        ({"shared": nn.Linear(5, 2)}, "network 'shared' does not take examples of shape"),
        ({"settings": {"splt.test": 0.1}}, "unknown key"),
        ({"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters())}, "give the class, torch.optim.Adam"),
        ({"lr": lambda round: 0.1}, "argument 'lr' is function; give a number, or a schedule"),
        ({"loss": "cross_entropy"}, "write 'module:loss', as 'torch.nn:CrossEntropyLoss'"),
        ({"observers": [3]}, "argument 'observers' has int"),
        ({"observers": 3}, "argument 'observers' has int"),
        ({"settings": {"split.test": 2.0}}, "split.test"),
        ({"sites": {}}, "argument 'sites'"),
        ({"in_place": True, "same": True}, "site 'north' and site 'south' share one nn.Module"),
        ({"shared": Holder(threading.Lock())}, "argument 'shared' cannot be copied for each participant"),
        ({"shared": functools.cache(lambda: nn.Linear(6, 2))}, "is the network of an earlier call"),
        ({"shared": Complex(torch.full((6, 2), -torch.inf))}, "use register_buffer(..., persistent=False)"),
        ({"shared": torch.jit.script(nn.Linear(6, 2))}, "is a module of torch.jit"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(tables, nets, shared, change, words):
    arguments = {"sites": sites(tables, nets), "method": "fml", "shared": shared, **QUICK, **change}
    if arguments.pop("same", False):
        arguments["sites"] = sites(tables, dict.fromkeys(NAMES, nets["north"]))
    with pytest.raises(UserError) as problem:
        fedmutual.federate(**arguments)
    sentence = str(problem.value)
    assert words in sentence
    assert not any(word in sentence for word in ("pydantic", "\n", ".toml"))


def test_columns_of_frames_are_encoded_in_training_predictions_and_scores(tables, tmp_path):
    frames = {name: t.assign(age=t.iloc[:, 0].where(t.index % 3 > 0), ward="I") for name, t in tables.items()}
    settings = {"data.columns": {"age": {"kind": "number", "fill": 0}, "ward": ["I", "II"]}}
    of_frames = {name: Site(train=frame, label="target") for name, frame in frames.items()}
    run = fedmutual.federate(of_frames, "fedavg", "mlp", settings=settings, out=tmp_path / "run", **QUICK)
    new = frames["north"].iloc[::-1]  # other columns and another order have no effect
    answers = run.predict(new, client="north")
    new.to_csv(tmp_path / "new.csv", index=False)
    from_file = [p.probability for p in fedmutual.predict(tmp_path / "run", tmp_path / "new.csv", client="north")]
    assert from_file == pytest.approx(answers.max(axis=1).tolist())
    assert run.predict(tmp_path / "new.csv", client="north").equals(answers)
    assert fedmutual.Run(tmp_path / "run").predict(new, client="north").equals(answers)  # without the objects
    with pytest.warns(fedmutual.RemarkWarning, match="in the training data"):
        scores = [run.score(rows, "north", label="target").values for rows in (new, tmp_path / "new.csv")]
    assert scores[0] == scores[1]
    np.savez(tmp_path / "new.npz", x=arrays(tables["north"])[0], y=arrays(tables["north"])[1])
    with pytest.raises(UserError, match="give it a CSV file"):
        run.score(tmp_path / "new.npz", "north", label="target")
    of_arrays = of_frames | {"north": Site(train=arrays(tables["north"]))}
    for data, words in (
        (of_frames | {"north": Site(train=new.assign(ward="III"), label="target")}, "holds 'III' in row 0"),
        (of_arrays, "'data.columns' is for the columns of tables"),
    ):
        with pytest.raises(UserError, match=words):
            fedmutual.federate(data, "fedavg", "mlp", settings=settings, **QUICK)


def test_frames_drop_columns_and_keep_groups_as_files_do(tables, tmp_path):
    frames = {i: t.assign(id=np.arange(len(t)), patient=np.arange(len(t)) // 4) for i, t in tables.items()}
    settings = {"data.drop": ["id"], "data.group_by": "patient"}
    of_frames = {i: Site(train=frame, label="target") for i, frame in frames.items()}
    run = fedmutual.federate(of_frames, "fedavg", "mlp", settings=settings, **QUICK)
    assert run.predict(frames["north"].drop(columns=["id", "patient"])).equals(run.predict(frames["north"]))
    with pytest.warns(fedmutual.RemarkWarning, match="in the training data"):
        assert run.score(frames["north"], label="target").values["examples"] == len(frames["north"])
    tables_of_run = tomllib.loads(dump_config(run.config))
    for i, frame in frames.items():
        frame.to_csv(tmp_path / f"{i}.csv", index=False)
        tables_of_run["clients"][i]["data"] = {"name": "csv", "root": str(tmp_path / f"{i}.csv"), "label": "target"}
    of_files = fedmutual.run(parse_config(tables_of_run), tmp_path / "files")
    states = [one.global_model().state_dict() for one in (run, of_files)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for train, words in (
        (arrays(tables["north"]), "give a DataFrame with the column"),
        (tables["north"], "no column 'patient'"),
    ):
        label = None if isinstance(train, tuple) else "target"
        with pytest.raises(UserError, match=words):
            fedmutual.federate(
                {"north": Site(train=train, label=label)}, "fedavg", "mlp", settings={"data.group_by": "patient"}, **QUICK
            )


@pytest.mark.parametrize(
    ("train", "label", "words"),
    [
        (lambda t: t, None, "name the column of its targets"),
        (lambda t: t, "diagnosis", "there is no column 'diagnosis'"),
        (lambda t: t.assign(sex="f"), "target", "the columns 'sex' are not numbers"),
        (lambda t: t.assign(age=np.nan), "target", "the columns 'age' have missing values"),
        (lambda t: t.assign(target=t["target"].where(t.index > 2)), "target", "its label is missing (2 of 100 labels)"),
        (lambda t: t.assign(**{"target.1": t["target"]}), "target", "'target.1' is a copy of the label"),
        (lambda t: pd.concat([t, t[["target"]]], axis=1), "target", "have one name, 'target'"),
        (lambda t: t.assign(**{"Unnamed: 0": 1.0}), "target", "DataFrame.drop(columns=['Unnamed: 0'])"),
        (lambda t: t, "Target", "did you mean 'target'?"),
        (lambda t: pd.concat({"north": t}, axis=1), "target", 'frame.columns = [" ".join(map(str, names))'),
        (lambda t: (np.ma.masked_less(arrays(t)[0], 0), arrays(t)[1]), None, "has masked values, which are missing"),
        (lambda t: (arrays(t)[0], ["ill", "well", "ill ", "ill"] * 25), None, 'data.labels = { "ill " = "ill" }'),
        (lambda t: arrays(t)[0], None, "is ndarray"),
        (lambda t: (arrays(t)[0], arrays(t)[1][:-1]), None, "one value for each of the 100 rows"),
        (lambda t: arrays(t), "target", "label = 'target' names a column"),
        (lambda t: TensorDataset(*map(torch.as_tensor, arrays(t))), "target", "label = 'target' names a column"),
        (lambda t: Endless(), None, "can only be iterated"),
    ],
)
def test_data_that_cannot_be_used_are_named_with_their_site(tables, train, label, words):
    given = sites(tables) | {"north": Site(train=train(tables["north"]), label=label)}
    with pytest.raises(UserError) as problem:
        fedmutual.federate(given, "fedavg", "mlp", **QUICK)
    assert "north" in str(problem.value)
    assert words in str(problem.value)


def test_columns_of_a_frame_are_labels():
    x, y = np.random.default_rng(0).normal(size=(60, 2)), np.random.default_rng(1).integers(0, 2, (60, 2))
    frame = pd.DataFrame({"a": x[:, 0], "fever": y[:, 0], "b": x[:, 1], "cough": y[:, 1]})
    own_sites = {name: Site(train=frame[k::2], label=["cough", "fever"]) for k, name in enumerate(("north", "south"))}
    run = fedmutual.federate(own_sites, "fedavg", "mlp", task="multilabel", **QUICK)
    assert list(run.predict(frame[["b", "a"]].astype("float32"))) == ["cough", "fever"]


@pytest.mark.parametrize(
    "label", [pd.Index(["target"])[0], pd.Index(["fever", "cough"]), np.array(["fever", "cough"]), 7, ("fever", "cough")]
)
def test_the_names_of_columns_in_every_form(tables, label):
    """The name is recorded, so that a table is scored without it."""
    frame = tables["north"].assign(fever=0, cough=1, target=tables["north"]["target"]).rename(columns={"target": 7})
    frame = frame if isinstance(label, int) else frame.rename(columns={7: "target"})
    task = {} if isinstance(label, str | int) else {"task": "multilabel"}
    run = fedmutual.federate({i: Site(train=frame, label=label) for i in "ab"}, "fedavg", "mlp", **task, **QUICK)
    assert run.config.clients["a"].data.label == (str(label) if not task else ("fever", "cough"))
    assert run.score(frame, client="a").values["examples"] == len(frame)


def test_settings_may_be_arrays_and_numbers_of_other_libraries(tables):
    x, y = arrays(tables["north"])
    settings = {
        "data.mean": x.mean(0),
        "data.std": torch.tensor(x.std(0)),
        "data.labels": {0: "ill", 1: "well"},
        "data.classes": pd.Series(["ill", "well"]),
        "training.class_weights": np.array([1.0, 2.0]),
    }
    arguments = QUICK | {"rounds": np.int64(1), "batch_size": np.int32(16), "device": torch.device("cpu")}
    run = fedmutual.federate({i: Site(train=(x, y)) for i in "ab"}, "fedavg", "mlp", settings=settings, **arguments)
    assert run.config.data.mean == tuple(map(float, x.mean(0)))
    assert run.config.training.batch_size == 16
    assert list(run.predict(x)) == ["ill", "well"]


@dataclass(frozen=True)
class Absolute(Regression):
    """A task of the user's own."""

    def fit(self, output, target):
        return (output.reshape(target.shape) - target).abs().mean()


@pytest.mark.parametrize("task", [Absolute, Absolute()])
def test_a_task_may_be_a_class_or_an_object(tables, task):
    x, y = arrays(tables["north"])
    run = fedmutual.federate({i: Site(train=(x, y)) for i in "ab"}, "fml", "mlp", task=task, **QUICK)
    assert run.task("a").fit(torch.zeros(2, 1), torch.ones(2)) == 1
    assert run.predict(x[:3], client="a").shape == (3, 1)


def test_a_table_in_a_file_is_scored_by_a_task_in_memory(tables, tmp_path):
    frame = tables["north"]
    frame.to_csv(tmp_path / "north.csv", index=False)
    run = fedmutual.federate({i: Site(train=frame, label="target") for i in "ab"}, "fml", "mlp", task=Absolute, **QUICK)
    assert run.score(tmp_path / "north.csv", client="a").values["examples"] == len(frame)


def after_a_pass(net):
    net(torch.zeros(2, 6))
    return net


@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 2))),
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 2))),
        lambda: after_a_pass(Holder()),
        lambda: lambda: after_a_pass(Holder(threading.Lock())),
        lambda: lambda: Holder(Locked(nn.Linear(2, 2))),
        lambda: Complex(torch.ones(6, 2, dtype=torch.complex64), persistent=False),
        lambda: Complex(torch.ones(6, 2, dtype=torch.complex64)),
        lambda: Complex(nn.Parameter(torch.ones(6, 2, dtype=torch.complex64))),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:There is a performance drop:UserWarning")
def test_networks_that_torch_cannot_copy_are_trained(tables, make, engine):
    run = fedmutual.federate(sites(tables), "fml", make(), engine=engine, **QUICK)
    assert run.predict(tables["north"].iloc[:3, :-1].astype("float32")).shape == (3, 2)


def test_a_copy_of_weight_norm_has_the_trained_function(tables):
    with pytest.warns(FutureWarning):
        net = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 2)))
    run = fedmutual.federate(sites(tables), "fedavg", net, in_place=True, **QUICK)
    x = torch.randn(4, 6)
    assert torch.equal(run.global_model()(x), net.eval()(x))


NOISED = {"privacy.nets": "both", "privacy.sigma": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_in_eval_mode_stop_a_run(tables, value):
    with pytest.raises(Diverged, match=re.escape(f"the shared model diverged in round 1: it gives {value} for 1 of ")):
        fedmutual.federate(sites(tables), "fml", NotFinite(value), **QUICK)
    with pytest.raises(
        Diverged, match=re.escape(f"client 'north' diverged in round 1: its personal model gives {value} for 1 of ")
    ):
        fedmutual.federate(sites(tables), "independent", NotFinite(value), **QUICK)


@pytest.mark.filterwarnings("ignore")
def test_outputs_that_are_not_finite_have_no_score_beside_noise(tables):
    run = fedmutual.federate(sites(tables), "fml", NotFinite(float("nan")), settings=NOISED, **QUICK)
    assert set(run.history()["metric"]) == {"examples"}
    assert "note in round 2: client 'south': its personal model gives nan for 1 of " in (run.folder / "log.txt").read_text()
    with pytest.raises(UserError, match=r"row 0 of x: the shared model .* gives outputs that are not finite"):
        run.predict(tables["north"].iloc[:3, :-1].astype("float32"))


def test_a_class_may_be_ruled_out_by_minus_infinity(tables):
    run = fedmutual.federate(sites(tables), "fml", NotFinite(-float("inf")), **QUICK)
    assert run.predict(tables["north"].iloc[:1, :-1].astype("float32")).iloc[0].tolist() == [0.0, 1.0]


def test_history_of_a_run_without_scores_is_an_empty_table(tmp_path):
    from fedmutual.results.frame import read_scores

    assert isinstance(read_scores(tmp_path), pd.DataFrame)
    assert read_scores(tmp_path).empty
