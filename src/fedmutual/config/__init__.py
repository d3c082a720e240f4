"""The configuration of an experiment: TOML files, typed settings, and errors that name the key and the fix.

The names below are imported when first used, so that the keys can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmutual.config.checks import check_scored as check_scored
    from fedmutual.config.methods import describe_method as describe_method
    from fedmutual.config.methods import has_aggregation as has_aggregation
    from fedmutual.config.methods import is_pooled as is_pooled
    from fedmutual.config.methods import list_keys as list_keys
    from fedmutual.config.methods import list_setting_types as list_setting_types
    from fedmutual.config.methods import list_tunable_settings as list_tunable_settings
    from fedmutual.config.methods import make_algorithm as make_algorithm
    from fedmutual.config.methods import read_client_settings as read_client_settings
    from fedmutual.config.reading import dump_config as dump_config
    from fedmutual.config.reading import load_compared as load_compared
    from fedmutual.config.reading import load_config as load_config
    from fedmutual.config.reading import merge_overrides as merge_overrides
    from fedmutual.config.reading import override_config as override_config
    from fedmutual.config.reading import parse_config as parse_config
    from fedmutual.config.reading import parse_override as parse_override
    from fedmutual.config.reading import read_algorithm_name as read_algorithm_name
    from fedmutual.config.reading import read_dumped as read_dumped
    from fedmutual.config.reading import read_tables as read_tables
    from fedmutual.config.reading import replace_algorithm as replace_algorithm
    from fedmutual.config.schema import ColumnConfig as ColumnConfig
    from fedmutual.config.schema import Config as Config
    from fedmutual.config.schema import DataConfig as DataConfig
    from fedmutual.config.schema import ModelConfig as ModelConfig
    from fedmutual.config.schema import PartitionConfig as PartitionConfig
    from fedmutual.config.schema import SplitConfig as SplitConfig
    from fedmutual.config.sites import ALONE as ALONE
    from fedmutual.config.sites import has_own_data as has_own_data
    from fedmutual.config.sites import make_client_config as make_client_config

_NAMES = {
    "checks": "check_scored",
    "methods": "describe_method has_aggregation is_pooled list_keys list_setting_types list_tunable_settings make_algorithm "
    "read_client_settings",
    "reading": "dump_config load_compared load_config merge_overrides override_config parse_config parse_override "
    "read_algorithm_name read_dumped read_tables replace_algorithm",
    "schema": "ColumnConfig Config DataConfig ModelConfig PartitionConfig SplitConfig",
    "sites": "ALONE has_own_data make_client_config",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
