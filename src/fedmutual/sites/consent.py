"""The check that a received contract equals a contract that the operator agreed to.

Contracts are compared as raw tables, before any table is parsed: a parser would import the modules that a table names.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import fedmutual
from fedmutual.config.keys import Table, list_effects
from fedmutual.config.schema import Config
from fedmutual.errors import ConfigError
from fedmutual.sites.protocol import clean_text, parse_strict_json
from fedmutual.sites.schema import ServerTable, SitesTable

FORMAT = 2
LONGEST_CONTRACT = 2**22  # characters of a received contract; a contract with 10,000 columns has about 200,000
_DEEPEST = 16  # levels of nested tables
_SHOWN = 80  # characters of another party's text in a message
_KEYS: dict[str, Any] = {"format": int, "version": str, "name": str, "public": dict | None, "tables": dict}
_CHANGEABLE = tuple(  # keys that a submission may change without the sites' consent; docs/security.md says why
    tuple(key.split("."))
    for table, prefix in ((Config, ""), (ServerTable, "server."), (SitesTable, "sites."))
    for key, effect in list_effects(table, prefix).items()
    if effect.lead_may_change
)


def check_agreed(text: Any, agreed: Iterable[Table], party: str) -> Table:
    """Return the record of a contract from JSON text, where the operator agreed to that contract.

    agreed: the records of the contracts that the operator agreed to. party: "this site" or "this server", for messages.
    Raises ConfigError where the text is no record, is of another version, or differs from the contract that the operator
    agreed to.
    """
    record = parse_contract_record(text)
    if record["format"] != FORMAT:
        raise ConfigError("this version of fedmutual does not read the contract's format; install the version that wrote it")
    check_release(record["version"], "the contract")
    agreed_by_name: dict[str, Table] = {}
    for contract in agreed:
        for name, tables in list_runs(contract["name"], contract["tables"]):
            agreed_by_name[name] = {**contract, "name": name, "tables": tables}
    if record["name"] not in agreed_by_name:
        raise ConfigError(
            f"the job is of federation {_shorten(repr(record['name']))}, "
            f"and {party} agreed to {', '.join(map(repr, agreed_by_name))}; "
            "to agree to another one, start it with --contract and that federation's file"
        )
    clause = find_difference(agreed_by_name[record["name"]], record, party)
    if clause is not None:
        raise ConfigError(f"the job is not of the federation that was agreed to: {clause}")
    return record


def list_runs(name: str, tables: Table) -> list[tuple[str, Table]]:
    """Return (name, tables) of each federation of a contract: NAME, or one for each seed and fold.

    With `sites.seeds` the names are NAME-seed0, NAME-seed1, ...; with `split.folds` NAME-0, NAME-1, ...; with both
    NAME-seed0-0, NAME-seed0-1, ...
    """
    split, sites, first = tables.get("split", {}), tables.get("sites", {}), tables.get("seed", 0)
    folds = [None] if split.get("folds") is None or split.get("fold") is not None else [*range(split["folds"])]
    seeds = [None] if sites.get("seeds", 1) == 1 else [*range(first, first + sites["seeds"])]
    runs = []
    for seed, fold in itertools.product(seeds, folds):
        run = name + ("" if seed is None else f"-seed{seed}") + ("" if fold is None else f"-{fold}")
        of_seed = {} if seed is None else {"seed": seed, "sites": {**sites, "seeds": 1}}
        of_fold = {} if fold is None else {"split": {**split, "fold": fold}}
        runs.append((run, {**tables, **of_seed, **of_fold, **({"name": run} if run != name else {})}))
    return runs


def parse_contract_record(text: Any) -> Table:
    """Return the recorded contract in a JSON text of another participant, after a check of keys and types only.

    Raises ConfigError where the text is too long, is not JSON, or has other keys or types.
    """
    with suppress(ValueError, RecursionError):
        record: Any = parse_strict_json(text) if isinstance(text, str) and len(text) <= LONGEST_CONTRACT else None
        is_record = isinstance(record, dict) and record.keys() == _KEYS.keys() and type(record["format"]) is int
        if is_record and all(isinstance(record[key], kind) for key, kind in _KEYS.items()):
            return dict(record)
    raise ConfigError("the contract was not written by fedmutual; install the same version everywhere")


def find_difference(agreed: Table, record: Table, party: str = "this site") -> str | None:
    """Return in one clause the first difference of two raw records that needs consent, or None where no value differs.

    Raises ConfigError where tables or lists of a record are nested too deep.
    """
    agreed_values, values = dict(_list_values(agreed["tables"])), dict(_list_values(record["tables"]))
    for path in sorted(agreed_values.keys() | values.keys()):
        if agreed_values.get(path) != values.get(path) and not _is_changeable(path):
            value, agreed_value = (_shorten(table.get(path, "unset")) for table in (values, agreed_values))
            return f"its {_shorten(repr('.'.join(path)))} is {value}, and {party} agreed to {agreed_value}"
    return None


def digest_agreed(record: Table) -> str:
    """Return the SHA-256 digest, in hex, of all values of a record that need the sites' consent to change.

    Raises ConfigError as `find_difference`.
    """
    values = [[list(path), value] for path, value in sorted(_list_values(record["tables"])) if not _is_changeable(path)]
    return hashlib.sha256(json.dumps([record["name"], record["public"], values]).encode()).hexdigest()


def check_release(version: str, subject: str) -> None:
    """Raise ConfigError where the first two numbers of a version differ from those of this version.

    subject: the owner of the version, for the message: "the server".
    """
    if version.split(".")[:2] != fedmutual.__version__.split(".")[:2]:
        raise ConfigError(
            f"{subject} has fedmutual {clean_text(_shorten(version))}, and this host has {fedmutual.__version__}; "
            "install the same version everywhere"
        )


def _is_changeable(path: tuple[str, ...]) -> bool:
    """Return whether a submission may change the value at this path without consent."""
    return any(path[: len(key)] == key for key in _CHANGEABLE)


def _list_values(tables: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, value) of each value in nested tables. Values are JSON text, in which 1, 1.0 and true differ.

    Raises ConfigError where tables or lists are nested too deep.
    """
    problem = ConfigError(f"the contract has tables in tables, more than {_DEEPEST} deep; it was not written by fedmutual")
    if len(path) > _DEEPEST:
        raise problem
    if isinstance(tables, Mapping) and tables:
        for key, value in tables.items():
            yield from _list_values(value, (*path, key))
    else:
        try:
            text = json.dumps(tables, sort_keys=True)
        except RecursionError:  # thousands of nested lists, which json.loads can still read
            raise problem from None
        yield path, text


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
