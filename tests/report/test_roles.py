"""A comparison treats a method by the role that its run folder records; earlier folders have roles of earlier versions."""

import json

import pytest

from fedmutual.algorithms.registry import METHODS
from fedmutual.config import is_pooled, make_algorithm, parse_config
from fedmutual.config.methods import find_method
from fedmutual.errors import RunError
from fedmutual.report.curves import assign_slots
from fedmutual.report.measures import measure_gains
from fedmutual.results.estimate import Missing
from fedmutual.results.frame import EARLIER_METHODS, read_runs
from fedmutual.results.gains import Gains
from fedmutual.role import LOCAL_ONLY
from run_folders import Made, make_comparison, write


def accuracy(seed, round, client):
    return 0.5


def write_run(folder, algorithm, **role):
    """Write the folder of a run of a user's own method with this role, and return the folder."""
    write(folder, Made("independent" if role.get("federates") is False else "fml", accuracy))
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('"independent"', f'"{algorithm}"').replace('"fml"', f'"{algorithm}"'))
    path = folder / "environment.json"
    about = {"title": algorithm.upper(), "shares": True, "preset": [], "role": role}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"algorithm": about}))
    return folder


def test_methods_stand_by_position_and_those_that_do_not_federate_stand_last(tmp_path):
    folders = [
        write_run(tmp_path / "a", "alone", federates=False, position=1),
        write_run(tmp_path / "b", "unplaced"),
        write_run(tmp_path / "c", "second", position=2),
        write_run(tmp_path / "d", "first", position=-3, colour=9),
    ]
    comparison = make_comparison(folders)
    assert [m.method for m in comparison.methods] == ["FIRST", "SECOND", "UNPLACED", "ALONE"]
    assert [m.method for m in comparison.federated] == ["FIRST", "SECOND", "UNPLACED"]
    assert assign_slots(comparison.methods) == {
        "FIRST": 1,
        "SECOND": 8,
        "UNPLACED": 7,
        "ALONE": 6,
    }  # colour 9 of 8 is the first


def test_a_reference_is_compared_with_every_other_federated_method(tmp_path):
    folders = [write_run(tmp_path / "a", "plain", position=1), write_run(tmp_path / "b", "named", reference=True)]
    assert [m.method for m in make_comparison(folders).references] == ["NAMED"]
    assert [m.method for m in make_comparison(folders[:1]).references] == ["PLAIN"]  # without a reference the first method


def test_a_method_that_does_not_federate_is_the_local_only_training_of_the_gains(tmp_path):
    comparison = make_comparison([write_run(tmp_path / "a", "alone", federates=False), write_run(tmp_path / "b", "mine")])
    federated, local = comparison.methods
    assert isinstance(measure_gains(comparison, federated), Gains)
    assert isinstance(measure_gains(comparison, local), Missing)


def test_two_methods_with_one_colour_are_drawn_in_two_colours(tmp_path):
    comparison = make_comparison([write_run(tmp_path / "a", "one", colour=3), write_run(tmp_path / "b", "two", colour=3)])
    assert assign_slots(comparison.methods) == {"ONE": 3, "TWO": 8}


@pytest.mark.parametrize("name", EARLIER_METHODS)
def test_folders_of_earlier_versions_have_the_titles_and_roles_of_today(name):
    earlier = EARLIER_METHODS[name]
    assert (earlier.title, earlier.role) == (find_method(name).title, find_method(name).role)
    config = parse_config({"name": "x", "data": {"name": "digits"}, "algorithm": {"name": name}}, "x.toml")
    assert earlier.shares == (is_pooled(config) or "global" in make_algorithm(config).scores)


def test_local_only_training_is_the_one_method_that_neither_federates_nor_pools_data():
    assert [n for n, method in METHODS.items() if not method.role.federates and not method.pooled] == [LOCAL_ONLY]


@pytest.mark.parametrize("role", [{"position": "first"}, {"colour": 0}, {"federates": 1}, "reference"])
def test_a_damaged_role_is_an_error_that_names_the_file(tmp_path, role):
    folder = write_run(tmp_path / "a", "mine")
    path = folder / "environment.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"algorithm": table["algorithm"] | {"role": role}}))
    with pytest.raises(RunError, match=r"environment\.json.*algorithm\.role"):
        read_runs([folder])
