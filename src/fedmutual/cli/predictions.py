"""The commands that use a trained model: predict, score and export. Answers are tables, or JSON for scripts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedmutual.cli.arguments import TrustCode
from fedmutual.cli.terminal import make_table, out, print_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedmutual.studies.predict import Prediction
    from fedmutual.studies.score import FileScore

RunOrModel = Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, or a model file in it.")]
Client = Annotated[str | None, typer.Option(help="The client whose personal model is used; unset, the shared model.")]
Best = Annotated[
    bool, typer.Option("--best", help="Use the model of the best round (records.keep_best); the default is the last round.")
]

_NEXT = 3  # further classes in the table
_MOST_COLUMNS = 8  # of numbers; more share one column
_NO_SCORES = ("file", "model", "training_rows", "examples", "groups", "reliability")
_PADDING = (0, 1, 0, 0)


def predict(
    run_or_model: RunOrModel,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Images; or CSV or npz files, for runs on such data.")
    ],
    client: Client = None,
    best: Best = False,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="The client's own model and the shared one together (records.ensemble).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each example, for scripts.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Predict classes, numbers, labels or masks of new examples, scaled as in training, and print which model answered.

    A client without a personal model is served by the shared model. Example: `fedmutual predict runs/x scan.png --client 3`
    """
    from fedmutual.studies.predict import predict as answer

    predictions = answer(run_or_model, files, client, best, ensemble=ensemble)
    if as_json:
        for prediction in predictions:
            typer.echo(_format_json_line(prediction))
        return
    print_text(f"answered by: {predictions[0].model}")
    out.print(_make_answer_table(predictions))


def _make_answer_table(predictions: "Sequence[Prediction]") -> Table:
    """Return a table with one line for each example: a number; or a class, its probability in percent, and the next few.

    Of several labels, the most probable label; of masks, the most frequent class, and its share of the pixels.
    """
    from fedmutual.metric import KINDS

    kind = predictions[0].kind
    if not KINDS[kind].is_named:
        names = predictions[0].names if len(predictions[0].names) <= _MOST_COLUMNS else ()
        table = make_table("example", *map(escape, names or ["number"]), padding=_PADDING)
        for p in predictions:
            cells = [f"{number:.6g}" for number in p.numbers]
            table.add_row(escape(p.example), *(cells if names else [", ".join(cells)]))
        return table
    table = make_table("example", "label" if kind == "labels" else "class", texts=2, padding=_PADDING)
    table.add_column("pixels, %" if kind == "masks" else "probability, %", justify="right", no_wrap=True)
    table.add_column("next", overflow="fold")
    for p in predictions:
        others = ", ".join(f"{name} {100 * share:.1f}" for name, share in p.ranked[1 : 1 + _NEXT])
        table.add_row(escape(p.example), escape(p.label), f"{100 * p.probability:.1f}", escape(others))
    return table


def _format_json_line(prediction: "Prediction") -> str:
    """Return a prediction as one line of JSON; probabilities and shares of pixels are in [0, 1]."""
    ranked = dict(prediction.ranked)
    numbers = {"numbers": prediction.numbers, **({"names": prediction.names} if prediction.names else {})}
    answers: dict[str, dict[str, Any]] = {
        "numbers": numbers,
        "times": numbers,
        "labels": {"labels": prediction.labels, "probabilities": ranked},
        "masks": {"mask": prediction.mask, "pixels": ranked},
    }
    answer = answers.get(prediction.kind) or {
        "class": prediction.label,
        "probability": prediction.probability,
        "probabilities": ranked,
    }
    return json.dumps({"example": prediction.example, "model": prediction.model, **answer})


def score(
    run_or_model: RunOrModel,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A labelled CSV or npz file, or images by class; unset, the run's test rows."),
    ] = None,
    client: Client = None,
    best: Best = False,
    by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Also score the rows of each value of this column, beside the others."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --by: keep these scores of the run's test rows for model card and report.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First fit a temperature to rows that trained nothing; the run keeps it.")
    ] = False,
    sensitivity: Annotated[
        float | None, typer.Option(help="Calibrate, and fit a threshold that finds this share of each class, as 0.9.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Score a model on labelled rows: the main metric of the task with an interval, the scores of each class, calibration.

    Examples: `fedmutual score runs/x new.csv --client 3`, `fedmutual score runs/x --calibrate`
    """
    from fedmutual.metric import ACCURACY
    from fedmutual.report.tables import make_calibration_tables, make_group_table
    from fedmutual.report.terminal import make_sheet
    from fedmutual.studies.calibration import calibrate as fit
    from fedmutual.studies.score import score as score_rows
    from fedmutual.studies.trained_run import choose_model

    if calibrate or sensitivity is not None:
        fit(choose_model(run_or_model, client, best), sensitivity)
    answering = choose_model(run_or_model, client, best)
    result = score_rows(answering, file, by=by, keep=keep)
    if as_json:
        typer.echo(json.dumps(_describe_score(result)))
        return
    print_text(f"answered by: {result.model}", soft_wrap=True)
    out.print(_make_score_table(result))
    if result.reliability is not None and answering.calibration is not None:
        for table in make_calibration_tables([(result.reliability.rows, answering.calibration, result.reliability)]):
            out.print(make_sheet(table))
    if result.groups is not None:
        out.print(make_sheet(make_group_table(by or "", result.metric or ACCURACY, [("", result.groups)], "Rows")))


def _describe_score(score: "FileScore") -> dict[str, Any]:
    """Return the scores of a file for JSON: score -> number, or score -> {class or label: number}; None: undefined.

    A metric that is a fraction is in [0, 1]. The 95 % interval of the main metric is a list of its two ends.
    """
    parts = {name: value for name, value in score.values.items() if isinstance(value, list)}
    named = {
        name: dict(zip(score.classes, value, strict=True)) if score.classes else value[0] for name, value in parts.items()
    }
    values = {**score.values, **named}  # a single output has no name
    interval = {} if score.metric is None else {f"{score.metric.name}_interval": score.interval and list(score.interval)}
    groups = {} if score.groups is None else {"groups": {name: one._asdict() for name, one in score.groups.items()}}
    seen = {} if score.reliability is None else {"reliability": score.reliability.model_dump(mode="json")}
    about = {"file": score.file, "model": score.model, "training_rows": score.training_rows}
    return {**about, **values, **interval, **groups, **seen}


def _make_score_table(score: "FileScore") -> Table:
    """Return a table of a file's scores: the main metric with its interval, other scores, and the scores of each class."""
    from fedmutual.metric import SCORES, Metric, describe_part, describe_score
    from fedmutual.results.scale import MetricScale

    metric = score.metric or Metric("number", "number", is_fraction=False)
    table = make_table("score", "value", padding=_PADDING)
    table.add_column("95 % interval", no_wrap=True)

    def add_row(title: str, value: Any, scale: MetricScale, interval: str = "") -> None:
        table.add_row(escape(title), "n/a" if value is None else f"{scale.format_value(value)}{scale.mark}", interval)

    values = {name: value for name, value in _describe_score(score).items() if name not in _NO_SCORES}
    interval = values.pop(f"{metric.name}_interval", None)
    if metric.name in values:
        scale = MetricScale(metric=metric)
        ends = " to ".join(map(scale.format_value, interval)) + scale.mark if interval else "n/a"
        add_row(f"{metric.title}, {score.values['examples']} examples", values.pop(metric.name), scale, ends)
    for name, value in values.items():
        written, (_, of) = describe_score(name, metric), describe_part(name)
        for part, part_value in value.items() if isinstance(value, dict) else [("", value)]:
            add_row(f"{written.title} {of} {part}" if part else written.title, part_value, MetricScale(metric=written))
    if score.reliability is not None:
        scale = MetricScale(metric=SCORES["calibration_error"])
        error, *bounds = score.reliability.error
        add_row(scale.metric.title, error, scale, " to ".join(map(scale.format_value, bounds)) + scale.mark)
    return table


def export(
    run_or_model: RunOrModel,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="The new folder; nothing is overwritten.")],
    client: Client = None,
    best: Best = False,
    trust_code: TrustCode = False,
) -> None:
    """Write a model for use without fedmutual: weights, programs that take raw inputs, and a model card.

    The programs are for torch.export and ONNX (with the extra fedmutual[onnx]); the scaling is inside.
    Example: `fedmutual export runs/x --client 3 --to model`
    """
    from fedmutual.studies.export import export as write_export
    from fedmutual.studies.trained_run import choose_model

    exported = write_export(choose_model(run_or_model, client, best), to)
    print_text(f"{to}: {exported.model}", soft_wrap=True)
    for file in exported.files:
        print_text(f"  {file.name}")
    for sentence in exported.left_out:
        print_text(f"left out: {sentence}", soft_wrap=True)
