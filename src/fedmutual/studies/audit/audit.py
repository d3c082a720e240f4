"""An audit of a run: attacks on its models and on the messages of one more round, with the run's own data as the truth."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor, nn

from fedmutual import plugins
from fedmutual.core import At, Client, Data, Message
from fedmutual.errors import RunError
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.files import write_bytes, write_json
from fedmutual.losses import Classification
from fedmutual.recorded_code import RecordedCode
from fedmutual.rundir.checkpoint import committed, file_name, load_client, read_state
from fedmutual.stepping import work
from fedmutual.studies.audit import imprint, membership
from fedmutual.studies.audit.membership import Membership
from fedmutual.studies.trained_run import Run

FILE, PAGE = "audit.json", "audit.md"
SHARED, PERSONAL, REPLY = "shared model", "personal model", "reply of one more round"


@dataclass(frozen=True)
class Finding:
    """The result of one attack on one client's training rows."""

    client: str
    target: str  # `SHARED`, `PERSONAL` or `REPLY`
    attack: str  # "loss" or "posterior"
    membership: Membership


@dataclass(frozen=True)
class Audit:
    """What the attacks learned about a run's training rows. It is no upper bound: a better attack may learn more."""

    run: str
    round: int
    findings: tuple[Finding, ...]
    imprint: dict[str, int] | None  # client -> training rows read; None: the attack does not fit the shared network
    epsilon: dict[str, float | None]  # client -> as the run's summary has it; None: no differential privacy

    def record(self) -> dict[str, Any]:
        """Return the audit as JSON has it."""
        findings = [{**asdict(f), "membership": f.membership._asdict()} for f in self.findings]
        return {"format": 1, **asdict(self), "findings": findings}


class _Audited:
    """A run with its data and clients, as after its last saved round."""

    def __init__(self, folder: Path) -> None:
        self.run, self.folder = Run(folder), folder
        saved = committed(folder)
        if saved is None:
            raise RunError(f"{folder}: no round was saved yet, so there is no model to audit")
        self.saved = saved
        with plugins.under(self.run._code):
            self.experiment: Experiment = build.build(self.run.config, device="cpu")
        if self.experiment.pooled:
            raise RunError(f"{folder}: trains one network on all data in one place, so no model of a client can be audited")

    @property
    def at(self) -> At:
        """The round after the last saved one, in the first phase."""
        return At(self.run.config.seed, self.saved.round, self.saved.round + 1)

    @cached_property
    def server(self) -> Message:
        """The server's state; empty where nothing is shared."""
        path = self.folder / "server" / file_name(self.saved.round)
        return read_state(path, self.saved.run, self.saved.round, self.experiment.server()) if path.exists() else {}

    def client(self, id: str) -> Client:
        """Return a client as after the last saved round."""
        with plugins.under(self.run._code):
            client = self.experiment.client(id)
        load_client(client, self.folder / "clients" / id / file_name(self.saved.round), self.saved.run, self.saved.round)
        return client

    def reply(self, client: Client, server: Message) -> Message:
        """Return what a client sends in one more round to a server with this state."""
        phase = self.experiment.algorithm.phases[0]
        return work(phase, client, phase.send(server, client.id, self.at), self.at)[0]

    @property
    def shares_a_model(self) -> bool:
        """Whether clients send their forks of a shared model, whole and in one phase."""
        algorithm = self.experiment.algorithm
        return "global" in algorithm.scores and len(algorithm.phases) == 1 and algorithm.restore is None


def audit(folder: str | Path, trust_code: bool = False) -> Audit:
    """Attack the models of a run, and return how much the attacks learned.

    Each client's training rows are the members; its validation rows, which no training used, are the others. The attacks
    read the personal models, the shared model, and the reply of one more round; the imprint attack sends a chosen model.

    Raises:
        RunError: nothing was saved, or the run cannot be audited: its task is not classification, or data are pooled.
        ConfigError, DataError: as for `run`, if the configuration or the data are not as they were.
    """
    folder = Path(folder)
    with plugins.under(RecordedCode(folder, trust_code)):
        audited = _Audited(folder)
        findings = tuple(finding for id in audited.experiment.clients for finding in _attack_client(audited, id))
        read = _imprint(audited)
    spent = audited.run.summary.get("privacy", {}).get("clients", {}) if audited.run.finished else {}
    epsilon = {id: spent.get(id, {}).get("epsilon") for id in audited.experiment.clients}
    return Audit(str(folder), audited.saved.round, findings, read, epsilon)


def write_audit(folder: Path, result: Audit) -> Path:
    """Write audit.json and audit.md into a folder, and return the path of the latter.

    Raises:
        RunError: the folder cannot be written.
    """
    template = resources.files(__package__).joinpath("page.md.j2").read_text(encoding="utf-8")
    page = jinja2.Environment(trim_blocks=True, autoescape=False).from_string(template)
    disclosed = sum(finding.membership.succeeds for finding in result.findings)
    write_json(folder / FILE, result.record())
    write_bytes(folder / PAGE, page.render(**vars(result), disclosed=disclosed).encode())
    return folder / PAGE


def _attack_client(audited: _Audited, id: str) -> Iterator[Finding]:
    """Attack every model that holds something of one client's training rows."""
    task, client = audited.experiment.task(id), audited.client(id)
    if not isinstance(task, Classification):
        raise RunError(f"{audited.folder}: client {id!r} does not learn classes; membership is inferred from classes only")
    rows = audited.experiment.rows(id)
    others = rows.get("validation") or rows.get("holdout")
    if others is None:
        raise RunError(f"{audited.folder}: client {id!r} has no validation rows to compare its training rows with")
    for target, net in _targets(audited, client):
        inside, outside = (membership.compute_numbers(net, part) for part in (rows["private"], others))
        for n, attack in enumerate(("loss", "posterior")):
            measured = membership.measure(inside[n], outside[n])
            yield Finding(id, target, attack, measured)


def _targets(audited: _Audited, client: Client) -> Iterator[tuple[str, nn.Module]]:
    """The models to attack. The reply is made last, because making it trains the client's networks."""
    if "personal" in client.nets:
        yield PERSONAL, client.nets["personal"]
    if "meme" in client.nets and audited.shares_a_model:
        meme = client.nets["meme"]
        meme.load_state_dict(meme.state_dict() | {k: audited.server[k] for k in client.shared})
        yield SHARED, meme
        reply = audited.reply(client, audited.server)
        meme.load_state_dict(meme.state_dict() | {k: reply[k] for k in client.shared})
        yield REPLY, meme


def _imprint(audited: _Audited) -> dict[str, int] | None:
    """Send each client a chosen shared model, and count the training rows that its reply gives away."""
    layers = imprint.find_linear_layers(audited.experiment.nets.shared)
    names = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    if not layers or not audited.shares_a_model or not names <= audited.server.keys():
        return None
    read = {}
    for id in audited.experiment.clients:
        rows = audited.experiment.rows(id)
        similar = _inputs(rows.get("validation") or rows["private"])
        sent = {**audited.server, **imprint.craft({k: audited.server[k] for k in names}, layers, similar)}
        reply = audited.reply(audited.client(id), sent)
        read[id] = imprint.count_read_rows(sent, reply, layers, _inputs(rows["private"]))
    return read


def _inputs(data: Data) -> Tensor:
    """Return the inputs of all rows, each as one vector: [N, F]."""
    return torch.cat([x.flatten(1) for x, *_ in data.rows(torch.split(torch.arange(len(data)), membership.ROWS))])
