"""Write the page of all claims of all experiments with their verdicts."""

from collections import Counter
from collections.abc import Sequence

from fedmutual.report.cells import Column, PageTable, TableCell
from fedmutual.report.text import count
from fedmutual.reproduce import prose, tables
from fedmutual.reproduce.claims import CONTRADICTED, DIVERGED, INCONCLUSIVE, NOT_RUN, SUPPORTED, TOO_SHORT
from fedmutual.reproduce.entries import capital
from fedmutual.reproduce.pages import MADE, Page, md_table
from fedmutual.reproduce.significance import stands

NAME = "verdicts.md"
ORDER = (SUPPORTED, CONTRADICTED, INCONCLUSIVE, TOO_SHORT, DIVERGED, NOT_RUN)


def overview(pages: Sequence[Page]) -> str:
    """Return the page as Markdown: the counts of verdicts, also after Holm's adjustment, then each claim and verdict."""
    parts = [MADE, "# Every claim and its verdict", _sentence(pages), md_table(counted(pages), False), prose.P_VALUES]
    for page in pages:
        if page.claims:
            index = page.experiment.index
            verdicts = tables.claims(page.claims, index.decimals)
            parts += [
                f"## [{index.title}]({page.experiment.id}.md)",
                prose.state(page.measured_cells),
                md_table(verdicts, False),
            ]
    return "\n\n".join(parts) + "\n"


def _sentence(pages: Sequence[Page]) -> str:
    claims = sum(len(page.claims) for page in pages)
    judged = [j for page in pages for j in page.judged]
    decided = [j for j in judged if j.verdict in (SUPPORTED, CONTRADICTED)]
    stand = sum(stands(j.holm[1]) for j in decided)
    return (
        f"{count(claims, 'claim')}, {count(len(judged), 'verdict')} including other readings; {len(decided)} of these are "
        f"supported or contradicted, and {stand} of them remain after Holm's adjustment over all pages."
    )


def counted(pages: Sequence[Page]) -> PageTable:
    """Return the table of verdict counts: by each verdict's interval, and after Holm's adjustment."""
    judged = [j for page in pages for j in page.judged]
    counts = Counter(j.verdict for j in judged)
    rows = []
    for verdict in ORDER:
        of_kind = [j for j in judged if j.verdict == verdict]
        stand = [str(sum(stands(j.holm[k]) for j in of_kind)) for k in (0, 1)] if verdict in ORDER[:2] else ["", ""]
        rows.append((TableCell(capital(verdict)), TableCell(str(counts[verdict])), *map(TableCell, stand)))
    heads = (
        Column("Verdict", numeric=False),
        Column("Verdicts"),
        Column("after Holm, a page"),
        Column("after Holm, all pages"),
    )
    return PageTable("counts", "", heads, tuple(rows), "")
