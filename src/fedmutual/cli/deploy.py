"""The commands `export` and `score`, which use a trained model outside of training."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedmutual.cli.arguments import TrustCode
from fedmutual.cli.terminal import out, print_text

RunOrModel = Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, or a model file in it.")]
Client = Annotated[str | None, typer.Option(help="The client whose personal model is used; unset, the shared model.")]
Best = Annotated[
    bool, typer.Option("--best", help="Use the model of the best round (records.keep_best); the default is the last round.")
]


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

    exported = write_export(run_or_model, to, client, best)
    print_text(f"{to}: {exported.model}", soft_wrap=True)
    for file in exported.files:
        print_text(f"  {file.name}")
    for sentence in exported.left_out:
        print_text(f"left out: {sentence}", soft_wrap=True)


def score(
    run_or_model: RunOrModel,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A labelled CSV or npz file, or a folder of images by class.")
    ],
    client: Client = None,
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Score a model on a labelled file: the main metric of the task with an interval, and the scores of each class.

    Example: `fedmutual score runs/x new.csv --client 3`
    """
    from fedmutual.cli import answers
    from fedmutual.studies.score import score_file

    result = score_file(run_or_model, file, client, best)
    if as_json:
        typer.echo(json.dumps(answers.describe_score(result)))
        return
    print_text(f"answered by: {result.model}", soft_wrap=True)
    out.print(answers.format_score(result))
