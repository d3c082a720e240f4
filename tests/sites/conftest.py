"""A federation whose sites have given their parts of the public seed set."""

import shutil

import pytest

from wards import seeded, site


@pytest.fixture(scope="session")
def seeded_wards(tmp_path_factory):
    """Its folder: the federation's file, a folder of each site, and all parts; and the sites. Not to be changed."""
    folder = tmp_path_factory.mktemp("given")
    _, sites = seeded(folder)
    for i in sites:
        site(folder, i, sites[i], public={"folder": "../public"})
    return folder, sites


@pytest.fixture
def ward(seeded_wards, tmp_path):
    """A copy of that folder, to spoil."""
    return shutil.copytree(seeded_wards[0], tmp_path / "ward")
