"""What the contract of a federation of real sites has to meet, beyond valid keys."""

from typing import TYPE_CHECKING

from fedmutual import tasks
from fedmutual.config import has_aggregation, is_pooled, make_algorithm
from fedmutual.config.keys import Table
from fedmutual.config.schema import ServerConfig
from fedmutual.core import get_target_kind
from fedmutual.errors import ConfigError
from fedmutual.sites.peers import is_peer_to_peer
from fedmutual.sites.schema import PRIVACY_FOLDER, WORK_FOLDER, LimitsTable, SitesTable
from fedmutual.sites.secure_sum.fixed_point import is_summable
from fedmutual.sites.secure_sum.messages import LEAST_SITES, MOST_SITES, find_threshold

if TYPE_CHECKING:
    from fedmutual.sites.contract import Contract


def check_contract(contract: "Contract", source: str) -> None:
    """Raise ConfigError where real sites cannot carry out the contract. source: the name of the file in messages."""
    if contract.name.lower() in (WORK_FOLDER, PRIVACY_FOLDER) or contract.name.startswith("."):
        raise ConfigError(
            f"{source}: key 'name' cannot be {contract.name!r}: the process has its own "
            "files under this name; choose another name"
        )
    shares = {"global", "proxy"} & set(contract.algorithm.scores)
    if contract.config.model.pretrained is not None and shares:
        raise ConfigError(
            f"{source}: key 'model.pretrained' is not allowed in FEDERATION.toml, because the shared network of real sites "
            "begins with random weights; move the key to the site.toml of a site whose own network is pretrained"
        )
    kind = get_target_kind(tasks.make_task(contract.config.training.task))
    if kind != "numbers" and "classes" not in contract.tables.get("data", {}):
        raise ConfigError(f"{source}: the key 'data.classes' is missing: labels are matched by these names at every site")
    if is_pooled(contract.config):
        raise ConfigError(
            f"{source}: algorithm {contract.config.algorithm['name']!r} trains on all data in one place, and real sites "
            "keep their data; choose another algorithm"
        )
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
    if contract.layout is not None:
        _check_statistics(contract, source)
    if contract.config.server != ServerConfig() and not has_aggregation(contract.config):
        name = "server.aggregate" if contract.config.server.aggregate != ServerConfig().aggregate else "server.sum"
        raise ConfigError(
            f"{source}: key {name!r} has no effect between real sites with algorithm "
            f"{contract.config.algorithm['name']!r}, which makes no mean of what they send; remove it"
        )
    if contract.is_masked:
        _check_masked(contract, source)
    if contract.public is not None and not _has_matching_seeds(contract, contract.public):
        raise ConfigError(f"{source}: its public seed set has other sites or classes than the contract; submit it again")


def _check_statistics(contract: "Contract", source: str) -> None:
    """Raise ConfigError where the server cannot sum statistics before the first round."""
    algorithm = contract.algorithm
    if algorithm.public is not None or len(algorithm.start) > 1 or is_peer_to_peer(algorithm):
        raise ConfigError(
            f"{source}: data.mean = 'federated' is summed at the server before the first round, and algorithm "
            f"{contract.config.algorithm['name']!r} has public data, messages between sites or a start of its own; set "
            "'data.mean' and 'data.std' to numbers"
        )


def _check_masked(contract: "Contract", source: str) -> None:
    """Raise ConfigError where a secure sum is not possible, or a key needs the updates that the server does not see."""
    algorithm, sites = contract.algorithm, contract.sites
    count, threshold = len(sites.names), find_threshold(len(sites.names))
    if len(algorithm.phases) != 1 or make_algorithm(contract.config).start or not is_summable(algorithm.phases[0]):
        raise ConfigError(
            f"{source}: server.sum = 'masked' adds updates of a shared model, and algorithm "
            f"{contract.config.algorithm['name']!r} sends more, or something else; choose fml, fedavg or fedprox, or remove "
            "'server.sum'"
        )
    if not LEAST_SITES <= count <= MOST_SITES:
        raise ConfigError(
            f"{source}: server.sum = 'masked' is for {LEAST_SITES} to {MOST_SITES} sites, and key 'sites.names' has {count}"
        )
    if sites.quorum is not None and sites.quorum < threshold:
        raise ConfigError(
            f"{source}: server.sum = 'masked' needs more than two thirds of the sites in every round; set 'sites.quorum' to "
            f"{threshold} or more, or remove it"
        )
    for key in ("update_limit", "examples_limit"):
        if getattr(sites, key) != SitesTable.model_fields[key].default:
            raise ConfigError(
                f"{source}: key 'sites.{key}' has no effect with server.sum = 'masked', where the server sees no site's "
                "update; remove one of the two"
            )


def _has_matching_seeds(contract: "Contract", seeds: Table) -> bool:
    """Return whether the description of the public seed set fits the sites, the classes and the algorithm."""
    public_data, names, counts = contract.algorithm.public, contract.sites.names, seeds["counts"]
    if public_data is None or public_data.labelled == (counts is None):
        return False
    if any(tuple(seeds[k]) != names for k in ("rows", "bytes", "parts")):
        return False
    classes = len(contract.config.data.classes or ())
    return counts is None or (tuple(counts) == names and all(len(site_counts) == classes for site_counts in counts.values()))


def check_rounds(rounds: int, agreed: int, limits: LimitsTable) -> None:
    """Check a submitted contract's rounds against a site's limit.

    agreed: the rounds of the contract that the site agreed to, which are the limit where the site's file sets none.

    Raises:
        ConfigError: the contract has more rounds.
    """
    limit = limits.rounds or agreed
    if rounds > limit:
        raise ConfigError(
            f"the job is of {rounds} rounds, and this site agreed to {limit}; set 'limits.rounds' in its file to allow more"
        )
