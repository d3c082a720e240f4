"""The two files of a federation of real sites: FEDERATION.toml, which all have, and each site's own site.toml."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedmutual.config.schema import (
    ClientData,
    ClientModel,
    ClientOptimizer,
    ClientTraining,
    Count,
    Names,
    PathSetting,
    Section,
    ServerConfig,
    Settings,
    ShareConfig,
    Sides,
    SplitConfig,
    key,
    optional,
)
from fedmutual.module_files import is_of_python

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
WORK_FOLDER = "flare"  # FLARE's, in a state folder, beside those of federations
_TAKEN = ("server", "authority")  # folders beside the sites' kits: that of the server's, and that of the root key
_Rows = Annotated[int, Field(ge=1, lt=2**31)]
Seconds = Annotated[float, Field(gt=0)]


def _hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    for host in value:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
            raise ValueError(f"a host is a name or an IPv4 address, not {host!r}")
    return value


def _sites(value: tuple[str, ...]) -> tuple[str, ...]:
    for site in value:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?", site) or site.lower() in _TAKEN:
            raise ValueError(
                f"a site's name is of letters, digits and '-', and not {' or '.join(map(repr, _TAKEN))}; {site!r} is not"
            )
    if len({site.lower() for site in value}) < len(value):
        raise ValueError(f"two sites have the same name: {', '.join(value)}")
    return value


def _leads(value: tuple[str, ...]) -> tuple[str, ...]:
    for lead in value:
        if not re.fullmatch(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}", lead):
            raise ValueError(f"who may submit is called by a mail address, not {lead!r}")
    return value


class ServerTable(ServerConfig):
    """Where the server is, and how it makes one model of those that sites send."""

    hosts: Annotated[Names, Field(min_length=1), AfterValidator(_hosts)] = key(
        ("localhost",),
        "names and addresses by which sites may reach the server; the first one is written into their kits",
        lead_may_change=True,
    )
    port: Annotated[int, Field(ge=1, le=65535)] = key(
        8002, "its port; sites open connections to it, and nobody to them", lead_may_change=True
    )


class SitesTable(Section):
    """Who takes part, and how long they are waited for."""

    names: Annotated[Names, Field(min_length=1), AfterValidator(_sites)] = Field(description="the sites")
    leads: Annotated[Names, Field(min_length=1), AfterValidator(_leads)] = key(
        ("lead@example.org",), "who may submit and stop, by mail address; each gets a kit"
    )
    input: Annotated[Sides, Field(min_length=1)] = Field(description="the shape of one example: [C, H, W], or [F]")
    columns: Names | None = key(
        None, "of tables: the names of the F columns in their order, which every site's file is held to"
    )
    quorum: Count | None = key(None, "so many sites must answer for a round to count; unset, more than half of them")
    deadline: Seconds = key(
        600.0, "seconds that a site has for its part of a round; who takes longer is left out of it", lead_may_change=True
    )
    wait: Seconds = key(
        60.0, "seconds that the start waits for all sites; then it begins with those that are there", lead_may_change=True
    )
    retries: Count = key(
        5, "how often the server starts anew, with longer and longer pauses, while no round succeeds", lead_may_change=True
    )
    update_limit: Annotated[float, Field(gt=1)] = key(
        10.0,
        "a site's update is refused where its norm is more than so many times the median of the others', from 3 sites on",
    )
    refuse_opposed: bool = key(
        True,
        "whether a site's update is refused where the updates of all other sites agree, its own points against all of them, "
        "and it is longer than their median, from 3 sites on",
    )
    examples_limit: Count | None = key(
        None,
        "the most training examples (n_k) that a site may state, where they weigh; unset, `sites.update_limit` times the "
        "median of the others'",
    )
    public: PathSetting | None = key(
        None,
        "the folder of the public seed set, SITE.npz of each, counted from this file; fedh2l, fedmd and aggregate need it",
    )

    @property
    def least(self) -> int:
        """How many sites must answer for a round to count."""
        return min(self.quorum or len(self.names) // 2 + 1, len(self.names))


class SeedsTable(Section):
    """What a contract says of the public seed set: of each site, and of the whole."""

    rows: dict[str, _Rows]
    counts: dict[str, list[Annotated[int, Field(ge=0)]]] | None  # examples a class; None: labels stay with their owners
    bytes: dict[str, Count]
    digest: Digest  # of the whole; of the labels, too, where they are given to all
    parts: dict[str, Digest]  # likewise of each site's part alone


class StateTable(Section):
    """Where a site keeps what it must not lose."""

    folder: PathSetting = Field(description="the site's state: its model, its ledger; outside the kit")


class PublicTable(Section):
    """The public seed set at a site."""

    folder: PathSetting = Field(
        description="the folder with SITE.npz of every site, this one's too; fedh2l, fedmd and aggregate need it"
    )


def check_modules(value: tuple[str, ...]) -> tuple[str, ...]:
    """The names of modules, as they are. Raises ValueError where one is no module's, or one of Python's own."""
    for module in value:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"a module is named as in Python, 'networks' or 'lab.networks', and {module!r} is not")
        if is_of_python(module):
            raise ValueError(f"{module!r} is a module of Python itself, which holds no network, data or algorithm")
    return value


class TrustTable(Section):
    """Which code the site runs beside fedmutual's."""

    modules: Annotated[Names, AfterValidator(check_modules)] = key(
        (),
        'the modules that "module:name" may name here, in this file or in the federation\'s; each lies beside this file or '
        "is installed, and can do all that the site's process may",
    )


class SitePrivacy(Section):
    """What a site may spend of its data's privacy, over all federations that use them."""

    epsilon: Annotated[float, Field(gt=0)] | None = key(
        None, "the site's budget, needed where the federation has privacy.nets; when it is spent the site declines"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = key(1e-5, "the delta that the budget is stated at")


class SiteSplit(optional(SplitConfig)):  # type: ignore[misc]
    """What a site holds out its own way."""


class SiteShare(optional(ShareConfig)):  # type: ignore[misc]
    """What a site tells beside its messages."""


class LimitsTable(Section):
    """What a site does not go beyond, whatever is submitted."""

    rounds: Count | None = key(
        None, "the most rounds that this site takes part in; unset, as many as the contract that it agreed to has"
    )


class SiteEngine(Section):
    """Where a site's work runs."""

    device: str = key("auto", "cpu, cuda, cuda:1, mps; auto takes a CUDA GPU, else Apple's, else the CPU")
    threads: Annotated[int, Field(ge=1, le=4096)] = key(1, "threads; part of what makes a result repeatable")
    precision: Literal["float32", "tf32", "bf16"] = key("float32", "of matrices and convolutions")


class SiteFile(Section):
    """What a site does its own way. Nothing of it crosses, and the server learns none of it."""

    site: str = Field(description="the site's name, as the federation has it")
    data: ClientData = ClientData()
    split: SiteSplit = SiteSplit()
    model: ClientModel = ClientModel()
    algorithm: Settings = Field({}, description="its own settings of the algorithm, alpha say")
    training: ClientTraining = ClientTraining()
    optimizer: ClientOptimizer = ClientOptimizer()
    engine: SiteEngine = SiteEngine()
    share: SiteShare = SiteShare()
    limits: LimitsTable = LimitsTable()
    privacy: SitePrivacy = SitePrivacy()
    state: StateTable
    public: PublicTable | None = None
    trust: TrustTable = TrustTable()
