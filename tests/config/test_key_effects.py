"""What a key affects, derived from the schema: held against what fingerprints and comparisons are known to depend on."""

from dataclasses import fields

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import list_keys
from fedmutual.config.keys import list_effects
from fedmutual.config.schema import Config
from fedmutual_papers.plan import has_effect

EFFECTS = list_effects(Config)


def keys_that(condition):
    return {key for key, effect in EFFECTS.items() if condition(effect)}


def test_the_keys_that_a_resumed_run_may_change():
    workers = {"engine.name", "engine.workers", "engine.resident", "engine.address", "engine.gpus"}  # the bits are the same
    budget = {"privacy.epsilon", "privacy.delta", "privacy.accountant"}  # training costs no less or more for them
    assert keys_that(lambda effect: effect.resumable) == workers | budget


def test_the_keys_that_change_no_number_of_a_result():
    machine = {
        "engine.device",
        "engine.threads",
        "engine.compile",
        "engine.products",
        "engine.turns",
        "data.root",
        "data.resident",
        "data.workers",
    }
    record = {"name", "records.checkpoint_every", "records.keep_best", "records.tensorboard", "records.trackers"}
    resumable = keys_that(lambda effect: effect.resumable)
    assert {key for key in EFFECTS if not has_effect(key)} == machine | record | resumable


def test_the_keys_that_change_scores_but_nothing_that_is_learned():
    records = {f"records.{key}" for key in ("evaluate_every", "evaluate_on", "best_by", "copies", "ensemble")}
    assert keys_that(lambda effect: effect.affects == "scores") == records | {"share.metrics"}


def test_every_key_of_a_configuration_has_an_effect():
    """The settings of algorithms are left out: all of them change what is learned."""
    dumped = Config().model_dump()
    tables = {key: value for key, value in dumped.items() if isinstance(value, dict) and key not in ("algorithm", "clients")}
    keys = {f"{table}.{key}" for table, values in tables.items() for key in values}
    assert keys | {"name", "seed", "rounds"} == EFFECTS.keys()


def test_a_condition_names_a_key_and_what_a_key_without_effect_gives():
    """A misspelt key would raise an error in the check of each configuration that sets the key with the condition."""
    settings = [f.metadata.get("only_if", ()) for kind in ALGORITHMS.values() for f in fields(kind)]
    conditions = {condition for effect in EFFECTS.values() for condition in effect.only_if}
    for condition in conditions | {condition for only_if in settings for condition in only_if}:
        if "." in condition.key:
            assert condition.key in {*list_keys(), "clients.ID.data"}
            assert condition.values
        else:
            assert condition.about
            assert bool(condition.remark) == bool(condition.values) == (condition.key in ("algorithm", "engine"))
