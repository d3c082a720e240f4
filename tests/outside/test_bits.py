"""The bits of one short run of each method, on each engine: equal wherever docs/engines.md promises it."""

import hashlib
import json

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import fedmutual
from outside.internals import run_sites, write_sites
from outside.snapshots import FOLDER

pytestmark = pytest.mark.long

METHODS = {
    "fml": ("algorithm.alpha=0.4", "algorithm.beta=0.7"),
    "centralised": (),
    "fedh2l": ("training.local_steps=3", "algorithm.public_batch=8"),
    "fedmd": ("training.local_steps=3", "algorithm.public_batch=8", "algorithm.transfer_epochs=1"),
    "aggregate": ("training.local_steps=3",),
}
"""Method -> what is set beside its name. engines/test_equal.py compares the others, without a command."""
EXACT = [(method, "processes") for method in METHODS] + [("fml", "cluster"), ("fedh2l", "cluster")]
ROUNDING = {"rtol": 1e-3, "atol": 1e-5}


def run(cli, method, engine, out, *more):
    """Run the experiment -> its folder."""
    settings = (f"algorithm.name={method}", f"engine.name={engine}", *METHODS[method], *more)
    cli.run("run", FOLDER / "experiment.toml", "--out", out, *(w for text in settings for w in ("--set", text)))
    return out


def read_state(folder):
    """All that the server and the clients carry after the last round: file and name -> tensor."""
    files = sorted(folder.glob("**/round-2.safetensors"))
    return {f"{path.parent.relative_to(folder).as_posix()} {k}": v for path in files for k, v in load_file(path).items()}


def read_scores(folder):
    """Every score: round, model, client and rows -> accuracy and loss."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        f"{line['round']} {score['model']} {score['client']} {score['data']}": [score["accuracy"], score["loss"]]
        for line in lines
        for score in line["scores"]
    }


def digest(state, scores):
    """SHA-256 of names, types, shapes and bits, and of all scores."""
    made = hashlib.sha256(json.dumps(scores, sort_keys=True).encode())
    for name, value in sorted(state.items()):
        made.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        made.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for the runs of this process."""
    return tmp_path_factory.mktemp("bits")


@pytest.fixture
def reference(cli, folders):
    """The folder of a method's run by the engine that runs all clients in this process; made once."""

    def find(method):
        path = folders / method
        return path if path.exists() else run(cli, method, "inprocess", path)

    return find


@pytest.mark.parametrize(("method", "engine"), EXACT)
def test_an_engine_has_the_same_bits(method, engine, reference, cli, tmp_path, request):
    address = ()
    if engine == "cluster":
        address = (f"engine.address={request.getfixturevalue('two_nodes').address}",)
    engine_run = run(cli, method, engine, tmp_path / "run", *address)
    reference_run = reference(method)
    assert json.loads((engine_run / "environment.json").read_text())["engine"]["name"] == engine
    assert digest(read_state(engine_run), read_scores(engine_run)) == digest(
        read_state(reference_run), read_scores(reference_run)
    )


@pytest.fixture
def two_nodes():
    """The Ray cluster that all tests share."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra fedmutual[ray])")
    from nodes import two_nodes

    return two_nodes()


@pytest.mark.parametrize("method", METHODS)
def test_stacked_clients_are_equal_but_for_rounding(method, reference, cli, tmp_path):
    actual, expected = read_state(run(cli, method, "stacked", tmp_path / "run")), read_state(reference(method))
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], **ROUNDING, msg=lambda text, name=name: f"{name}: {text}")


SITES = {
    "fml": ({"alpha": 0.4, "beta": 0.7}, False),
    "fedavg": ({}, False),
    "fedprox": ({"mu": 0.1}, False),
    "independent": ({}, False),
    "fedh2l": ({"public_batch": 8}, True),
    "fedmd": ({"public_batch": 8, "transfer_epochs": 1}, True),
    "aggregate": ({}, True),
}
"""Method -> its settings, and whether it needs a public seed set."""


@pytest.mark.sites
@pytest.mark.parametrize("method", SITES)
def test_real_sites_have_the_bits_of_one_process(method, cli, tmp_path):
    settings, has_public = SITES[method]
    file, sites, together = write_sites(tmp_path, {"name": method, **settings}, has_public)
    states = run_sites(file, sites, tmp_path / "server")
    (tmp_path / "together.toml").write_text(tomli_w.dumps(together))
    cli.run("run", tmp_path / "together.toml", "--out", tmp_path / "one")
    one_process, server = fedmutual.Run(tmp_path / "one"), fedmutual.Run(tmp_path / "server")
    assert server.summary["personal"] == one_process.summary["personal"]
    receivers = 2 if method == "fedh2l" else 1  # each site sends to both others, or to the server
    assert server.summary["bytes"] == one_process.summary["bytes"] | {"up": receivers * one_process.summary["bytes"]["up"]}
    assert server.complete == one_process.complete
    pairs = [(server.global_model(), one_process.global_model())] if one_process.complete else []
    if method not in ("fedavg", "fedprox"):
        pairs += [
            (fedmutual.Run(path).personal_model(name), one_process.personal_model(name)) for name, path in states.items()
        ]
    assert pairs
    for site_model, expected_model in pairs:
        assert digest(site_model.state_dict(), {}) == digest(expected_model.state_dict(), {})
