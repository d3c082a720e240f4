"""Import NVIDIA FLARE, check its version, and silence its console output."""

import importlib
import importlib.metadata
import logging
import os
import re
from types import ModuleType

from fedmutual.errors import ConfigError

# The first version, and the first version that is too new, as in the extra `sites`; older versions accept unsigned jobs.
FLARE = ((2, 9), (2, 10))
_FIRST, _END = (".".join(map(str, limit)) for limit in FLARE)
WANTED = f"pip install 'nvflare>={_FIRST},<{_END}'"
MISSING = f"real sites need NVIDIA FLARE, fedmutual's extra 'sites': {WANTED}"


def import_nvflare(name: str = "nvflare") -> ModuleType:
    """Return an imported module of FLARE.

    Raises:
        ConfigError: FLARE is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(MISSING) from None


def check_version() -> str:
    """Return the version of FLARE.

    Raises:
        ConfigError: FLARE is not installed, or its version is not supported.
    """
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(MISSING) from None
    if not FLARE[0] <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < FLARE[1]:
        raise ConfigError(f"nvflare {version} is not supported, install one from {_FIRST} to before {_END}: {WANTED}")
    return version


def silence_nvflare() -> None:
    """Discard FLARE's log lines in this process; fedmutual prints the messages for a lead itself."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.getLogger().addHandler(logging.NullHandler())
