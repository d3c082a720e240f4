"""The sample run folders open, are reported and predict: each of their models is the one of its files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedmutual
from log_lines import read_lines
from outside import samples as sample_folders
from outside.state import assert_equal, under

pytestmark = pytest.mark.long

MODELS = {
    "fml": (True, ["0", "1"], ["0", "1"]),
    "records": (True, ["0", "1"], ["0", "1"]),
    "part": (False, ["0", "1"], ["0", "1"]),
    "fedh2l": (False, ["0", "90"], []),
    "compare/fml": (True, ["0", "1"], ["0", "1"]),
    "compare/fedavg": (True, [], ["0", "1"]),
    "compare/independent": (False, ["0", "1"], []),
    "compare/centralised": (True, [], []),
    "adapt/fml": (True, ["0"], ["0"]),
    "adapt/fine-tune": (False, ["0"], []),
    "adapt/scratch": (False, ["0"], []),
    "site": (True, ["north"], ["north"]),
    "server": (True, [], []),
}
"""Kind of run folder -> whether it has a complete shared model, the clients with a personal model, those with a fork."""


@pytest.mark.parametrize("kind", sample_folders.RUNS)
def test_a_sample_opens(kind, samples):
    """The models of a sample equal the tensors in its files."""
    folder = samples / sample_folders.RUNS[kind]
    run = fedmutual.Run(folder)
    has_global, personal, forks = MODELS[kind]
    assert (run.folder, run.finished, run.complete) == (folder, True, has_global and kind != "compare/centralised")
    assert run.round == run.config.rounds == run.summary["rounds"]
    assert run.summary["algorithm"] == run.config.algorithm["name"]
    generation = f"round-{run.round}.safetensors"
    server = load_file(folder / "server" / generation) if (folder / "server" / generation).exists() else {}
    if kind == "compare/centralised":
        server = under("personal.", load_file(folder / "clients" / "pooled" / generation))
    if has_global:
        assert_equal(run.global_model().state_dict(), server)
        assert not run.global_model().training
    else:
        with pytest.raises(fedmutual.RunError, match="no complete global model"):
            run.global_model()
    for client in personal:
        state = load_file(folder / "clients" / client / generation)
        assert_equal(run.personal_model(client).state_dict(), under("personal.", state))
    for client in forks:
        state = load_file(folder / "clients" / client / generation)
        assert_equal(run.meme(client).state_dict(), server | under("meme.", state))
    for read in (run.personal_model, run.meme, run.task):
        with pytest.raises(fedmutual.RunError, match="nobody"):
            read("nobody")


def test_the_best_weights_of_a_sample(samples):
    run = fedmutual.Run(samples / "records")
    for client in ("0", "1"):
        best = load_file(run.folder / "clients" / client / "best.safetensors")
        assert_equal(run.personal_model(client, best=True).state_dict(), under("personal.", best))
        assert 1 <= run.best_round(client) <= 2
    assert_equal(run.global_model(best=True).state_dict(), load_file(run.folder / "server" / "best.safetensors"))
    assert 1 <= run.best_round() <= 2


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        *((name, [name]) for name in ("fml", "records", "part", "fedh2l", "sites/server/wards", "sites/north/state/wards")),
        ("compare", [f"compare/{method}/0" for method in ("fml", "fedavg", "independent", "centralised")]),
    ],
)
def test_a_sample_is_reported(name, printed, samples, cli):
    """The table has the clients' mean after the last round, in percent, as summary.json has it."""
    out, _ = cli.run("report", name, "-o", "page.html")
    page = (samples / "page.html").read_text()
    assert page.count("<svg") >= 1
    for folder in printed:
        accuracy = fedmutual.Run(samples / folder).summary["personal"]["val_accuracy"]["last"]["mean"]
        assert f"{100 * accuracy:.1f}" in out, (folder, out)


def test_an_adaptation_is_reported(samples, cli):
    out, _ = cli.run("report", "adapt", "-o", "page.html")
    for sizes in json.loads((samples / "adapt/adapt.json").read_text())["accuracy"].values():
        assert f"{100 * sizes['40']['0']:.1f}" in out


ANSWERS = [
    ("fml", None, False),
    ("fml", "0", False),
    ("fml", "1", False),
    ("records", "1", True),
    ("records", None, True),
    ("part", "1", False),
    ("fedh2l", "90", False),
    ("compare/fedavg", "0", False),
    ("compare/centralised", None, False),
    ("adapt/scratch", "0", False),
    ("site", "north", False),
    ("server", None, False),
]


@pytest.mark.parametrize(("kind", "client", "best"), ANSWERS)
def test_a_sample_predicts(kind, client, best, samples, cli, digit):
    """The probabilities are the softmax of the model's logits for the example as environment.json scales it."""
    folder = sample_folders.RUNS[kind]
    options = [*(("--client", client) if client else ()), *(("--best",) if best else ())]
    out, _ = cli.run("predict", folder, digit, *options, "--json")
    answer = json.loads(out)
    run = fedmutual.Run(folder)
    has_own = client is not None and client in MODELS[kind][1]
    net = run.personal_model(client, best) if has_own else run.global_model(best)
    about = json.loads((samples / folder / "environment.json").read_text())
    known = about["clients"].get(client or next(iter(about["clients"])), about)
    scaling, classes = known["scaling"], known["classes"]
    x = torch.from_numpy(np.load(digit)["x"]).float() / scaling["divisor"]
    logits = net((x - scaling["mean"][0]) / scaling["std"][0])
    expected = dict(zip(classes, logits.double().softmax(1)[0].tolist(), strict=True))
    assert answer["probabilities"] == pytest.approx(expected, abs=1e-5)
    assert answer["class"] == max(expected, key=expected.get)
    (prediction,) = fedmutual.predict(folder, [digit], client, best)
    assert (prediction.label, dict(prediction.ranked)) == (answer["class"], answer["probabilities"])


def test_json_for_scripts(samples, cli, digit, snapshots):
    prediction = json.loads(cli("predict", "fml", digit, "--json")[1])
    ledger = json.loads(cli("ledger", "sites/north/state", "--json")[1])
    assert ledger["left"] == read_lines(samples / "sites/north/state/wards/left.jsonl")
    assert ledger["totals"]["server"]["bytes"] == sum(line["bytes"] for line in ledger["left"])
    keys = {"predict": sorted(prediction), "ledger": sorted(ledger), "totals": sorted(ledger["totals"]["server"])}
    snapshots.check("command_line", "--json", keys)
