"""All claims of all experiments and their verdicts on one page."""

from collections import Counter
from collections.abc import Sequence

from fedmutual.report.cells import Cell, Column, Table
from fedmutual.report.text import count, listed
from fedmutual.reproduce import words
from fedmutual.reproduce.claims import NOT_RUN
from fedmutual.reproduce.entries import capital
from fedmutual.reproduce.pages import MADE, Page, md_table

NAME = "verdicts.md"


def overview(told: Sequence[Page]) -> str:
    """The page as Markdown: how many claims came out in which way, then each with its verdict."""
    parts = [MADE, "# Every claim and its verdict", _counted(told)]
    for page in told:
        if page.judged:
            index = page.experiment.index
            parts += [f"## [{index.title}]({page.experiment.id}.md)", words.state(page.looks), md_table(_table(page), False)]
    return "\n\n".join(parts) + "\n"


def _counted(told: Sequence[Page]) -> str:
    judged = [j for page in told for j in page.judged]
    ways = listed([f"{n} {verdict}" for verdict, n in Counter(j.verdict for j in judged).most_common()])
    short = sum(j.shortened for j in judged if j.verdict != NOT_RUN)
    rest = f" {count(short, 'verdict')} of shortened runs, which may be others at full length." if short else ""
    return f"{count(len(judged), 'claim')}: {ways or 'none'}.{rest}"


def _table(page: Page) -> Table:
    decimals = page.experiment.index.decimals
    told = [(j.claim.text, capital(words.verdict(j, decimals))) for j in page.judged]
    rows = [(Cell(str(n)), Cell(text), Cell(verdict)) for n, (text, verdict) in enumerate(told, 1)]
    columns = (Column("No."), Column("Claim", numeric=False), Column("Verdict", numeric=False))
    return Table("verdicts", "", columns, tuple(rows), "")
