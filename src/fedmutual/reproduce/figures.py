"""The figures: curves over rounds, drawn as the report draws its own; and as files that stand alone."""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from importlib.resources import files
from statistics import fmean
from xml.sax.saxutils import escape

from fedmutual.report.comparison import NAMES
from fedmutual.report.curves import Curve, Picture, Point
from fedmutual.report.plots import draw_curves
from fedmutual.report.svg import SLOTS, Styles
from fedmutual.report.text import percent
from fedmutual.reproduce import measures
from fedmutual.reproduce.cells import Experiment
from fedmutual.reproduce.kept import Result
from fedmutual.reproduce.looks import Look
from fedmutual.reproduce.tables import name

_WORDS = {
    "global_test": "global model on the test set, %",
    "own": "clients' model on own validation data, %",
    "local": "model as the client trained it, validation data, %",
}


def pictures(experiment: Experiment, looks: Sequence[Look]) -> list[Picture]:
    """A picture a cell and measure that was run, or one a client where the experiment looks at clients."""
    found = []
    for look in looks:
        if not look.run or not fnmatch(look.cell.name, experiment.index.draw):
            continue
        tag = f" ({look.words})" if look.words else ""
        stem = look.cell.name.replace("/", "-")
        if experiment.index.view == "clients":
            for i, network in look.networks.items():
                title = f"{look.cell.title}: client {i}, {network}, own data, %{tag}"
                found.append(Picture(f"{stem}-{i}", title, True, _curves(look, partial(_of_client, client=i))))
            continue
        for measure in experiment.index.figures:
            key = measures.find(measure)[0].curve
            title = f"{look.cell.title}: {_WORDS[key]}{tag}"
            found.append(Picture(f"{stem}-{key}".replace("_", "-"), title, True, _curves(look, partial(curve, key=key))))
    return [p for p in found if p.curves]


def curve(result: Result, key: str) -> tuple[float, ...]:
    """A curve of a run by its name; "local" is that of the model that a client trained itself."""
    return result.curves.get(measures.trained(result) if key == "local" else key, ())


def _of_client(result: Result, client: str) -> tuple[float, ...]:
    return result.clients[client].curve if client in result.clients else ()


def _curves(look: Look, values: Callable[[Result], Sequence[float]]) -> tuple[Curve, ...]:
    taken = _slots(list(look.cell.shown))
    curves = []
    for arm, found in look.results.items():
        runs = [(s, dict(zip(r.evaluated, v, strict=True))) for s, r in sorted(found.items()) if (v := values(r))]
        common = sorted(set.intersection(*(set(v) for _, v in runs))) if runs else []
        points = [Point(n, fmean(of := [v[n] for _, v in runs]), min(of), max(of)) for n in common]
        if points:
            label = name(arm, look.cell.shown[arm])
            curves.append(Curve(label, taken[arm], 0, tuple(points), len(runs), tuple(runs)))
    return tuple(curves)


def _slots(arms: Sequence[str]) -> dict[str, int]:
    """A colour and a mark for each arm: the known methods have their own, as in every report."""
    taken = {arm: list(NAMES).index(arm) + 1 for arm in arms if arm in NAMES}
    free = [s for s in range(1, SLOTS + 1) if s not in taken.values()]
    rest = [arm for arm in arms if arm not in taken]
    return taken | {arm: free[k % len(free)] for k, arm in enumerate(rest)}


def standalone(picture: Picture) -> str:
    """A picture as an SVG file of its own: the page's light colours, and a name for every line."""
    styles: Styles = {}
    drawn = draw_curves(picture, picture.id, styles)
    css = (files("fedmutual.report") / "templates" / "style.css").read_text(encoding="utf-8")
    root = css[: css.index("}")]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", root))

    def light(style: str) -> str:
        return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], style)

    rules = "".join(f".{name}{{{light(style)}}}" for style, name in styles.items())
    rules += f"svg{{background:{colours['paper']}}}text{{font-family:sans-serif}}rect{{fill:none}}"
    head, rest = drawn.split(">", 1)
    about = f"<title>{escape(picture.title)}</title><desc>{escape(summary(picture))}</desc>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{about}<style>{rules}</style>{rest}\n'


def summary(picture: Picture) -> str:
    """A picture in words: where each line ends."""
    ends = (f"{c.label} {percent(c.points[-1].mean)} after round {c.points[-1].round}" for c in picture.curves)
    return f"{picture.title}. {'; '.join(ends)}"
