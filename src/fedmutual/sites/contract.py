"""The contract of a federation of real sites: it is read from FEDERATION.toml, and every site checks a job against it."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import fedmutual
from fedmutual import tasks
from fedmutual.algorithms.fork import is_summable
from fedmutual.algorithms.peers import is_peer_to_peer
from fedmutual.calling import Shapes, find_image_shape
from fedmutual.config import (
    Config,
    has_aggregation,
    is_pooled,
    make_algorithm,
    parse_config,
    read_tables,
)
from fedmutual.config.checks import parse_table
from fedmutual.config.keys import FEDERATED, Table, list_effects
from fedmutual.config.schema import ServerConfig, ShareConfig
from fedmutual.core import Algorithm, get_target_kind
from fedmutual.data.scaling import UNSCALED
from fedmutual.data.space import Space
from fedmutual.data.statistics import Layout, make_layout
from fedmutual.data.targets import name_outputs
from fedmutual.errors import ConfigError
from fedmutual.metric import KINDS
from fedmutual.role import LOCAL_ONLY
from fedmutual.rundir import folder as folders
from fedmutual.sites import seedset
from fedmutual.sites.consent import FORMAT, check_agreed, digest_agreed, list_runs
from fedmutual.sites.schema import (
    PRIVACY_FOLDER,
    SITE_KEYS,
    WORK_FOLDER,
    LimitsTable,
    SeedsTable,
    ServerTable,
    SitesTable,
)
from fedmutual.sites.secure_sum.messages import LEAST_SITES, MOST_SITES, find_threshold
from fedmutual.sites.statistics import SumStatistics

_NOT_COMMON = {
    "partition": "remove the key, because every site has its own data",
    "participants": "name those that take part in sites.names",
    "clients": "write a site's own settings in its site.toml, which the other sites do not see",
    "engine": "move the key to site.toml, which says where a site computes",
    **dict.fromkeys(SITE_KEYS, "move the key to site.toml, which describes a site's own data and budget"),
}
_METRICS = "accuracy"  # the scores that a site shares where no file has the key share.metrics


@dataclass(frozen=True)
class Contract:
    """The settings of a federation. They are public: the server and all sites have them."""

    tables: Table  # the keys of an experiment, equal at all sites
    sites: SitesTable
    server: ServerTable
    public: Table | None = None  # the description of the public seed set (schema.SeedsTable)
    version: str = fedmutual.__version__
    source: str = "the contract"  # the name of the contract in error messages

    @cached_property
    def config(self) -> Config:
        """The validated settings that all sites share."""
        return parse_config(self.tables, self.source)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm, with the settings that all sites share. Statistics of all sites are summed at its start."""
        algorithm = make_algorithm(self.config)
        return algorithm if self.layout is None else replace(algorithm, start=(SumStatistics(self.layout), *algorithm.start))

    @cached_property
    def layout(self) -> Layout | None:
        """What the statistics of all sites hold; None unless data.mean = "federated"."""
        if self.config.data.mean != FEDERATED:
            return None
        task, classes = self.config.training.task, self.classes
        space = Space(find_image_shape(self.sites.shape), classes, len(classes), task, UNSCALED, self.sites.columns)
        return make_layout(space, self.config.data.columns)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or of the outputs of a task without classes."""
        config = self.config
        return config.data.classes or name_outputs(tasks.make_task(config.training.task), config.data, ("y",))

    @property
    def name(self) -> str:
        """The name of the federation."""
        return self.config.name

    @property
    def quorum(self) -> int:
        """The number of sites that must answer for a round to count."""
        return max(self.sites.least, find_threshold(len(self.sites.trainers))) if self.is_masked else self.sites.least

    @property
    def is_masked(self) -> bool:
        """Whether sites mask their updates, so that the server learns only the sum."""
        return self.server.sum == "masked"

    @property
    def trains_alone(self) -> bool:
        """Whether each site also trains its personal network alone, in the same rounds (`sites.baseline`)."""
        return self.sites.baseline and self.config.algorithm["name"] != LOCAL_ONLY

    @property
    def binding(self) -> str:
        """The digest, in hex, that binds keys and signatures of a secure sum to this contract."""
        return digest_agreed(self.record())

    def list_runs(self) -> list["Contract"]:
        """Return the contracts that one submission carries out, one after the other (`consent.list_runs`)."""
        runs = list_runs(self.name, {**self.tables, "sites": self.sites.model_dump(mode="json")})
        sites = self.sites.model_copy(update={"seeds": 1})
        return [replace(self, tables={k: v for k, v in tables.items() if k != "sites"}, sites=sites) for _, tables in runs]

    def record(self) -> Table:
        """Return the contract as the table that is sent as JSON, without the local folder of the public seed set."""
        sites = self.sites.model_dump(mode="json", exclude={"public"})
        tables = {"server": self.server.model_dump(mode="json"), "sites": sites}
        about = {"format": FORMAT, "version": self.version, "name": self.name}
        record: Table = json.loads(json.dumps({**about, "public": self.public, "tables": {**self.tables, **tables}}))
        return record  # JSON turned the tuples into lists

    @property
    def imprint(self) -> str:
        """The digest of the full submitted contract, in hex."""
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """The digest, in hex, of `sites.input`, the one key of [sites] that may not change during a federation."""
        declared = self.sites.model_dump(mode="json", include={"input"})["input"]
        return hashlib.sha256(json.dumps(declared).encode()).hexdigest()


def identify(config: Config, fingerprint: str) -> str:
    """Return `folders.compute_identity` of a federation or site, without the table `share`, which may change."""
    clients = {i: client.model_copy(update={"share": None}) for i, client in config.clients.items()}
    return folders.compute_identity(config.model_copy(update={"share": ShareConfig(), "clients": clients}), fingerprint)


def read_contract(path: Path) -> Contract:
    """Read FEDERATION.toml and return the contract, without the description of the public seed set.

    Raises ConfigError where the file cannot be read, or as `make_contract`.
    """
    return make_contract(read_tables(path), str(path))


def read_submitted_contract(path: Path) -> Contract:
    """Read FEDERATION.toml and return the contract to submit, with the description of the public seed set.

    The description is made from the sites' files in the folder `sites.public`. Raises UserError as `read_contract`, or the
    seed set file of a site is missing or unusable.
    """
    contract = read_contract(path)
    public_data, folder = contract.algorithm.public, contract.sites.public
    if public_data is None or folder is None:
        return contract
    sites, classes = contract.sites, contract.config.data.classes or ()
    shape = sites.shape
    if isinstance(shape, Shapes):
        raise ConfigError(
            f"{path}: the public seed set of real sites has one input, and sites.input names several; choose an algorithm "
            "without public data"
        )
    all_have = contract.config.split.public_file is not None
    record = seedset.record_seedset(path.parent / folder, sites.names, shape, classes, public_data, all_have)
    return replace(contract, public=record)


def make_contract(tables: Mapping[str, Any], source: str, **more: Any) -> Contract:
    """Return the contract of these tables. source: the name of the file in error messages. more: other fields.

    Raises ConfigError where a key is wrong, missing, or not allowed in a contract.
    """
    run_tables = {k: v for k, v in tables.items() if k not in ("server", "sites")}
    values = run_tables | {  # parse_config refuses what is no table
        f"{table}.{name}": value
        for table, keys in run_tables.items()
        if isinstance(keys, Mapping)
        for name, value in keys.items()
    }
    for key, fix in _NOT_COMMON.items():
        if key in values:
            raise ConfigError(f"{source}: key {key!r} is not allowed in FEDERATION.toml; {fix}")
    for key, effect in list_effects(Config).items():
        default = attrgetter(key)(Config())
        if effect.unused_on_sites and values.get(key, default) != default:
            raise ConfigError(f"{source}: key {key!r} has no effect between real sites: {effect.unused_on_sites}; remove it")
    share = run_tables.get("share", {})
    run_tables["share"] = {"metrics": _METRICS, **share} if isinstance(share, Mapping) else share
    server = parse_table(ServerTable, tables.get("server", {}), source, "server")
    run_tables["server"] = server.model_dump(include=set(ServerConfig.model_fields))  # a run does not need the address
    if server.sum == "masked":
        run_tables["server"]["sum"] = "fixed"  # a masked sum has the same bits
    sites = parse_table(SitesTable, tables.get("sites", {}), source, "sites")
    contract = Contract(run_tables, sites, server, source=source, **more)
    fault = next(_list_faults(contract), None)
    if fault is not None:
        raise ConfigError(f"{source}: {fault}")
    return contract


def accept_contract(text: Any, agreed: Iterable[Table], party: str = "this site") -> Contract:
    """Return the contract of a job, after `consent.check_agreed` has compared it with the contracts of the operator.

    text: the contract as JSON, from another participant. agreed, party: as `consent.check_agreed` has them. Raises
    ConfigError where the operator did not agree to the contract, or this version cannot carry it out.
    """
    record = check_agreed(text, agreed, party)
    seeds = record["public"]
    if seeds is not None:
        seeds = parse_table(SeedsTable, seeds, "the contract", "public").model_dump()
    return make_contract(record["tables"], "the contract", public=seeds, version=record["version"])


def _list_faults(contract: Contract) -> Iterator[str]:
    """Yield in one clause why real sites cannot carry out the contract."""
    config, algorithm, sites, layout = contract.config, contract.algorithm, contract.sites, contract.layout
    method, public = f"algorithm {config.algorithm['name']!r}", algorithm.public
    for name, one in sites.inputs.items():
        if not one.has_valid_range:
            yield f"key 'sites.input': the range of {name!r} must be the least and the greatest {one.dtype}, not {one.range}"
    several = next(
        (key for key, n in (("split.folds", config.split.folds), ("sites.seeds", sites.seeds)) if (n or 1) > 1), ""
    )
    if several and public is not None and config.split.public_file is None:
        yield f"{several!r} changes the training rows, and {method} has a public seed set that is made once; remove it"
    if sites.seeds > 1 and config.privacy.nets != "none":
        yield "'sites.seeds' trains on the same rows again, which costs each site its privacy budget again; remove it"
    if not re.fullmatch(r"[\w.-]+", contract.name, re.ASCII):
        yield f"key 'name' must have only ASCII letters, digits, '.', '_' and '-' between real sites, not {contract.name!r}"
    if contract.name.lower() in (WORK_FOLDER, PRIVACY_FOLDER) or contract.name.startswith("."):
        yield f"key 'name' cannot be {contract.name!r}: the process has its own files under this name; choose another name"
    if config.model.pretrained is not None and {"global", "proxy"} & set(algorithm.scores):
        yield (
            "key 'model.pretrained' is not allowed in FEDERATION.toml, because the shared network of real sites begins with "
            "random weights; move the key to the site.toml of a site whose own network is pretrained"
        )
    kind = get_target_kind(tasks.make_task(config.training.task))
    if KINDS[kind].is_named and config.data.classes is None:
        yield "the key 'data.classes' is missing: labels are matched by these names at every site"
    if is_pooled(config) or (public is not None and public.server):
        yield f"{method} trains on data at the server, and the server of real sites has no data; choose another algorithm"
    if public is not None and sites.public is None and contract.public is None:
        yield f"{method} needs the key 'sites.public', the folder of the public seed set that all sites have"
    if layout is not None and (public is not None or len(algorithm.start) > 1 or is_peer_to_peer(algorithm)):
        yield (
            f"data.mean = 'federated' is summed at the server before the first round, and {method} has public data, "
            "messages between sites or a start of its own; set 'data.mean' and 'data.std' to numbers"
        )
    if config.server != ServerConfig() and not has_aggregation(config):
        name = "server.aggregate" if config.server.aggregate != ServerConfig().aggregate else "server.sum"
        yield (
            f"key {name!r} has no effect between real sites with {method}, which makes no mean of what they send; remove it"
        )
    yield from _list_role_faults(contract, method)
    if contract.is_masked:
        yield from _list_masked_faults(contract, method)
    if contract.public is not None and not _has_matching_seeds(contract, contract.public):
        yield "its public seed set has other sites or classes than the contract; submit it again"


def _list_role_faults(contract: Contract, method: str) -> Iterator[str]:
    """Yield which roles of sites are impossible, or would give one site the model of another."""
    sites, algorithm = contract.sites, contract.algorithm
    for key in ("evaluators", "joins", "no_vote"):
        if unknown := sorted(set(getattr(sites, key)) - set(sites.names)):
            yield f"key 'sites.{key}' names {unknown[0]!r}, and no site of 'sites.names' has that name"
    if both := sorted(set(sites.evaluators) & {*sites.joins, *sites.no_vote}):
        yield f"site {both[0]!r} is one of 'sites.evaluators', which train nothing; remove it from the other key"
    if sites.no_vote and (contract.config.split.folds is not None or not set(sites.trainers) - set(sites.no_vote)):
        yield "key 'sites.no_vote' leaves no site that votes, or is used with 'split.folds'; remove it"
    if not (sites.evaluators or sites.joins):
        return
    if algorithm.public is not None or is_peer_to_peer(algorithm) or "global" not in algorithm.scores:
        yield (
            f"keys 'sites.evaluators' and 'sites.joins' need a shared model that the server sends, and no public seed set; "
            f"{method} has another form; remove them"
        )
    if sites.evaluators and contract.config.privacy.nets != "none":
        yield "key 'sites.evaluators' sends scores, which the epsilon of 'privacy.nets' does not count; remove it"
    first = [i for i in sites.trainers if sites.takes_part(i, 0)]
    if len(first) < max(sites.least, 2) or sites.least < 2:
        yield (
            f"{len(first)} sites train in round 1, with a quorum of {sites.least}: with 'sites.evaluators' or 'sites.joins' "
            "the quorum is 2 or more, or a site could get the model of a single other one, and so many sites train from "
            "round 1; change 'sites.quorum' or 'sites.joins'"
        )


def _list_masked_faults(contract: Contract, method: str) -> Iterator[str]:
    """Yield why a secure sum is not possible, or which key needs the updates that the server does not see."""
    algorithm, sites = make_algorithm(contract.config), contract.sites
    count, threshold = len(sites.trainers), find_threshold(len(sites.trainers))
    if len(algorithm.phases) != 1 or algorithm.start or not is_summable(algorithm.phases[0]):
        yield (
            f"server.sum = 'masked' adds updates of a shared model, and {method} sends more, or something else; choose fml, "
            "fedavg or fedprox, or remove 'server.sum'"
        )
    if not LEAST_SITES <= count <= MOST_SITES:
        yield f"server.sum = 'masked' is for {LEAST_SITES} to {MOST_SITES} sites, and key 'sites.names' has {count}"
    if sites.joins:
        yield (
            "key 'sites.joins' is not possible with server.sum = 'masked': the difference of two sums, with and without the "
            "new site, is nearly its update; begin a federation of another name with all sites"
        )
    if sites.quorum is not None and sites.quorum < threshold:
        yield (
            "server.sum = 'masked' needs more than two thirds of the sites in every round; set 'sites.quorum' to "
            f"{threshold} or more, or remove it"
        )
    for key in ("update_limit", "examples_limit"):
        if getattr(sites, key) != SitesTable.model_fields[key].default:
            yield (
                f"key 'sites.{key}' has no effect with server.sum = 'masked', where the server sees no site's update; "
                "remove one of the two"
            )


def _has_matching_seeds(contract: Contract, seeds: Table) -> bool:
    """Return whether the description of the public seed set fits the sites, the classes and the algorithm."""
    use, names, counts = contract.algorithm.public, contract.sites.names, seeds["counts"]
    of_sites, classes = [seeds[key] for key in ("rows", "bytes", "parts")], len(contract.config.data.classes or ())
    if counts is not None:
        of_sites.append(counts)
    fits = use is not None and use.labelled == (counts is not None) and all(tuple(table) == names for table in of_sites)
    return fits and all(len(site_counts) == classes for site_counts in (counts or {}).values())


def check_rounds(rounds: int, agreed: int, limits: LimitsTable) -> None:
    """Raise ConfigError where a submitted contract has more rounds than a site allows.

    agreed: the rounds of the contract that the site agreed to, which are the limit where the site's file sets none.
    """
    limit = limits.rounds or agreed
    if rounds > limit:
        raise ConfigError(
            f"the job is of {rounds} rounds, and this site agreed to {limit}; set 'limits.rounds' in its file to allow more"
        )
