"""Predictions and scores as tables for the terminal, and as JSON for scripts."""

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.metric import Metric
from fedmutual.results.scale import MetricScale
from fedmutual.studies.predict import Prediction
from fedmutual.studies.score import FileScore

_NEXT = 3  # further classes in the table
_NO_SCORES = ("file", "model", "training_rows", "examples")
_NO_FRACTIONS = ("loss", "r2")
_NUMBER = Metric("number", "number", is_fraction=False)
_TITLES = {"auroc": "AUROC", "majority": "always the commonest", "f1": "F1", "label_auroc": "AUROC", "class_dice": "Dice"}


def format_answers(predictions: Sequence[Prediction]) -> Table:
    """Return a table with one line for each example: a number; or a class, its probability in percent, and the next few.

    Of several labels, the most probable label; of masks, the most frequent class, and its share of the pixels.
    """
    kind = predictions[0].kind
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("example", overflow="fold")
    if kind == "numbers":
        table.add_column("number", justify="right", no_wrap=True)
        for p in predictions:
            table.add_row(escape(p.example), ", ".join(f"{number:.6g}" for number in p.numbers))
        return table
    table.add_column("label" if kind == "labels" else "class", overflow="fold")
    table.add_column("pixels, %" if kind == "masks" else "probability, %", justify="right", no_wrap=True)
    table.add_column("next", overflow="fold")
    for p in predictions:
        others = ", ".join(f"{name} {100 * share:.1f}" for name, share in p.ranked[1 : 1 + _NEXT])
        table.add_row(escape(p.example), escape(p.label), f"{100 * p.probability:.1f}", escape(others))
    return table


def format_json_line(prediction: Prediction) -> str:
    """Return a prediction as one line of JSON; probabilities and shares of pixels are in [0, 1]."""
    answer: dict[str, Any]
    match prediction.kind:
        case "numbers":
            answer = {"numbers": prediction.numbers}
        case "labels":
            answer = {"labels": prediction.labels, "probabilities": dict(prediction.ranked)}
        case "masks":
            answer = {"mask": prediction.mask, "pixels": dict(prediction.ranked)}
        case _:
            answer = {
                "class": prediction.label,
                "probability": prediction.probability,
                "probabilities": dict(prediction.ranked),
            }
    return json.dumps({"example": prediction.example, "model": prediction.model, **answer})


def describe_score(score: FileScore) -> dict[str, Any]:
    """Return the scores of a file for JSON: score -> number, or score -> {class or label: number}; None: undefined.

    A metric that is a fraction is in [0, 1]. The 95 % interval of the main metric is a list of its two ends.
    """
    values = {
        name: dict(zip(score.classes, value, strict=True)) if isinstance(value, list) else value
        for name, value in score.values.items()
    }
    interval = {} if score.metric is None else {f"{score.metric.name}_interval": score.interval and list(score.interval)}
    return {"file": score.file, "model": score.model, "training_rows": score.training_rows, **values, **interval}


def format_score(score: FileScore) -> Table:
    """Return a table of a file's scores: the main metric with its interval, other scores, and the scores of each class."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("score", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95 % interval", no_wrap=True)
    metric = score.metric or _NUMBER
    values = {name: value for name, value in describe_score(score).items() if name not in _NO_SCORES}
    interval = values.pop(f"{metric.name}_interval", None)
    if metric.name in values:
        scale = MetricScale(metric=metric)
        ends = " to ".join(map(scale.format_value, interval)) + scale.mark if interval else "n/a"
        title = f"{metric.title}, {score.values['examples']} examples"
        table.add_row(escape(title), _format(values.pop(metric.name), scale), ends)
    for name, value in values.items():
        scale = MetricScale(metric=metric if metric.is_fraction and name not in _NO_FRACTIONS else _NUMBER)
        title = _TITLES.get(name, name.replace("_", " "))
        for part, number in value.items() if isinstance(value, dict) else [("", value)]:
            table.add_row(escape(f"{title} of {part}" if part else title), _format(number, scale), "")
    return table


def _format(value: Any, scale: MetricScale) -> str:
    """Return a score as text with its unit; "n/a" for None."""
    return "n/a" if value is None else f"{scale.format_value(value)}{scale.mark}"
