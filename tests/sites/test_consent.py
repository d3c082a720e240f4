"""What a job's contract is compared with, and how: as raw tables, before anything that it names could be imported."""

import json
import sys

import pytest

from fedmutual.errors import ConfigError
from fedmutual.sites import contract as contracts
from fedmutual.sites.consent import LONGEST_CONTRACT, check_agreed, find_difference, parse_contract_record
from wards import COMMON, SEEDED, SITES, accepted, contract

pytestmark = pytest.mark.sites


@pytest.fixture
def record(tmp_path):
    """The record of a contract, as its operator agreed to it."""
    return contracts.read_contract(contract(tmp_path)).record()


def changed(record, **tables):
    return record | {"tables": record["tables"] | tables}


@pytest.fixture
def hostile_module(tmp_path, monkeypatch):
    """A module in the working folder, which is on Python's path as FLARE's is for `python -m`; it leaves a mark."""
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\n\nPath({str(tmp_path / 'mark')!r}).touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield "evil:X"
    sys.modules.pop("evil", None)


@pytest.mark.parametrize("table", ["algorithm", "model", "training"])
def test_no_code_that_a_job_names_is_imported(record, hostile_module, tmp_path, table):
    """The contract is compared before it is parsed."""
    key = {"algorithm": "name", "model": "shared", "training": "task"}[table]
    bad = changed(record, **{table: record["tables"][table] | {key: hostile_module}})
    with pytest.raises(ConfigError, match=f"its '{table}.{key}' is \"evil:X\", and this site agreed to"):
        accepted(bad, record)
    assert not (tmp_path / "mark").exists()


def test_the_same_contract_is_taken(record):
    assert accepted(record).record() == record
    with pytest.raises(ConfigError, match="does not read the contract's format; install the version that wrote it"):
        accepted(record | {"format": 1}, record)  # of version 0.2


@pytest.mark.parametrize(
    ("common", "sites_table", "key"),
    [
        ({}, {"deadline": 5.0, "wait": 1.0, "retries": 50}, None),
        ({"rounds": 9}, {}, None),
        ({"server": {"hosts": ["fl.example.org"], "port": 9000}}, {}, None),
        ({"share": {"metrics": "accuracy"}}, {}, None),  # the default between real sites
        ({}, {"quorum": 1}, "sites.quorum"),  # would let a lead, with a site, single another site out
        ({}, {"leads": ["other@example.org"]}, "sites.leads"),
        ({"share": {"metrics": "all"}}, {}, "share.metrics"),
        ({"seed": 1}, {}, "seed"),
        ({"server": {"sum": "fixed"}}, {}, "server.sum"),
        ({"server": {"aggregate": "median"}}, {}, "server.aggregate"),
        ({"server": {"aggregate": "trimmed-mean", "trim": 0.1}}, {}, "server.aggregate"),
    ],
)
def test_what_a_submission_changes_needs_consent_unless_it_is_listed(tmp_path, record, common, sites_table, key):
    submitted = contracts.read_contract(contract(tmp_path, COMMON | common, **sites_table)).record()
    difference = find_difference(record, submitted)
    assert difference is None if key is None else difference.startswith(f"its '{key}' is ")


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"algorithm.name": "fml", "algorithm": {**COMMON["algorithm"], "name": "evil:X"}}, "algorithm.name"),
        ({"algorithm": {**COMMON["algorithm"], "alpha": 1}}, "algorithm.alpha"),
        ({"seed": None}, "seed"),
        ({"roundsx": 1}, "roundsx"),
        ({"sites": {"waitx": 3}}, "sites"),
        ({"serverx": {}}, "serverx"),
        ({"model": {}}, "model"),
        ({"training": {**COMMON["training"], "local_epochs": True}}, "training.local_epochs"),
        ({"training": {**COMMON["training"], "local_epochs": 1.0}}, "training.local_epochs"),
        ({"data": {**COMMON["data"], "classes": {"0": "a"}}}, "data.classes"),
    ],
)
def test_a_changed_value_of_the_contract_is_found(record, tables, key):
    """Keys with dots, null and a missing key, 1 and true, 1 and 1.0, a key with the prefix of a key that may change."""
    assert f"its '{key}" in find_difference(record, changed(record, **tables))


def test_tables_too_deep_end_the_comparison(record):
    deep = {}
    for _ in range(40):
        deep = {"more": deep}
    with pytest.raises(ConfigError, match="tables in tables, more than 16 deep"):
        find_difference(record, changed(record, data=deep))


@pytest.mark.parametrize(
    "text",
    [
        None,
        {"format": 1},
        "",
        "[]",
        "{}",
        '{"format": NaN, "version": "0.1.0", "name": "wards", "public": null, "tables": {}}',
        '{"format": true, "version": "0.1.0", "name": "wards", "public": null, "tables": {}}',
        '{"format": 1, "version": 1, "name": "wards", "public": null, "tables": {}}',
        '{"format": 1, "version": "0.1.0", "name": ["wards"], "public": null, "tables": {}}',
        '{"format": 1, "version": "0.1.0", "name": "wards", "public": null, "tables": []}',
        '{"format": 1, "version": "0.1.0", "name": "wards", "public": null, "tables": {}, "more": 1}',
        '{"format": 1, "version": "0.1.0", "name": "a", "name": "wards", "public": null, "tables": {}}',
        "[" * 200_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        " " * (LONGEST_CONTRACT + 1),
    ],
    ids=range(16),
)
def test_a_text_that_is_not_a_record_is_refused(text):
    with pytest.raises(ConfigError, match="not written by fedmutual"):
        parse_contract_record(text)


def test_of_several_contracts_the_one_of_that_name_is_meant(record):
    """As at a server that carries out several federations."""
    second_record = changed(record, name="others") | {"name": "others"}
    assert check_agreed(json.dumps(second_record), [record, second_record], "this server") == second_record
    with pytest.raises(ConfigError, match="is of federation 'others', and this server agreed to 'wards'"):
        check_agreed(json.dumps(second_record), [record], "this server")
    with pytest.raises(ConfigError, match='its \'name\' is "others", and this server agreed to "wards"'):
        check_agreed(json.dumps(second_record | {"name": "wards"}), [record], "this server")


def test_an_error_message_quotes_foreign_text_briefly(record):
    bad = changed(record, **{"a\x1b[2J\n" * 1000: "y" * 100_000})
    difference = find_difference(record, bad)
    assert len(difference) < 300
    assert difference.isprintable()


def test_a_version_that_crosses_moves_no_cursor(record):
    """The version is shown on a console."""
    with pytest.raises(ConfigError, match="the contract has fedmutual") as caught:
        accepted(record | {"version": "0.0\x1b]0;evil\x07\n12:00:00  takes part"}, record)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["tables", "public"])
def test_lists_in_lists_are_refused_at_every_depth(record, key):
    """Just few enough can be read and not be written: a frame or two are between."""
    for depth in range(900, 1010):
        text = json.dumps(record | {key: "@@"}).replace('"@@"', '{"rows": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(ConfigError):
            contracts.accept_contract(text, [record])


def test_a_public_seed_set_has_no_more_rows_than_can_be_counted(tmp_path):
    """A lead states the rows of each site, and no operator agreed to these numbers."""
    agreed = contracts.read_contract(contract(tmp_path, SEEDED, public="public")).record()
    ones, digest = dict.fromkeys(SITES, 1), "0" * 64
    counts, parts = dict.fromkeys(SITES, [1] * 10), dict.fromkeys(SITES, digest)
    seeds = {"rows": ones | {"north": 2**80}, "counts": counts, "bytes": ones, "digest": digest, "parts": parts}
    with pytest.raises(ConfigError, match=r"public\.rows"):
        accepted(agreed | {"public": seeds}, agreed)
