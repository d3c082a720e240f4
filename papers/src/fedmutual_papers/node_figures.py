"""Build the pictures of one node: its features under each method, its accuracy and its losses over the rounds."""

from collections.abc import Iterator
from functools import partial

from fedmutual.report.curves import Curve, Picture
from fedmutual_papers.cell_results import MeasuredCell
from fedmutual_papers.curves import make_curves
from fedmutual_papers.entries import name_arm
from fedmutual_papers.result import Result
from fedmutual_papers.scatter import Scatter

LOCAL = ("local", "personal")  # what methods call the loss of the step on the node's own batch
MUTUAL = ("kl", "ce")
EARLY = 1000  # rounds over which the mutual losses are drawn, as the paper's figure has it


def make_node_pictures(measured: MeasuredCell) -> Iterator[Picture | Scatter]:
    """Yield the pictures of the node that the cell names, from all runs that have a node analysis.

    The pictures are those of Figures 1 and 2 of the FedH2L paper, https://arxiv.org/abs/2101.11296.
    """
    node, tag, stem = (
        measured.cell.about.node,
        f" ({measured.words})" if measured.words else "",
        measured.cell.name.replace("/", "-"),
    )
    for arm, by_seed in measured.results.items():
        for seed, closeup in [(s, r.closeup) for s, r in by_seed.items() if r.closeup and r.closeup.cloud.points]:
            method = name_arm(arm, measured.cell.shown[arm])
            title = f"{measured.cell.title}: features of node {node}'s model, {method}, seed {seed}{tag}"
            yield Scatter(f"{stem}-features-{arm}", title, closeup.cloud)
    title = f"{measured.cell.title}: node {node}'s model on all nodes' validation data, %{tag}"
    yield Picture(f"{stem}-validation", title, True, make_curves(measured, _read_validation))
    title = f"{measured.cell.title}: node {node}, loss of the local step{tag}"
    yield Picture(
        f"{stem}-local-loss",
        title,
        False,
        tuple(c for term in LOCAL for c in make_curves(measured, partial(_read_loss, term=term))),
    )
    title = f"{measured.cell.title}: node {node}, losses of the mutual step, the first {EARLY:,} rounds{tag}"
    yield Picture(
        f"{stem}-mutual-loss",
        title,
        False,
        tuple(c for k, term in enumerate(MUTUAL) for c in _draw_early(measured, term, k)),
    )


def _read_validation(result: Result) -> tuple[float, ...]:
    return result.closeup.validation if result.closeup else ()


def _read_loss(result: Result, term: str) -> tuple[float, ...]:
    return result.closeup.losses.get(term, ()) if result.closeup else ()


def _draw_early(measured: MeasuredCell, term: str, style: int) -> Iterator[Curve]:
    for c in make_curves(measured, partial(_read_loss, term=term)):
        early = Curve(f"{c.label}, {term.upper()}", c.slot, style, c.values[c.values.index <= EARLY])
        if early.points:
            yield early
