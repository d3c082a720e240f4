"""Which modules a site's process imports for module:name: those that its operator lists, out of the operator's folder."""

import sys
from pathlib import Path

import pytest

from fedmutual.errors import ConfigError
from fedmutual.sites import contract as contracts
from fedmutual.sites.modules import ListedModules, leave_working_folders, make_server_rule
from fedmutual.sites.site_settings import build_site, read_site_file
from fedmutual.user_code import plugins, recorded_code
from wards import COMMON, SITES, contract, site

pytestmark = pytest.mark.sites

NET = """
from torch import nn

def Net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Each test has Python's finders, path and modules to itself."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("own", "helper", "lab"):
            del sys.modules[name]


def north(folder, personal="own:Net", **tables):
    """A site whose file names a network of its own."""
    contract(folder)
    return site(folder, "north", SITES["north"] | {"model": {"personal": personal}}, **tables)


def make_client(path):
    """What a site's process makes of its file."""
    mine = read_site_file(path)
    with plugins.use_rule(mine.code):
        return build_site(contracts.read_contract(path.parents[1] / "federation.toml"), mine).build_client("north")


def refused(path, *words):
    """The one sentence by which a site does not import the code that its file names."""
    with pytest.raises(ConfigError) as caught:
        make_client(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_code_that_the_site_does_not_list_is_refused(tmp_path):
    """In one sentence, with what to write where."""
    path = north(tmp_path)
    (path.parent / "own.py").write_text("raise SystemExit\n")
    refused(path, "model.personal'", "'own'", f'write trust = {{ modules = ["own"] }} into {path}')
    assert "own" not in sys.modules


def test_code_that_the_site_lists_lies_beside_its_file(tmp_path, monkeypatch):
    """Wherever the process works."""
    path = north(tmp_path, trust={"modules": ["own", "helper"]})
    (path.parent / "own.py").write_text(NET + "import helper\n")
    (path.parent / "helper.py").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text("raise SystemExit\n")
    (elsewhere / "helper.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(elsewhere)
    before = [*sys.path]
    make_client(path)
    assert sys.modules["own"].__file__ == str(path.parent / "own.py")
    assert sys.modules["helper"].__file__ == str(path.parent / "helper.py")
    assert sys.path == before


def test_the_contracts_code_is_the_sites_choice_too(tmp_path):
    """A common algorithm of somebody's own: who agrees to the file still has to list the module."""
    common = COMMON | {"algorithm": {"name": "own:Mine", "alpha": 0.5, "beta": 0.5}}
    file, path = contract(tmp_path, common), site(tmp_path, "north")
    (path.parent / "own.py").write_text(
        "from dataclasses import dataclass\nfrom fedmutual.algorithms import FML\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(FML):\n    'FML.'\n"
    )
    names = "'algorithm.name' names code of the module 'own', which this process"
    with pytest.raises(ConfigError, match=names), plugins.use_rule(read_site_file(path).code):
        contracts.read_contract(file)
    with pytest.raises(ConfigError, match="add --trust-module own"), plugins.use_rule(make_server_rule([], [file])):
        contracts.read_contract(file)
    listed = read_site_file(site(tmp_path, "north", trust={"modules": ["own"]}))
    with plugins.use_rule(listed.code):
        assert contracts.read_contract(file).algorithm.phases


@pytest.mark.parametrize(
    ("name", "listed", "message"),
    [
        ("os:system", ["own"], "which this process does not trust"),
        ("owner:Net", ["own"], "which this process does not trust"),
        ("lab:Net", ["lab.nets"], "which this process does not trust"),
        ("0a1b2c3d-0000-4000-8000-0123456789ab.app_north.config.evil:X", ["own"], "which this process does not trust"),
        ("own.0a1b.evil:X", ["own"], "cannot be the name of a user's module"),
        (".own:Net", ["own"], "which this process does not trust"),
        ("own..own:Net", ["own"], "cannot be the name of a user's module"),
        ("own:Net", ["own"], "there is no module 'own'; put own.py into"),
    ],
)
def test_names_that_lead_elsewhere(tmp_path, name, listed, message):
    """A folder without a file of its own is no module: a state folder of that name would be one."""
    path = north(tmp_path, name, trust={"modules": listed})
    (path.parent / "own" / "flare").mkdir(parents=True)
    refused(path, message)


@pytest.mark.parametrize(
    ("module", "message"), [("os", "of Python itself"), ("a-b", "is named as in Python"), ("", "is named")]
)
def test_what_cannot_be_listed(tmp_path, module, message):
    with pytest.raises(ConfigError, match=f"'trust.modules'.*{message}") as caught:
        read_site_file(north(tmp_path, trust={"modules": [module]}))
    assert "\n" not in str(caught.value)


def test_a_module_of_which_there_are_several_is_refused(tmp_path, monkeypatch):
    """It would hide an installed one, or was imported from elsewhere."""
    path = north(tmp_path, "tomli_w:Net", trust={"modules": ["tomli_w"]})
    (path.parent / "tomli_w.py").write_text(NET)
    refused(path, "there are several of that name", str(path.parent / "tomli_w.py"), "rename one")
    path = north(tmp_path, trust={"modules": ["own"]})
    for folder in (path.parent, tmp_path):
        (folder / "own.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("own")
    refused(path, "there are several of that name", str(tmp_path / "own.py"), str(path.parent / "own.py"))


def test_a_listed_package_covers_what_is_in_it(tmp_path):
    path = north(tmp_path, "lab.nets:Net", trust={"modules": ["lab"]})
    (path.parent / "lab").mkdir()
    (path.parent / "lab" / "__init__.py").write_text("")
    (path.parent / "lab" / "nets.py").write_text(NET)
    assert make_client(path).nets["personal"]


def test_a_server_needs_no_trust_in_networks_of_the_sites(tmp_path):
    """The server records only the digests of the modules that it imports."""
    file = tmp_path / "federation.toml"
    for name in ("own", "lab"):
        (tmp_path / f"{name}.py").write_text(NET)
    tables = {"algorithm": {"name": "own:Mine"}, "model": {"personal": ["lab:Net"]}}
    with plugins.use_rule(make_server_rule(["own"], [file])):
        assert recorded_code.compute_digests(tables).keys() == {"own"}


def test_a_process_that_is_confined_is_so_in_all_threads(monkeypatch):
    monkeypatch.setattr(plugins, "process_rule", None)
    rule = ListedModules([], [Path("/nowhere")], lambda name: f"list {name}")
    plugins.set_rule(rule)
    assert plugins.get_rule() is rule
    with pytest.raises(ConfigError, match="then list own"):
        plugins.load("own:Net", "model.shared")


def test_no_folder_in_which_a_process_works_is_searched(tmp_path, in_tmp_path, monkeypatch):
    work, installed = tmp_path / "state", tmp_path / "site-packages"
    custom = work / "flare" / "0a1b" / "app_north" / "custom"
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), str(work), str(custom), str(installed)])
    leave_working_folders(work)
    assert sys.path == [str(installed)]
