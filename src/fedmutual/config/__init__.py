"""The configuration of an experiment: TOML files, typed settings, and errors that name the key and the fix.

The names below are imported when first used, so that the keys can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmutual.config.checks import *  # noqa: F403
    from fedmutual.config.methods import *  # noqa: F403
    from fedmutual.config.reading import *  # noqa: F403
    from fedmutual.config.schema import *  # noqa: F403

_NAMES = {
    "checks": "check_scored",
    "methods": "ALONE describe_method has_aggregation is_pooled list_keys list_setting_types list_tunable_settings "
    "make_algorithm make_client_config read_client_settings",
    "reading": "dump_config load_compared load_config merge_overrides override_config parse_config parse_override "
    "read_algorithm_name read_dumped read_tables replace_algorithm",
    "schema": "ColumnConfig Config DataConfig ModelConfig PartitionConfig SplitConfig has_own_data",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
