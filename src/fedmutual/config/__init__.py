"""The configuration of an experiment: TOML files, typed settings, and errors that name the key and the mend."""

from fedmutual.config.methods import all_keys, client_settings, describe_method, has_aggregation, make_algorithm, settings_of
from fedmutual.config.reading import (
    check_scored,
    dump_config,
    load_compared,
    load_config,
    merge,
    override,
    parse_config,
    read_dumped,
    read_tables,
    with_algorithm,
)
from fedmutual.config.schema import Config, DataConfig, ModelConfig, PartitionConfig, SplitConfig
from fedmutual.config.sites import ALONE, alone, brings_data

__all__ = [
    "ALONE",
    "Config",
    "DataConfig",
    "ModelConfig",
    "PartitionConfig",
    "SplitConfig",
    "all_keys",
    "alone",
    "brings_data",
    "check_scored",
    "client_settings",
    "describe_method",
    "dump_config",
    "has_aggregation",
    "load_compared",
    "load_config",
    "make_algorithm",
    "merge",
    "override",
    "parse_config",
    "read_dumped",
    "read_tables",
    "settings_of",
    "with_algorithm",
]
