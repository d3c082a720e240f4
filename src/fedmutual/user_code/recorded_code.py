"""Check a user's code before a run folder imports it: a run records digests of the modules that it used.

A run folder may come from another person. A module that its files name as "module:name" would run here with the user's
rights. So a module is imported only if it lies in the folder in which the user runs the command and has the recorded
digest, or if the user trusts the code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedmutual.errors import ConfigError, RunError
from fedmutual.files import read_json
from fedmutual.user_code import module_files, plugins
from fedmutual.user_code.module_files import SHIPPED, get_top_name

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
MODULES = "modules"  # the key of environment.json: first part of the module's name -> digest
_TRUST = "look at that code, then add --trust-code (in Python: trust_code=True)"
_KEYS = (("algorithm", "name"), ("data", "name"), ("training", "task"))
_NETWORKS = ("shared", "personal", "adaptor")
_TORCHVISION = "torchvision:"  # before the name of a network of torchvision's, which is no module of the user's

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
    """Yield (key, text) of all keys that may name a module."""
    if not isinstance(tables, Mapping):
        return
    for table, key in _KEYS:
        inner = tables.get(table)
        if isinstance(inner, Mapping) and isinstance(inner.get(key), str):
            yield f"{table}.{key}", inner[key]
    model = tables.get("model")
    networks = {key: model.get(key) for key in _NETWORKS} if isinstance(model, Mapping) else {}
    for key, value in networks.items():
        for name in value if isinstance(value, list | tuple) else (value,):
            if isinstance(name, str) and not name.startswith(_TORCHVISION):
                yield f"model.{key}", name


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
    specs = {top: module_files.find_spec_on_path(top) for top in sorted(tops)}
    return {top: module_files.digest(spec) for top, spec in specs.items() if module_files.has_file(spec)}


class RecordedCode:
    """The rule for a run folder: modules of the working folder with a recorded digest, or any module of trusted code."""

    def __init__(self, folder: Path, trust_code: bool = False, granted: Mapping[str, Any] | None = None) -> None:
        """granted: tables of the user's configuration, whose modules are the user's choice."""
        self._folder, self._trusted = folder, trust_code or _trusts.get()
        self._granted = list_named_modules(granted or {}).keys() | set(SHIPPED)
        self._default = plugins.WorkingFolder()

    @property
    def place(self) -> str:
        """Return the working folder."""
        return self._default.place

    def admit(self, module: str, key: str) -> None:
        """Put the working folder in the search path, if the module may be imported.

        Raises:
            ConfigError: the module is not in the working folder, is part of the run folder, or differs from the recorded
                one.
            RunError: environment.json of the run folder is missing or damaged.
        """
        if not self._trusted and module not in self._granted:
            self._check(module, key)
        self._default.admit(module, key)

    def _check(self, module: str, key: str) -> None:
        working_folder = Path(self.place)
        names = f"{self._folder}: key {key!r} names code of the module {module!r}"
        spec = module_files.find_spec_in(working_folder, module) if module.replace(".", "").isidentifier() else None
        if spec is None:
            raise ConfigError(f"{names}, which is not in the folder {working_folder} where you run this; {_TRUST}")
        if Path(str(spec.origin)).resolve().is_relative_to(self._folder.resolve()):
            raise ConfigError(f"{names}, which is part of the run folder itself; {_TRUST}")
        self._default.admit(module, key)
        if not module_files.is_same(spec, module_files.find_spec_on_path(module)):
            raise ConfigError(f"{names}, and another module of that name comes before {spec.origin}; {_TRUST}")
        problem = _describe_difference(self._folder, get_top_name(module), module_files.digest(spec))
        if problem is not None:
            raise ConfigError(f"{names}: {spec.origin} {problem}; {_TRUST}")


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
            "add --trust-code (in Python: trust_code=True)"
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
            raise RunError(
                f"{folder}: key {key!r}: the code of the module {top!r} {problem}; to run this code add --trust-code "
                "(in Python: trust_code=True), or begin a new run with another --out"
            )


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
