"""The page and the table of an audit: what an attacker gains. `templates/audit.j2` has the sentences."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fedmutual.report.audit_result import Audit, Guarantee, Imprint, Membership
from fedmutual.report.findings import Finding, describe_finding
from fedmutual.report.html import write_text
from fedmutual.report.rendering import load_page_template
from fedmutual.results.scale import MetricScale

_ATTACKS = {
    "loss": "loss",
    "answers": "answers alone",
    "shadows": "shadow runs",
}


class AuditResult(Finding):
    """A result of an audit, which a macro of audit.j2 states as sentences."""

    template = "audit.j2"


@dataclass(frozen=True)
class Memberships(AuditResult):
    """How many membership attacks there were, how many distinguish training rows from held-out rows, and the clearest."""

    macro = "memberships"
    attacks: int
    detected: int
    clearest: Membership | None  # with the highest lower end of its interval; None if no attack is detected

    @property
    def model(self) -> str:
        """The attacked model of the clearest attack."""
        return describe_model(self.clearest) if self.clearest else ""

    @property
    def attack(self) -> str:
        """The name of the clearest attack."""
        return _ATTACKS[self.clearest.attack] if self.clearest else ""


@dataclass(frozen=True)
class ImprintSkipped(AuditResult):
    """The reason why the imprint attack was not possible."""

    macro = "imprint_skipped"
    reason: str


@dataclass(frozen=True)
class ImprintResult(AuditResult):
    """How many training rows a dishonest server reads, over all clients."""

    macro = "imprint_result"
    records: int
    rows: int  # of training


@dataclass(frozen=True)
class Coincidences(AuditResult):
    """How many held-out rows count as read, although the server never received them."""

    macro = "coincidences"
    rows: int


@dataclass(frozen=True)
class PrivacyBound(AuditResult):
    """The differential privacy that the run states, and the advantage that it allows."""

    macro = "guarantee"
    privacy: Guarantee | None

    @property
    def largest_advantage(self) -> float:
        """The largest advantage of an attack; 1.0 without a finite epsilon."""
        if self.privacy is None or self.privacy.epsilon is None:
            return 1.0
        return bound_advantage(self.privacy.epsilon, self.privacy.delta)


class NoBound(AuditResult):
    """The limit of every audit."""

    macro = "no_bound"


def describe_model(membership: Membership) -> str:
    """Return the attacked model: "shared model", "meme returned by 0", "personal model of 0"."""
    if membership.client is None:
        return "shared model"
    return (
        f"meme returned by {membership.client}"
        if membership.model == "returned"
        else f"personal model of {membership.client}"
    )


def make_membership_rows(audit: Audit) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each membership attack: model, attack, advantage, its interval, AUC with its interval."""
    return [
        (
            describe_model(m),
            _ATTACKS[m.attack],
            f"{m.advantage:.2f}",
            f"{m.low:.2f} to {m.high:.2f}",
            f"{m.auc:.2f} ({m.auc_low:.2f} to {m.auc_high:.2f})",
        )
        for m in audit.memberships
    ]


def make_sentences(audit: Audit) -> list[str]:
    """Return the findings of the audit, one or two sentences each; the first one is the result."""
    return [*(describe_finding(finding, MetricScale(0)) for finding in find_results(audit)), *audit.notes]


def find_results(audit: Audit) -> Iterator[Finding]:
    """Return the results of an audit, in the order of the page."""
    detected = [m for m in audit.memberships if m.is_detected]
    yield Memberships(len(audit.memberships), len(detected), max(detected, key=lambda m: m.low, default=None))
    yield from _find_imprints(audit.imprints)
    yield PrivacyBound(audit.privacy)
    yield NoBound()


def _find_imprints(imprints: Sequence[Imprint]) -> Iterator[Finding]:
    for reason in sorted({i.skipped for i in imprints if i.skipped is not None}):
        yield ImprintSkipped(reason)
    tried = [i for i in imprints if i.skipped is None]
    if tried:
        yield ImprintResult(sum(i.records for i in tried), sum(i.rows for i in tried))
    if coincidences := sum(i.coincidences for i in tried):
        yield Coincidences(coincidences)


def bound_advantage(epsilon: float, delta: float) -> float:
    """Return the largest advantage that (epsilon, delta) allows (Humphries et al. 2020, https://arxiv.org/abs/2010.12112)."""
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700)) + 1))


def make_imprint_rows(audit: Audit) -> list[tuple[str, str, str, str]]:
    """Return a row for each client: client, training rows, rows that were read, coincidences."""
    return [
        (i.client, f"{i.rows}", *(("not possible", "") if i.skipped else (f"{i.records}", f"{i.coincidences}")))
        for i in audit.imprints
    ]


def write_audit(audit: Audit, out: Path) -> None:
    """Write the page of an audit.

    Raises:
        RunError: `out` cannot be written, or is a file of another kind.
    """
    template = load_page_template("audit.html.j2")
    page = template.render(
        audit=audit,
        sentences=make_sentences(audit),
        memberships=make_membership_rows(audit),
        imprints=make_imprint_rows(audit),
        level=f"{100 * audit.level:g} %",
        version=version("fedmutual"),
    )
    write_text(page, out)
