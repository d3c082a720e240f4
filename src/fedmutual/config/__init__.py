"""The configuration of an experiment: TOML files, typed settings, and errors that name the key and the fix.

The names of `__all__` are imported when first used, so that the keys can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmutual.config.checks import check_scored
    from fedmutual.config.methods import (
        describe_method,
        has_aggregation,
        is_pooled,
        list_keys,
        list_setting_types,
        list_tunable_settings,
        make_algorithm,
        read_client_settings,
    )
    from fedmutual.config.reading import (
        dump_config,
        load_compared,
        load_config,
        merge_overrides,
        override_config,
        parse_config,
        parse_override,
        read_algorithm_name,
        read_dumped,
        read_tables,
        replace_algorithm,
    )
    from fedmutual.config.schema import ColumnConfig, Config, DataConfig, ModelConfig, PartitionConfig, SplitConfig
    from fedmutual.config.sites import ALONE, has_own_data, make_client_config

__all__ = [
    "ALONE",
    "ColumnConfig",
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
    "is_pooled",
    "list_keys",
    "list_setting_types",
    "list_tunable_settings",
    "load_compared",
    "load_config",
    "make_algorithm",
    "make_client_config",
    "merge_overrides",
    "override_config",
    "parse_config",
    "parse_override",
    "read_algorithm_name",
    "read_client_settings",
    "read_dumped",
    "read_tables",
    "replace_algorithm",
]

_MODULES = {
    "describe_method": "methods",
    "has_aggregation": "methods",
    "is_pooled": "methods",
    "list_keys": "methods",
    "list_setting_types": "methods",
    "make_algorithm": "methods",
    "read_client_settings": "methods",
    "list_tunable_settings": "methods",
    "check_scored": "checks",
    "dump_config": "reading",
    "load_compared": "reading",
    "load_config": "reading",
    "merge_overrides": "reading",
    "parse_config": "reading",
    "parse_override": "reading",
    "read_dumped": "reading",
    "read_tables": "reading",
    "replace_algorithm": "reading",
    "ColumnConfig": "schema",
    "read_algorithm_name": "reading",
    "override_config": "reading",
    "Config": "schema",
    "DataConfig": "schema",
    "ModelConfig": "schema",
    "PartitionConfig": "schema",
    "SplitConfig": "schema",
    "ALONE": "sites",
    "has_own_data": "sites",
    "make_client_config": "sites",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
