"""Predictions as a person reads them, and as a script does."""

import json
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.studies.predict import Prediction

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
