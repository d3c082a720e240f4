"""FLARE itself: there or not, and kept quiet on the console."""

import importlib
import logging
from types import ModuleType

from fedmutual.errors import ConfigError


def load(name: str = "nvflare") -> ModuleType:
    """A module of FLARE's.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError("real sites need NVIDIA FLARE: pip install 'fedmutual[sites]'") from None


def quiet() -> None:
    """What FLARE logs goes into its files; the console is for what an operator must know."""
    logging.getLogger("nvflare").setLevel(logging.ERROR)
