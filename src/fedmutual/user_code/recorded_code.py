"""Check a user's code before a run folder imports it: a run records digests of the modules that it used.

A run folder may come from another person. A module that its files name as "module:name" would run here with the user's
rights. So a module is imported only if it lies in the folder in which the user runs the command and has the recorded
digest, or if the user trusts the code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from pathlib import Path
from typing import Any

from fedmutual.errors import ConfigError, RunError
from fedmutual.files import read_json
from fedmutual.user_code import plugins
from fedmutual.user_code.plugins import SHIPPED, get_top_name

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
MODULES = "modules"  # the key of environment.json: first part of the module's name -> digest
_ADD = "add --trust-code (in Python: trust_code=True)"
_TRUST = f"look at that code, then {_ADD}"
_KEYS = (
    "algorithm.name", "data.name", "training.task", "training.loss", "optimizer.name", "model.shared", "model.personal",
    "model.adaptor",
)  # fmt: skip

_trusts: ContextVar[bool] = ContextVar("trusts", default=False)


@contextmanager
def set_trust(trust_code: bool) -> Iterator[None]:
    """Within, set for this thread whether the user trusts code that run folders name."""
    token = _trusts.set(trust_code or _trusts.get())
    try:
        yield
    finally:
        _trusts.reset(token)


def is_trusting() -> bool:
    """Return whether the user trusts code that run folders name."""
    return _trusts.get()


def list_named_modules(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return module -> the first key that names it, for the user's modules in a configuration's tables."""
    named: dict[str, str] = {}
    clients = tables.get("clients")
    per_client = clients.items() if isinstance(clients, Mapping) else ()
    for prefix, table in (("", tables), *((f"clients.{i}.", client) for i, client in per_client)):
        for key, name in _list_module_keys(table):
            module, colon, _ = name.partition(":")
            if colon and module not in SHIPPED:
                named.setdefault(module, f"{prefix}{key}")
    return named


def _list_module_keys(tables: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of all keys that may name a module; names of libraries' networks do not."""
    for key in _KEYS:
        value = tables
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        for name in value if isinstance(value, list | tuple) else (value,):
            if isinstance(name, str) and not (key.startswith("model.") and name.startswith(plugins.LIBRARIES)):
                yield key, name


def compute_digests(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return module -> digest of the modules that a configuration's tables name, as imported here, for environment.json.

    Modules that may not be imported in this process are left out: a server does not need its sites' networks.

    Raises:
        RunError: as `Rule.admit`.
    """
    rule, tops = plugins.get_rule() or plugins.WorkingFolder(), set[str]()
    for module, key in list_named_modules(tables).items():
        with suppress(ConfigError):
            rule.admit(module, key)
            tops.add(get_top_name(module))
    specs = {top: plugins.find_spec_on_path(top) for top in sorted(tops)}
    return {top: plugins.digest(spec) for top, spec in specs.items() if plugins.has_file(spec)}


class RecordedCode(plugins.WorkingFolder):
    """The rule for a run folder: modules of the working folder with a recorded digest, or any module of trusted code."""

    def __init__(self, folder: Path, trust_code: bool = False, granted: Mapping[str, Any] | None = None) -> None:
        """granted: tables of the user's configuration, whose modules are the user's choice."""
        self._folder, self._trusted = folder, trust_code or _trusts.get()
        self._granted = list_named_modules(granted or {}).keys() | set(SHIPPED)

    def move(self, folder: Path) -> "RecordedCode":
        """Return the rule for another run folder of the same configuration."""
        moved = copy(self)
        moved._folder = folder
        return moved

    def admit(self, module: str, key: str) -> None:
        """Put the working folder in the search path, if the module may be imported.

        Raises:
            ConfigError: the module is not in the working folder, is part of the run folder, or differs from the recorded
                one.
            RunError: environment.json of the run folder is missing or damaged.
        """
        if not self._trusted and module not in self._granted:
            problem = self._describe_problem(module, key)
            if problem is not None:
                raise ConfigError(f"{self._folder}: key {key!r} names code of the module {module!r}{problem}; {_TRUST}")
        super().admit(module, key)

    def _describe_problem(self, module: str, key: str) -> str | None:
        folder = Path(self.place)
        spec = plugins.find_spec_in(folder, module) if module.replace(".", "").isidentifier() else None
        if spec is None:
            return f", which is not in the folder {folder} where you run this"
        if Path(str(spec.origin)).resolve().is_relative_to(self._folder.resolve()):
            return ", which is part of the run folder itself"
        super().admit(module, key)
        if not plugins.is_same(spec, plugins.find_spec_on_path(module)):
            return f", and another module of that name comes before {spec.origin}"
        difference = _describe_difference(self._folder, get_top_name(module), plugins.digest(spec))
        return None if difference is None else f": {spec.origin} {difference}"


def check_tables(tables: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if a run folder's config.toml names a module that may not be imported, or a Ray cluster.

    The owner of a cluster can run code in all processes that join it.

    Raises:
        RunError: environment.json of the run folder is missing or damaged.
    """
    engine = tables.get("engine")
    address = engine.get("address") if isinstance(engine, Mapping) else None
    if address not in (None, "auto") and not _trusts.get():
        raise ConfigError(
            f"{folder}: key 'engine.address' names the Ray cluster {address!r}, which may run code here; if it is yours, "
            f"{_ADD}"
        )
    rule = plugins.get_rule() or RecordedCode(folder)
    for module, key in list_named_modules(tables).items():
        rule.admit(module, key)


def check_unchanged(folder: Path, tables: Mapping[str, Any]) -> None:
    """Check that a run resumes with the code that it began with. tables: of the user's configuration.

    Raises:
        RunError: a module that the tables name differs from the one that the run recorded; or environment.json is missing or
            damaged.
    """
    if _trusts.get():
        return
    named = list_named_modules(tables)
    for top, now in compute_digests(tables).items():
        problem = _describe_difference(folder, top, now)
        if problem is not None:
            key = next(key for module, key in named.items() if get_top_name(module) == top)
            fix = f"to run this code {_ADD}, or begin a new run with another --out"
            raise RunError(f"{folder}: key {key!r}: the code of the module {top!r} {problem}; {fix}")


def _describe_difference(folder: Path, top: str, now: str) -> str | None:
    """Return how a module's code differs from the code that a run folder recorded; None if it does not differ."""
    recorded = read_json(folder / ENVIRONMENT).get(MODULES)
    before = recorded.get(top) if isinstance(recorded, dict) else None
    if before is None:
        return "was not recorded by this run, which an older version of fedmutual may have written"
    return None if before == now else "has changed since this run recorded it"


def is_run_config(path: Path) -> bool:
    """Return whether a TOML file is the config.toml of a run folder, and not a configuration written by a user."""
    return path.name == CONFIG and (path.parent / ENVIRONMENT).is_file()
