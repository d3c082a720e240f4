"""The partition as a table for a terminal: clients by classes."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedmutual.data.federation import Federation
from fedmutual.errors import format_count

_BARS = " ▁▂▃▄▅▆▇█"
_SHARES = {"private": "train", "public": "public", "validation": "valid", "holdout": "hold", "test": "test"}
_MAX_CLASS_ROWS = 40  # more classes are too many table rows


def draw(federation: Federation) -> "PartitionDrawing":
    """Return a table for rich to print: each client's training examples of each class, with a small bar."""
    return PartitionDrawing(federation.partition)


class PartitionDrawing:
    """The table in the widest form that fits: classes as columns, classes as rows, or all bars in one column."""

    def __init__(self, partition: dict[str, Any]) -> None:
        self._partition = partition

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        partition, clients = self._partition, len(self._partition["clients"])
        lines = list(self._list_lines())
        forms = [_make_table(lines)]
        if len(partition["classes"]) <= _MAX_CLASS_ROWS:
            forms.append(_make_table([list(line) for line in zip(*lines, strict=True)]))
        unlimited = options.update(max_width=10_000)
        fitting = [t for t in forms if console.measure(t, options=unlimited).maximum <= options.max_width]
        yield fitting[0] if fitting else _make_table(list(self._list_lines(in_bars=True)))
        yield Text(
            f"{partition['source']}, partition {partition['kind']!r}, {format_count(clients, 'client')}, "
            f"seed {partition['seed']}, fingerprint {partition['fingerprint'][:12]}"
        )

    def _list_lines(self, in_bars: bool = False) -> Iterator[list[str]]:
        """Yield a heading, one line for each client, and the test set.

        A line has the name, the share sizes, and one cell for each class, or with `in_bars` one cell for all classes.
        """
        names = self._partition["classes"]
        clients, test = self._partition["clients"], self._partition["test"]
        shares = [s for s in _SHARES if any(s in c["counts"] for c in clients.values())]
        greatest = max(max(c["counts"]["private"]) for c in clients.values())
        classes = [f"{len(names)} classes, a bar each"] if in_bars else names
        yield ["client", *(_SHARES[s] for s in shares), *classes]
        for i, client in clients.items():
            class_counts = client["counts"]["private"]
            cells = [f"{make_bar(n, greatest)}{'' if in_bars else n or ''}" for n in class_counts]
            yield [i, *(str(sum(client["counts"].get(s, ()))) for s in shares), *(["".join(cells)] if in_bars else cells)]
        scale = max(test["counts"])
        cells = ["".join(make_bar(n, scale) for n in test["counts"])] if in_bars else [str(n) for n in test["counts"]]
        yield ["test set", str(test["examples"]), *[""] * (len(shares) - 1), *cells]


def _make_table(lines: list[list[str]]) -> Table:
    """Return a table with the first line as heading; all columns but the first are aligned right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    has_bars = len(lines[0]) > 1 and lines[0][-1].endswith("a bar each")
    for i, name in enumerate(lines[0]):
        is_last = has_bars and i == len(lines[0]) - 1
        table.add_column(Text(name), justify="left" if i == 0 or is_last else "right", no_wrap=not is_last, overflow="fold")
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    return table


def make_bar(n: int, greatest: int) -> str:
    """Return one of eight bar heights: the lowest for the smallest number above 0, a dot for 0."""
    return _BARS[-(-n * 8 // greatest)] if n else "·"
