"""What `list keys` and `list algorithms` say of a configuration, held against the schema."""

from pathlib import Path

import pytest

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import list_keys
from fedmutual.config.reference import describe_algorithms, list_reference_keys, render_page
from fedmutual.sites import reference as of_sites
from fedmutual.sites.schema import SiteFile

KEYS = {key.name: key for key in list_reference_keys()}


def test_every_key_is_there_once_in_the_order_of_the_schema() -> None:
    names = [key.name for key in list_reference_keys()]
    assert len(names) == len(set(names))
    named_by_users = ("clients.", "data.columns.NAME.")
    assert {name for name in names if not name.startswith(named_by_users)} == set(list_keys())
    assert names[:4] == ["name", "seed", "rounds", "data.name"]
    tables = list(dict.fromkeys(name.split(".")[0] for name in names if "." in name))
    expected = ["data", "partition", "split", "algorithm", "model", "training", "optimizer", "server", "engine", "records"]
    expected += ["share", "privacy", "clients"]
    assert tables == expected
    assert [line[3:] for line in render_page().splitlines() if line.startswith("## ")] == expected


def test_every_key_has_a_meaning_in_one_line() -> None:
    assert [key.name for key in list_reference_keys() if not key.about.strip() or "\n" in key.about] == []


@pytest.mark.parametrize(
    ("name", "type", "default"),
    [
        ("rounds", "whole number >= 1", "20"),
        ("data.name", "text", '"digits"'),
        ("data.root", "path", "unset"),
        ("data.classes", "list of text", "unset"),
        ("data.labels", "table of text", "{}"),
        ("data.size", "list of whole numbers >= 1", "unset"),
        ("data.std", 'list of numbers > 0 or "federated"', "unset"),
        ("data.resident", "true or false", "unset"),
        ("partition.kind", '"iid", "shards", "dirichlet", "pfllib", "domains" or "file"', '"iid"'),
        ("partition.clients", "whole number >= 1", "5"),
        ("split.validation", "number >= 0, < 1", "unset"),
        ("optimizer.lr", "number or schedule", "0.01"),
        ("optimizer.weight_decay", "number >= 0", "0.0005"),
        ("optimizer.amsgrad", "true or false", "false"),
        ("server.aggregate", '"mean", "median" or "trimmed-mean"', '"mean"'),
        ("server.trim", "number >= 0, < 0.5", "0.34"),
        ("server.sum", '"float" or "fixed"', '"float"'),
        ("algorithm.name", "text", '"fml"'),
        ("algorithm.alpha", "number or schedule", "0.5"),
        ("algorithm.temperature", "number", "1.0"),
        ("algorithm.weighting", '"samples" or "uniform"', '"samples"'),
        ("clients.ID.algorithm.mu", "number or schedule", "the federation's"),
        ("clients.ID.share.metrics", '"none", "accuracy" or "all"', "the federation's"),
        ("clients.ID.training.batch_size", "whole number >= 1, <= 1000000000", "the federation's"),
    ],
)
def test_types_and_defaults_in_words(name: str, type: str, default: str) -> None:
    assert KEYS[name][1:3] == (type, default)


def test_a_setting_of_an_algorithm_names_its_owners_and_a_client_has_those_that_are_its_own_to_set() -> None:
    assert KEYS["algorithm.alpha"].about.startswith("fml and proxyfl: ")
    assert KEYS["algorithm.mu"].about.startswith("fedprox: ")
    assert KEYS["algorithm.head_epochs"].about.startswith("fedrep: ")
    assert KEYS["algorithm.weighting"].about.startswith("fedavg, fedprox, fedavg-ft, ditto")
    assert "algorithm.bench" not in KEYS, "what a run fills in is no key"
    client_settings = {name.rpartition(".")[2] for name in KEYS if name.startswith("clients.ID.algorithm.")}
    assert client_settings >= {"alpha", "beta", "lam", "mix", "mu", "proto_lam"}
    assert not client_settings & {"weighting", "temperature", "adaptive", "head_epochs"}


def test_every_algorithm_has_its_own_line() -> None:
    descriptions = describe_algorithms()
    assert list(descriptions) == list(ALGORITHMS)
    assert len(set(descriptions.values())) == len(descriptions)
    assert descriptions["centralised"].startswith("One model, trained on all participants' data")
    assert descriptions["fml"].endswith("Settings: alpha, beta, temperature.")


@pytest.mark.sites
def test_the_files_of_real_sites_are_there_key_by_key() -> None:
    keys = {key.name: key for key in (*of_sites.list_federation_keys(), *of_sites.list_site_keys())}
    assert keys["server.port"][1:3] == ("whole number >= 1, <= 65535", "8002")
    assert keys["sites.names"][1:3] == ("list of text", "needed")
    assert keys["sites.quorum"][1:3] == ("whole number >= 1", "unset")
    assert keys["state.folder"][1:3] == ("path", "needed")
    client_keys = {name.rpartition(".")[2] for name in KEYS if name.startswith("clients.ID.algorithm.")}
    assert keys["algorithm.KEY"].about.split(", ") == sorted(client_keys)
    named = {name.partition(".")[0] for name in keys}
    assert named == {"server", "sites", *SiteFile.model_fields}
    assert [name for name, key in keys.items() if not key.about.strip() or "\n" in key.about] == []
    assert of_sites.render_sites_page() in (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(
        encoding="utf-8"
    )
