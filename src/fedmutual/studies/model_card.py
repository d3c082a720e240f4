"""The model card of an exported model: its data, training, scores and limits."""

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any, Literal

from fedmutual.config import Config, read_dumped
from fedmutual.core import get_metric
from fedmutual.errors import format_count
from fedmutual.metric import ACCURACY
from fedmutual.report.rendering import make_environment
from fedmutual.results.comparison import flatten_table, format_setting
from fedmutual.results.estimate import compute_wilson_interval, estimate
from fedmutual.results.frame import RunFacts, read_run
from fedmutual.results.scale import MetricScale
from fedmutual.rundir.file_names import CONFIG
from fedmutual.rundir.schema import ScoreRow
from fedmutual.studies.answering_model import AnsweringModel, find_raw_shape, list_columns

_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!])")
_ROWS = {
    "test": "test set",
    "validation": "validation rows",
    "holdout": "hold-out rows",
}


@dataclass(frozen=True)
class CardScore:
    """A line of the table of scores, as text."""

    rows: str  # which rows, and of which client
    examples: str
    value: str  # of the main metric
    interval: str  # 95 %, or the reason why there is none
    over: Literal["rows", "clients"] | None = None  # what the interval is over; None: there is no interval


def write_model_card(folder: Path, answering: AnsweringModel, files: dict[str, str], left_out: list[str]) -> str:
    """Return the text of a model card in Markdown.

    folder: of the run. files: name of each exported file -> what the file is. left_out: sentences on files that could not
    be made.

    Raises:
        RunError: a file of the run's folder is missing or damaged.
    """
    run, config = read_run(folder), read_dumped(folder / CONFIG)
    owner = answering.owner
    # html=False: the text is Markdown, and `_escape` takes markup out of names
    environment = make_environment("fedmutual.studies", html=False, keep_trailing_newline=True)
    environment.filters["plain"] = _escape
    metric = get_metric(answering.task)
    scale = None if metric is None else MetricScale(metric=metric)
    return environment.get_template("model_card.md.j2").render(
        run=run,
        answering=answering,
        takes=answering.takes,
        shape=find_raw_shape(answering.takes),
        columns=list_columns(answering.takes),
        data=_describe_data(run, answering),
        values=_describe_values(answering),
        settings={**config.algorithm, **(config.get_client_config(owner).algorithm if owner else {})},
        own_settings=_describe_own_settings(config, owner),
        examples=_count_training_examples(run, answering),
        scale=scale,
        scores=list(_list_scores(run, answering, scale)),
        privacy=_describe_privacy(run, answering),
        files=files,
        left_out=left_out,
        trained_with=run.environment.fedmutual or "unknown",
        exported_with=version("fedmutual"),
    )


def _escape(value: Any) -> str:
    """Return a name from the run's folder as one line of text without Markdown or HTML markup."""
    return html.escape(_MARKUP.sub(r"\\\1", " ".join(str(value).split())), quote=False)


def _describe_values(answering: AnsweringModel) -> str:
    """Return a description of the numbers of an input: the stored numbers, before any scaling."""
    if answering.takes.scaling.get("columns"):
        return (
            "one value for each column: a number as stored, a date as days since 1970-01-01, a category as its position in "
            "the column's values in model.json, and NaN where a value is missing"
        )
    divisor = answering.takes.scaling["divisor"]
    if answering.files:
        return f"the pixels of upright images, with white in place of transparent parts, from 0 to {divisor:g}"
    return f"stored values, from 0 to {divisor:g}" if divisor != 1 else "stored values, not scaled"


def _describe_data(run: RunFacts, answering: AnsweringModel) -> str:
    """Return the data that the model learned from, without the folders above a file: they are private."""
    clients, owner = run.partition.clients, answering.owner
    count = len(clients)
    if any(client.source is not None for client in clients.values()):
        source = clients[owner].source if owner in clients else None
        return (
            f"{PurePath(source).name}, the data of one of {count} clients"
            if source
            else f"{count} clients with data of their own"
        )
    return f'{PurePath(run.partition.source).name}, divided by "{run.partition.kind}" over {count} clients'


def _describe_own_settings(config: Config, owner: str | None) -> str:
    """Return the settings of one client alone; for a model of all clients, each key and how many clients set it."""
    by_client = {
        id: dict(flatten_table(client.model_dump(mode="json", exclude_defaults=True, exclude={"data", "share"})))
        for id, client in config.clients.items()
    }
    if owner is not None:
        return ", ".join(f"{key} = {format_setting(value)}" for key, value in by_client.get(owner, {}).items())
    keys = dict.fromkeys(key for settings in by_client.values() for key in settings)
    return ", ".join(f"{key} of {format_count(sum(key in s for s in by_client.values()), 'client')}" for key in keys)


def _count_training_examples(run: RunFacts, answering: AnsweringModel) -> int:
    """Return how many examples trained the model: the client's own, or those of all clients."""
    clients = run.partition.clients
    owner = answering.owner
    chosen = [clients[owner]] if owner in clients else clients.values()
    return sum(sum(holding.training) for holding in chosen)


def _list_scores(run: RunFacts, answering: AnsweringModel, scale: MetricScale | None) -> Iterator[CardScore]:
    """Yield the scores of the model after its round: on the test set, on the client's rows, or as a mean over clients."""
    if scale is None:
        return
    rows = [row for e in run.evaluations if e.round == answering.round for row in e.rows if row.model == answering.role]
    scores = [(row, value) for row in rows if (value := row.find_number(scale.metric.name)) is not None]
    for data in dict.fromkeys(row.data for row, _ in scores):
        by_client = {row.client: (row, value) for row, value in scores if row.data == data}
        title = _ROWS.get(data, data)
        if answering.client in by_client:
            yield _format_score(
                *by_client[answering.client],
                title if answering.client is None else f"{title} of client {answering.client}",
                scale,
            )
        elif None in by_client:
            yield _format_score(*by_client[None], title, scale)
        elif answering.client is None and len(by_client) > 1:
            mean, most = (
                estimate([value for _, value in by_client.values()], "clients"),
                1.0 if scale.metric.is_fraction else math.inf,
            )
            examples = [n for row, _ in by_client.values() if (n := row.values.get("examples")) is not None]
            yield CardScore(
                f"{title}, mean of {len(by_client)} clients",
                f"{sum(examples)}" if len(examples) == len(by_client) else "not shared",
                scale.format_value(fmean(value for _, value in by_client.values())),
                f"{scale.format_value(max(mean.low, 0.0))} to {scale.format_value(min(mean.high, most))}, over clients",
                "clients",
            )


def _format_score(row: ScoreRow, score: float, rows: str, scale: MetricScale) -> CardScore:
    value, examples = scale.format_value(score), row.values.get("examples")
    if not examples:
        return CardScore(rows, "not shared", value, "unknown: the number of rows is not shared")
    if scale.metric != ACCURACY:
        return CardScore(rows, str(examples), value, "not recorded: `fedmutual score` computes it for a file")
    low, high = map(scale.format_value, compute_wilson_interval(score, examples))
    return CardScore(rows, str(examples), value, f"{low} to {high}", "rows")


def _describe_privacy(run: RunFacts, answering: AnsweringModel) -> list[str]:
    """Return sentences on differential privacy: the guarantee, and whether it covers this model."""
    nets = run.config.get("privacy", {}).get("nets", "none")
    if nets == "none":
        return ["None. The model may reveal examples that it was trained on."]
    if run.summary is None or run.summary.privacy is None:
        return ["Not stated: the run has not finished, so its epsilon is not known."]
    guarantee, client = run.summary.privacy, answering.client
    spent = [guarantee.clients[client]] if client in guarantee.clients else list(guarantee.clients.values())
    epsilons = [s.epsilon for s in spent]
    largest = "infinite" if None in epsilons else f"{max(e for e in epsilons if e is not None):.3g}"
    sentences = [f"Epsilon {largest} at delta {guarantee.delta:g}, of each {guarantee.unit}, for all that left the clients."]
    if answering.role == "personal" and nets != "both":
        sentences.append("The guarantee does not cover this model: its own network was trained without noise.")
    return sentences
