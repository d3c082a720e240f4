"""Predictions and scores as tables for the terminal, and as JSON for scripts."""

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.studies.predict import Prediction
from fedmutual.studies.score import FileScore

_NEXT = 3  # further classes in the table


def format_answers(predictions: Sequence[Prediction]) -> Table:
    """Return a table with one line for each example: the class, its probability in percent, and the next few classes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("example", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability, %", justify="right", no_wrap=True)
    table.add_column("next", overflow="fold")
    for p in predictions:
        others = ", ".join(f"{name} {100 * share:.1f}" for name, share in p.ranked[1 : 1 + _NEXT])
        table.add_row(escape(p.example), escape(p.label), f"{100 * p.probability:.1f}", escape(others))
    return table


def format_json_line(prediction: Prediction) -> str:
    """Return a prediction as one line of JSON, with the probability of every class, in [0, 1]."""
    return json.dumps(
        {
            "example": prediction.example,
            "model": prediction.model,
            "class": prediction.label,
            "probability": prediction.probability,
            "probabilities": dict(prediction.ranked),
        }
    )


def describe_score(score: FileScore) -> dict[str, Any]:
    """Return the scores of a file for JSON: fractions in [0, 1]; recall by class, None if the file lacks the class."""
    recall = score.values["recall"]
    assert isinstance(recall, list)
    return {
        "file": score.file,
        "model": score.model,
        **score.values,
        "accuracy_interval": list(score.interval),
        "recall": dict(zip(score.classes, recall, strict=True)),
    }


def format_score(score: FileScore) -> Table:
    """Return a table of a file's scores in percent: accuracy with its interval, other scores, the recall of each class."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("score", overflow="fold")
    table.add_column("%", justify="right", no_wrap=True)
    table.add_column("95 % interval", no_wrap=True)
    low, high = (f"{100 * end:.1f}" for end in score.interval)
    table.add_row(f"accuracy, {score.values['examples']} examples", _percent(score.values["accuracy"]), f"{low} to {high}")
    for key, name in (("balanced_accuracy", "balanced accuracy"), ("auroc", "AUROC"), ("majority", "always the commonest")):
        table.add_row(name, _percent(score.values[key]), "")
    for name, share in describe_score(score)["recall"].items():
        table.add_row(escape(f"recall of {name}"), _percent(share), "")
    return table


def _percent(fraction: Any) -> str:
    return "n/a" if fraction is None else f"{100 * fraction:.1f}"
