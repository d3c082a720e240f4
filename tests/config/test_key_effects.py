"""What a key affects, derived from the schema; docs/configuration.md states the effect of each key."""

from dataclasses import fields

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import list_keys
from fedmutual.config.keys import list_effects
from fedmutual.config.schema import Config
from fedmutual_papers.plan import has_effect

EFFECTS = list_effects(Config)


def test_a_key_that_a_resumed_run_may_change_changes_no_result():
    changes = {key for key, effect in EFFECTS.items() if has_effect(key)}
    assert {"rounds", "optimizer.lr", "share.metrics", "engine.precision", "partition.file"} <= changes
    assert not changes & {"name", "engine.name", "engine.threads", "data.root", "records.keep_best"}
    assert not changes & {key for key, effect in EFFECTS.items() if effect.resumable}
    assert changes == {key for key, effect in EFFECTS.items() if effect.affects in ("result", "scores")}


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
