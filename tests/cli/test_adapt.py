"""`adapt`: a newcomer takes on a run's shared model, which is read and never written to."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import fedmutual
from fedmutual.config import merge_overrides, parse_config
from fedmutual.studies.adapt import adapt as adapt_in_python

pytestmark = pytest.mark.long

NEWCOMER = """
name = "north"
rounds = 2
data = { name = "digits" }
algorithm = { alpha = 0.4, beta = 0.7 }
training = { local_epochs = 1, batch_size = 8 }
optimizer = { lr = 0.05 }
engine = { name = "inprocess", device = "cpu" }
"""
CNN = 'model = { personal = "cnn1" }\n'
QUICK = ("--examples", "20,40", "--seeds", 2)


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory):
    """A folder for what is trained once, and copied."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def run(small, cli, trained_runs):
    """The folder of a finished run of three clients, and NEWCOMER.toml beside it."""
    if not (trained_runs / "r").exists():
        cli.run("run", small, "--set", "rounds=2", "--out", trained_runs / "r")
    shutil.copytree(trained_runs / "r", "r")
    Path("n.toml").write_text(NEWCOMER)
    return Path("r")


def digest(folder):
    return {
        str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


def adapt(cli, *more, text=NEWCOMER, out="a"):
    Path("n.toml").write_text(text)
    return cli("adapt", "r", "--data", "n.toml", "--out", out, *more)


def state(folder, round=2, half="clients/0"):
    tensors = load_file(Path(folder) / half / f"round-{round}.safetensors")
    return {k.removeprefix("personal."): v for k, v in tensors.items() if half == "server" or k.startswith("personal.")}


def test_every_way_is_an_ordinary_run_and_the_others_are_not_touched(run, cli):
    before = digest(run)
    code, out, err = adapt(cli, *QUICK, text=NEWCOMER + CNN)
    assert code == 0, err
    assert digest(run) == before
    folders = {str(p.parent.relative_to("a")) for p in Path("a").rglob("summary.json")}
    assert folders == {f"{way}/{n}/{s}" for way in ("fml", "scratch", "fine-tune") for n in (20, 40) for s in (0, 1)}
    recorded = json.loads(Path("a/adapt.json").read_text())
    for way, network in (("fml", "cnn1"), ("scratch", "cnn1"), ("fine-tune", "mlp")):
        way_run = fedmutual.Run(f"a/{way}/20/1")
        assert (
            recorded["networks"][way]
            == network
            == json.loads((way_run.folder / "environment.json").read_text())["models"]["personal"]["0"]["name"]
        )
        assert recorded["accuracy"][way]["20"]["1"] == way_run.summary["personal"]["val_accuracy"]["last"]["mean"]
        assert sum(json.loads((way_run.folder / "partition.json").read_text())["clients"]["0"]["counts"]["private"]) == 20
    assert recorded["from"]["round"] == 2
    assert recorded["examples"]["40"] == {"training": 40, "validation": 359}
    assert fedmutual.Run("a/fml/20/0").config.algorithm == {"name": "fml", "alpha": 0.4, "beta": 0.7}
    assert "FML (cnn1)" in out
    output = " ".join(out.split())
    assert "FML's fork of the shared model (mlp)" in output
    forks = output.count(
        "These numbers are of its personal model. Its fork of the shared model, which it may use too, scores "
    )
    assert output.count("against training from scratch it ") == 2
    assert output.count("against fine-tuning FML's shared model it ") == 2 + forks
    assert output.count("against the unchanged shared model it ") == 2
    assert cli("report", "a", "-o", "again.html")[1] == out.replace("a/report.html", "again.html")
    page = Path("a/report.html").read_text()
    assert Path("again.html").read_text() == page
    assert "north, 20 examples" in page
    assert "Fine-tuned FML" in page
    assert "there is no shared model: nothing is shared" in page, "by fine-tuning, and from scratch"
    assert "a part of it stays with the clients" not in page


def test_a_way_starts_from_the_shared_model_or_from_nothing(run, cli):
    """At a learning rate of 0 the networks of the last round are those of the start. RUN is stopped: it has no summary."""
    (run / "summary.json").unlink()
    code, _, err = adapt(cli, "--examples", "20", "--seeds", 1, "--set", "optimizer.lr=0", "--rounds", 1)
    assert code == 0, err
    shared = state(run, 2, "server")
    for folder, half in (("a/fml/20/0", "server"), ("a/fml/20/0", "clients/0"), ("a/fine-tune/20/0", "clients/0")):
        first_state = state(folder, 1, half)
        assert first_state.keys() == shared.keys()
        assert all(torch.equal(first_state[k], shared[k]) for k in shared), folder
    scratch = state("a/scratch/20/0", 1)
    assert not any(torch.equal(scratch[k], shared[k]) for k in shared if k.endswith("weight"))
    adaptation = json.loads(Path("a/adapt.json").read_text())
    assert adaptation["from"]["round"] == 2
    untouched = adaptation["as it is"]["20"]["0"]
    assert untouched == adaptation["accuracy"]["fml"]["20"]["0"] == adaptation["accuracy"]["fine-tune"]["20"]["0"]


def test_fedavg_s_shared_model_is_fine_tuned_where_it_is_given(run, small, cli):
    cli("run", small, "--set", "rounds=1", "--set", "algorithm.name=fedavg", "--out", "avg")
    code, out, err = adapt(cli, "--examples", "20", "--seeds", 1, "--set", "optimizer.lr=0", "--fedavg", "avg")
    assert code == 0, err
    assert "against fine-tuning FedAvg's shared model it " in " ".join(out.split())
    tensors, shared = state("a/fine-tune/20/0"), state("avg", 1, "server")
    assert all(torch.equal(tensors[k], shared[k]) for k in shared)
    code, _, err = adapt(cli, "--fedavg", "r", out="b")
    assert code == 2
    assert "r: is a run of 'fml', and --fedavg must name a run of 'fedavg'" in err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.mean=[0.3]", "data.std=[0.4]"], "key 'data.mean' is [0.3053], and the shared model of avg has [0.3]"),
        (["data.size=[9,9]"], "the shape of the examples is [1, 8, 8], and the shared model of avg has [1, 9, 9]"),
        (['data.labels={0="O"}'], "the classes is '0', '1', "),
    ],
)
def test_a_fedavg_run_on_other_inputs_is_refused(run, small, cli, settings, sentence):
    changes = [x for s in ["rounds=1", "algorithm.name=fedavg", *settings] for x in ("--set", s)]
    cli.run("run", small, *changes, "--out", "avg")
    code, _, err = adapt(cli, "--fedavg", "avg")
    assert code == 2
    assert sentence in err
    assert "\n" not in err.strip()
    assert not Path("a").exists()


def test_arrays_without_columns_do_not_fit_a_run_of_tables(small, cli):
    cells = np.arange(120.0).reshape(60, 2)
    rows = "".join(f"{a},{b},{n % 2}\n" for n, (a, b) in enumerate(cells))
    Path("t.csv").write_text(f"age,crp,label\n{rows}")
    np.savez("n.npz", x=cells, y=np.arange(60) % 2)
    table = "{ name = 'csv', root = 't.csv', mean = [60.0, 60.0], std = [30.0, 30.0] }"
    partition = "partition = { kind = 'iid', clients = 2 }\nsplit = { test = 0.3 }\n"
    small.write_text(partition + NEWCOMER.replace('{ name = "digits" }', table))
    cli.run("run", small, "--set", "model.shared=mlp", "--out", "r")
    code, _, err = adapt(cli, text=NEWCOMER.replace('{ name = "digits" }', "{ name = 'npz', root = 'n.npz' }"))
    assert code == 2
    assert "the columns is [], and the shared model of r has 'age', 'crp'; give the file these, in this order" in err


@pytest.mark.parametrize("out", ["r", "r/adapted", "other", "tuned/x"])
def test_it_never_writes_into_a_run(run, cli, out):
    shutil.copytree("r", "tuned")
    config = Path("tuned/config.toml")
    config.write_text(config.read_text().replace('name = "fml"', 'name = "fedavg"').replace("alpha = 0.4\nbeta = 0.6\n", ""))
    shutil.copytree("r", "other")
    before = digest(Path())
    code, _, err = adapt(cli, *QUICK, "--fedavg", "tuned", out=out)
    assert (code, "choose another folder with --out" in err) == (2, True), err
    assert ("lies in" in err) == (out != "other")
    assert {k: v for k, v in digest(Path()).items() if k != "n.toml"} == {k: v for k, v in before.items() if k != "n.toml"}


def test_a_run_that_holds_an_adaptation_is_reported_as_a_run(run, cli):
    Path("r/adapt.json").write_text("{}")
    out, _ = cli.run("report", "r")
    assert "FML" in out


def test_it_is_gone_on_with_and_never_mixed_with_another_shared_model(run, small, cli):
    first = ("--examples", "20", "--seeds", 1)
    assert adapt(cli, *first)[0] == 0
    before = {k: v for k, v in digest(Path("a")).items() if "/0/" in k}
    code, _, err = adapt(cli, *first)
    assert code == 2
    assert "a: already contains an adaptation; add --resume" in err
    code, _, err = adapt(cli, "--examples", "20,40", "--seeds", 1, "--resume")
    assert code == 0, err
    assert before == {k: v for k, v in digest(Path("a")).items() if "/20/0/" in k}
    cli("run", small, "--set", "rounds=3", "--out", "r", "--resume")
    code, _, err = adapt(cli, *first, "--resume")
    assert code == 2
    assert "a: began with another shared model than that of r after round 3" in err


def test_three_of_the_ten_classes_are_matched_by_name(run, cli):
    digits = load_digits()
    is_kept = np.isin(digits.target, (2, 5, 7))
    names = np.array([f"digit {d}" if d == 7 else str(d) for d in digits.target[is_kept]])
    np.savez("three.npz", x=digits.images[is_kept] / 16, y=names)
    text = NEWCOMER.replace('name = "digits"', 'name = "npz", root = "three.npz"')
    code, _, err = adapt(cli, "--examples", "30", "--seeds", 1, text=text)
    assert code == 2
    assert "its class 'digit 7' is none of the classes '0', '1'" in err
    assert "of the shared model in r; rename it with data.labels, or start from a run that shares only a part" in err
    assert not Path("a").exists()
    text = text.replace('"three.npz"', '"three.npz", labels = { "digit 7" = "7" }')
    code, _, err = adapt(cli, "--examples", "30", "--seeds", 1, text=text)
    assert code == 0, err
    assert "the newcomer's inputs are divided by 1, and the inputs of r were divided by 16" in err
    done = fedmutual.Run("a/fml/30/0")
    assert done.personal_model("0")(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert done.config.data.mean == (0.3053,)
    held = json.loads((done.folder / "partition.json").read_text())["clients"]["0"]["counts"]["private"]
    assert [d for d, n in enumerate(held) if n] == [2, 5, 7]


PART = """
name = "part"
rounds = 1
data = { mean = [0.3], std = [0.4] }
model = { shared = "cnn1", part = "features", personal = "mlp" }
training = { local_epochs = 1, batch_size = 16 }
engine = { device = "cpu" }

[clients.low]
data = { name = "npz", root = "low.npz" }

[clients.high]
data = { name = "npz", root = "high.npz" }
"""


def digits(file, wanted, name="{}"):
    """Some digits, in a file whose labels are names."""
    digits = load_digits()
    is_kept = np.isin(digits.target, wanted)
    np.savez(file, x=digits.images[is_kept] / 16, y=np.array([name.format(d) for d in digits.target[is_kept]]))


@pytest.fixture
def parts(tmp_path, in_tmp_path, cli, trained_runs):
    """The folders of two runs that share a part, `fml` and `fedavg`, and new.npz with other classes."""
    if (trained_runs / "parts").exists():
        shutil.copytree(trained_runs / "parts", tmp_path, dirs_exist_ok=True)
        return
    digits("low.npz", range(5))
    digits("high.npz", range(4, 10))
    digits("new.npz", (2, 5, 7), "kind {}")
    Path("part.toml").write_text(PART)
    for name in ("fml", "fedavg"):
        cli.run("run", "part.toml", "--set", f"algorithm.name={name}", "--out", name)
    shutil.copytree(tmp_path, trained_runs / "parts")


TO_A_PART = NEWCOMER.replace('name = "digits"', 'name = "npz", root = "new.npz"')
STILL = ("--set", "optimizer.lr=0", "--rounds", 1, "--examples", "30", "--seeds", 1)


def test_a_newcomer_to_a_shared_part_has_its_own_outputs(parts, cli):
    Path("n.toml").write_text(TO_A_PART + 'model = { personal = "mlp" }\n')
    out, _ = cli.run("adapt", "fml", "--data", "n.toml", "--fedavg", "fedavg", "--out", "a", *STILL)
    assert "as it is" not in out
    for way, source in (("fml", "fml"), ("fine-tune", "fedavg")):
        shared, newcomer_state = state(source, 1, "server"), load_file(f"a/{way}/30/0/server/round-1.safetensors")
        assert newcomer_state.keys() == shared.keys()
        assert all(torch.allclose(newcomer_state[k], shared[k]) for k in shared), way
        assert fedmutual.Run(f"a/{way}/30/0").meme("0")(torch.zeros(1, 1, 8, 8)).shape == (1, 3)
    adaptation = json.loads(Path("a/adapt.json").read_text())
    assert adaptation["networks"] == {"fml": "mlp", "scratch": "mlp", "fine-tune": "cnn1"}
    assert all(adaptation["accuracy"][way]["30"]["0"] > 0 for way in adaptation["accuracy"])


def test_a_newcomer_to_a_shared_part_chooses_its_adaptor(parts, cli):
    for model in ('adaptor = "rest"', 'adaptor = "rest", part = "features"', 'adaptor = "rest", part = ["features"]'):
        Path("n.toml").write_text(f"{TO_A_PART}model = {{ {model} }}\n")
        cli.run("adapt", "fml", "--data", "n.toml", "--out", "a", *STILL)
        for way in ("fml", "fine-tune"):
            done = fedmutual.Run(f"a/{way}/30/0")
            assert (done.config.model.adaptor, done.config.model.part) == ("rest", ("features",))
            assert {k for k in done.meme("0").state_dict() if k.startswith("classifier.fc2")}, "cnn1's own further layers"
        shutil.rmtree("a")


def test_a_whole_fedavg_model_beside_a_part_must_fit_the_newcomer_s_data(parts, cli):
    """Her data decide: the run that shares a part may be on any other."""
    keys = {"data.root": "new.npz", "data.name": "npz", "algorithm.name": "fedavg", "model.shared": "cnn1"}
    keys |= {"data.mean": [0.3], "data.std": [4.0], "partition.clients": 2, "engine.device": "cpu", "rounds": 1}
    fedmutual.run(parse_config(merge_overrides({}, keys)), "whole")
    Path("n.toml").write_text(TO_A_PART)
    command = ("adapt", "fml", "--data", "n.toml", "--fedavg", "whole", "--out", "a", *STILL)
    for settings, sentence in (
        (["data.mean=[0.3]", "data.std=[0.4]"], "n.toml: key 'data.std' is [0.4], and the shared model of whole has"),
        (["data.size=[12,12]"], "is [1, 12, 12], and the shared model of whole has [1, 8, 8]; set data.size"),
        (['data.labels={"kind 2"="two"}'], "and the shared model of whole has 'kind 2', "),
    ):
        assert sentence in cli.fail(*command, *(x for s in settings for x in ("--set", s)))
    cli.run(*command, "--set", "data.mean=[0.3]", "--set", "data.std=[4.0]")
    tensors, shared = state("a/fine-tune/30/0", 1), state("whole", 1, "server")
    assert all(torch.equal(tensors[k], shared[k]) for k in shared)


def test_a_newcomer_to_a_shared_part_brings_its_own_kind_of_data(parts, cli):
    """Three channels at another size, where the run had one: nothing of it is put on them."""
    rng = np.random.default_rng(0)
    np.savez("colour.npz", x=rng.random((80, 3, 12, 12), dtype=np.float32), y=np.arange(80) % 3)
    cli.run("run", "part.toml", "--out", "end", "--set", "model.part=features.conv2", "--set", "model.adaptor=rest")
    Path("n.toml").write_text(NEWCOMER.replace('name = "digits"', 'name = "npz", root = "colour.npz"'))
    cli.run("adapt", "end", "--data", "n.toml", "--out", "a", *STILL)
    for way in ("fml", "scratch", "fine-tune"):
        data_config = fedmutual.Run(f"a/{way}/30/0").config.data
        assert (data_config.mean, data_config.std, data_config.size) == (None, None, None)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ('part = "classifier"', "key 'model.part' is 'classifier', and fml has features; remove the key"),
        ('shared = "mlp"', "key 'model.shared' is 'mlp', and fml has cnn1; remove the key"),
        ('start = "server"', "key 'model.start' has no place here: it is set by each way"),
        ("part = 3", "key 'model.part'"),
    ],
)
def test_a_newcomer_file_must_agree_with_the_part_of_the_run(parts, cli, model, sentence):
    Path("n.toml").write_text(f"{TO_A_PART}model = {{ {model} }}\n")
    assert sentence in cli.fail("adapt", "fml", "--data", "n.toml", "--out", "a", *STILL)


def test_a_size_above_the_available_examples_is_left_out(run, cli):
    code, _, err = adapt(cli, "--examples", "20,5000,all", "--seeds", 1, "--set", "rounds=1")
    assert code == 0, err
    assert "there are 1438 training examples, so --examples 5000 is left out" in err
    assert json.loads(Path("a/adapt.json").read_text())["examples"]["all"] == {"training": 1438, "validation": 359}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rounds = 1", "n.toml: the key 'data.name' is missing, the source of the newcomer's examples"),
        (
            NEWCOMER + "partition = { clients = 3 }",
            "n.toml: key 'partition' has no place here: a newcomer is one participant",
        ),
        (NEWCOMER + 'model = { shared = "cnn1" }', "n.toml: key 'model.shared' is 'cnn1', and r has mlp; remove the key"),
        (NEWCOMER + 'model = { part = "features" }', "n.toml: key 'model.part' is 'features', and r has unset"),
        (NEWCOMER + "model = 3", "n.toml: key 'model'"),
        (NEWCOMER + 'model = { start = "own" }', "n.toml: key 'model.start' has no place here: it is set by each way"),
        (NEWCOMER.replace("alpha", 'name = "fedavg", alph'), "unknown key 'algorithm.alph"),
        (
            NEWCOMER.replace("alpha = 0.4, beta = 0.7", 'name = "fedavg"'),
            "n.toml: key 'algorithm.name': a newcomer cannot adapt by 'fedavg', because its class does not declare",
        ),
        (
            NEWCOMER.replace("alpha = 0.4, beta = 0.7", 'name = "proxyfl"'),  # a subclass does not inherit `adapt_rival`
            "n.toml: key 'algorithm.name': a newcomer cannot adapt by 'proxyfl', because its class does not declare",
        ),
        (
            NEWCOMER.replace('"digits"', '"digits", classes = ["1", "2"]'),
            "n.toml: key 'data.classes' is ['1', '2'], and r has",
        ),
        (NEWCOMER.replace('"digits"', '"digits", size = [9, 9]'), "has [1, 8, 8]; set data.size = [8, 8]"),
        (NEWCOMER.replace('"digits"', '"digits", mean = [0.5], std = [1]'), "n.toml: key 'data.mean' is [0.5], and"),
        (
            NEWCOMER.replace('"digits"', '"digits", mean = "federated", std = "federated"'),
            "n.toml: 'data.mean' and 'data.std' cannot be 'federated' of a newcomer; remove both keys",
        ),
        (NEWCOMER + 'model = { personal = "lenet5" }', "takes images of at least 12 x 12 pixels"),
        (NEWCOMER + "roundz = 3", "n.toml: unknown key 'roundz'; did you mean 'rounds'?"),
    ],
)
def test_what_contradicts_the_run_is_refused_in_a_sentence(run, cli, text, sentence):
    code, out, err = adapt(cli, text=text)
    assert (code, out) == (2, ""), err
    assert sentence in err
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere",), "nowhere: is not a run's folder, because it has no config.toml"),
        (("r", "--examples", "20,x"), "--examples 20,x: 'x' is no number of examples; write for example 50,100,all"),
        (("r", "--examples", "20,20"), "--examples 20,20: '20' comes twice"),
        (("r", "--examples", "9999"), "--examples: n.toml has 1438 training examples; name fewer, or all"),
    ],
)
def test_a_wrong_word_is_refused_in_a_sentence(run, cli, arguments, sentence):
    assert sentence in cli.fail("adapt", *arguments, "--data", "n.toml", "--out", "a")


def test_a_run_that_shares_nothing_has_nothing_to_adapt(run, small, cli):
    public = ("split.public=0.3", "algorithm.public_batch=4", "training.local_steps=1")
    for name, more in {"independent": (), "centralised": (), "fedh2l": public}.items():
        changes = [word for change in ("rounds=1", f"algorithm.name={name}", *more) for word in ("--set", change)]
        cli.run("run", small, *changes, "--out", name)
        assert f"{name}: its algorithm shares no model; name the folder of a run of fml or fedavg" in cli.fail(
            "adapt", name, "--data", "n.toml", "--out", "a"
        )


def test_an_adaptation_without_seeds_is_refused(run):
    with pytest.raises(fedmutual.ConfigError, match="seeds = 0"):
        adapt_in_python(run, "n.toml", "a", seeds=0)
    assert not Path("a").exists()


def test_what_is_unfinished_is_not_shown(run, cli):
    from fedmutual.report.adaptation import summarise_adaptation

    adapt(cli, "--examples", "20", "--seeds", 1)
    recorded = json.loads(Path("a/adapt.json").read_text())
    Path("a/adapt.json").write_text(json.dumps({k: recorded[k] for k in ("format", "from", "fine-tuned")}))
    with pytest.raises(fedmutual.RunError, match="a: the adaptation there is not finished"):
        summarise_adaptation(Path("a"))
    shutil.rmtree("a")
    with pytest.raises(fedmutual.RunError, match="there is no such file"):
        summarise_adaptation(Path("a"))


def test_at_alpha_equal_beta_two_equal_nets_teach_each_other_nothing_in_round_one(run, cli):
    """KL and its gradient are 0, so mutual learning from the server's model is fine-tuning at alpha times the rate."""
    options = (
        "--examples",
        "40",
        "--seeds",
        1,
        "--rounds",
        1,
        "--set",
        "optimizer.weight_decay=0",
        "--set",
        "algorithm.beta=0.4",
    )
    assert adapt(cli, *options, out="mutual")[0] == 0
    assert adapt(cli, *options, "--set", "optimizer.lr=0.02", out="tuned")[0] == 0
    mutual, tuned = state("mutual/fml/40/0", 1), state("tuned/fine-tune/40/0", 1)
    assert all(torch.allclose(mutual[k], tuned[k], atol=1e-6) for k in tuned)
