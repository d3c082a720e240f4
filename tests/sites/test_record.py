"""What a contract says of the public seed set, and what of it crosses."""

import json
from dataclasses import replace

import pytest

from fedmutual.errors import ConfigError
from fedmutual.sites import contract as contracts
from fedmutual.sites.consent import find_difference
from wards import SEEDED, UNLABELLED, accepted, changed, in_one_process, seeded

pytestmark = pytest.mark.sites


@pytest.mark.parametrize("common", [SEEDED, UNLABELLED], ids=["labelled", "unlabelled"])
def test_it_is_of_the_set_of_one_process(common, tmp_path):
    path, sites = seeded(tmp_path, common)
    one_process, labelled = in_one_process(sites, common).public, common is SEEDED
    public_set = contracts.read_submitted_contract(path).public
    assert public_set["rows"] == {i: len(rows) for i, rows in one_process.owners.items()}
    assert public_set["bytes"] == one_process.count_bytes(labelled)
    assert public_set["digest"] == (one_process.digest if labelled else one_process.unlabelled)
    assert public_set["counts"] == (
        {i: list(class_counts) for i, class_counts in one_process.counts.items()} if labelled else None
    )
    assert list(public_set["rows"]) == list(public_set["parts"]) == list(sites)
    assert len(set(public_set["parts"].values())) == len(sites)


def test_where_the_set_lies_does_not_cross(seeded_wards):
    folder, _ = seeded_wards
    contract = contracts.read_submitted_contract(folder / "federation.toml")
    crossed = json.dumps(contract.record())
    assert "public" not in contract.record()["tables"]["sites"]
    assert str(folder) not in crossed
    back = contracts.accept_contract(crossed, [contract.record()])
    assert (back.public, back.digest) == (contract.public, contract.digest)
    assert find_difference(contracts.read_contract(folder / "federation.toml").record(), back.record()) is None
    elsewhere = replace(contract, sites=contract.sites.model_copy(update={"public": None}))
    assert elsewhere.digest == contract.digest


@pytest.mark.parametrize(
    "spoil",
    [
        {"rows": {"south": 84, "north": 84, "west": 84}},
        {"parts": {"north": "0" * 64}},
        {"counts": None},
        {"counts": {"north": [1], "south": [1], "west": [1]}},
        {"digest": "short"},
        {"bytes": {"north": -1, "south": 1, "west": 1}},
        {"more": 1},
    ],
)
def test_an_invalid_public_set_of_a_contract_is_refused(spoil, seeded_wards):
    record = contracts.read_submitted_contract(seeded_wards[0] / "federation.toml").record()
    with pytest.raises(ConfigError, match=r"^the contract: .*public") as caught:
        accepted(record | {"public": record["public"] | spoil}, record)
    assert "\n" not in str(caught.value)


def test_a_contract_that_crossed_has_one(seeded_wards):
    with pytest.raises(ConfigError, match=r"needs the key 'sites.public'"):
        accepted(contracts.read_contract(seeded_wards[0] / "federation.toml").record())


def test_the_description_of_the_public_set_may_change(seeded_wards):
    """A starting site does not know it yet."""
    path = seeded_wards[0] / "federation.toml"
    contract, submitted = contracts.read_contract(path), contracts.read_submitted_contract(path)
    assert find_difference(contract.record(), submitted.record()) is None


def test_too_few_examples_are_seen_before_anything_is_sent(ward):
    changed(ward / "federation.toml", algorithm={"name": "fedh2l", "public_batch": 85})
    with pytest.raises(ConfigError, match=r"client 'north' has 84 public examples, and algorithm.public_batch is 85"):
        contracts.read_submitted_contract(ward / "federation.toml")


@pytest.mark.parametrize(("version", "fine"), [("0.2.7", True), ("0.1.0", False), ("1.1.0", False)])
def test_a_job_of_another_version_is_refused_before_its_keys_are_read(seeded_wards, version, fine):
    """With keys that this version does not know, as another one may have."""
    record = contracts.read_submitted_contract(seeded_wards[0] / "federation.toml").record() | {"version": version}
    if fine:
        assert accepted(record).version == version
        return
    with pytest.raises(ConfigError) as caught:
        accepted(record | {"tables": record["tables"] | {"new": 1}}, record)
    assert str(caught.value) == (
        f"the contract has fedmutual {version}, and this host has 0.2.0; install the same version everywhere"
    )
