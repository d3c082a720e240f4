"""Whether a contract that crossed is one that an operator agreed to. It is compared as raw tables, before any is parsed:
what it names may be code.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fedmutual
from fedmutual.config.keys import Table, list_effects
from fedmutual.config.schema import Config
from fedmutual.errors import ConfigError
from fedmutual.sites.protocol import clean_text
from fedmutual.sites.schema import ServerTable, SitesTable

FORMAT = 1
LONGEST = 2**22  # characters of a contract that crosses; one that names 10,000 columns has about 200,000
_DEEPEST = 16  # tables in tables
_SHOWN = 80  # characters of somebody else's text in a message
_TYPES: dict[str, tuple[type, ...]] = {  # the keys of a contract's record, and their types in JSON
    "format": (int,),
    "version": (str,),
    "name": (str,),
    "public": (dict, type(None)),
    "tables": (dict,),
}
_CHANGEABLE = (
    tuple(  # by a submission without the sites' consent, rounds within each site's limit; docs/security.md says why
        tuple(key.split("."))
        for table, prefix in ((Config, ""), (ServerTable, "server."), (SitesTable, "sites."))
        for key, effect in list_effects(table, prefix).items()
        if effect.lead_may_change
    )
)


def check_agreed(text: Any, agreed: Iterable[Table], who: str) -> Table:
    """A contract's record out of JSON text, if the operator agreed to that contract.

    agreed: the records of the contracts that the operator agreed to. who: "this site" or "this server", for messages.

    Raises:
        ConfigError: the text is no record, is of another version, or is not what the operator agreed to.
    """
    record = read_record(text)
    if record["format"] != FORMAT:
        raise ConfigError("the contract is of another format than this version of fedmutual reads; install the same one")
    check_release(record["version"], "the contract")
    known = {contract["name"]: contract for contract in agreed}
    if record["name"] not in known:
        raise ConfigError(
            f"the job is of federation {_shorten(repr(record['name']))}, and {who} agreed to {', '.join(map(repr, known))}; "
            "to agree to another one, start it with --contract and that federation's file"
        )
    clause = find_difference(known[record["name"]], record, who)
    if clause is not None:
        raise ConfigError(f"the job is not of the federation that was agreed to: {clause}")
    return record


def read_record(text: Any) -> Table:
    """A contract's record out of JSON text of somebody else's: its keys and their types are right, nothing more is known.

    Raises:
        ConfigError: the text is too long, no JSON, or not of these keys and types.
    """
    problem = ConfigError("the contract is none that fedmutual writes; install the same version everywhere")
    if not isinstance(text, str) or len(text) > LONGEST:
        raise problem
    try:
        record = json.loads(text, object_pairs_hook=_read_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise problem from None
    if not isinstance(record, dict) or record.keys() != _TYPES.keys():
        raise problem
    if any(type(record[key]) not in types for key, types in _TYPES.items()):
        raise problem
    return record


def find_difference(agreed: Table, record: Table, who: str = "this site") -> str | None:
    """What of a contract's record the operator did not consent to, in one clause; None: nothing. Both are raw records."""
    ours, theirs = (dict(_leaves(one["tables"])) for one in (agreed, record))
    for path in sorted(ours.keys() | theirs.keys()):
        if ours.get(path) != theirs.get(path) and not _is_open(path):
            now, then = (_shorten(leaves.get(path, "unset")) for leaves in (theirs, ours))
            return f"its {_shorten(repr('.'.join(path)))} is {now}, and {who} agreed to {then}"
    return None


def digest_agreed(record: Table) -> str:
    """Digest, in hex, of all of a contract's record that changes with the sites' consent alone."""
    about = [[list(path), value] for path, value in sorted(_leaves(record["tables"])) if not _is_open(path)]
    return hashlib.sha256(json.dumps([record["name"], record["public"], about]).encode()).hexdigest()


def check_release(version: str, whose: str) -> None:
    """Raise ConfigError where somebody runs a version that speaks otherwise: its first two numbers are others."""
    if version.split(".")[:2] != fedmutual.__version__.split(".")[:2]:
        raise ConfigError(
            f"{whose} is of fedmutual {clean_text(_shorten(version))}, and here is {fedmutual.__version__}; "
            "install the same version everywhere"
        )


def _is_open(path: tuple[str, ...]) -> bool:
    """Whether a submission may change what stands there without consent."""
    return any(path[: len(key)] == key for key in _CHANGEABLE)


def _leaves(tables: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, value) of all that stands in tables; values as JSON text, in which 1, 1.0 and true differ.

    Raises:
        ConfigError: tables, or lists, stand in each other too deep.
    """
    problem = ConfigError(f"the contract has tables in tables, more than {_DEEPEST} deep; it is none that fedmutual writes")
    if len(path) > _DEEPEST:
        raise problem
    if isinstance(tables, Mapping) and tables:
        for key, value in tables.items():
            yield from _leaves(value, (*path, key))
    else:
        try:
            text = json.dumps(tables, sort_keys=True)
        except RecursionError:  # lists in lists, by the thousand: just few enough that they could be read
            raise problem from None
        yield path, text


def _read_object(pairs: list[tuple[str, Any]]) -> Table:
    """A JSON object. A key that comes twice is refused: another reader might take the other value."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key comes twice")
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
