"""Find the file of a module, and load code that a configuration names as "module:name".

A rule says which modules may be imported, and from where.

The default rule takes the folder in which the command runs, and installed packages. Processes of real sites set a rule
permanently (`set_rule`); reading another person's run folder sets one for a while (`use_rule`).
"""

import hashlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from fedmutual.errors import ConfigError

LIBRARIES = ("torchvision:", "timm:", "monai:", "hf:")  # begin the names of networks of libraries, and no module
SHIPPED = ("fedmutual.demo.own", "fedmutual.in_memory")  # modules for configurations to name that come with fedmutual


def get_top_name(module: str) -> str:
    """Return the first part of a dotted name, which is the file or folder to find."""
    return module.partition(".")[0]


def find_spec_in(folder: Path, module: str) -> ModuleSpec | None:
    """Return the spec that an import of the module's first part would use in this folder; None if there is none.

    A folder without an `__init__.py` is not a module here.
    """
    spec = PathFinder.find_spec(get_top_name(module), [str(folder)])
    return spec if has_file(spec) else None


def has_file(spec: ModuleSpec | None) -> TypeGuard[ModuleSpec]:
    """Return whether a module's code is a file; a folder without `__init__.py` and a module built into Python have none."""
    return spec is not None and spec.origin is not None and spec.has_location and Path(spec.origin).is_file()


def find_spec_on_path(module: str) -> ModuleSpec | None:
    """Return the spec that an import of the module's first part uses, or used, in this process; None if there is none."""
    try:
        return find_spec(get_top_name(module))
    except (ImportError, ValueError, AttributeError):  # ValueError: an imported module that says not where it is from
        return None


def is_of_python(module: str) -> bool:
    """Return whether a module belongs to the standard library."""
    return get_top_name(module) in sys.stdlib_module_names or get_top_name(module) in sys.builtin_module_names


def is_same(one: ModuleSpec | None, other: ModuleSpec | None) -> bool:
    """Return whether two module specs name one file; False if either has no file."""
    return has_file(one) and has_file(other) and Path(str(one.origin)).resolve() == Path(str(other.origin)).resolve()


def digest(spec: ModuleSpec) -> str:
    """Return the SHA-256 of a module's code as hex: of its file, or for a package of all importable files in its folder."""
    origin = Path(str(spec.origin))
    files = {origin.name: origin}
    for folder in map(Path, spec.submodule_search_locations or ()):
        suffixes = tuple(all_suffixes())
        paths = (path for path in folder.rglob("*") if path.name.endswith(suffixes) and path.parent.name != "__pycache__")
        files |= {path.relative_to(folder).as_posix(): path for path in paths}
    code = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        code.update(f"{name}\n{content}\n".encode())
    return code.hexdigest()


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
    except Exception as problem:  # a user's module may fail in any way
        missing = problem.name if isinstance(problem, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            fix = f"put {module.replace('.', '/')}.py into {rule.place} or install it"
            raise ConfigError(f"key {key!r}: there is no module {module!r}; {fix}") from None
        reason = str(problem) if missing else f"{type(problem).__name__}: {problem}"
        raise ConfigError(f"key {key!r}: module {module!r} cannot be imported: {reason}") from None
    if not hasattr(imported, attribute):
        raise ConfigError(f"key {key!r}: module {module!r} has no {attribute!r}")
    return getattr(imported, attribute)
