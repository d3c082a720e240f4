"""The commands of `fedmutual data`, and `fedmutual stats`: look at the data of an experiment before training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmutual.cli.arguments import File, Set, TrustCode, read_config
from fedmutual.cli.terminal import make_table, out, print_text
from fedmutual.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedmutual.config import Config

app = typer.Typer(
    no_args_is_help=True, help="Look at the data of an experiment before training; write the public data of a site."
)


@app.command()
def show(file: File, set: Set = None, trust_code: TrustCode = False) -> None:
    """Draw the examples of each client by class."""
    from fedmutual import data

    federation = data.load(read_config(file, set))
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

    config = read_config(file, set)
    try:
        prepared = data.prepare(config)
    except DataError as problem:
        problems = data.list_problems(problem)
        try:
            suggested = describe_suggestion(config)
        except DataError:  # a file that is no table is among the problems
            suggested = []
        for line in (*(problems if len(problems) > 1 else ()), *suggested):
            print_text(line)
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


@app.command()
def give(
    file: Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation.", show_default=False)],
    site: Annotated[Path, typer.Option("--site", metavar="SITE.toml", help="The site's own file.", show_default=False)],
    folder: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The folder for SITE.npz.")] = Path(),
) -> None:
    """Write a real site's part of the public seed set into a file; the site then sends the file to all others.

    The file holds only the rows that `split.public` selects from the site's own data. With `split.public_file`, a file that
    all have, the parts of all sites are written. Trains nothing, sends nothing.
    """
    from fedmutual.sites import site_settings
    from fedmutual.sites.modules import leave_working_folders

    leave_working_folders()
    for line in site_settings.describe_export(site_settings.export_seedset(file, site, folder), folder):
        print_text(line, soft_wrap=True)


def stats(file: File, set: Set = None, trust_code: TrustCode = False) -> None:
    """Print mean, standard deviation and missing values of each input, and the rows of each class, over all clients.

    Clients give only sums of their rows, as for `data.mean = "federated"`. Trains nothing.
    """
    from fedmutual import data

    federation = data.load(_ask_statistics(read_config(file, set)))
    statistics = federation.statistics
    assert statistics is not None
    table = make_table("input", "mean", "std", "missing")
    rows = zip(statistics.inputs, statistics.mean, statistics.std, statistics.missing, strict=True)
    for name, mean, std, missing in rows:
        table.add_row(escape(name), *("-" if n is None else f"{n:.6g}" for n in (mean, std)), str(missing))
    out.print(table)
    if statistics.classes:
        table = make_table("class", "rows")
        for name, count in statistics.classes.items():
            table.add_row(escape(name), str(count))
        out.print(table)
    print_text(
        f'{statistics.rows} training rows of {len(federation.clients)} clients; data.mean = data.std = "federated" '
        "standardises by these"
    )


def _ask_statistics(config: "Config") -> "Config":
    """Return the configuration with data.mean = data.std = "federated" for all clients, whatever the file sets."""
    if config.privacy.nets != "none":
        raise ConfigError(
            f"privacy.nets = {config.privacy.nets!r}: the statistics are exact, and epsilon does not count them; add "
            "--set privacy.nets=none where the rows may be summed"
        )
    clients = {
        client: own.model_copy(update={"data": own.data.model_copy(update={"mean": None, "std": None})})
        for client, own in config.clients.items()
    }
    data = config.data.model_copy(update={"mean": "federated", "std": "federated"})
    return config.model_copy(update={"data": data, "clients": clients})
