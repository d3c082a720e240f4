"""Write the findings page: the verdicts on the claims that have a `finding` in an index."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedmutual.files import write_bytes
from fedmutual.report.rendering import make_environment
from fedmutual_papers import prose
from fedmutual_papers.claims import CONTRADICTED, DECIDED, INCONCLUSIVE, SUPPORTED, Judgement
from fedmutual_papers.drawing import Forest
from fedmutual_papers.entries import capitalize, get_unit
from fedmutual_papers.figures import make_standalone_svg
from fedmutual_papers.pages import FIGURES, MADE, Page
from fedmutual_papers.printed import ALL
from fedmutual_papers.significance import is_significant

NAME, TEMPLATE = "findings.md", "findings.md.j2"
FIGURE = "findings.svg"
HOLDS, DEPENDS, FAILS, OPEN, UNMEASURED = "holds", "depends", "fails", "open", "unmeasured"


@dataclass(frozen=True)
class PaperFinding:
    """A claim on the findings page, judged under each reading."""

    page: Page
    readings: tuple[Judgement, ...]

    @property
    def text(self) -> str:
        """Return the claim as one complete sentence."""
        return self.readings[0].claim.finding

    @property
    def outcome(self) -> str:
        """Return the outcome over all readings; a verdict counts only if it stands after Holm's adjustment."""
        outcomes = [_decide_outcome(judged) for judged in self.readings]
        measured = [o for o in outcomes if o is not None]
        if not measured:
            return UNMEASURED
        if len(set(measured)) > 1:
            return DEPENDS
        return {SUPPORTED: HOLDS, CONTRADICTED: FAILS, INCONCLUSIVE: OPEN}[measured[0]]

    @property
    def verdicts(self) -> str:
        """Return each reading's verdict: "As the paper trains: supported: +1.2 points ...; at equal steps: not run"."""
        texts = []
        for judged in self.readings:
            verdict = prose.describe_verdict(judged, self.page.experiment.index.decimals)
            if judged.verdict in DECIDED and not is_significant(judged.holm[1]):
                verdict += "; after Holm's adjustment the claim is not decided"
            texts.append(f"{judged.reading}: {verdict}" if judged.reading else verdict)
        return capitalize("; ".join(texts))


def _decide_outcome(judged: Judgement) -> str | None:
    """Return the verdict, or inconclusive if the verdict may be chance; None if too few runs exist for a verdict."""
    if judged.verdict in DECIDED:
        return judged.verdict if is_significant(judged.holm[1]) else INCONCLUSIVE
    return INCONCLUSIVE if judged.verdict == INCONCLUSIVE else None


def find_findings(pages: Sequence[Page]) -> list[PaperFinding]:
    """Return the claims that have a `finding`, in the order of the pages."""
    return [PaperFinding(page, readings) for page in pages for readings in page.claims if readings[0].claim.finding]


def make_forest(findings: Sequence[PaperFinding]) -> Forest:
    """Return the forest plot of the findings that are differences in points and have a verdict."""
    rows = []
    for finding in findings:
        label = finding.text
        for number, judged in enumerate(finding.readings):
            if _decide_outcome(judged) is None or judged.overall is None or get_unit(judged) != "points":
                continue
            sign = {SUPPORTED: 1, CONTRADICTED: -1}.get(judged.verdict, 0)
            rows.append((label if number == 0 else f"{label} {judged.reading}", judged.overall, sign))
            label = "\N{HORIZONTAL ELLIPSIS}"  # the readings below it are of the same claim
    return Forest("The papers' claims that were measured", tuple(rows))


def write_findings(pages: Sequence[Page], counts: pd.DataFrame, root: Path, folder: Path) -> list[Path]:
    """Write the findings page beside the folder of the pages, from the template of the experiments, and return its paths.

    counts: the numbers of printed values by state; the sum is in the row "all". Without a template nothing is written.

    Raises:
        RunError: a file cannot be written.
    """
    if not (root / TEMPLATE).exists():
        return []
    path, drawn = folder.parent / NAME, make_forest(findings := find_findings(pages))
    text = render_findings(findings, counts, root, Path(os.path.relpath(folder, path.parent)).as_posix())
    write_bytes(folder / FIGURES / FIGURE, make_standalone_svg(drawn).encode())
    write_bytes(path, text.encode())
    return [path]


def render_findings(findings: Sequence[PaperFinding], counts: pd.DataFrame, root: Path, pages: str) -> str:
    """Return the findings page as Markdown. pages: the relative path from this page to the experiments' pages."""
    template = make_environment(root, html=False).get_template(TEMPLATE)
    return template.render(
        made=MADE,
        figure=f"{pages}/{FIGURES}/{FIGURE}",
        picture=make_forest(findings),
        pages=pages,
        methods="methods.md",
        groups={
            outcome: [f for f in findings if f.outcome == outcome] for outcome in (HOLDS, DEPENDS, FAILS, OPEN, UNMEASURED)
        },
        printed=counts.loc[ALL].to_dict(),
    )
