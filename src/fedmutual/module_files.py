"""Where the code of a module lies, found without importing it, and the digest of that code."""

import hashlib
import sys
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

SHIPPED = ("fedmutual.demo.own", "fedmutual.in_memory")  # modules for configurations to name that come with fedmutual


def top_of(module: str) -> str:
    """The first part of a dotted name, which is the file or the folder that is looked for."""
    return module.partition(".")[0]


def spec_in(folder: Path, module: str) -> ModuleSpec | None:
    """What an import of the module's first part would take in this folder; None where there is nothing.

    A folder of that name without an `__init__.py` is no module here.
    """
    spec = PathFinder.find_spec(top_of(module), [str(folder)])
    return spec if has_file(spec) else None


def has_file(spec: ModuleSpec | None) -> TypeGuard[ModuleSpec]:
    """Whether a module's code is a file: a folder without `__init__.py`, and what is built into Python, have none."""
    return spec is not None and spec.origin is not None and spec.has_location and Path(spec.origin).is_file()


def spec_on_path(module: str) -> ModuleSpec | None:
    """What an import of the module's first part takes in this process, or took; None where there is nothing."""
    try:
        return find_spec(top_of(module))
    except (ImportError, ValueError, AttributeError):  # ValueError: an imported module that says not where it is from
        return None


def is_of_python(module: str) -> bool:
    """Whether a module belongs to the standard library."""
    return top_of(module) in sys.stdlib_module_names or top_of(module) in sys.builtin_module_names


def is_same(one: ModuleSpec | None, other: ModuleSpec | None) -> bool:
    """Whether two specs are of the same file."""
    return has_file(one) and has_file(other) and Path(str(one.origin)).resolve() == Path(str(other.origin)).resolve()


def digest(spec: ModuleSpec) -> str:
    """SHA-256 over a module's code: its file; of a package all files in its folder that can be imported. Hex."""
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
