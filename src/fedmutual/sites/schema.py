"""The two files of a federation of real sites: FEDERATION.toml, common to all, and the site.toml of each site."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field
from torch import Tensor

from fedmutual.calling import Shape, Shapes
from fedmutual.config.keys import Count, Names, PathSetting, Section, Settings, Sides, key
from fedmutual.config.schema import (
    ClientData,
    ClientModel,
    ClientOptimizer,
    ClientTraining,
    ServerConfig,
    ShareConfig,
    SplitConfig,
    make_optional_table,
)
from fedmutual.settings import Products
from fedmutual.user_code.plugins import is_of_python

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
WORK_FOLDER = "flare"  # FLARE's, in a state folder, beside those of federations
CLOCK_FILE = "clock.json"  # in it: how far the clock of the server is ahead of a site's
MOST_AHEAD = 60.0  # seconds between two clocks from which the operator is warned
PRIVACY_FOLDER = "privacy"  # the ledgers of the privacy budget and the secret of the noise, in a site's state folder
WARM_UP = 10  # rounds from that of `sites.joins` on in which an update counts at most as long as the others' median
SITE_KEYS = (  # only for site.toml: of a site's own data and budget
    *("data.name", "data.root", "data.test", "data.group_by", "data.label", "data.labels"),
    *("privacy.epsilon", "privacy.delta", "privacy.accountant"),
)
_Rows = Annotated[int, Field(ge=1, lt=2**31)]
Seconds = Annotated[float, Field(gt=0)]


def _check_each(pattern: str, wanted: str, taken: tuple[str, ...] = ()) -> AfterValidator:
    """Return a check that each text of a tuple matches a pattern, is not taken, and, of sites, is there once.

    wanted: the sentence about what it must be.
    """

    def check(value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not re.fullmatch(pattern, text) or text.lower() in taken:
                raise ValueError(f"{wanted}; got {text!r}")
        if taken and len({text.lower() for text in value}) < len(value):
            raise ValueError(f"two sites have the same name: {', '.join(value)}")
        return value

    return AfterValidator(check)


_Hosts = _check_each(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", "a host is a name or an IPv4 address")
_Leads = _check_each(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}", "sites.leads entries must be email addresses")
_Sites = _check_each(
    r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?",
    "a site's name is of letters, digits and '-', and not 'server' or 'authority'",
    ("server", "authority"),  # folders beside the sites' kits: that of the server's, and that of the root key
)


class ServerTable(ServerConfig):
    """The address of the server, and how it aggregates the models of the sites."""

    hosts: Annotated[Names, Field(min_length=1), _Hosts] = key(
        ("localhost",),
        "host names and addresses of the server; the first one is written into the kits of the sites",
        lead_may_change=True,
    )
    port: Annotated[int, Field(ge=1, le=65535)] = key(
        8002, "the port of the server; sites connect to this port, and accept no connections", lead_may_change=True
    )
    sum: Literal["float", "fixed", "masked"] = key(  # type: ignore[assignment]  # one value more than in one process
        "float",
        "mean: how numbers are added; fixed: as 64-bit integers; masked: as masked 64-bit integers, so that the "
        "server reads only the sum",
    )


@dataclass(frozen=True)
class InputTable:
    """An input of an example, as networks get it: the shape, the type, and the smallest and the largest value."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    shape: Sides
    dtype: Literal["float32", "int64", "bool"] = "float32"
    range: tuple[float, float] | None = None  # what networks must take, not what a site's rows have

    @property
    def has_valid_range(self) -> bool:
        """Return whether the range is two numbers of the type in ascending order, or is not set."""
        low, high = self.range or (0.0, 0.0)
        most = {"float32": torch.finfo(torch.float32).max, "int64": 2.0**53, "bool": 1.0}[self.dtype]
        is_number = self.dtype == "float32" or (low.is_integer() and high.is_integer())
        return -most <= low <= high <= most and is_number

    def make_examples(self) -> Tensor:
        """Return two constant inputs [2, *shape]: the ends of the range; without one 0, or 1 where 0 may be padding."""
        ends = self.range or 2 * (0 if self.dtype == "float32" else 1,)
        return torch.stack([torch.full(self.shape, end, dtype=getattr(torch, self.dtype)) for end in ends])


class SitesTable(Section):
    """The participants, and how long the server waits for them."""

    names: Annotated[Names, Field(min_length=1), _Sites] = Field(description="the sites")
    evaluators: Names = key(
        (), "sites that train nothing: they get the shared model of each evaluated round, and score it on all their rows"
    )
    joins: dict[str, Count] = key(
        {}, "sites that join later: site -> the first round in which it takes part, as { west = 5 }; by default round 1"
    )
    no_vote: Names = key((), "sites that train, and whose scores do not count in the choice of the best round")
    leads: Annotated[Names, Field(min_length=1), _Leads] = key(
        ("lead@example.org",), "the email addresses of the leads, who may submit and stop federations; each lead gets a kit"
    )
    input: Annotated[Sides, Field(min_length=1)] | Annotated[dict[str, InputTable], Field(min_length=1)] = Field(
        description="the shape of one example: [channels, height, width], or [features]. Ids, and examples with several "
        "inputs, need a table with the name, the shape and the type of each input: "
        '{ ids = { shape = [16], dtype = "int64", range = [0, 999] }, table = { shape = [5] } }; an example of one array '
        "has the input x. `range` is the smallest and the largest value; the server, which has no data, tries networks with "
        "both values"
    )
    columns: Names | None = key(
        None, "tables: the names of the feature columns in their order; the file of every site must have these columns"
    )
    quorum: Count | None = key(
        None, "the number of sites that must reply in a valid round; unset, more than half of the sites"
    )
    deadline: Seconds = key(
        600.0,
        "the seconds that a site has for its part of a round; the round continues without slower sites",
        lead_may_change=True,
    )
    wait: Seconds = key(
        60.0,
        "the seconds to wait for all sites at the start; then the federation begins with the connected sites",
        lead_may_change=True,
    )
    retries: Count = key(
        5,
        "how often in a row the server restarts the federation, with exponential backoff, if no round succeeds",
        lead_may_change=True,
    )
    update_limit: Annotated[float, Field(gt=1)] = key(
        10.0,
        "the largest norm of an update, as a multiple of the median norm of the others' updates; a larger update is "
        "refused; needs 3 sites",
    )
    refuse_opposed: bool = key(
        True,
        "whether an update is refused if it opposes the updates of all other sites, these agree, and its norm is "
        "above their median; needs 3 sites",
    )
    examples_limit: Count | None = key(
        None,
        "the most training examples (n_k) that a site may state as its weight; unset, `sites.update_limit` times the "
        "median of the other sites' numbers",
    )
    baseline: bool = key(
        True,
        "whether each site also trains its personal network alone, on the same minibatches, which shows the gain of each "
        "site; of this network only the scores that `share.metrics` discloses leave the site",
    )
    seeds: Count = key(
        1,
        "the number of seeds, from `seed` upwards, with which one `submit` trains the federation, as NAME-seed0, "
        "NAME-seed1, ...",
    )
    public: PathSetting | None = key(
        None,
        "the folder of the public seed set, SITE.npz of each site, relative to this file; for fedh2l, fedmd, aggregate",
    )

    @property
    def least(self) -> int:
        """Return the number of sites that must reply for a round to count."""
        return min(self.quorum or len(self.trainers) // 2 + 1, len(self.trainers))

    @property
    def trainers(self) -> tuple[str, ...]:
        """The sites that train, also those that join later."""
        return tuple(name for name in self.names if name not in self.evaluators)

    def takes_part(self, site: str, round: int) -> bool:
        """Return whether a site has joined in a round, from 0; the start is round -1."""
        return self.joins.get(site, 1) <= max(round + 1, 1)

    def is_newcomer(self, site: str, round: int) -> bool:
        """Return whether a round, from 0, is one of the first `WARM_UP` rounds of a site that joined later."""
        return 1 < self.joins.get(site, 1) > round + 1 - WARM_UP

    def describe_roles(self) -> Iterator[str]:
        """Yield a sentence on each site that does not train and vote from round 1."""
        for site in self.names:
            if site in self.evaluators:
                yield f"site {site!r} trains nothing: it gets the shared model of each evaluated round, and scores it"
            if self.joins.get(site, 1) > 1:
                yield f"site {site!r} takes part from round {self.joins[site]} on"
            if site in self.no_vote:
                yield f"the scores of site {site!r} do not count in the choice of the best round"

    @property
    def shape(self) -> Shape:
        """The shape of one example, or of its inputs by name."""
        inputs = self.inputs
        return inputs["x"].shape if [*inputs] == ["x"] else Shapes({name: one.shape for name, one in inputs.items()})

    @property
    def inputs(self) -> dict[str, InputTable]:
        """The inputs of one example by name."""
        return {"x": InputTable(self.input)} if isinstance(self.input, tuple) else self.input


class SeedsTable(Section):
    """The record of the public seed set in a contract: of each site's part, and of the complete set."""

    rows: dict[str, _Rows]
    counts: dict[str, list[Annotated[int, Field(ge=0)]]] | None  # examples a class; None: labels stay with their owners
    bytes: dict[str, Annotated[int, Field(ge=0, lt=2**63)]]  # 0: of a file that all sites have
    digest: Digest  # of the whole; of the labels, too, where they are given to all
    parts: dict[str, Digest]  # likewise of each site's part alone


class StateTable(Section):
    """The place of the state that a site must not lose."""

    folder: PathSetting = Field(description="the folder of the site's model, ledger and other state; outside the kit")


class PublicTable(Section):
    """The public seed set at a site."""

    folder: PathSetting = Field(
        description="the folder with SITE.npz of every site, also of this site; fedh2l, fedmd and aggregate need the folder"
    )


def check_modules(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names. Raises ValueError where a name cannot be a module's, or is of a module of Python itself."""
    for module in value:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"a module is named as in Python, 'networks' or 'lab.networks', and {module!r} is not")
        if is_of_python(module):
            raise ValueError(f"{module!r} is a module of Python itself, which holds no network, data or algorithm")
    return value


class TrustTable(Section):
    """Which code the site runs besides fedmutual's."""

    modules: Annotated[Names, AfterValidator(check_modules)] = key(
        (),
        'the modules that "module:name" may name in this file or in the federation\'s file; each module is beside this '
        "file or is installed, and has all rights of the site's process",
    )


class SitePrivacy(Section):
    """The privacy budget of a site's data, over all federations that use these data."""

    epsilon: Annotated[float, Field(gt=0)] | None = key(
        None,
        "the site's budget, needed if the federation has privacy.nets; when the budget is spent, the site declines orders",
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = key(1e-5, "the delta of the guarantee (epsilon, delta)")


SiteSplit, SiteShare = make_optional_table(SplitConfig), make_optional_table(ShareConfig)


class LimitsTable(Section):
    """The limits of a site, whatever a lead submits."""

    rounds: Count | None = key(
        None, "the most rounds that this site takes part in; unset, the rounds of the contract that it accepted"
    )


class SiteRecords(Section):
    """The records of a site's scores, shared or not. No other participant gets these records."""

    best_by: Literal["holdout", "validation"] | None = key(
        None,
        "the site's own rows on which the best round is chosen; unset, hold-out rows if there are any, else validation rows",
    )
    keep_best: bool = key(
        False, "keep the weights of the best round, of the site's own model and of the shared model (`predict --best`)"
    )
    tensorboard: bool = key(False, "also write the site's scores for TensorBoard (the extra `tensorboard`)")
    trackers: list[Literal["mlflow", "wandb"]] = key(
        [], "also log the site's scores to MLflow or Weights & Biases (the extras `mlflow` and `wandb`); no file is sent"
    )


class SiteEngine(Section):
    """Where a site's computations run."""

    device: str = key("auto", "cpu, cuda, cuda:1, mps; auto takes a CUDA GPU, else Apple's, else the CPU")
    threads: Annotated[int, Field(ge=1, le=4096)] = key(1, "threads; results are bit-identical only with equal threads")
    precision: Literal["float32", "tf32", "bf16", "fp16"] = key(
        "float32", "the precision of matrix products and convolutions"
    )
    products: Products = key("auto", "the library that multiplies float32 matrices on a CPU: blas or onednn")


class SiteFile(Section):
    """The settings of one site. They are never sent, and the server does not learn them."""

    site: str = Field(description="the name of the site in `sites.names` of the federation")
    data: ClientData = ClientData()
    split: SiteSplit = SiteSplit()  # type: ignore[valid-type]
    model: ClientModel = ClientModel()
    algorithm: Settings = Field({}, description="its own settings of the algorithm, for example alpha")
    training: ClientTraining = ClientTraining()
    optimizer: ClientOptimizer = ClientOptimizer()
    engine: SiteEngine = SiteEngine()
    records: SiteRecords = SiteRecords()
    share: SiteShare = SiteShare()  # type: ignore[valid-type]
    limits: LimitsTable = LimitsTable()
    privacy: SitePrivacy = SitePrivacy()
    state: StateTable
    public: PublicTable | None = None
    trust: TrustTable = TrustTable()
