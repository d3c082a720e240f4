"""--set and Python's overrides, what an algorithm's settings become, and switching to another algorithm."""

import re
from pathlib import Path

import pytest

from fedmutual.config import (
    load_config,
    make_algorithm,
    parse_config,
    parse_override,
    read_client_settings,
    read_tables,
    replace_algorithm,
)
from fedmutual.core import Schedule
from fedmutual.errors import ConfigError
from fedmutual.losses import Classification

FML = """
[algorithm]
name = "fml"
alpha = 0.3
temperature = 2
[training]
batch_size = 16
[clients.4.algorithm]
alpha = { start = 0.9, end = 0.1 }
[clients.4.training]
local_epochs = 2
[clients."st.mary".algorithm]
beta = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FML, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("rounds=3", "rounds", 3),
        ("rounds=1_000", "rounds", 1000),
        ("optimizer.lr=1e-3", "optimizer.lr", 0.001),
        (" data.name = mnist ", "data.name", "mnist"),
        ("data.name='mnist'", "data.name", "mnist"),
        ("data.root=/data/of mine=3", "data.root", "/data/of mine=3"),
        ("data.resident=true", "data.resident", True),
        ("data.size=[8, 8]", "data.size", [8, 8]),
        ("optimizer.lr={start=0.1, end=0.2}", "optimizer.lr", {"start": 0.1, "end": 0.2}),
        ("model.shared=my_models:Wide", "model.shared", "my_models:Wide"),
        ("name=2026-03-01", "name", "2026-03-01"),  # TOML's dates are no key's type
        ("name=07", "name", "07"),
        ("name=", "name", ""),
        ("name=1\nrounds=2", "name", "1\nrounds=2"),
    ],
)
def test_set(text: str, key: str, value: object) -> None:
    override = parse_override(text)
    assert override == (key, value)
    assert type(override[1]) is type(value)


@pytest.mark.parametrize("text", ["rounds", "=3", " = 3"])
def test_set_without_key_or_value(text: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_override(text)
    assert str(problem.value) == f"--set {text}: write key=value, for example --set algorithm.alpha=0.3"


def test_overrides_by_key_and_by_table(file: Path) -> None:
    config = load_config(
        file,
        rounds=3,
        optimizer={"lr": 0.5},
        **{"algorithm.alpha": 1, "optimizer.momentum": 0.0, "clients.9.training.batch_size": 4},
    )
    assert (config.rounds, config.optimizer.lr, config.optimizer.momentum) == (3, 0.5, 0.0)
    assert config.algorithm == {"name": "fml", "alpha": 1, "temperature": 2}
    assert config.training.batch_size == 16
    assert set(config.clients) == {"4", "st.mary", "9"}
    assert config.clients["9"].training.batch_size == 4
    tables = read_tables(file)
    parse_config(tables, overrides={"algorithm.alpha": 1, "clients.4.algorithm.alpha": 0.5})
    assert tables == read_tables(file)  # what is given is not changed


def test_an_override_is_checked_like_the_file(file: Path) -> None:
    for overrides, message in (
        ({"roundz": 3}, f"{file}: unknown key 'roundz'; did you mean 'rounds'?"),
        ({"algorithm.alpha": 3}, f"{file}: key 'algorithm.alpha' must be between 0 and 1, not 3"),
        ({"rounds.x": 3}, f"{file}: key 'rounds' must be a whole number, not {{'x': 3}}"),
        ({"data.resident": 1}, f"{file}: key 'data.resident' must be true or false, not 1"),
    ):
        with pytest.raises(ConfigError) as problem:
            load_config(file, **overrides)
        assert str(problem.value) == message


def test_a_key_under_a_value_cannot_be_set(file: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("'algorithm.alpha'")):
        load_config(file, **{"algorithm.alpha.x": 3})


def test_what_the_federation_sets_and_what_a_client_has_its_own(file: Path) -> None:
    config = load_config(file)
    federations = {"alpha": 0.3, "temperature": 2.0, "batch_size": 16, "local_epochs": 5, "task": Classification()}
    assert read_client_settings(config) == federations
    assert read_client_settings(config, "4") == {"alpha": Schedule(0.9, 0.1), "local_epochs": 2}
    assert read_client_settings(config, "0") == {}
    phase = make_algorithm(config).phases[0]
    assert (phase.alpha, phase.beta, phase.temperature, phase.batch_size) == (0.3, 0.5, 2.0, 16)


def test_another_algorithm_drops_what_it_lacks_and_names_it(file: Path) -> None:
    config = load_config(file)
    changed, dropped = replace_algorithm(config, "fedprox")
    assert set(dropped) == {
        "algorithm.alpha",
        "algorithm.temperature",
        "clients.4.algorithm.alpha",
        "clients.st.mary.algorithm.beta",
    }
    assert changed.algorithm == {"name": "fedprox"}
    assert changed.clients["4"].algorithm == changed.clients["st.mary"].algorithm == {}
    assert changed.clients["4"].training.local_epochs == 2
    assert config == load_config(file)
    assert changed.model_copy(update={"algorithm": config.algorithm, "clients": config.clients}) == config


def test_another_algorithm_keeps_what_it_knows(file: Path) -> None:
    same, dropped = replace_algorithm(load_config(file), "fml")
    assert (same, dropped) == (load_config(file), ())
    average = parse_config({"algorithm": {"name": "fedavg", "weighting": "uniform"}})
    assert replace_algorithm(average, "fedprox")[0].algorithm == {"name": "fedprox", "weighting": "uniform"}


def test_set_to_another_algorithm_warns_what_it_drops(file: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"'independent' has no algorithm.alpha, algorithm.temperature, clients.4.algorithm"
    ):
        config = load_config(file, **{"algorithm.name": "independent"})
    assert config.algorithm == {"name": "independent"}


def test_an_unknown_compared_algorithm_is_refused(file: Path) -> None:
    message = "key 'algorithm.name': there is no algorithm 'fmll'; did you mean 'fml'?"
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        replace_algorithm(load_config(file), "fmll")
    with pytest.raises(ConfigError) as problem:
        load_config(file, **{"algorithm.name": "fmll"})
    assert str(problem.value) == f"{file}: {message}"


def test_another_algorithm_over_tables_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("clients = 3", encoding="utf-8")
    with pytest.raises(ConfigError) as problem:
        load_config(path, **{"algorithm.name": "fedavg"})
    assert str(problem.value) == f"{path}: key 'clients' must be a table, not 3"
