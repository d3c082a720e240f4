"""The partition as a table for a terminal: clients by classes."""

from collections.abc import Collection, Iterator, Mapping
from itertools import compress
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedmutual.data.federation import Federation
from fedmutual.errors import format_count

_BARS = " ▁▂▃▄▅▆▇█"
_SHARES = {"private": "train", "public": "public", "validation": "valid", "holdout": "hold", "test": "test"}


def draw(federation: Federation) -> "PartitionDrawing":
    """Return a table for rich to print: each client's training examples of each class, with a small bar."""
    of_classes = (space.classes for space in federation.spaces.values() if space.targets == "classes")
    return PartitionDrawing(federation.partition, {name for classes in of_classes for name in classes})


class PartitionDrawing:
    """The table in the form that fits: a column for each class, or all bars in one column."""

    def __init__(self, partition: Mapping[str, Any], shown: Collection[str]) -> None:
        """partition: the content of partition.json. shown: the classes with a column, of which each row has one."""
        self._partition = partition
        self._shown = [name in shown for name in partition["classes"]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        partition, table = self._partition, self._make_table()
        is_fitting = console.measure(table, options=options.update(max_width=10_000)).maximum <= options.max_width
        yield table if is_fitting or not any(self._shown) else self._make_table(in_bars=True)
        yield Text(
            f"{partition['source']}, partition {partition['kind']!r}, {format_count(len(partition['clients']), 'client')}, "
            f"seed {partition['seed']}, fingerprint {partition['fingerprint'][:12]}"
        )

    def _make_table(self, in_bars: bool = False) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        heading, *lines = self._list_lines(in_bars)
        for i, name in enumerate(heading):
            is_bars = in_bars and i == len(heading) - 1
            justify: Any = "left" if i == 0 or is_bars else "right"
            table.add_column(Text(name), justify=justify, no_wrap=not is_bars, overflow="fold")
        for line in lines:
            table.add_row(*map(Text, line))
        return table

    def _list_lines(self, in_bars: bool) -> Iterator[list[str]]:
        """Yield a heading, one line for each client, and the test set.

        A line has the name, the share sizes, and one cell for each class, or with `in_bars` one cell for all classes.
        """
        clients, test = self._partition["clients"], self._partition["test"]
        names, test_counts = (list(compress(of, self._shown)) for of in (self._partition["classes"], test["counts"]))
        shares = [s for s in _SHARES if any(s in c["counts"] for c in clients.values())]
        greatest = max((n for c in clients.values() for n in compress(c["counts"]["private"], self._shown)), default=0)
        yield ["client", *(_SHARES[s] for s in shares), *([f"{len(names)} classes, a bar each"] if in_bars else names)]
        for i, client in clients.items():
            counts = client["counts"]
            trained = list(compress(counts["private"], self._shown))
            bars = [make_bar(n, greatest) for n in trained]
            cells = [f"{bar}{n or ''}" for bar, n in zip(bars, trained, strict=True)]
            yield [i, *(str(sum(counts.get(s, ()))) for s in shares), *(["".join(bars)] if in_bars else cells)]
        bars = ["".join(make_bar(n, max(test_counts)) for n in test_counts)]
        blanks = [""] * (len(shares) - 1)
        yield ["test set", str(test["examples"]), *blanks, *(bars if in_bars else map(str, test_counts))]


def make_bar(n: int, greatest: int) -> str:
    """Return one of eight bar heights: the lowest for the smallest number above 0, a dot for 0."""
    return _BARS[-(-n * 8 // greatest)] if n else "·"
