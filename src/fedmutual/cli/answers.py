"""Predictions and scores as a person reads them, and as a script does."""

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
    """A line an example: the class, its probability, and the next few."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("example", overflow="fold")
    drawn.add_column("class", overflow="fold")
    drawn.add_column("probability, %", justify="right", no_wrap=True)
    drawn.add_column("next", overflow="fold")
    for p in predictions:
        others = ", ".join(f"{name} {100 * share:.1f}" for name, share in p.ranked[1 : 1 + _NEXT])
        drawn.add_row(escape(p.example), escape(p.label), f"{100 * p.probability:.1f}", escape(others))
    return drawn


def format_json_line(prediction: Prediction) -> str:
    """One prediction as a line of JSON, with the probability of every class."""
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
    """The scores of a file as JSON has them: fractions in [0, 1]; recall by class, null where the file lacks the class."""
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
    """A line a score of a file, in percent: accuracy with its interval, what accuracy hides, the recall of each class."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("score", overflow="fold")
    drawn.add_column("%", justify="right", no_wrap=True)
    drawn.add_column("95 % interval", no_wrap=True)
    low, high = (f"{100 * end:.1f}" for end in score.interval)
    drawn.add_row(f"accuracy, {score.values['examples']} examples", _percent(score.values["accuracy"]), f"{low} to {high}")
    for key, name in (("balanced_accuracy", "balanced accuracy"), ("auroc", "AUROC"), ("majority", "always the commonest")):
        drawn.add_row(name, _percent(score.values[key]), "")
    for name, share in describe_score(score)["recall"].items():
        drawn.add_row(escape(f"recall of {name}"), _percent(share), "")
    return drawn


def _percent(fraction: Any) -> str:
    return "n/a" if fraction is None else f"{100 * fraction:.1f}"
