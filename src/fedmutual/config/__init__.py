"""The configuration of an experiment: TOML files, typed settings, and errors that name the key and the mend."""

from fedmutual.config.methods import (
    describe_method,
    has_aggregation,
    list_keys,
    list_setting_types,
    make_algorithm,
    read_client_settings,
)
from fedmutual.config.reading import (
    check_scored,
    dump_config,
    load_compared,
    load_config,
    merge_overrides,
    parse_config,
    parse_override,
    read_dumped,
    read_tables,
    with_algorithm,
)
from fedmutual.config.schema import Config, DataConfig, ModelConfig, PartitionConfig, SplitConfig
from fedmutual.config.sites import ALONE, has_own_data, make_client_config

__all__ = [
    "ALONE",
    "Config",
    "DataConfig",
    "ModelConfig",
    "PartitionConfig",
    "SplitConfig",
    "check_scored",
    "describe_method",
    "dump_config",
    "has_aggregation",
    "has_own_data",
    "list_keys",
    "list_setting_types",
    "load_compared",
    "load_config",
    "make_algorithm",
    "make_client_config",
    "merge_overrides",
    "parse_config",
    "parse_override",
    "read_client_settings",
    "read_dumped",
    "read_tables",
    "with_algorithm",
]
