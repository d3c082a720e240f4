"""What the participants of a federation of real sites agreed on: read from FEDERATION.toml, held against at every site."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

import fedmutual
from fedmutual.config import Config, all_keys, make_algorithm, merge, parse_config, read_tables
from fedmutual.config.schema import Section, Table
from fedmutual.config.sentences import sentence
from fedmutual.core import Algorithm
from fedmutual.engines.sites import public
from fedmutual.engines.sites.schema import SeedsTable, ServerTable, SiteFile, SitesTable
from fedmutual.errors import ConfigError

S = TypeVar("S", bound=Section)
_NOT_COMMON = {
    "partition": "every site has data of its own",
    "clients": "what a site does its own way stands in its own site.toml, and the others do not learn it",
    "engine": "where its work runs is for each site to say, in its site.toml",
}
_NOT_READ = {
    ("records", "keep_best"): (False, "best rounds' weights are not kept there"),
    ("records", "checkpoint_every"): (1, "every round is saved there"),
    ("records", "tensorboard"): (False, "it is not written there"),
    ("model", "weights"): (None, "the server begins with random weights, or goes on with its own"),
}
_OPEN = ("rounds", "server", "sites.quorum", "sites.deadline", "sites.wait", "sites.retries", "sites.leads")
# what a submission may change without the sites' consent: nothing that says what leaves a site


@dataclass(frozen=True)
class Contract:
    """A federation's settings. Public: the server and all sites have it."""

    tables: Table  # the keys of an experiment that all have in common
    sites: SitesTable
    server: ServerTable
    public: Table | None = None  # what it says of the public seed set (schema.SeedsTable)
    version: str = fedmutual.__version__
    source: str = "the contract"  # what messages call it

    @cached_property
    def config(self) -> Config:
        """The common settings, checked."""
        return parse_config(self.tables, self.source)

    @cached_property
    def algorithm(self) -> Algorithm:
        """Its phases, with the common settings."""
        return make_algorithm(self.config)

    @property
    def name(self) -> str:
        """The federation's."""
        return self.config.name

    @property
    def quorum(self) -> int:
        """How many sites must answer."""
        return min(self.sites.quorum or len(self.sites.names) // 2 + 1, len(self.sites.names))

    def at(self, own: SiteFile, source: str) -> Config:
        """The whole configuration of one site: a federation of one client, who brings its own data.

        Raises:
            ConfigError: a key of the site's file is wrong, or does not go together with the contract.
        """
        kept = own.model_dump(exclude_unset=True)
        mine = {k: kept[k] for k in ("data", "model", "algorithm", "training", "optimizer", "share") if k in kept}
        given = {"engine": own.engine.model_dump(), "split": {k: v for k, v in own.split if v is not None}}
        given["privacy"] = {k: v for k, v in own.privacy if v is not None}
        tables = merge(self.tables, {"clients": {own.site: {"data": {"name": "digits"}, **mine}}, **given})
        try:
            return parse_config(tables, source)
        except ConfigError as problem:
            raise ConfigError(str(problem).replace(f"clients.{own.site}.", "")) from None

    def record(self) -> Table:
        """As it crosses, in JSON. Where the public seed set lies is for everybody to know alone."""
        sites = self.sites.model_dump(mode="json", exclude={"public"})
        tables = {"server": self.server.model_dump(mode="json"), "sites": sites}
        about = {"format": 1, "version": self.version, "name": self.name}
        return {**about, "public": self.public, "tables": {**self.tables, **tables}}

    @property
    def imprint(self) -> str:
        """Of all that is submitted. Hex."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """Of what may not change while a federation goes on, beside its settings: sites may come and go. Hex."""
        return hashlib.sha256(json.dumps(list(self.sites.input)).encode()).hexdigest()

    def differing(self, other: "Contract") -> str | None:
        """What of another contract this one's site did not consent to, in one clause; None: nothing."""
        ours, theirs = (dict(_flat(c.record()["tables"])) for c in (self, other))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key) and not key.startswith(_OPEN):
                now, then = (json.dumps(t[key]) if key in t else "unset" for t in (theirs, ours))
                return f"its {key!r} is {now}, and this site agreed to {then}"
        return None


def read(path: Path) -> Contract:
    """A federation's contract from its FEDERATION.toml, without what it says of the public seed set.

    Raises:
        ConfigError: in one sentence, which key is wrong, missing, or has no place there.
    """
    return made(read_tables(path), str(path))


def whole(path: Path) -> Contract:
    """The same with it, as it is submitted: from the files that the sites gave, in the folder `sites.public`.

    Raises:
        UserError: likewise; or what is wrong with which site's file.
    """
    found = read(path)
    use, folder = found.algorithm.public, found.sites.public
    if use is None or folder is None:
        return found
    classes = found.config.data.classes or ()
    return replace(found, public=public.record(path.parent / folder, found.sites.names, found.sites.input, classes, use))


def made(tables: Mapping[str, Any], source: str, **more: Any) -> Contract:
    """The same from tables."""
    rest = {k: v for k, v in tables.items() if k not in ("server", "sites")}
    for key, why in _NOT_COMMON.items():
        if key in rest:
            raise ConfigError(f"{source}: key {key!r} has no place in a federation's file: {why}; take it out")
    tabled = {table: keys for table, keys in rest.items() if isinstance(keys, Mapping)}  # what is none is said further down
    given = {"data": {}, "model": {}, "records": {}, "privacy": {}, **tabled}
    for (table, key), (idle, why) in _NOT_READ.items():
        if given[table].get(key, idle) != idle:
            raise ConfigError(f"{source}: key '{table}.{key}' has no effect between real sites: {why}; take it out")
    own = [k for k in ("name", "root", "test", "group_by", "label", "labels") if k in given["data"]]
    if own:
        raise ConfigError(
            f"{source}: key 'data.{own[0]}' has no place in a federation's file: a site's data stand in its site.toml"
        )
    budget = [k for k in ("epsilon", "delta", "accountant") if k in given["privacy"]]
    if budget:
        raise ConfigError(
            f"{source}: key 'privacy.{budget[0]}' has no place in a federation's file: a site's budget stands in its "
            "site.toml"
        )
    server = parsed(ServerTable, tables.get("server", {}), source, "server")
    contract = Contract(
        dict(rest), parsed(SitesTable, tables.get("sites", {}), source, "sites"), server, source=source, **more
    )
    if contract.config.model.pretrained is not None and "global" in contract.algorithm.scores:
        raise ConfigError(
            f"{source}: key 'model.pretrained' cannot be here, for between real sites the shared network begins with random "
            "weights; a site's own network takes it from its site.toml"
        )
    if contract.config.training.task == "classification" and "classes" not in given["data"]:
        raise ConfigError(f"{source}: the key 'data.classes' is missing: labels are matched by these names at every site")
    if contract.algorithm.public is not None and contract.sites.public is None and contract.public is None:
        raise ConfigError(
            f"{source}: algorithm {contract.config.algorithm['name']!r} needs the key 'sites.public', the folder of the "
            "public seed set that all sites have"
        )
    if contract.public is not None and not _fits(contract, contract.public):
        raise ConfigError(f"{source}: what it says of the public seed set is not of its sites and classes; submit it anew")
    return contract


def restored(record: Mapping[str, Any]) -> Contract:
    """A contract that crossed.

    Raises:
        ConfigError: it is of a version that this one cannot read.
    """
    if record.get("format") != 1:
        raise ConfigError("the contract is of another format than this version of fedmutual reads; install the same one")
    check_release(record["version"], "the contract")
    seeds = record["public"]
    if seeds is not None:
        seeds = parsed(SeedsTable, seeds, "the contract", "public").model_dump()
    return made(record["tables"], "the contract", public=seeds, version=record["version"])


def parsed(kind: type[S], table: Any, source: str, prefix: str = "") -> S:
    """A table of a kind. Raises ConfigError, in one sentence."""
    try:
        return kind.model_validate(table)
    except ValidationError as problem:
        keys = [*all_keys(), *(f"{prefix}.{k}" if prefix else k for k in kind.model_fields)]
        raise ConfigError(f"{source}: {sentence(problem.errors()[0], keys, prefix, kind)}") from None


def _fits(contract: Contract, seeds: Table) -> bool:
    """Whether it speaks of the public seed set as its algorithm needs it."""
    use, names, counts = contract.algorithm.public, contract.sites.names, seeds["counts"]
    if use is None or use.labelled == (counts is None) or any(tuple(seeds[k]) != names for k in ("rows", "bytes", "parts")):
        return False
    classes = len(contract.config.data.classes or ())
    return counts is None or (tuple(counts) == names and all(len(own) == classes for own in counts.values()))


def check_release(version: str, whose: str) -> None:
    """Raise ConfigError where somebody runs a version that speaks otherwise: its first two numbers are others."""
    if version.split(".")[:2] != fedmutual.__version__.split(".")[:2]:
        raise ConfigError(
            f"{whose} is of fedmutual {version}, and here is {fedmutual.__version__}; install the same version everywhere"
        )


def _flat(tables: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tables, Mapping) and tables:
        for key, value in tables.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tables
