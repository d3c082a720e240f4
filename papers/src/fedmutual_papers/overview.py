"""Write the page of all claims of all experiments with their verdicts."""

from collections import Counter
from collections.abc import Sequence

from fedmutual.errors import format_count
from fedmutual.report.cells import Column, PageTable, TableCell
from fedmutual_papers import prose, tables
from fedmutual_papers.claims import CONTRADICTED, DIVERGED, INCONCLUSIVE, NOT_RUN, SUPPORTED, TOO_SHORT
from fedmutual_papers.entries import capitalize
from fedmutual_papers.pages import MADE, Page, render_table
from fedmutual_papers.significance import is_significant

NAME = "verdicts.md"
ORDER = (SUPPORTED, CONTRADICTED, INCONCLUSIVE, TOO_SHORT, DIVERGED, NOT_RUN)


def render_overview(pages: Sequence[Page]) -> str:
    """Return the page as Markdown: the counts of verdicts, also after Holm's adjustment, then each claim and verdict."""
    parts = [
        MADE,
        "# Every claim and its verdict",
        _make_sentence(pages),
        render_table(count_verdicts(pages), False),
        prose.P_VALUES,
    ]
    for page in pages:
        if page.claims:
            index = page.experiment.index
            verdicts = tables.make_claims_table(page.claims, index.decimals)
            parts += [
                f"## [{index.title}]({page.experiment.id}.md)",
                prose.describe_state(page.measured_cells),
                render_table(verdicts, False),
            ]
    return "\n\n".join(parts) + "\n"


def _make_sentence(pages: Sequence[Page]) -> str:
    claims = sum(len(page.claims) for page in pages)
    judged = [j for page in pages for j in page.judged]
    decided = [j for j in judged if j.verdict in (SUPPORTED, CONTRADICTED)]
    stand = sum(is_significant(j.holm[1]) for j in decided)
    return (
        f"{format_count(claims, 'claim')}, {format_count(len(judged), 'verdict')} including other readings; "
        f"{len(decided)} of these are "
        f"supported or contradicted, and {stand} of them remain after Holm's adjustment over all pages."
    )


def count_verdicts(pages: Sequence[Page]) -> PageTable:
    """Return the table of verdict counts: by each verdict's interval, and after Holm's adjustment."""
    judged = [j for page in pages for j in page.judged]
    counts = Counter(j.verdict for j in judged)
    rows = []
    for verdict in ORDER:
        of_kind = [j for j in judged if j.verdict == verdict]
        stand = [str(sum(is_significant(j.holm[k]) for j in of_kind)) for k in (0, 1)] if verdict in ORDER[:2] else ["", ""]
        rows.append((TableCell(capitalize(verdict)), TableCell(str(counts[verdict])), *map(TableCell, stand)))
    heads = (
        Column("Verdict", numeric=False),
        Column("Verdicts"),
        Column("after Holm, a page"),
        Column("after Holm, all pages"),
    )
    return PageTable("counts", "", heads, tuple(rows), "")
