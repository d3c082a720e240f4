"""The scores of a run over its rounds, as a table and as a plot."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmutual.rundir.logs import METRICS, read_lines

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("round", "model", "client", "data", "metric", "value")


def read_history(folder: Path) -> "pd.DataFrame":
    """Return all scores of a run's folder, a row a number.

    Columns: round (from 1), model ("global", "personal" or "meme"), client (None: the common test set), data ("validation",
    "test" or "holdout"), metric, value (accuracies are fractions in [0, 1]). Scores that clients do not share are not in it.
    """
    import pandas as pd  # takes 0.3 s, and only tables need it

    rows = [
        (line["round"], score["model"], score["client"], score["data"], metric, float(value))
        for line in (read_lines(folder / METRICS) if (folder / METRICS).exists() else ())
        for score in line["scores"]
        for metric, value in score.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def plot_history(history: "pd.DataFrame", metric: str, data: str, title: str) -> Any:
    """Draw a metric over the rounds, a line a model and client -> the matplotlib Axes.

    Raises:
        ValueError: the history has no such metric on such data.
    """
    import matplotlib.pyplot as plt  # a second to import, and only plots need it

    chosen = history[(history["metric"] == metric) & (history["data"] == data)]
    if chosen.empty:
        known = history[["metric", "data"]].drop_duplicates().itertuples(index=False)
        listed = ", ".join(f"{m} on {d}" for m, d in known) or "none"
        raise ValueError(f"there is no metric {metric!r} on the data {data!r}; there are: {listed}")
    _, axes = plt.subplots()
    for (model, client), line in chosen.groupby(["model", "client"], dropna=False):
        who = model if client is None or client != client else f"{model}, {client}"
        axes.plot(line["round"], line["value"], label=who, linestyle="--" if model == "global" else "-", marker=".")
    axes.set(xlabel="round", ylabel=f"{metric} on {data}", title=title)
    axes.legend()
    return axes
