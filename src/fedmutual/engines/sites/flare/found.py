"""FLARE itself: there or not, and kept quiet on the console."""

import importlib
import logging
import os
from types import ModuleType

from fedmutual.errors import ConfigError

MISSING = "real sites need NVIDIA FLARE, fedmutual's extra 'sites': pip install 'nvflare>=2.8.3,<2.10'"


def load(name: str = "nvflare") -> ModuleType:
    """A module of FLARE's.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(MISSING) from None


def quiet() -> None:
    """FLARE's log lines go nowhere in this process: what a lead must know is said in our words."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.getLogger().addHandler(logging.NullHandler())
