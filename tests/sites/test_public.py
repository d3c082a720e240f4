"""The public seed set at a site: its own rows and the others' parts, held against its split and against the contract."""

import shutil
import tomllib

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedmutual.sites import contract as contracts
from fedmutual.sites import site_settings
from own_data import everything
from wards import (
    SEEDED,
    Federation,
    arrays,
    changed,
    contract,
    in_one_process,
    joined,
    refused,
    rewritten,
    run_together,
    same,
    site,
    with_data,
)

pytestmark = pytest.mark.sites


def test_a_site_has_the_set_of_one_process(seeded_wards):
    folder, sites = seeded_wards
    expected = in_one_process(sites).public
    for name in sites:
        experiment = joined(folder, name)
        for key in ("owners", "counts", "digest", "unlabelled", "sizes"):
            assert getattr(experiment.data.public, key) == getattr(expected, key)
        assert experiment.clients == (name,)


def test_how_numbers_are_stored_is_for_each_site_to_choose(ward):
    """Bytes at one site, floats at another: each file says by what its examples are divided."""
    held = arrays(tomllib.loads((ward / "north" / "site.toml").read_text())["data"]["root"])
    np.savez(ward / "floats.npz", x=(held["x"] / 255).astype(np.float32), y=held["y"])
    before, _ = everything(joined(ward, "south").data.public.data)
    changed(ward / "north" / "site.toml", data={"name": "npz", "root": str(ward / "floats.npz")})
    site_settings.export_seedset(ward / "federation.toml", ward / "north" / "site.toml", ward / "public")
    for name in ("north", "south"):
        after, _ = everything(joined(ward, name).data.public.data)
        assert torch.allclose(before, after)


def test_the_folder_is_asked_for_where_the_algorithm_has_a_set(ward):
    changed(ward / "north" / "site.toml", public=None)
    refused(ward, "site.toml: the key 'public.folder' is missing: algorithm 'fedh2l' needs the public seed set")
    changed(ward / "federation.toml", algorithm={"name": "fml"}, training={"local_epochs": 1, "batch_size": 32})
    shutil.rmtree(ward / "public")
    assert joined(ward).seeds is None


def test_a_part_of_another_seed_is_seen_by_its_owner(ward):
    first = contracts.read_contract(ward / "federation.toml")
    changed(ward / "federation.toml", seed=1)
    message = refused(
        ward, "the file does not contain the public rows that this site's split selects; the file was made with another seed"
    )
    assert message.startswith(str(ward / "public" / "north.npz"))
    held = arrays(tomllib.loads((ward / "north" / "site.toml").read_text())["data"]["root"])  # other labels of them
    np.savez(ward / "relabelled.npz", **held | {"y": held["y"][::-1]})
    changed(ward / "north" / "site.toml", data={"name": "npz", "root": str(ward / "relabelled.npz")})
    refused(ward, "north.npz: the file does not contain the public rows", agreed=first)


def relabelled(arrays):
    y = arrays["y"].copy()
    y[0] = (y[0] + 1) % 10
    return {"y": y}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda arrays: {k: arrays[k][:-1] for k in "xy"}, "this one has 83 rows, and theirs has 84; have it give all the"),
        (relabelled, "examples of class number"),
        (lambda arrays: {"x": arrays["x"][::-1]}, "as many examples of each class, but not the same ones in the same order"),
    ],
)
def test_another_part_than_the_contract_was_made_with(change, difference, ward):
    agreed = contracts.read_submitted_contract(ward / "federation.toml")
    path = ward / "public" / "south.npz"
    rewritten(path, **change(arrays(path)))
    message = refused(
        ward, "the contract was made with another part of site 'south': this one has ", difference, agreed=agreed
    )
    assert message.startswith(str(path))
    refused(ward, "south.npz: the file does not contain the public rows", agreed=agreed, name="south")


def test_a_class_missing_in_the_public_set_is_refused(tmp_path):
    """North has two nines, and its split sets none of them apart."""
    sites = with_data(tmp_path)
    for i, about_ in sites.items():
        held = arrays(about_["data"]["root"])
        keep = held["y"] != 9
        keep[np.flatnonzero(~keep)[: 2 * (i == "north")]] = True
        np.savez(about_["data"]["root"], x=held["x"][keep], y=held["y"][keep])
    path = contract(tmp_path, SEEDED, sites, public="public")
    for i in sites:
        site_settings.export_seedset(path, site(tmp_path, i, sites[i], public={"folder": "../public"}), tmp_path / "public")
    refused(
        tmp_path, "public: the public seed set has no example of class '9', which this site trains on; raise 'split.public'"
    )
    joined(tmp_path, "south")  # who has none misses none


def test_a_site_that_gives_nothing(ward):
    changed(ward / "north" / "site.toml", split={"public": 0.0})
    refused(ward, "needs a public seed set; set split.public")


@pytest.mark.parametrize("settings", [{}, {"labels": False, "confidence": False, "local_data": "private"}])
def test_a_file_that_all_have_gives_the_bits_of_one_process(settings, tmp_path):
    """With labels, and without: then fedh2l learns from what the others say of the rows."""
    x, y = (part[1500:1600] for part in load_digits(return_X_y=True))
    held = {"x": (x * 15).reshape(-1, 8, 8).astype(np.uint8)} | ({} if settings else {"y": y})
    split = {k: v for k, v in SEEDED["split"].items() if k != "public"} | {"public_file": str(tmp_path / "all.npz")}
    common = SEEDED | {"split": split, "algorithm": SEEDED["algorithm"] | settings, "rounds": 2}
    np.savez(tmp_path / "all.npz", **held)
    np.savez(tmp_path / "copy.npz", **held)
    path, sites = contract(tmp_path, common, with_data(tmp_path), public="public"), with_data(tmp_path)
    own = {i: {"split": {"public_file": "../copy.npz"}, "public": {"folder": "../public"}} for i in sites}
    files = {i: site(tmp_path, i, sites[i], **own[i]) for i in sites}
    parts = [site_settings.export_seedset(path, file, tmp_path / "public") for file in files.values()]
    assert [[len(part.x) for part in of_site] for of_site in parts] == [[34, 33, 33]] * 3
    federation = Federation(tmp_path, common, sites, site_tables=own["north"], public="public").run()
    run = run_together(tmp_path / "one", common, sites)
    assert all(same(mine, run.personal_model(i).state_dict()) for i, mine in federation.personal().items())
    assert federation.summary["bytes"]["seed"] == run.summary["bytes"]["seed"] == 0

    np.savez(tmp_path / "copy.npz", **held | {"x": held["x"][::-1]})
    site_settings.export_seedset(path, files["north"], tmp_path / "public")
    refused(tmp_path, "north.npz: the contract was made with another part of site 'north'", agreed=federation.agreed)
