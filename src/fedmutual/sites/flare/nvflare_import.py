"""FLARE itself: there or not, and kept quiet on the console."""

import importlib
import importlib.metadata
import logging
import os
import re
from types import ModuleType

from fedmutual.errors import ConfigError

FLARE = ((2, 9), (2, 10))  # from, and before, as the extra `sites` has it: older ones let sites take unsigned jobs
_FIRST, _END = (".".join(map(str, limit)) for limit in FLARE)
WANTED = f"pip install 'nvflare>={_FIRST},<{_END}'"
MISSING = f"real sites need NVIDIA FLARE, fedmutual's extra 'sites': {WANTED}"


def import_nvflare(name: str = "nvflare") -> ModuleType:
    """A module of FLARE's.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(MISSING) from None


def check_version() -> str:
    """FLARE's version.

    Raises:
        ConfigError: it is not installed, or of a version that fedmutual does not work with.
    """
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(MISSING) from None
    if not FLARE[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < FLARE[1]:
        raise ConfigError(f"nvflare {version} is not of {_FIRST} to {_END}: {WANTED}")
    return version


def silence_nvflare() -> None:
    """FLARE's log lines go nowhere in this process: what a lead must know is said in our words."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.getLogger().addHandler(logging.NullHandler())
