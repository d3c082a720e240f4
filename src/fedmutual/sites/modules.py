"""Modules that a process of real sites imports for "module:name": only the modules that the operator lists.

A listed module is installed, or lies in a folder of the operator's own files. No folder in which FLARE, a job or the shell
works is searched: what lies there may have come over the wire.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from fedmutual.errors import ConfigError
from fedmutual.user_code import plugins
from fedmutual.user_code.plugins import SHIPPED, get_top_name


class ListedModules(MetaPathFinder):
    """The rule of a process of real sites, and the finder by which Python finds the listed modules in their folders."""

    def __init__(self, modules: Sequence[str], folders: Sequence[Path], fix: Callable[[str], str]) -> None:
        """modules: dotted names; a listed package includes its modules. folders: searched after the installed packages.

        fix: module -> how the operator lists it, for messages.
        """
        self._modules, self._fix = tuple(modules), fix
        self._folders = tuple(dict.fromkeys(folder.resolve() for folder in folders))

    @property
    def place(self) -> str:
        """The operator's folders."""
        return " or ".join(map(str, self._folders))

    def admit(self, module: str, key: str) -> None:
        """Let Python find the module.

        Raises ConfigError where the operator does not list it, it is one of Python's own, or two modules have its name.
        """
        if module in SHIPPED:
            return
        names = f"key {key!r} names code of the module {module!r}"
        if not any(f"{module}.".startswith(f"{listed}.") for listed in self._modules):
            raise ConfigError(
                f"{names}, which this process does not trust; read that code, which would have all rights of this process, "
                f"then {self._fix(module)}"
            )
        if plugins.is_of_python(module) or not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"{names}, which cannot be the name of a user's module")
        beside = [spec for folder in self._folders if (spec := plugins.find_spec_in(folder, module)) is not None]
        places = dict.fromkeys(
            _describe_place(spec) for spec in (*beside, plugins.find_spec_on_path(module)) if spec is not None
        )
        if len(places) > 1:
            raise ConfigError(f"{names}, and there are several of that name: {' and '.join(places)}; rename one")
        if self not in sys.meta_path:
            sys.meta_path.append(self)  # the last one: nothing in these folders comes before what is installed

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return where a listed module is; Python's import system calls this method for modules that are not installed."""
        if path is not None or fullname not in map(get_top_name, self._modules):
            return None
        return next((spec for folder in self._folders if (spec := plugins.find_spec_in(folder, fullname))), None)


def make_server_rule(modules: Sequence[str], contracts: Sequence[Path]) -> ListedModules:
    """Return the rule of a server's process. contracts: the federations' files, beside which its operator puts modules."""
    return ListedModules(modules, [path.parent for path in contracts], lambda name: f"add --trust-module {name}")


def _describe_place(spec: ModuleSpec) -> str:
    """Return the place of a module for messages."""
    if plugins.has_file(spec):
        return str(Path(str(spec.origin)).resolve())
    return ", ".join(spec.submodule_search_locations or ()) or str(spec.origin)


def leave_working_folders(*folders: Path) -> None:
    """Take the working folder, and all that lies in the given ones, off the path on which Python searches modules."""
    here, roots = Path.cwd().resolve(), [folder.resolve() for folder in folders]
    paths = {entry: Path(entry).resolve() for entry in sys.path if entry}
    sys.path[:] = [i for i, path in paths.items() if path != here and not any(map(path.is_relative_to, roots))]
