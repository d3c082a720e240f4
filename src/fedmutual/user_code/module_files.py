"""Find the file of a module without importing it, and compute the digest of its code."""

import hashlib
import sys
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

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
