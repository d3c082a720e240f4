"""The commands of `fedmutual data`: look at the data of an experiment, and export a part of the public seed set."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmutual.cli.arguments import File, Set, TrustCode, read_config
from fedmutual.cli.terminal import out, print_text
from fedmutual.errors import DataError

if TYPE_CHECKING:
    from fedmutual.config import Config

app = typer.Typer(
    no_args_is_help=True, help="Look at the data of an experiment before training; write the public data of a site."
)


@app.command()
def show(file: File, set: Set = None, trust_code: TrustCode = False) -> None:
    """Draw the examples of each client by class."""
    from fedmutual import data

    federation = data.load(read_config(file, set or []))
    out.print(data.draw(federation))
    for remark in federation.notes:
        print_text(f"note: {remark}")


@app.command()
def check(file: File, set: Set = None, trust_code: TrustCode = False) -> None:
    """Print the problems of the data, other facts worth knowing, and whether the networks fit the data.

    Problems of all files are listed in one run, and settings are recommended that can be pasted once for all clients.
    """
    from fedmutual import data
    from fedmutual.data.suggest import describe_suggestion
    from fedmutual.federation import build

    config = read_config(file, set or [])
    try:
        prepared = data.prepare(config)
    except DataError as problem:
        problems = data.list_problems(problem)
        _print_problems(config, problems)
        if len(problems) == 1:
            raise
        raise DataError(f"{file}: the data cannot be used ({len(problems)} problems, listed above)") from None
    findings = [*data.find_problems(config, prepared), *describe_suggestion(config)]
    for finding in findings:
        print_text(finding)
    experiment = build.build(config, device="cpu", prepared=prepared)
    for client in experiment.clients:
        experiment.build_networks(client)  # a network is made, and checked, when it is needed
    if not findings:
        print_text("nothing stands out")


def _print_problems(config: "Config", problems: list[str]) -> None:
    """Print all problems of unusable data, and the recommended settings. A single problem is left to the error."""
    from fedmutual.data.suggest import describe_suggestion

    try:
        suggested = describe_suggestion(config)
    except DataError:  # a file that is no table is among the problems
        suggested = []
    for line in (*(problems if len(problems) > 1 else ()), *suggested):
        print_text(line)


@app.command()
def give(
    file: Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation.", show_default=False)],
    site: Annotated[Path, typer.Option("--site", metavar="SITE.toml", help="The site's own file.", show_default=False)],
    folder: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The folder for SITE.npz.")] = Path(),
) -> None:
    """Write a real site's part of the public seed set into a file; the site then sends the file to all others.

    The file holds only the rows that `split.public` selects from the site's own data. Trains nothing, sends nothing.
    """
    from fedmutual.sites import seedset_export
    from fedmutual.sites.modules import leave_working_folders

    leave_working_folders()
    for line in seedset_export.describe_export(seedset_export.export_seedset(file, site, folder), folder):
        print_text(line, soft_wrap=True)
