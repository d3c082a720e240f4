"""Which methods `compare` trains: the file's own, those that `--methods` names, and with `all` those that fit."""

import pytest

import fedmutual
from fedmutual.algorithms import ALGORITHMS
from fedmutual.errors import ConfigError
from fedmutual.studies.compare import find_unfit_methods

pytestmark = pytest.mark.run

PUBLIC_DATA = {"aggregate", "feddf", "fedh2l", "fedmd", "kt-pfl"}
OWN = """
from dataclasses import dataclass

from fedmutual.algorithms import FedAvg


@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    "FedAvg by another name."
"""


def find_unfit(path, **overrides):
    config = fedmutual.load_config(path, **overrides)
    return find_unfit_methods(config, tuple(ALGORITHMS), ["fml"], {"public_batch": 4})


def trained(folder):
    return {path.parent.parent.name for path in folder.glob("*/*/summary.json")}


def test_methods_of_public_data_are_left_out_where_none_are_set_apart(small):
    unfit = find_unfit(small)
    assert set(unfit) == PUBLIC_DATA | {"fedbn"}
    assert all("split.public" in unfit[method] for method in PUBLIC_DATA)
    assert "no BatchNorm layer" in unfit["fedbn"]


def test_methods_that_count_steps_need_a_file_that_does(small):
    passes, steps = (find_unfit(small, **{"split.public": 0.2, **more}) for more in ({}, {"training.local_steps": 2}))
    assert {"fedh2l"} == set(passes) - set(steps)
    assert "set training.local_steps" in passes["fedh2l"]
    assert set(steps) == {"fedbn"}


def test_methods_of_one_network_are_left_out_where_networks_differ(small):
    unfit = find_unfit(small, **{"model.personal": ["mlp", "mlp", "cnn1"]})
    assert {"apfl", "ditto", "fedala", "fedavg-ft", "fedgh", "pfedme"} == set(unfit) - PUBLIC_DATA - {"fedbn"}


def test_methods_of_classes_are_left_out_where_targets_are_numbers(small):
    rows = "".join(f"{i % 5},{i},{-i}\n" for i in range(120))
    (small.parent / "numbers.csv").write_text("label,a,b\n" + rows)
    small.write_text(
        'data = { name = "csv", root = "numbers.csv" }\npartition = { kind = "iid", clients = 3 }\n'
        'model = { shared = "mlp" }\ntraining = { task = "regression" }\n'
    )
    assert {"fedproto", "fedtgp"} <= set(find_unfit(small))


def test_a_method_that_is_named_is_not_left_out(small):
    with pytest.raises(ConfigError, match=r"'fedmd' needs a public seed set"):
        find_unfit_methods(fedmutual.load_config(small), ("fml", "fedmd"), ["fedmd"])


def test_all_trains_what_fits_and_has_a_line_for_what_does_not(small, cli):
    out, _ = cli.run("compare", small, "--methods", "all", "--seeds", 1, "--set", "rounds=1", "--out", "c")
    lines = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert {line.split(": ")[1] for line in lines} == PUBLIC_DATA | {"fedbn"}
    assert trained(small.parent / "c") == set(ALGORITHMS) - PUBLIC_DATA - {"fedbn"}


def test_a_setting_of_left_out_methods_alone_is_refused(small, cli):
    assert "key 'algorithm.consensus' is a setting of fedmd" in cli.fail(
        "compare", small, "--methods", "all", "--set", "algorithm.consensus=posteriors"
    )


def test_the_algorithm_of_the_file_is_compared(small, cli):
    small.write_text(small.read_text().replace('"fml", alpha = 0.4, beta = 0.6', '"ditto", lam = 0.5'))
    cli.run("compare", small, "--seeds", 1, "--set", "rounds=1", "--out", "c")
    assert trained(small.parent / "c") == {"ditto", "fml", "fedavg", "fedprox", "independent"}
    assert fedmutual.load_config("c/ditto/0/config.toml").algorithm == {"name": "ditto", "lam": 0.5}


@pytest.mark.parametrize(("algorithm", "left_out"), [('algorithm = { name = "fml" }\n', ["fml"]), ("", [])])
def test_a_line_says_that_methods_leave_out_the_algorithm_of_the_file(small, cli, algorithm, left_out):
    lines = [line for line in small.read_text().splitlines() if not line.startswith("algorithm = ")]
    small.write_text(algorithm + "\n".join(lines))
    options = ("--methods", "fedavg,independent", "--seeds", 1, "--set", "rounds=1", "--out", "c")
    out, _ = cli.run("compare", small, *options)
    assert trained(small.parent / "c") == {"fedavg", "independent"}
    assert [line.split(": ")[1] for line in out.splitlines() if line.startswith("left out: ")] == left_out


@pytest.mark.parametrize("more", [(), ("--methods", "independent,my_method:Mine")])
def test_a_method_by_its_import_path_has_a_folder_that_any_system_takes(small, cli, more):
    (small.parent / "my_method.py").write_text(OWN)
    small.write_text(small.read_text().replace('"fml", alpha = 0.4, beta = 0.6', '"my_method:Mine"'))
    cli.run("compare", small, "--seeds", 1, "--set", "rounds=1", "--out", "c", *more)
    (folder,) = (small.parent / "c").glob("my_method-Mine-*")
    assert fedmutual.load_config(folder / "0/config.toml").algorithm == {"name": "my_method:Mine"}
    assert ":" not in "".join(trained(small.parent / "c"))
