"""Load code that a configuration names as "module:name". A rule says which modules may be imported, and from where.

The default rule takes the folder in which the command runs, and installed packages. Processes of real sites set a rule
permanently (`set_rule`); reading another person's run folder sets one for a while (`use_rule`).
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from fedmutual.errors import ConfigError


class Rule(Protocol):
    """A rule that says which modules may be imported."""

    @property
    def place(self) -> str:
        """Return the folder in which the user can put a module, for messages."""

    def admit(self, module: str, key: str) -> None:
        """Make the module importable. key: of the configuration that names the module, for messages.

        Raises:
            ConfigError: the module may not be imported.
            RunError: the rule reads the record of a run folder, and the record is missing or damaged.
        """


class WorkingFolder:
    """The rule for a user's configuration: any module of the folder in which the command runs, or any installed module."""

    @property
    def place(self) -> str:
        """Return the working folder."""
        return str(Path.cwd())

    def admit(self, module: str, key: str) -> None:
        """Put the working folder first in the search path."""
        if self.place not in sys.path:
            sys.path.insert(0, self.place)


_scoped: ContextVar[Rule | None] = ContextVar("rule", default=None)
process_rule: Rule | None = None


def set_rule(rule: Rule) -> None:
    """Set the rule for all threads of this process, until it ends."""
    global process_rule
    process_rule = rule


@contextmanager
def use_rule(rule: Rule) -> Iterator[None]:
    """Within, set the rule for this thread."""
    token = _scoped.set(rule)
    try:
        yield
    finally:
        _scoped.reset(token)


def get_rule() -> Rule | None:
    """Return the rule that was set; None for the default."""
    return _scoped.get() or process_rule


def load(name: str, key: str) -> Any:
    """Return the object that "module:name" names. key: the configuration key, for messages.

    Raises:
        ConfigError: the module may not be imported, cannot be imported, or lacks the name.
        RunError: as `Rule.admit`.
    """
    module, _, attribute = name.partition(":")
    rule = get_rule() or WorkingFolder()
    rule.admit(module, key)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name and f"{module}.".startswith(f"{problem.name}."):
            file = f"{module.replace('.', '/')}.py"
            raise ConfigError(
                f"key {key!r}: there is no module {module!r}; put {file} into {rule.place} or install it"
            ) from None
        raise ConfigError(f"key {key!r}: module {module!r} cannot be imported: {problem}") from None
    except Exception as problem:  # a user's module may fail in any way
        raise ConfigError(
            f"key {key!r}: module {module!r} cannot be imported: {type(problem).__name__}: {problem}"
        ) from None
    if not hasattr(imported, attribute):
        raise ConfigError(f"key {key!r}: module {module!r} has no {attribute!r}")
    return getattr(imported, attribute)
