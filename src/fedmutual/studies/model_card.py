"""The model card of an exported model: its data, training, scores and limits."""

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import PurePath
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from fedmutual.core import get_metric
from fedmutual.errors import format_count
from fedmutual.in_memory import PREFIX
from fedmutual.metric import ACCURACY
from fedmutual.report.rendering import make_environment
from fedmutual.report.tables import make_calibration_tables, make_group_table
from fedmutual.results.estimate import compute_wilson_interval, estimate
from fedmutual.results.frame import RunFacts, format_setting, read_run
from fedmutual.results.scale import MetricScale
from fedmutual.rundir.record_files import flatten_table, read_model_environment, read_subgroups
from fedmutual.rundir.schema import ScoreRow
from fedmutual.studies.answering_model import AnsweringModel

_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!])")
_NETWORK = "model.personal"
_ROWS = {"test": "test set", "validation": "validation rows", "holdout": "hold-out rows"}


def write_model_card(
    answering: AnsweringModel, inputs: Sequence[Mapping[str, Any]], files: dict[str, str], left_out: list[str]
) -> str:
    """Return the text of a model card in Markdown.

    inputs: of the programs, each with its "name", "dtype" and "shape". files: name of each exported file -> what the file
    is. left_out: sentences on files that could not be made.

    Raises:
        RunError: a file of the run's folder is missing or damaged.
    """
    fitted = answering.calibration
    run, config, owner = read_run(answering.folder), answering.config, answering.owner
    clients = run.partition.clients
    described = next(iter(clients)) if len(clients) == 1 else owner  # a site knows its own settings only
    client_config = config.get_client_config(described or "")
    rate = config.optimizer.lr if client_config.optimizer.lr is None else client_config.optimizer.lr
    trainers = [clients[owner]] if owner in clients else clients.values()
    metric = get_metric(answering.task)
    scale = None if metric is None else MetricScale(metric=metric)
    # html=False: the text is Markdown, and `_escape` takes markup out of names
    environment = make_environment("fedmutual.studies", html=False, keep_trailing_newline=True)
    environment.filters["plain"] = _escape
    return environment.get_template("model_card.md.j2").render(
        run=run,
        answering=answering,
        takes=answering.takes,
        data=_describe_data(run, owner),
        inputs=[(one, _describe_values(answering, one["name"])) for one in inputs],
        settings={**config.algorithm, **client_config.algorithm},
        rate=format_setting(rate.model_dump() if isinstance(rate, BaseModel) else rate),
        own_settings=_describe_own_settings(answering, described, [*clients]),
        is_of_one=described is not None,
        examples=sum(sum(client.training) for client in trainers),
        scale=scale,
        scores=[] if scale is None else list(_list_scores(run, answering, scale)),
        calibration=make_calibration_tables([(_ROWS[seen.rows], fitted, seen) for seen in fitted.seen] if fitted else []),
        subgroups=[
            make_group_table(kept.by, kept.metric, [("", kept.groups)])
            for kept in read_subgroups(run.folder)
            if kept.identity == (owner, answering.role, answering.round)
        ],
        row_names=_ROWS,
        privacy=_describe_privacy(run, answering),
        files=files,
        left_out=left_out,
        trained_with=run.environment.fedmutual or "unknown",
        exported_with=version("fedmutual"),
    )


def _escape(value: Any) -> str:
    """Return a name from the run's folder as one line of text without Markdown or HTML markup."""
    return html.escape(_MARKUP.sub(r"\\\1", " ".join(str(value).replace(PREFIX, "").split())), quote=False)


def _describe_values(answering: AnsweringModel, name: str) -> str:
    """Return a description of the numbers of an input: the stored numbers, before any scaling. name: of the input."""
    if answering.encoding is not None:
        return (
            "one value for each column: a number as stored, a date as days since 1970-01-01, a category as its position in "
            "the column's values in model.json, and NaN where a value is missing"
        )
    scaling = answering.takes.scaling
    divisor = (scaling.inputs or {}).get(name, scaling).divisor
    if answering.files and divisor == 1:
        return (
            "the values of DICOM or NIfTI files in their own unit: with rescale slope and intercept applied, white as the "
            "greatest value, and volumes with the axes to the head, to the front and to the right"
        )
    if answering.files:
        return f"the pixels of upright images, with white in place of transparent parts, from 0 to {divisor:g}"
    return f"stored values, from 0 to {divisor:g}" if divisor != 1 else "stored values, not scaled"


def _describe_data(run: RunFacts, owner: str | None) -> str:
    """Return the data that the model learned from, without the folders above a file: they are private."""
    clients = run.partition.clients
    if all(client.source is None for client in clients.values()):
        return f'{PurePath(run.partition.source).name}, divided by "{run.partition.kind}" over {len(clients)} clients'
    source = clients[owner].source if owner in clients else None
    if source is None:
        return f"{len(clients)} clients with data of their own"
    return f"{PurePath(source).name}, the data of one of {len(clients)} clients"


def _describe_own_settings(answering: AnsweringModel, client: str | None, clients: Sequence[str]) -> str:
    """Return the settings of one client alone; for several, each setting in which they differ, without their names."""
    config, exclude = answering.config, {"data", "share"}
    by_client = {i: dict(_flatten(c, exclude_defaults=True, exclude=exclude)) for i, c in config.clients.items()}
    if client is not None:
        return ", ".join(f"{key} = {format_setting(value)}" for key, value in by_client.get(client, {}).items())
    networks = read_model_environment(answering.folder).models.personal
    names = {i: "of its own" if n.name.startswith(PREFIX) else n.name for i, n in networks.items()}
    by_client = {i: by_client.get(i, {}) | ({_NETWORK: names[i]} if i in names else {}) for i in clients}
    common, sentences = dict(_flatten(config)), []
    for key in dict.fromkeys(key for settings in by_client.values() for key in settings):
        values = Counter(format_setting(settings.get(key, common.get(key))) for settings in by_client.values())
        if len(values) > 1:
            listed = ", ".join(f"{value} ({format_count(count, 'client')})" for value, count in values.items())
            sentences.append(f"{key} = {listed}")
    return "; ".join(sentences)


def _flatten(settings: BaseModel, **options: Any) -> Iterator[tuple[str, Any]]:
    return flatten_table(settings.model_dump(mode="json", **options))


def _list_scores(run: RunFacts, answering: AnsweringModel, scale: MetricScale) -> Iterator[dict[str, str]]:
    """Yield the scores of the model after its round: on the test set, on the client's rows, or as a mean over clients.

    Each is a row of a table as text: `rows`, `examples`, `value`, `interval`, and what the interval is `over`.
    """
    client = answering.client
    by_data: dict[str, dict[str | None, tuple[ScoreRow, float]]] = {}
    for row in (row for e in run.evaluations if e.round == answering.round for row in e.rows if row.model == answering.role):
        if (value := row.find_number(scale.metric.name)) is not None:
            by_data.setdefault(row.data, {})[row.client] = row, value
    for data, by_client in by_data.items():
        rows = _ROWS.get(data, data)
        if client in by_client:
            yield _format_score(*by_client[client], rows if client is None else f"{rows} of client {client}", scale)
        elif None in by_client:
            yield _format_score(*by_client[None], rows, scale)
        elif client is None and len(by_client) > 1:
            values = [value for _, value in by_client.values()]
            mean, (least, most) = estimate(values, "clients"), scale.metric.ends
            low, high = scale.format_value(max(mean.low, least)), scale.format_value(min(mean.high, most))
            examples = [n for row, _ in by_client.values() if (n := row.values.get("examples")) is not None]
            yield {
                "rows": f"{rows}, mean of {len(by_client)} clients",
                "examples": f"{sum(examples)}" if len(examples) == len(by_client) else "not shared",
                "value": scale.format_value(fmean(values)),
                "interval": f"{low} to {high}, over clients",
                "over": "clients",
            }


def _format_score(row: ScoreRow, value: float, rows: str, scale: MetricScale) -> dict[str, str]:
    examples, over = row.values.get("examples"), ""
    if not examples:
        interval = "unknown: the number of rows is not shared"
    elif scale.metric != ACCURACY:
        interval = "not recorded: `fedmutual score` computes it for a file"
    else:
        interval = " to ".join(map(scale.format_value, compute_wilson_interval(value, examples)))
        over = "rows"
    shown = {"rows": rows, "examples": str(examples or "not shared"), "value": scale.format_value(value)}
    return {**shown, "interval": interval, "over": over}


def _describe_privacy(run: RunFacts, answering: AnsweringModel) -> list[str]:
    """Return sentences on differential privacy: the guarantee, and whether it covers this model."""
    nets = run.config.get("privacy", {}).get("nets", "none")
    if nets == "none":
        return ["None. The model may reveal examples that it was trained on."]
    if run.summary is None or run.summary.privacy is None:
        return ["Not stated: the run has not finished, so its epsilon is not known."]
    guarantee = run.summary.privacy  # also a personal model learned from what other clients sent
    spent = "infinite" if guarantee.epsilon is None else f"{guarantee.epsilon:.3g}"
    sentences = [f"Epsilon {spent} at delta {guarantee.delta:g}, of each {guarantee.unit}, for all that left the clients."]
    if not answering.is_guaranteed:
        sentences.append("The guarantee does not cover this model: its own network was trained without noise.")
    return sentences
