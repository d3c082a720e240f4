"""Draw the figures of an experiment as SVG, for the page and as separate files."""

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from importlib.resources import files
from xml.sax.saxutils import escape

import pandas as pd

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config.methods import find_method
from fedmutual.report.cells import PageTable
from fedmutual.report.curves import SLOTS, Curve, Picture, make_data_table
from fedmutual.report.plots import Styles, draw_curves
from fedmutual.results.scale import MetricScale, format_number, format_percent_number
from fedmutual_papers import measures
from fedmutual_papers.drawing import Forest, Scatter, draw_forest, draw_scatter, make_scatter_table
from fedmutual_papers.entries import name_arm
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.result import Result

Plot = Picture | Scatter
Drawing = Plot | Forest  # what a file of its own may hold

_WORDS = {
    "global_test": "global model on the test set, %",
    "own": "clients' model on own validation data, %",
    "local": "model as the client trained it, validation data, %",
}


def make_pictures(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> list[Plot]:
    """Return the pictures of the cells with results.

    There is one picture for each cell and measure of the index, or for each client if the view of the index is "clients".
    Then there are the pictures of the node that a cell names.
    """
    drawn: list[Plot] = []
    for measured in measured_cells:
        if not measured.run or not fnmatch(measured.cell.name, experiment.index.draw):
            continue
        if measured.cell.about.node is not None:
            drawn += make_node_pictures(measured)
        tag = f" ({measured.words})" if measured.words else ""
        stem = measured.cell.name.replace("/", "-")
        if experiment.index.view == "clients":
            for i, network in measured.networks.items():
                title = f"{measured.cell.title}: client {i}, {network}, own data, %{tag}"
                drawn.append(
                    Picture(f"{stem}-{i}", title, True, make_curves(measured, partial(_make_client_reader, client=i)))
                )
            continue
        for measure in experiment.index.figures:
            key = measures.find(measure)[0].curve
            title = f"{measured.cell.title}: {_WORDS[key]}{tag}"
            drawn.append(
                Picture(f"{stem}-{key}".replace("_", "-"), title, True, make_curves(measured, partial(get_curve, key=key)))
            )
    return [p for p in drawn if isinstance(p, Scatter) or p.curves]


def get_curve(result: Result, key: str) -> tuple[float, ...]:
    """Return the values of a curve of a run; "local" is the curve of the model that the client trained itself."""
    return result.curves.get(measures.name_trained_curve(result) if key == "local" else key, ())


def _make_client_reader(result: Result, client: str) -> tuple[float, ...]:
    return result.clients[client].curve if client in result.clients else ()


def draw(picture: Plot, prefix: str, styles: Styles) -> str:
    """Return the picture as SVG for use inside a page."""
    if isinstance(picture, Scatter):
        return draw_scatter(picture, prefix, styles)
    return draw_curves(picture, prefix, styles)


def make_number_table(picture: Plot, decimals: int) -> PageTable:
    """Return the numbers of a picture as a table. decimals: of accuracies in percent."""
    return make_scatter_table(picture) if isinstance(picture, Scatter) else make_data_table(picture, MetricScale(decimals))


def make_standalone_svg(picture: Drawing) -> str:
    """Return the picture as a separate SVG file, in the page's light colours and with a label on every line."""
    styles: Styles = {}
    drawn = draw_forest(picture, "p", styles) if isinstance(picture, Forest) else draw(picture, "p", styles)
    css = (files("fedmutual.report") / "templates" / "style.css").read_text(encoding="utf-8")
    root = css[: css.index("}")]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", root))

    def light(style: str) -> str:
        return re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], style)

    rules = "".join(f".{name}{{{light(style)}}}" for style, name in styles.items())
    rules += f"svg{{background:{colours['paper']}}}text{{font-family:sans-serif}}rect{{fill:none}}"
    head, rest = drawn.split(">", 1)
    about = f"<title>{escape(picture.title)}</title><desc>{escape(describe_picture(picture))}</desc>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{about}<style>{rules}</style>{rest}\n'


def describe_picture(picture: Drawing) -> str:
    """Return a description of the picture in words; for curves, the last value of each line."""
    if isinstance(picture, Scatter | Forest):
        return picture.words
    format_value = format_percent_number if picture.percent else partial(format_number, decimals=3)
    ends = (f"{c.label} {format_value(c.points[-1].mean)} after round {c.points[-1].round}" for c in picture.curves)
    return f"{picture.title}. {'; '.join(ends)}"


def make_curves(measured: MeasuredCell, values: Callable[[Result], Sequence[float]]) -> tuple[Curve, ...]:
    """Return one curve for each arm that has values. values: a result -> one value for each evaluated round, or nothing."""
    slots = _assign_slots(list(measured.cell.shown))
    drawn = []
    for arm, by_seed in measured.results.items():
        runs = {s: dict(zip(r.evaluated, v, strict=True)) for s, r in sorted(by_seed.items()) if (v := values(r))}
        drawn.append(Curve(name_arm(arm, measured.cell.shown[arm]), slots[arm], 0, pd.DataFrame(runs)))
    return tuple(curve for curve in drawn if curve.points)


def _assign_slots(arms: Sequence[str]) -> dict[str, int]:
    """Return arm -> colour and mark slot: arms named as algorithms have the slots of the report, others take free slots."""
    taken = {arm: colour for arm in arms if arm in ALGORITHMS and (colour := find_method(arm).role.colour)}
    free = [s for s in range(1, SLOTS + 1) if s not in taken.values()]
    rest = [arm for arm in arms if arm not in taken]
    return taken | {arm: free[k % len(free)] for k, arm in enumerate(rest)}


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
