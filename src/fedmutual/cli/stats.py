"""The command `fedmutual stats`: the statistics of all clients' training rows, as tables."""

from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.cli.arguments import File, Set, TrustCode, read_config
from fedmutual.cli.terminal import out, print_text
from fedmutual.errors import ConfigError

if TYPE_CHECKING:
    from fedmutual.config import Config
    from fedmutual.data.statistics import Statistics


def stats(file: File, set: Set = None, trust_code: TrustCode = False) -> None:
    """Print mean, standard deviation and missing values of each input, and the rows of each class, over all clients.

    Clients give only sums of their rows, as for `data.mean = "federated"`. Trains nothing.
    """
    from fedmutual import data

    federation = data.load(_ask_statistics(read_config(file, set or [])))
    assert federation.statistics is not None
    _print_statistics(federation.statistics, len(federation.clients))


def _ask_statistics(config: "Config") -> "Config":
    """Return the configuration with data.mean = data.std = "federated" for all clients, whatever the file sets.

    Raises:
        ConfigError: the configuration has differential privacy, which does not cover the statistics.
    """
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


def _print_statistics(statistics: "Statistics", clients: int) -> None:
    """Print one table of the inputs, and one of the classes if there are any."""
    table = _make_table("input", "mean", "std", "missing")
    columns = zip(statistics.inputs, statistics.mean, statistics.std, statistics.missing, strict=True)
    for name, mean, std, missing in columns:
        table.add_row(escape(name), _format(mean), _format(std), str(missing))
    out.print(table)
    if statistics.classes:
        table = _make_table("class", "rows")
        for name, count in statistics.classes.items():
            table.add_row(escape(name), str(count))
        out.print(table)
    print_text(
        f'{statistics.rows} training rows of {clients} clients; data.mean = data.std = "federated" standardises by these'
    )


def _make_table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right")
    return table


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
