"""What `list keys` and `list algorithms` say of a configuration, held against the schema."""

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import list_keys
from fedmutual.config.reference import describe_algorithms, list_reference_keys

KEYS = dict(list_reference_keys())
CLIENT_SETTINGS = {name.rpartition(".")[2] for name in KEYS if name.startswith("clients.ID.algorithm.")}


def test_every_key_is_there_once_with_its_meaning() -> None:
    names = [name for name, _ in list_reference_keys()]
    assert len(names) == len(set(names))
    assert {name for name in names if not name.startswith(("clients.", "data.columns.NAME."))} == set(list_keys())
    assert [name for name, line in KEYS.items() if line.endswith(": ") or "\n" in line] == []


def test_a_client_may_set_the_settings_of_its_own_loss() -> None:
    assert "algorithm.bench" not in KEYS, "what a run fills in is no key"
    assert {"alpha", "beta", "lam", "mix", "mu", "proto_lam"} <= CLIENT_SETTINGS
    assert not CLIENT_SETTINGS & {"weighting", "temperature", "adaptive", "head_epochs"}


def test_every_algorithm_has_its_own_line() -> None:
    descriptions = describe_algorithms()
    assert list(descriptions) == list(ALGORITHMS)
    assert len(set(descriptions.values())) == len(descriptions)
    assert descriptions["centralised"].startswith("One model, trained on all participants' data")
    assert descriptions["fml"].endswith("Settings: alpha, beta, temperature.")
