"""Federated mutual learning: participants that differ in data, in model and in objective teach each other.

The names of `__all__` are the API. They are imported when first used, so that `fedmutual --help` does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmutual.config import Config, load_config
    from fedmutual.errors import ConfigError, DataError, RemarkWarning, RunError, UserError
    from fedmutual.results.read import read
    from fedmutual.studies.objects import Comparison, compare, federate
    from fedmutual.studies.predict import Prediction, predict
    from fedmutual.studies.site_objects import Site
    from fedmutual.studies.study import run
    from fedmutual.studies.sweep import Sweep, sweep
    from fedmutual.studies.trained_run import Run

__all__ = [
    "Comparison",
    "Config",
    "ConfigError",
    "DataError",
    "Prediction",
    "RemarkWarning",
    "Run",
    "RunError",
    "Site",
    "Sweep",
    "UserError",
    "compare",
    "federate",
    "load_config",
    "predict",
    "read",
    "run",
    "sweep",
]
__version__ = version("fedmutual")

_HOMES = {  # of other names: errors
    **dict.fromkeys(("Config", "load_config"), "config"),
    **dict.fromkeys(("Comparison", "compare", "federate"), "studies.objects"),
    **dict.fromkeys(("Prediction", "predict"), "studies.predict"),
    **dict.fromkeys(("Sweep", "sweep"), "studies.sweep"),
    "read": "results.read",
    "Run": "studies.trained_run",
    "run": "studies.study",
    "Site": "studies.site_objects",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'fedmutual' has no attribute {name!r}")
    return getattr(import_module(f"fedmutual.{_HOMES.get(name, 'errors')}"), name)
