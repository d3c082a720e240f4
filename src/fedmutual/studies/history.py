"""Plot the scores of a run over its rounds."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def plot_history(history: "pd.DataFrame", metric: str, data: str, title: str) -> Any:
    """Draw a metric over the rounds, one line for each model and client -> the matplotlib Axes.

    Raises:
        ValueError: the history has no such metric on these data; the message lists the metrics.
    """
    import matplotlib.pyplot as plt  # a second to import, and only plots need it

    chosen = history[(history["metric"] == metric) & (history["data"] == data)]
    if chosen.empty:
        known = history[["metric", "data"]].drop_duplicates().itertuples(index=False)
        listed = ", ".join(f"{m} on {d}" for m, d in known) or "none"
        raise ValueError(f"there is no metric {metric!r} on the data {data!r}; there are: {listed}")
    _, axes = plt.subplots()
    for (model, client), line in chosen.groupby(["model", "client"], dropna=False):
        label = model if client is None or client != client else f"{model}, {client}"
        axes.plot(line["round"], line["value"], label=label, linestyle="--" if model == "global" else "-", marker=".")
    axes.set(xlabel="round", ylabel=f"{metric} on {data}", title=title)
    axes.legend()
    return axes
