"""A verdict: the answer of a comparison in words, with the sentences for and against it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The question of a comparison, the answer in a sentence, its most important reasons, and all sentences.

    sentences: every fact for the answer and against it; a page folds them.
    """

    question: str
    lead: str
    highlights: tuple[str, ...]
    sentences: tuple[str, ...]
