"""Names of algorithms that set keys of [model]: put in where unset, taken out with the name, refused where undone."""

import re

import pytest

from fedmutual.algorithms.registry import METHODS
from fedmutual.config import dump_config, load_config, parse_config, replace_algorithm
from fedmutual.config.schema import ModelConfig
from fedmutual.errors import ConfigError
from fedmutual.federation.build import build

PLAIN = ModelConfig()
PRESETS = [name for name, method in METHODS.items() if method.model]


def named(name, **tables):
    return parse_config({"name": "x", "algorithm": {"name": name}, **tables})


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_sets_keys_that_are_never_the_defaults(name):
    config = named(name)
    keys = METHODS[name].model
    for key, value in keys.items():
        assert getattr(config.model, key) == value != getattr(PLAIN, key)
    assert config.model.model_dump(exclude=set(keys)) == PLAIN.model_dump(exclude=set(keys))


def test_what_the_configuration_says_counts():
    config = named("fedper", model={"part": ["features.fc1", "features.fc2"]})
    assert (config.model.part, config.model.adaptor) == (("features.fc1", "features.fc2"), "rest")


@pytest.mark.parametrize(
    ("name", "model", "sentence"),
    [
        ("fedbn", {"batchnorm": "average"}, "key 'model.batchnorm' = 'average' undoes what algorithm 'fedbn' sets"),
        ("fedper", {"adaptor": "linear"}, "sets ('rest'); remove the key"),
        ("ditto", {"start": "own"}, "key 'model.start' = 'own' undoes what algorithm 'ditto' sets"),
        ("apfl", {"part": ["features"]}, "model.start = 'server' needs a complete shared model"),
    ],
)
def test_what_would_undo_it_is_refused(name, model, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        named(name, model=model)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_down_is_read_back(name, tmp_path):
    config = named(name)
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize("name", PRESETS)
def test_another_method_of_a_comparison_has_its_own_keys_only(name, tmp_path):
    """Both ways: from the preset's file, and to the preset."""
    changed, _ = replace_algorithm(named("fedavg"), name)
    assert changed == named(name)
    back, _ = replace_algorithm(changed, "fedavg")
    assert back == named("fedavg")
    (tmp_path / "config.toml").write_text(dump_config(named(name)))
    assert load_config(tmp_path / "config.toml", **{"algorithm.name": "fedavg"}).model == PLAIN


def test_a_key_that_is_the_users_own_stays():
    config = named("fedavg", model={"part": ["features.fc1"]})
    changed, _ = replace_algorithm(config, "fedper")
    assert (changed.model.part, changed.model.adaptor) == (("features.fc1",), "rest")
    back, _ = replace_algorithm(changed, "independent")
    assert back.model == config.model


def test_fedper_is_fedavg_of_a_part():
    """Both have equal networks, and exchange equal tensors."""
    presets, keys = named("fedper"), named("fedavg", model={"part": ["features"], "adaptor": "rest"})
    assert build(presets).list_leaves() == build(keys).list_leaves()
    assert set(build(presets).make_server_state()) == {
        k for k in build(named("fedavg")).make_server_state() if k.startswith("features.")
    }
    assert set(build(named("lg-fedavg")).make_server_state()) == {"classifier.weight", "classifier.bias"}
