"""What a user brings along: "module:name" is imported from the folder the command runs in, or from what is installed."""

import importlib
import sys
from pathlib import Path
from typing import Any

from fedmutual.errors import ConfigError


def load(name: str, key: str) -> Any:
    """The object that "module:name" names, for the configuration key `key`.

    Raises:
        ConfigError: the module does not import, or has no such name.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name and f"{module}.".startswith(f"{problem.name}."):
            raise ConfigError(
                f"key {key!r}: there is no module {module!r}; put {module.replace('.', '/')}.py into {here} or install it"
            ) from None
        raise ConfigError(f"key {key!r}: module {module!r} does not import: {problem}") from None
    except Exception as problem:  # a user's module may fail in any way
        raise ConfigError(f"key {key!r}: module {module!r} does not import: {type(problem).__name__}: {problem}") from None
    if not hasattr(found, attribute):
        raise ConfigError(f"key {key!r}: module {module!r} has no {attribute!r}")
    return getattr(found, attribute)
