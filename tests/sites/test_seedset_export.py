"""What a site gives to the public seed set: the rows that its split sets apart, and no others."""

import json

import numpy as np
import pytest

from fedmutual.errors import ConfigError, RunError
from fedmutual.sites import contract as contracts
from fedmutual.sites import site_settings
from wards import CLASSES, SEEDED, UNLABELLED, arrays, contract, in_one_process, seeded, site, with_data

pytestmark = pytest.mark.sites


def test_a_part_holds_the_public_rows_and_no_others(seeded_wards):
    folder, sites = seeded_wards
    one_process = in_one_process(sites)
    for i in sites:
        arrays_of_part, held = arrays(folder / "public" / f"{i}.npz"), arrays(sites[i]["data"]["root"])
        rows = one_process.clients[i].public.index
        assert arrays_of_part.keys() == {"x", "y", "classes", "about"}
        assert np.array_equal(arrays_of_part["x"], held["x"][rows][:, None])
        assert arrays_of_part["x"].dtype == np.uint8
        assert np.array_equal(arrays_of_part["y"], held["y"][rows])
        assert arrays_of_part["classes"].tolist() == CLASSES
        assert json.loads(str(arrays_of_part["about"])) == {
            "format": 1,
            "site": i,
            "scaling": {"divisor": 255.0, "mean": [0.3], "std": [0.4], "size": None},
        }


def test_labels_that_stay_with_their_owners_are_in_no_file(tmp_path):
    path, sites = seeded(tmp_path, UNLABELLED)
    for i in sites:
        assert arrays(tmp_path / "public" / f"{i}.npz").keys() == {"x", "classes", "about"}
    record = json.dumps(contracts.read_submitted_contract(path).public)
    assert '"counts": null' in record


def test_the_command(seeded_wards, tmp_path, cli):
    folder, _ = seeded_wards
    arguments = ("data", "give", folder / "federation.toml", "--site", folder / "north" / "site.toml", "-o", tmp_path)
    output, _ = cli.run(*arguments)
    counts = np.bincount(arrays(tmp_path / "north.npz")["y"], minlength=10)
    assert counts.sum() == 84
    assert counts.min() >= 7
    assert output.splitlines() == [
        f"{tmp_path / 'north.npz'}: 84 examples of site 'north', {84 * (64 + 8):,} bytes",
        "of each class: " + ", ".join(f"{k} {count}" for k, count in enumerate(counts)),
        "Send this file to all other sites and to the person who submits the federation. They then know these examples "
        "and their labels, and this cannot be undone; the file has no other rows.",
    ]
    first = (tmp_path / "north.npz").read_bytes()
    assert cli(*arguments)[0] == 0
    assert (tmp_path / "north.npz").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["north.npz"]


def test_data_of_the_sites_own_code_are_found_beside_its_file(tmp_path, cli):
    sites = with_data(tmp_path)
    path = contract(tmp_path, SEEDED, sites, public="public")
    mine = site(
        tmp_path, "north", sites["north"] | {"data": {"name": "north_rows:load"}, "trust": {"modules": ["north_rows"]}}
    )
    code = f"import numpy\n\ndef load():\n    return dict(numpy.load({sites['north']['data']['root']!r}))\n"
    mine.with_name("north_rows.py").write_text(code)
    site_settings.export_seedset(path, mine, tmp_path / "one")
    site_settings.export_seedset(path, site(tmp_path, "north", sites["north"]), tmp_path / "other")
    one, other = (arrays(tmp_path / place / "north.npz") for place in ("one", "other"))
    assert all(np.array_equal(one[k], other[k]) for k in one | other)


NOTHING = {
    "no set": ({"algorithm": {"name": "fml"}}, {}, "federation.toml: algorithm 'fml' has no public seed set"),
    "no rows": ({"split": {"preset": "v1"}}, {}, "federation.toml: the key 'split.public' is not set"),
    "numbers": (
        {"algorithm": {"name": "aggregate"}, "data": {}, "training": {"local_steps": 1, "task": "regression"}},
        {},
        "federation.toml: training.task learns numbers",
    ),
    "stranger": ({}, {"site": "east"}, "site 'east' is not of federation 'wards'"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_give(case, tmp_path):
    common, site_tables, expected = NOTHING[case]
    sites = with_data(tmp_path)
    path = contract(tmp_path, SEEDED | common, sites, public="public")
    with pytest.raises(ConfigError) as caught:
        site_settings.export_seedset(path, site(tmp_path, "north", sites["north"], **site_tables), tmp_path / "public")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "public").exists()


def test_a_file_is_whole_or_not_there(seeded_wards, tmp_path, monkeypatch):
    folder, _ = seeded_wards

    def full(file, **arrays_):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(RunError, match=r"north.npz: cannot be written \(No space left on device\)"):
        site_settings.export_seedset(folder / "federation.toml", folder / "north" / "site.toml", tmp_path)
    assert list(tmp_path.iterdir()) == []
