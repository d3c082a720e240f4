"""The result of an audit: audit.json, its sentences, its tables and its page. `templates/audit.j2` has the sentences."""

import math
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from fedmutual.report.cells import Column, PageTable, TableCell, make_table
from fedmutual.report.rendering import load_page_template, render_facts, write_text
from fedmutual.results.scale import MetricScale, format_number

Attack = Literal["loss", "answers", "shadows"]
Model = Literal["shared", "returned", "personal"]

_ATTACKS = {"loss": "loss", "answers": "answers alone", "shadows": "shadow runs"}


class Membership(BaseModel, frozen=True, extra="forbid"):
    """What one membership attack achieved against one model; see `studies.attacks.measure_strength`."""

    model: Model  # the shared model; the meme as a client returns it; a client's personal model
    client: str | None  # None: the shared model, and the rows of all clients
    attack: Attack  # by the loss of the true class; by the answer alone; by the loss beside that of shadow runs
    members: int  # rows that the model was trained on
    others: int  # held-out rows
    advantage: float  # true positives - false positives, as shares, on rows that did not choose the threshold
    low: float  # the interval of the advantage
    high: float
    auc: float  # 0.5: the attack is as good as chance
    auc_low: float
    auc_high: float

    @property
    def is_detected(self) -> bool:
        """Whether the attack distinguishes training rows from held-out rows: the interval of the advantage is above 0."""
        return self.low > 0


class Imprint(BaseModel, frozen=True, extra="forbid"):
    """What a server reads out of one client's meme by a crafted shared model."""

    client: str
    rows: int  # the client's training rows
    records: int  # training rows that were read
    coincidences: int  # held-out rows that the same test counts as read: nobody trained on them
    skipped: str | None = None  # why the attack was not possible


class Guarantee(BaseModel, frozen=True, extra="forbid"):
    """The differential privacy that the run states."""

    nets: str  # "meme" or "both"
    unit: str  # "example" or "group"
    epsilon: float | None  # the largest of any client; None: infinite
    delta: float


class Audit(BaseModel, frozen=True, extra="forbid"):
    """The content of audit.json. It is not an upper bound: another attack may achieve more."""

    format: Literal[1] = 1
    run: str
    algorithm: str
    round: int
    level: float  # at which all intervals of the advantages hold together; those of the AUCs are not counted
    shadows: int
    privacy: Guarantee | None
    memberships: tuple[Membership, ...]
    imprints: tuple[Imprint, ...]
    notes: tuple[str, ...]


def _describe_model(membership: Membership) -> str:
    """Return the attacked model: "shared model", "meme returned by 0", "personal model of 0"."""
    if membership.client is None:
        return "shared model"
    kind = "meme returned by" if membership.model == "returned" else "personal model of"
    return f"{kind} {membership.client}"


_MEMBERSHIP_COLUMNS = (
    Column("Model", numeric=False, keys=("model",), read=_describe_model),
    Column("Attack by", numeric=False, keys=("attack",), read=lambda m: _ATTACKS[m.attack]),
    Column("Advantage", keys=("advantage",), read=lambda m: m.advantage, form=lambda n: TableCell(format_number(n, 2))),
    Column(
        "Interval",
        keys=("low", "high"),
        form=lambda m: TableCell(f"{format_number(m.low, 2)} to {format_number(m.high, 2)}"),
        numbers=lambda m: (m.low, m.high),
    ),
    Column(
        "AUC",
        keys=("auc", "auc_low", "auc_high"),
        form=lambda m: TableCell(f"{m.auc:.2f} ({m.auc_low:.2f} to {m.auc_high:.2f})"),
        numbers=lambda m: (m.auc, m.auc_low, m.auc_high),
    ),
)
_IMPRINT_COLUMNS = (
    Column("Client", numeric=False, keys=("client",), read=lambda i: i.client),
    Column("Training rows", keys=("rows",), read=lambda i: i.rows),
    Column("Read", keys=("read",), read=lambda i: "not possible" if i.skipped else i.records),
    Column("Coincidences", keys=("coincidences",), read=lambda i: "" if i.skipped else i.coincidences),
)


def make_membership_table(audit: Audit) -> PageTable:
    """Return the table with a line for each membership attack: its advantage and its AUC, with their intervals."""
    return make_table("memberships", "Membership attacks", _MEMBERSHIP_COLUMNS, audit.memberships)


def make_sentences(audit: Audit) -> list[str]:
    """Return the findings of the audit, one or two sentences each; the first one is the result."""
    say = partial(render_facts, "audit.j2", MetricScale(0))
    detected = [m for m in audit.memberships if m.is_detected]
    best = max(detected, key=lambda m: m.low, default=None)  # with the highest lower end of its interval
    clearest = {"best": best, "model": _describe_model(best), "attack": _ATTACKS[best.attack]} if best else {"best": None}
    sentences = [say("memberships", attacks=len(audit.memberships), detected=len(detected), **clearest)]
    skipped = sorted({i.skipped for i in audit.imprints if i.skipped is not None})
    sentences += [say("imprint_skipped", reason=reason) for reason in skipped]
    tried = [i for i in audit.imprints if i.skipped is None]
    if tried:
        sentences.append(say("imprint_result", records=sum(i.records for i in tried), rows=sum(i.rows for i in tried)))
    if coincidences := sum(i.coincidences for i in tried):
        sentences.append(say("coincidences", rows=coincidences))
    privacy = audit.privacy
    bound = 1.0 if privacy is None or privacy.epsilon is None else bound_advantage(privacy.epsilon, privacy.delta)
    bound = math.ceil(100 * bound - 1e-9) / 100  # no attack has more than the printed number
    return [*sentences, say("guarantee", privacy=privacy, largest_advantage=bound), say("no_bound"), *audit.notes]


def bound_advantage(epsilon: float, delta: float) -> float:
    """Return the largest advantage that (epsilon, delta) allows (Humphries et al. 2020, https://arxiv.org/abs/2010.12112)."""
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700)) + 1))


def write_audit(audit: Audit, out: Path) -> None:
    """Write the page of an audit.

    Raises:
        RunError: `out` cannot be written, or is a file of another kind.
    """
    page = load_page_template("audit.html.j2").render(
        audit=audit,
        sentences=make_sentences(audit),
        memberships=make_membership_table(audit),
        imprints=make_table("imprints", "Imprint attack", _IMPRINT_COLUMNS, audit.imprints),
        level=f"{100 * audit.level:g} %",
        version=version("fedmutual"),
    )
    write_text(page, out)
