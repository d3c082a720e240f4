"""A small federation of real sites, and an equal configuration for one process."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from sklearn.datasets import load_digits

import fedmutual
from authority import write_startup
from fedmutual import data
from fedmutual.config import parse_config
from fedmutual.core import Message
from fedmutual.errors import UserError
from fedmutual.events import Noted
from fedmutual.federation.experiment import Experiment
from fedmutual.rundir.logs import describe_event
from fedmutual.sites import contract as contracts
from fedmutual.sites import site_settings
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.journal import Journal
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.protocol import WORK, MalformedMessage, Order, pack_message, read_order
from fedmutual.sites.secure_sum.messages import WORDS
from fedmutual.sites.site_journal import UPDATE
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import build_site, read_site_file

CLASSES = [str(k) for k in range(10)]
COMMON = {
    "name": "wards",
    "rounds": 3,
    "data": {"classes": CLASSES, "mean": [0.3], "std": [0.4]},
    "split": {"private": 0.12, "validation": 0.06, "test": 0.06},
    "algorithm": {"name": "fml", "alpha": 0.4, "beta": 0.6},
    "model": {"shared": "mlp"},
    "training": {"local_epochs": 1, "batch_size": 32},
    "optimizer": {"lr": 0.05},
}
SITES = {
    "north": {"model": {"personal": "mlp"}, "algorithm": {"alpha": 0.7}, "data": {"name": "digits"}},
    "south": {"model": {"personal": "cnn1"}, "data": {"name": "digits"}, "training": {"batch_size": 16}},
    "west": {"model": {"personal": "cnn2"}, "data": {"name": "digits"}, "optimizer": {"lr": 0.02}},
}
MLPS = {i: {**tables, "model": {"personal": "mlp"}} for i, tables in SITES.items()}
SEEDED = COMMON | {  # with a public seed set
    "split": {"private": 0.12, "public": 0.14, "validation": 0.06, "test": 0.06},
    "algorithm": {"name": "fedh2l", "public_batch": 8},
    "training": {"local_steps": 2, "batch_size": 16},
    "optimizer": {"name": "adam", "lr": 0.003},
}


TELLING = {"share": {"metrics": "all"}}  # all scores and losses, as one process has it unless it is told otherwise
UNLABELLED = SEEDED | {"algorithm": SEEDED["algorithm"] | {"labels": False}}


def contract(folder, common=COMMON, sites=SITES, **given):
    """Write FEDERATION.toml into a folder and return its path."""
    path = folder / "federation.toml"
    table = {"names": list(sites), "input": [1, 8, 8], "baseline": False, **given}
    path.write_text(tomli_w.dumps({**common, "sites": table}))
    return path


def site(folder, name, site_tables=None, **more_tables):
    """Write a site's site.toml into a folder of its own and return its path."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / "site.toml"
    tables = {
        "site": name,
        "state": {"folder": "state"},
        "engine": {"device": "cpu"},
        **(site_tables or SITES[name]),
        **more_tables,
    }
    path.write_text(tomli_w.dumps(tables))
    return path


def together(common=COMMON, sites=SITES):
    """Return all sites as one experiment."""
    return {**common, "clients": sites, "engine": {"name": "inprocess", "device": "cpu"}}


def with_data(folder: Path) -> dict:
    """Return the sites, each with a third of the digits in a file of its own."""
    digits, sites = load_digits(), {}
    for k, (name, about) in enumerate(SITES.items()):
        path = folder / f"{name}-digits.npz"
        np.savez(path, x=(digits.images[k::3] * 15).astype(np.uint8), y=digits.target[k::3])
        site_tables = {key: value for key, value in about.items() if key != "algorithm"}
        sites[name] = site_tables | {"data": {"name": "npz", "root": str(path)}}
    return sites


def seeded(folder: Path, common=SEEDED, **given) -> tuple[Path, dict]:
    """Write FEDERATION.toml and the public seed set of all sites beside it; return (its path, the sites)."""
    sites = with_data(folder)
    path = contract(folder, common, sites, public="public", **given)
    for i in sites:
        site_settings.export_seedset(path, site(folder, i, sites[i]), folder / "public")
    return path, sites


def in_one_process(sites, common=SEEDED) -> data.Federation:
    """Return the data of all sites as one experiment has them."""
    return data.load(parse_config(together(common, sites)))


def arrays(path: Path | str) -> dict[str, np.ndarray]:
    """Return the content of an npz file."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def changed(path: Path, **tables) -> None:
    """Replace tables of a TOML file; None removes a table."""
    tables_by_name = tomllib.loads(path.read_text()) | tables
    path.write_text(tomli_w.dumps({k: v for k, v in tables_by_name.items() if v is not None}))


def rewritten(path: Path, **arrays_) -> None:
    """Replace arrays of a part; None removes an array."""
    new_arrays = arrays(path) | arrays_
    np.savez(path, **{k: v for k, v in new_arrays.items() if v is not None})


def joined(folder: Path, name="north") -> Experiment:
    """Return the experiment of a site that joins, by the contract as it is submitted."""
    return build_site(
        contracts.read_submitted_contract(folder / "federation.toml"), read_site_file(folder / name / "site.toml")
    )


def refused(folder: Path, *words: str, agreed=None, name="north") -> str:
    """Return the one sentence with which a site refuses to take part."""
    with pytest.raises(UserError) as caught:
        build_site(
            agreed or contracts.read_contract(folder / "federation.toml"), read_site_file(folder / name / "site.toml")
        )
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def accepted(record: dict, agreed: dict | None = None) -> contracts.Contract:
    """Return the contract of a job with this record. agreed: the contract that sites agreed to; by default the same one."""
    return contracts.accept_contract(json.dumps(record), [agreed or record])


def halves(folder: Path, path: Path, sites=SITES) -> tuple[contracts.Contract, dict[str, SiteRuntime]]:
    """Return the contract as it is submitted, and a half for each site."""
    agreed = contracts.read_submitted_contract(path)
    place = {"public": {"folder": str(folder / "public")}}
    return agreed, {i: SiteRuntime(agreed, read_site_file(site(folder, i, sites[i], **place))) for i in sites}


class InMemoryTransport:
    """A transport whose sites are objects in this process. It keeps a copy of everything that they sent.

    Tests disturb it by its attributes: `before` is called with (round, phase) before orders of work; `alter(site, order,
    inbox)` returns another order and inbox; `change(site, order, content)` returns the contents that arrive as answers.
    """

    def __init__(
        self, halves: Mapping[str, SiteRuntime], carry: Callable[[str, str, bytes], bytes | None] | None = None
    ) -> None:
        """carry: how a message is changed on its way, by sender and receiver; None: it is lost."""
        self.halves, self.carry = dict(halves), carry or (lambda sender, to, letter: letter)
        self.away: set[str] = set()  # not connected
        self.silent: set[str] = set()  # connected, and without an answer
        self.late: tuple[str, ...] = ()
        self.answers: list[tuple[str, bytes, bytes]] = []  # site, order, answer
        self.letters: list[tuple[str, str, bytes]] = []  # from, to, letter
        self.before: Callable[[int, int], object] = lambda round, phase: None
        self.alter: Callable[[str, Order, Message], tuple[Order, Message]] | None = None
        self.change: Callable[[str, Order, bytes], list[bytes]] = lambda site, order, content: [content]

    def list_connected(self) -> tuple[str, ...]:
        return tuple(i for i in self.halves if i not in self.away)

    def list_late(self) -> tuple[str, ...]:
        return self.late

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        first = next((read_order(content)[0] for content in orders.values()), None)
        if first is not None and first.kind == WORK:
            self.before(first.round, first.phase)
        for i, content in orders.items():
            if i in self.silent:
                continue
            order = content if self.alter is None else pack_message(*self.alter(i, *read_order(content)))
            answer = self.halves[i].carry_out(order)
            self.answers.append((i, order, answer))
            for to, letter in self.halves[i].make_peer_messages(order).items():
                self.letters.append((i, to, letter))
                carried = self.carry(i, to, letter)
                with suppress(MalformedMessage):
                    if carried is not None:
                        self.halves[to].peers.receive(i, carried)
            yield from ((i, arrived) for arrived in self.change(i, read_order(content)[0], answer))


class Federation:
    """Real sites and their server in this process, in a folder: their contract, transport, notes and results."""

    def __init__(self, folder, common=COMMON, sites=SITES, public=False, carry=None, start=None, site_tables=None, **given):
        """public: with a public seed set. start: name -> a site; site_tables: more of each; given: of the table `sites`."""
        folder.mkdir(exist_ok=True)
        self.folder, self.notes, self.start = folder, [], start or self.start
        path, sites = seeded(folder, common, **given) if public else (contract(folder, common, sites, **given), sites)
        more = {"public": {"folder": str(folder / "public")}} if public else {}
        self.sites = {i: {**about, **more, **(site_tables or {})} for i, about in sites.items()}
        self.agreed = contracts.read_submitted_contract(path)
        self.transport = InMemoryTransport({i: self.start(i) for i in sites}, carry)

    def __getitem__(self, name):
        return self.transport.halves[name]

    def start(self, name, say=lambda line: None):
        """A site's process, from its files."""
        startup = write_startup(self.folder / name / "startup", name) if self.agreed.is_masked else None
        settings = read_site_file(site(self.folder, name, self.sites[name]))
        return SiteRuntime(self.agreed, settings, say, startup=startup)

    def restart(self, *names):
        """Start sites, or all of them, from what they have saved."""
        self.transport.halves |= {i: self.start(i) for i in names or self.sites}

    def run(self, *observers):
        """Run the rounds that are not done, and return this object."""
        startup = write_startup(self.folder / "server-kit", "server") if self.agreed.is_masked else None

        def note(event):
            if isinstance(event, Noted):
                self.notes += describe_event(event)

        Coordinator(self.agreed, self.server, startup).run(self.transport, [note, *observers])
        return self

    @property
    def server(self):
        """The folder of the server."""
        return self.folder / "server"

    @property
    def model(self):
        return fedmutual.Run(self.server).global_model().state_dict()

    @property
    def summary(self):
        return fedmutual.Run(self.server).summary

    def personal(self, *names):
        """Return site -> its own model."""
        return {i: fedmutual.Run(self[i].folder).personal_model(i).state_dict() for i in names or self.transport.halves}

    def equals(self, run, *names):
        """Return whether the shared model and the sites' own ones have the bits of a run in one process."""
        alike = [same(mine, run.personal_model(i).state_dict()) for i, mine in self.personal(*names).items()]
        return all(alike) and same(self.model, run.global_model().state_dict())

    def about(self, name):
        """Return the notes that name a site."""
        return [note for note in self.notes if repr(name) in note]

    def environment(self):
        return json.loads((self.server / "environment.json").read_text())

    def ledger(self, name):
        """Return what left a site."""
        return read_ledger(self[name].folder)


def run_together(folder, common=COMMON, sites=SITES, **server):
    """Return the run of all sites in one process. server: keys of its table."""
    return fedmutual.run(parse_config(together(common | ({"server": server} if server else {}), sites)), folder)


def find_event(name, round=None):
    """Return a condition of events: of this kind, and of this round."""
    return lambda event: type(event).__name__ == name and (round is None or event.round == round)


def read_update(folder: Path, round: int = 0) -> torch.Tensor | None:
    """Return the words of a site's update in a round before they are masked, int64 [N]; None where there is none."""
    with closing(Journal(folder, read_only=True)) as journal:
        return journal.read_tensors(UPDATE, round).get(WORDS)


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two models are equal, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
