"""What the participants of a federation of real sites agreed on: read from FEDERATION.toml, held against at every site."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

import fedmutual
from fedmutual.config import Config, has_aggregation, list_keys, make_algorithm, merge_overrides, parse_config, read_tables
from fedmutual.config.keys import Section, Table, list_effects
from fedmutual.config.schema import ServerConfig, ShareConfig
from fedmutual.config.sentences import format_validation_error
from fedmutual.core import Algorithm
from fedmutual.errors import ConfigError
from fedmutual.rundir import folder as folders
from fedmutual.sites import seedset
from fedmutual.sites.consent import FORMAT, check_agreed, digest_agreed
from fedmutual.sites.schema import WORK_FOLDER, LimitsTable, SeedsTable, ServerTable, SiteFile, SitesTable
from fedmutual.sites.screening import Limits
from fedmutual.sites.secure_sum.fixed_point import is_summable
from fedmutual.sites.secure_sum.messages import LEAST_SITES, MOST_SITES, find_threshold

S = TypeVar("S", bound=Section)
_NOT_COMMON = {
    "partition": "every site has data of its own",
    "clients": "what a site does its own way stands in its own site.toml, and the others do not learn it",
    "engine": "where its work runs is for each site to say, in its site.toml",
}
_METRICS = "accuracy"  # what a site tells of its scores, unless the federation's file or the site's own says otherwise


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
        return parse_config(self._settings, self.source)

    @property
    def _settings(self) -> Table:
        """The tables, with what is told of scores between real sites where they do not say it."""
        share = self.tables.get("share", {})
        return {**self.tables, "share": {"metrics": _METRICS, **share}} if isinstance(share, Mapping) else self.tables

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
        return max(self.sites.least, find_threshold(len(self.sites.names))) if self.is_masked else self.sites.least

    @property
    def is_masked(self) -> bool:
        """Whether sites mask their updates, so that the server has the sum alone."""
        return self.server.sum == "masked"

    @property
    def binding(self) -> str:
        """Digest, in hex, of what keys and signatures of a secure sum are bound to."""
        return digest_agreed(self.record())

    @property
    def limits(self) -> Limits:
        """What the server holds replies to."""
        return Limits(self.sites.update_limit, self.sites.examples_limit, self.sites.refuse_opposed)

    def at(self, own: SiteFile, source: str) -> Config:
        """The whole configuration of one site: a federation of one client, who brings its own data.

        Raises:
            ConfigError: a key of the site's file is wrong, or does not go together with the contract.
        """
        kept = {key: table for key, table in own.model_dump(exclude_unset=True).items() if table != {}}
        mine = {k: kept[k] for k in ("data", "model", "algorithm", "training", "optimizer", "share") if k in kept}
        given = {"engine": own.engine.model_dump(), "split": {k: v for k, v in own.split if v is not None}}
        given["privacy"] = {k: v for k, v in own.privacy if v is not None}
        tables = merge_overrides(self._settings, {"clients": {own.site: {"data": {"name": "digits"}, **mine}}, **given})
        try:
            return parse_config(tables, source)
        except ConfigError as problem:
            raise ConfigError(str(problem).replace(f"clients.{own.site}.", "")) from None

    def record(self) -> Table:
        """As it crosses, in JSON. Where the public seed set lies is for everybody to know alone."""
        sites = self.sites.model_dump(mode="json", exclude={"public"})
        tables = {"server": self.server.model_dump(mode="json"), "sites": sites}
        about = {"format": FORMAT, "version": self.version, "name": self.name}
        record: Table = json.loads(json.dumps({**about, "public": self.public, "tables": {**self.tables, **tables}}))
        return record  # as JSON has it, in which no tuple is

    @property
    def imprint(self) -> str:
        """Of all that is submitted. Hex."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """Of what may not change while a federation goes on, beside its settings: sites may come and go. Hex."""
        return hashlib.sha256(json.dumps(list(self.sites.input)).encode()).hexdigest()


def identify(config: Config, fingerprint: str) -> str:
    """`folders.identity` of a federation's or a site's state: what is told of scores may change while it goes on."""
    clients = {i: own.model_copy(update={"share": None}) for i, own in config.clients.items()}
    return folders.identity(config.model_copy(update={"share": ShareConfig(), "clients": clients}), fingerprint)


def read_contract(path: Path) -> Contract:
    """A federation's contract from its FEDERATION.toml, without what it says of the public seed set.

    Raises:
        ConfigError: in one sentence, which key is wrong, missing, or has no place there.
    """
    return make_contract(read_tables(path), str(path))


def read_submitted_contract(path: Path) -> Contract:
    """The same with it, as it is submitted: from the files that the sites gave, in the folder `sites.public`.

    Raises:
        UserError: likewise; or what is wrong with which site's file.
    """
    found = read_contract(path)
    use, folder = found.algorithm.public, found.sites.public
    if use is None or folder is None:
        return found
    classes = found.config.data.classes or ()
    return replace(
        found, public=seedset.record_seedset(path.parent / folder, found.sites.names, found.sites.input, classes, use)
    )


def make_contract(tables: Mapping[str, Any], source: str, **more: Any) -> Contract:
    """The same from tables."""
    rest = {k: v for k, v in tables.items() if k not in ("server", "sites")}
    for key, why in _NOT_COMMON.items():
        if key in rest:
            raise ConfigError(f"{source}: key {key!r} has no place in a federation's file: {why}; take it out")
    tabled = {table: keys for table, keys in rest.items() if isinstance(keys, Mapping)}  # what is none is said further down
    given = {"data": {}, "privacy": {}, **tabled}
    for key, effect in list_effects(Config).items():
        table, _, name = key.partition(".")
        default = attrgetter(key)(Config())
        if effect.unused_on_sites and given.get(table, {}).get(name, default) != default:
            raise ConfigError(
                f"{source}: key {key!r} has no effect between real sites: {effect.unused_on_sites}; take it out"
            )
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
    server = parse_table(ServerTable, tables.get("server", {}), source, "server")
    rest["server"] = server.model_dump(include=set(ServerConfig.model_fields))  # where it is, no run has to know
    if server.sum == "masked":
        rest["server"]["sum"] = "fixed"  # whose bits it has
    contract = Contract(
        dict(rest), parse_table(SitesTable, tables.get("sites", {}), source, "sites"), server, source=source, **more
    )
    if contract.name.lower() == WORK_FOLDER or contract.name.startswith("."):
        raise ConfigError(
            f"{source}: key 'name' cannot be {contract.name!r}: beside the federation's folder of that name there are "
            "files and folders of the process itself; choose another"
        )
    shares = {"global", "proxy"} & set(contract.algorithm.scores)
    if contract.config.model.pretrained is not None and shares:
        raise ConfigError(
            f"{source}: key 'model.pretrained' cannot be here, for between real sites the shared network begins with random "
            "weights; a site's own network takes it from its site.toml"
        )
    if contract.config.training.task == "classification" and "classes" not in given["data"]:
        raise ConfigError(f"{source}: the key 'data.classes' is missing: labels are matched by these names at every site")
    if contract.algorithm.public is not None and contract.algorithm.public.server:
        raise ConfigError(
            f"{source}: algorithm {contract.config.algorithm['name']!r} trains on public data at the server, and between "
            "real sites the server has no data; choose another algorithm"
        )
    if contract.algorithm.public is not None and contract.sites.public is None and contract.public is None:
        raise ConfigError(
            f"{source}: algorithm {contract.config.algorithm['name']!r} needs the key 'sites.public', the folder of the "
            "public seed set that all sites have"
        )
    if contract.config.server != ServerConfig() and not has_aggregation(contract.config):
        name = "server.aggregate" if contract.config.server.aggregate != ServerConfig().aggregate else "server.sum"
        raise ConfigError(
            f"{source}: key {name!r} has no effect between real sites with algorithm "
            f"{contract.config.algorithm['name']!r}, which makes no mean of what they send; take it out"
        )
    if contract.is_masked:
        _check_masked(contract, source)
    if contract.public is not None and not _fits(contract, contract.public):
        raise ConfigError(f"{source}: what it says of the public seed set is not of its sites and classes; submit it anew")
    return contract


def _check_masked(contract: Contract, source: str) -> None:
    """Raise ConfigError where a secure sum is not possible, or a key would need what the server does not see."""
    algorithm, sites = contract.algorithm, contract.sites
    count, threshold = len(sites.names), find_threshold(len(sites.names))
    if len(algorithm.phases) != 1 or algorithm.start or not is_summable(algorithm.phases[0]):
        raise ConfigError(
            f"{source}: server.sum = 'masked' adds updates of a shared model, and algorithm "
            f"{contract.config.algorithm['name']!r} sends more, or something else; choose fml, fedavg or fedprox, or take "
            "'server.sum' out"
        )
    if not LEAST_SITES <= count <= MOST_SITES:
        raise ConfigError(
            f"{source}: server.sum = 'masked' is for {LEAST_SITES} to {MOST_SITES} sites, and key 'sites.names' has {count}"
        )
    if sites.quorum is not None and sites.quorum < threshold:
        raise ConfigError(
            f"{source}: server.sum = 'masked' needs more than two thirds of the sites in every round; set 'sites.quorum' to "
            f"{threshold} or more, or take it out"
        )
    for key in ("update_limit", "examples_limit"):
        if getattr(sites, key) != SitesTable.model_fields[key].default:
            raise ConfigError(
                f"{source}: key 'sites.{key}' has no effect with server.sum = 'masked', where the server sees no site's "
                "update; take one of the two out"
            )


def accept_contract(text: Any, agreed: Iterable[Table], who: str = "this site") -> Contract:
    """The contract that a job brought, once it is known to be what the operator agreed to; as `consent.check_agreed`.

    Raises:
        ConfigError: it is not, or cannot be carried out by this version.
    """
    record = check_agreed(text, agreed, who)
    seeds = record["public"]
    if seeds is not None:
        seeds = parse_table(SeedsTable, seeds, "the contract", "public").model_dump()
    return make_contract(record["tables"], "the contract", public=seeds, version=record["version"])


def check_rounds(rounds: int, agreed: int, limits: LimitsTable) -> None:
    """Check a submitted contract's rounds against a site's limit.

    agreed: the rounds of the contract that the site agreed to, which are the limit where the site's file sets none.

    Raises:
        ConfigError: they are more.
    """
    most = limits.rounds or agreed
    if rounds > most:
        raise ConfigError(
            f"the job is of {rounds} rounds, and this site agreed to {most}; set 'limits.rounds' in its file to allow more"
        )


def parse_table(kind: type[S], table: Any, source: str, prefix: str = "") -> S:
    """A table of a kind. Raises ConfigError, in one sentence."""
    try:
        return kind.model_validate(table)
    except ValidationError as problem:
        keys = [*list_keys(), *(f"{prefix}.{k}" if prefix else k for k in kind.model_fields)]
        raise ConfigError(f"{source}: {format_validation_error(problem.errors()[0], keys, prefix, kind)}") from None


def _fits(contract: Contract, seeds: Table) -> bool:
    """Whether it speaks of the public seed set as its algorithm needs it."""
    use, names, counts = contract.algorithm.public, contract.sites.names, seeds["counts"]
    if use is None or use.labelled == (counts is None) or any(tuple(seeds[k]) != names for k in ("rows", "bytes", "parts")):
        return False
    classes = len(contract.config.data.classes or ())
    return counts is None or (tuple(counts) == names and all(len(own) == classes for own in counts.values()))
