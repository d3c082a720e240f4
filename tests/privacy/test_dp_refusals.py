"""What would void epsilon is refused before anything is trained, in one sentence with the reason and the fix."""

from importlib import util

import pytest
import torch

from fedmutual.algorithms import FML
from fedmutual.config import parse_config
from fedmutual.engines.select import choose_engine
from fedmutual.errors import ConfigError
from fedmutual.federation import build
from fedmutual.federation.networks import Workload
from fedmutual.privacy.rules import list_remarks
from fedmutual.studies.run import can_stack
from noised import client
from toy import difference, federation


def config(nets="meme", algorithm=None, **further_tables):
    privacy = {"nets": nets, "sigma": 1.0} | further_tables.pop("privacy", {})
    return parse_config(
        {
            "rounds": 3,
            "partition": {"clients": 2, "examples": 40},
            "algorithm": {"name": "fml", "beta": 1.0} if algorithm is None else algorithm,
            "privacy": {k: v for k, v in privacy.items() if v is not None},
            "engine": {"device": "cpu"} | further_tables.pop("engine", {}),
            **further_tables,
        }
    )


def refused(*words, **settings):
    """The sentence by which these settings are refused."""
    with pytest.raises(ConfigError) as caught:
        build.build(config(**settings)).build_client("0")
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence
    return sentence


def moving(start, end, shape="linear", **more):
    return {"name": "fml", "beta": {"start": start, "end": end, "shape": shape, **more}}


@pytest.mark.parametrize(
    ("algorithm", "round"),
    [
        ({"name": "fml"}, 1),
        ({"name": "fml", "beta": 0.9999}, 1),
        (moving(1.0, 0.5), 2),
        (moving(0.5, 1.0), 1),
        (moving(1.0, 0.9, "step", at=0.5), 3),
    ],
)
def test_a_meme_that_is_taught_is_refused(algorithm, round):
    refused("beta = 1 in every round", f"in round {round}", "without noise", "'both'", algorithm=algorithm)
    build.build(config("both", algorithm))


def test_proxyfl_with_noise_on_the_proxy_alone_is_refused_as_it_was_published():
    """Its private model, without noise, teaches the proxy."""
    refused("beta = 1 in every round", "without noise", "'both'", algorithm={"name": "proxyfl", "beta": 0.5})
    for nets, beta in (("meme", 1.0), ("both", 0.5)):
        made = build.build(config(nets, {"name": "proxyfl", "beta": beta}))
        assert made.build_client("0").privacy.nets == ({"meme"} if nets == "meme" else {"personal", "meme"})


@pytest.mark.parametrize("training", [{"class_weights": "balanced"}, {"patience": 2}])
def test_keys_that_read_private_rows_outside_of_the_steps_are_refused(training):
    (key,) = training
    refused(f"'training.{key}'", "epsilon does not count", training=training)
    refused(f"'clients.1.training.{key}'", clients={"1": {"training": training}})


def test_a_client_with_a_beta_that_teaches_its_meme_is_refused():
    refused("client '1'", "beta = 1", clients={"1": {"algorithm": {"beta": 0.5}}})


@pytest.mark.parametrize("algorithm", [{"name": "fml", "beta": 1}, moving(1.0, 1.0), moving(1.0, 0.2, "step", at=1.0)])
def test_a_meme_that_learns_from_labels_alone_is_taken(algorithm):
    assert build.build(config("meme", algorithm)).build_client("0").privacy.nets == {"meme"}


def test_counts_of_examples_are_refused():
    for name in ("fedavg", "fedprox"):
        refused("weighting = 'uniform'", "number of examples", algorithm={"name": name})
        build.build(config(algorithm={"name": name, "weighting": "uniform"}))


@pytest.mark.parametrize("name", ["fedh2l", "fedmd"])
def test_methods_that_send_posteriors_have_no_meme_to_noise(name):
    refused("has no meme", "'both'", algorithm={"name": name, "public_batch": 4}, split={"public": 0.5})


@pytest.mark.parametrize("name", ["independent", "centralised"])
def test_what_leaves_nothing_needs_no_noise_and_says_so(name):
    made = build.build(config(algorithm={"name": name}))
    assert made.build_client(made.clients[0]).privacy is None
    assert any("'privacy.nets' has no effect" in note for note in made.make_plan({}).notes)


def test_batchnorm_is_refused_in_student_and_teacher():
    for model in ({"shared": "resnet18"}, {"shared": "mlp", "personal": "resnet18"}):
        for nets in ("meme", "both"):
            refused("BatchNorm2d", "resnet18-gn", nets=nets, model=model)
    build.build(config(model={"shared": "resnet18-gn"})).build_client("0")


def test_settings_that_void_epsilon_are_refused():
    refused("keep_best", "scores", records={"keep_best": True})
    refused("stacked", "'auto'", engine={"name": "stacked"})
    refused("precision", "'float32'", engine={"precision": "bf16"})
    refused("privacy.sigma", "--epsilon", privacy={"sigma": None})
    refused("group_by", privacy={"unit": "group"})
    refused("group_rows", "no effect", privacy={"group_rows": 3})
    tables = {"data": {"name": "digits", "mean": [0.3], "std": [0.4]}}
    refused("clients.a.data.mean", "in [data]", clients={"a": tables, "b": {"data": {"name": "digits"}}}, partition={})
    for key, value in (("sigma", 0.0), ("clip", -1.0), ("delta", 1.0), ("epsilon", 0), ("nets", "personal")):
        refused(f"privacy.{key}", privacy={key: value})


def test_an_unreviewed_algorithm_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from fedmutual.algorithms import FedAvg\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Plain(FedAvg):\n"
        "    pass\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Ready(FedAvg):\n"
        "    dp_ready: ClassVar[bool] = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    refused(
        "does not declare that only its gradient steps read private rows",
        "mine:Plain",
        algorithm={"name": "mine:Plain", "weighting": "uniform"},
    )
    made = build.build(config(algorithm={"name": "mine:Ready", "weighting": "uniform"}))
    assert made.noised == {"meme"}


def test_a_missing_extra_is_named(monkeypatch):
    real = util.find_spec
    monkeypatch.setattr("fedmutual.privacy.accountant.find_spec", lambda name: None if name == "opacus" else real(name))
    refused("pip install 'fedmutual[privacy]'")


def test_keys_without_effect_are_remarked():
    notes = build.build(config("none", privacy={"clip": 2.0})).make_plan({}).notes
    assert any("'privacy.clip', 'privacy.sigma'" in note for note in notes)


def test_the_limits_of_epsilon_are_remarked():
    remarks = [note for note in build.build(config()).make_plan({}).notes if "epsilon" in note]
    assert len(remarks) == 1
    assert "scores" in remarks[0]


def test_a_delta_that_promises_nothing_is_refused():
    refused("privacy.delta", "40 examples", "0.025", privacy={"delta": 0.025})
    build.build(config(privacy={"delta": 0.0249})).build_client("0")


def test_the_privacy_remark_says_that_first_weights_are_not_counted(tmp_path):
    assert not any("first weights" in note for note in build.build(config()).make_plan({}).notes)
    for key in ("weights", "pretrained"):
        assert len(list_remarks(frozenset({"meme"}), config(model={key: str(tmp_path)}))) == 2
    tables = {"0": {"model": {"pretrained": str(tmp_path)}}}
    assert len(list_remarks(frozenset({"meme"}), config(clients=tables))) == 2


def test_clients_with_noise_are_not_stepped_as_one():
    assert not can_stack([config(engine={"device": "cpu"})] * 2)
    cuda, work = torch.device("cuda"), {"0": Workload(1, 1), "1": Workload(1, 1)}
    assert choose_engine("auto", None, cuda, work).name == "stacked"
    assert choose_engine("auto", None, cuda, work, "no stack").name == "inprocess"
    results = []
    for engine in ("inprocess", "stacked"):
        algorithm = FML(local_epochs=1, batch_size=8, beta=1.0).algorithm()
        ours = [client(i, algorithm, ["meme"]) for i in ("0", "1", "2")]
        results.append(federation(algorithm, ours, engine=engine))
        assert all(one.privacy.steps == 9 for one in ours)
    assert difference(*results) == 0.0


def test_whether_a_client_stops_does_not_depend_on_what_has_no_noise():
    algorithm = FML(local_epochs=1, batch_size=8, beta=1.0).algorithm()
    one = client("0", algorithm, ["meme"])
    with torch.no_grad():
        one.nets["personal"][0].weight.fill_(float("nan"))
    last = federation(algorithm, [one], rounds=1)
    assert all(v.isfinite().all() for v in last.values())
