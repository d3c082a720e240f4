"""The configuration: every key, its type and its default are those of the snapshot, and the defaults are what a run has."""

import json
import re

import pytest

import fedmutual

pytestmark = pytest.mark.long

HEADING = re.compile(r"^## (.+)$")
KEY = re.compile(r"^- `(?P<name>[^`]+)` \((?P<type>.+?); (?P<default>[^;]+?)(?P<effect>; .+?)?\): (?P<about>.+)$")
FILES = ("FEDERATION.toml", "site.toml")  # each has a heading of its own; all others are tables of a configuration


def read_keys(page):
    """File -> key -> (type, default), from what `fedmutual list keys` prints."""
    keys, file = {"configuration": {}} | {name: {} for name in FILES}, "configuration"
    for line in page.splitlines():
        if heading := HEADING.match(line):
            file = heading[1] if heading[1] in FILES else "configuration"
        elif line.startswith("- "):
            key = KEY.match(line)
            assert key is not None, line
            for name in _expanded(file, key):
                assert name not in keys[file], name
                keys[file][name] = (key["type"], key["default"])
    return keys


def _expanded(file, key):
    """The keys that a line means: `data.KEY` in site.toml stands for those that its text lists."""
    if file != "site.toml" or not key["name"].endswith(".KEY"):
        return [key["name"]]
    return [key["name"].removesuffix("KEY") + inner for inner in key["about"].split(", ")]


def test_every_key_and_default(cli, snapshots):
    page, _ = cli.run("list", "keys")
    for file, keys in read_keys(page).items():
        snapshots.check("configuration", file, {name: f"{kind}; {default}" for name, (kind, default) in keys.items()})


def test_a_configuration_without_keys_has_these_defaults(cli, tmp_path):
    (tmp_path / "empty.toml").write_text("")
    config = fedmutual.load_config(tmp_path / "empty.toml")
    keys = read_keys(cli("list", "keys")[1])["configuration"]
    checked = 0
    for name, (_, default) in keys.items():
        if name.startswith(("algorithm.", "clients.", "data.columns.NAME.")):  # of each algorithm, client or column its own
            continue
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        assert value == (None if default == "unset" else json.loads(default)), name
        checked += 1
    assert checked > 60
