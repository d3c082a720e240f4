"""The page and the table of an audit: what an attacker gains, in plain words."""

import math
from importlib.metadata import version
from pathlib import Path

from fedmutual.report.audit_result import Audit, Guarantee, Imprint, Membership
from fedmutual.report.html import write_text
from fedmutual.report.rendering import make_environment

_ATTACKS = {
    "loss": "loss",
    "answers": "answers alone",
    "shadows": "shadow runs",
}
NO_BOUND = (
    "This is no upper bound. Another attack, or an attacker that knows more, may achieve more; an interval that contains 0 "
    "does not show that the model is safe."
)


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
    """Return what the audit means, one sentence each; the first sentence is the result."""
    return [
        _summarise_memberships(audit),
        *_summarise_imprints(audit.imprints),
        describe_guarantee(audit.privacy),
        NO_BOUND,
        *audit.notes,
    ]


def _summarise_memberships(audit: Audit) -> str:
    detected = [m for m in audit.memberships if m.is_detected]
    number = len(audit.memberships)
    if not number:
        return "No membership attack could be measured."
    if not detected:
        return (
            f"None of the {number} membership attacks tells training rows from held-out rows: every interval of the "
            "advantage contains 0."
        )
    best = max(detected, key=lambda m: m.low)
    return (
        f"{len(detected)} of {number} membership attacks tell training rows from held-out rows. The clearest is the attack "
        f"on the {describe_model(best)} by {_ATTACKS[best.attack]}: an attacker recognises training rows more often than it "
        f"accuses held-out rows, by {100 * best.advantage:.0f} percentage points ({100 * best.low:.0f} to "
        f"{100 * best.high:.0f})."
    )


def _summarise_imprints(imprints: tuple[Imprint, ...]) -> list[str]:
    tried = [i for i in imprints if i.skipped is None]
    skipped = {i.skipped for i in imprints if i.skipped is not None}
    sentences = [f"The imprint attack was not possible: {reason}." for reason in sorted(skipped)]
    if tried:
        records, rows = sum(i.records for i in tried), sum(i.rows for i in tried)
        sentences.append(
            f"Imprint attack: a dishonest server reads {records} of {rows} training rows out of the memes of one round."
        )
        coincidences = sum(i.coincidences for i in tried)
        if coincidences:
            sentences.append(
                f"By the same test it reads {coincidences} held-out rows, which it never received: so many matches may be "
                "coincidences."
            )
    return sentences


def describe_guarantee(privacy: Guarantee | None) -> str:
    """Return the differential privacy that the run states, and the advantage that it allows."""
    if privacy is None:
        return "Differential privacy: none. Nothing bounds what an attacker learns (`privacy.nets` sets it)."
    if privacy.epsilon is None:
        return "Differential privacy: epsilon is infinite. Nothing bounds what an attacker learns."
    most = bound_advantage(privacy.epsilon, privacy.delta)
    covered = "the shared model" if privacy.nets == "meme" else "the shared and the personal models"
    return (
        f"Differential privacy: epsilon {privacy.epsilon:.3g} at delta {privacy.delta:g}, of each {privacy.unit}, for "
        f"{covered}. No attack on one {privacy.unit} has an advantage above {most:.2f}; a "
        "meme returned in a further round costs more than this epsilon."
    )


def bound_advantage(epsilon: float, delta: float) -> float:
    """Return the largest advantage that (epsilon, delta) allows (Humphries et al. 2020, https://arxiv.org/abs/2010.12112)."""
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700)) + 1))


def make_imprint_rows(audit: Audit) -> list[tuple[str, str, str, str]]:
    """Return a row for each client: client, training rows, rows that were read, coincidences."""
    return [
        (i.client, f"{i.rows}", *(("not tried", "") if i.skipped else (f"{i.records}", f"{i.coincidences}")))
        for i in audit.imprints
    ]


def write_audit(audit: Audit, out: Path) -> None:
    """Write the page of an audit.

    Raises:
        RunError: `out` cannot be written, or is a file of another kind.
    """
    template = make_environment("fedmutual.report", html=True).get_template("audit.html.j2")
    page = template.render(
        audit=audit,
        sentences=make_sentences(audit),
        memberships=make_membership_rows(audit),
        imprints=make_imprint_rows(audit),
        level=f"{100 * audit.level:g} %",
        version=version("fedmutual"),
    )
    write_text(page, out)
