"""All claims of all experiments and their verdicts on one page."""

from collections import Counter
from collections.abc import Sequence

from fedmutual.report.text import count, listed
from fedmutual.reproduce import words
from fedmutual.reproduce.claims import NOT_RUN
from fedmutual.reproduce.entries import capital
from fedmutual.reproduce.pages import Page

NAME = "verdicts.md"


def overview(told: Sequence[Page]) -> str:
    """The page as Markdown: how many claims came out in which way, then each with its verdict."""
    parts = [
        "<!-- Made by `fedmutual reproduce --pages FOLDER` from the results; not to be edited. -->",
        "# Every claim and its verdict",
        _counted(told),
        *(part for page in told if page.judged for part in _of_page(page)),
    ]
    return "\n\n".join(parts) + "\n"


def _counted(told: Sequence[Page]) -> str:
    judged = [j for page in told for j in page.judged]
    ways = listed([f"{n} {verdict}" for verdict, n in Counter(j.verdict for j in judged).most_common()])
    short = sum(j.shortened for j in judged if j.verdict != NOT_RUN)
    return (
        f"{count(len(judged), 'claim')}: {ways or 'none'}. {short} of these verdicts rest on shortened runs, and may be "
        "others at full length. Not all claims are the papers': some ask what these leave open, and say so."
    )


def _of_page(page: Page) -> list[str]:
    id, index = page.experiment.id, page.experiment.index
    told = [(j.claim.text, capital(words.verdict(j, index.decimals))) for j in page.judged]
    rows = [f"| {number} | {text} | {verdict} |" for number, (text, verdict) in enumerate(told, 1)]
    return [
        f"## [{index.title}]({id}.md)",
        words.state(page.looks),
        "\n".join(["| | Claim | Verdict |", "| ---: | --- | --- |", *rows]),
    ]
