"""A federation's file and a site's own: the keys that each file allows."""

import pytest

from fedmutual.core import Recipe
from fedmutual.errors import ConfigError, RunError
from fedmutual.sites import contract as contracts
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import build_site, read_site_file
from wards import CLASSES, COMMON, SITES, accepted, contract, joined, refused, site

pytestmark = pytest.mark.sites


@pytest.mark.parametrize(
    "tables",
    [
        {"records": {"keep_best": False, "checkpoint_every": 1, "tensorboard": False}},
        {"algorithm": {"name": "independent"}, "model": {"personal": ["mlp"], "pretrained": "weights"}},
    ],
)
def test_defaults_and_keys_for_sites_own_networks_are_accepted(tables):
    assert contracts.make_contract({**COMMON, "sites": {"names": ["a", "b"], "input": [1, 8, 8]}, **tables}, "f.toml")


@pytest.mark.parametrize(
    ("weights_key", "read"), [("weights", "north/weights"), ("imagenet", "imagenet"), ("/w.pth", "/w.pth")]
)
def test_weights_that_a_site_names_count_from_its_file(tmp_path, weights_key, read):
    pretrained = read_site_file(
        site(tmp_path, "north", {**SITES["north"], "model": {"pretrained": weights_key}})
    ).file.model.pretrained
    assert pretrained == (str(tmp_path / read) if "north" in read else read)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        *(
            ({"algorithm": {"name": name}}, f"algorithm {name!r} trains on data at the server, and the server of real sites")
            for name in ("centralised", "feddf")
        ),
        ({"partition": {"clients": 3}}, "key 'partition' is not allowed in FEDERATION.toml"),
        ({"clients": {"north": {}}}, "key 'clients' is not allowed in FEDERATION.toml"),
        ({"engine": {"name": "auto"}}, "key 'engine' is not allowed in FEDERATION.toml"),
        ({"data": {"name": "digits"}}, "key 'data.name' is not allowed in FEDERATION.toml"),
        ({"model": {"shared": "mlp", "pretrained": "imagenet"}}, "key 'model.pretrained' is not allowed in FEDERATION.toml"),
        ({"model": 3}, "key 'model'"),
        ({"records": True}, "key 'records'"),
        ({"data": "digits"}, "key 'data'"),
        ({"model": {"shared": "mlp", "weights": "runs/before"}}, "key 'model.weights' has no effect between real sites"),
        ({"records": {"keep_best": True}}, "key 'records.keep_best' has no effect between real sites"),
        ({"records": {"checkpoint_every": 5}}, "key 'records.checkpoint_every' has no effect between real sites"),
        ({"data": {"classes": None}}, "the key 'data.classes' is missing"),
        ({"sites": {"input": [1, 8, 8]}}, "the key 'sites.names' is missing"),
        ({"sites": {"names": ["a", "a"], "input": [1]}}, "two sites have the same name"),
        ({"sites": {"names": ["a b"], "input": [1]}}, "a site's name is of letters, digits and '-'"),
        ({"sites": {"names": ["authority"], "input": [1]}}, "not 'server' or 'authority'"),  # the root key's folder
        ({"sites": {"names": ["Server"], "input": [1]}}, "not 'server' or 'authority'"),
        *(
            ({"name": name}, "key 'name' must have only ASCII letters, digits") for name in ("北京", "ward 1")
        ),  # FLARE takes no others
        ({"name": "flare"}, "key 'name' cannot be 'flare'"),  # the folder of FLARE's keys
        ({"name": "privacy"}, "key 'name' cannot be 'privacy'"),
        ({"name": ".lock"}, "key 'name' cannot be '.lock'"),
        ({"sites": {"names": ["a"], "input": [1], "quorom": 2}}, "unknown key 'sites.quorom'; did you mean 'sites.quorum'?"),
        ({"server": {"port": 70000}}, "key 'server.port'"),
        ({"server": {"hosts": ["a_b"]}}, "a host is a name or an IPv4 address"),
        ({"sites": {"names": ["a"], "input": [1], "leads": ["me"]}}, "email addresses"),
    ],
)
def test_a_federation_file_that_is_wrong_is_one_sentence(tables, message):
    good = {**COMMON, "sites": {"names": ["a", "b"], "input": [1, 8, 8]}}
    if tables == {"data": {"classes": None}}:
        tables = {"data": {}}
    with pytest.raises(ConfigError) as caught:
        contracts.make_contract({**good, **tables}, "f.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("f.toml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own_tables", "message"),
    [
        ({"data": {}}, "the key 'data.name' is missing"),
        ({"data": {"name": "digits"}, "state": {}}, "the key 'state.folder' is missing"),
        ({"data": {"name": "digits"}, "optimiser": {}}, "unknown key 'optimiser'; did you mean 'optimizer'?"),
        ({"data": {"name": "digits"}, "optimizer": {"lr": "x"}}, "key 'optimizer.lr'"),
        ({"data": {"name": "digits"}, "algorithm": {"alpha": 2}}, "key 'algorithm.alpha' must be between 0 and 1"),
        ({"data": {"name": "digits", "size": [16, 16]}}, "the examples have the shape [1, 16, 16]"),
        ({"data": {"name": "digits"}, "site": "east"}, "site 'east' is not of federation 'wards'"),
    ],
)
def test_a_site_file_that_is_wrong_is_one_sentence(tmp_path, own_tables, message):
    agreed = contracts.read_contract(contract(tmp_path))
    with pytest.raises((ConfigError, RunError)) as caught:
        SiteRuntime(agreed, read_site_file(site(tmp_path, "north", own_tables)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_contract_without_a_name_has_one_that_crosses():
    plain = {k: v for k, v in COMMON.items() if k != "name"}
    contract = contracts.make_contract({**plain, "sites": {"names": ["a"], "input": [1, 8, 8]}}, "f.toml")
    assert contract.record()["name"] == contract.name == accepted(contract.record()).name


TABLES = {"rounds": 1, "data": {"classes": ["well", "ill"]}, "algorithm": {"name": "fml"}, "model": {"shared": "mlp"}}


@pytest.mark.parametrize(
    ("header", "difference"),
    [
        ("age,pulse,heat", None),
        ("heat,pulse,age", "the same columns in another order ('heat', 'pulse', 'age')"),
        ("age,pulse,salt", "other columns ('salt')"),
    ],
)
def test_a_sites_columns_are_those_of_the_contract(tmp_path, header, difference):
    rows = (f"{i},{i % 7},3,{'ill' if i % 2 else 'well'}" for i in range(40))
    (tmp_path / "a.csv").write_text("\n".join([f"{header},label", *rows, ""]))
    tables = {"data": {"name": "csv", "root": str(tmp_path / "a.csv")}}
    contract(tmp_path, TABLES, {"north": tables}, input=[3], columns=["age", "pulse", "heat"])
    site(tmp_path, "north", tables)
    if difference is None:
        assert joined(tmp_path).data.space.columns == ("age", "pulse", "heat")
    else:
        refused(
            tmp_path,
            f"site.toml: the examples have {difference}, and the federation agreed on 'age', 'pulse', 'heat' (sites",
        )


def test_a_site_has_the_recipe_of_the_contract_and_of_its_own_file(tmp_path):
    common = {**COMMON, "training": {"batch_size": 32, "clip_norm": 2.0, "accumulate": 2, "label_smoothing": 0.1}}
    agreed = contracts.read_contract(contract(tmp_path, {**common, "optimizer": {"name": "rmsprop", "alpha": 0.5}}))
    own = read_site_file(site(tmp_path, "north", training={"clip_norm": 0.5, "class_weights": "balanced"}))
    client = build_site(agreed, own).build_client("north")
    assert client.recipe == Recipe(clip_norm=0.5, accumulate=2)
    assert client.optimizers["meme"].defaults["alpha"] == 0.5
    assert client.task.label_smoothing == 0.1
    assert len(client.task.class_weights) == len(CLASSES)
