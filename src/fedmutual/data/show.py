"""Who has what, drawn for a terminal: clients by classes."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedmutual.data.draws import many
from fedmutual.data.federation import Federation

_BARS = " ▁▂▃▄▅▆▇█"
_SHARES = {"private": "train", "public": "public", "validation": "valid", "holdout": "hold", "test": "test"}
_MOST_DOWN = 40  # classes that may run down the page


def draw(federation: Federation) -> "Drawing":
    """A table for rich to print: how many training examples of each class a client has, with a small bar."""
    return Drawing(federation.partition)


class Drawing:
    """Chooses its form by the width at hand: classes across the page, down the page, or as bars in one column."""

    def __init__(self, partition: dict[str, Any]) -> None:
        self._partition = partition

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        about, clients = self._partition, len(self._partition["clients"])
        lines = list(self._lines())
        forms = [_table(lines)]
        if len(about["classes"]) <= _MOST_DOWN:
            forms.append(_table([list(line) for line in zip(*lines, strict=True)]))
        free = options.update(max_width=10_000)
        fitting = [t for t in forms if console.measure(t, options=free).maximum <= options.max_width]
        yield fitting[0] if fitting else _table(list(self._lines(in_bars=True)))
        yield Text(
            f"{about['source']}, partition {about['kind']!r}, {many(clients, 'client')}, "
            f"seed {about['seed']}, fingerprint {about['fingerprint'][:12]}"
        )

    def _lines(self, in_bars: bool = False) -> Iterator[list[str]]:
        """A heading, a line a client, and the test set: name, sizes of the shares, then a cell a class, or all in one."""
        names = self._partition["classes"]
        clients, test = self._partition["clients"], self._partition["test"]
        shares = [s for s in _SHARES if any(s in c["counts"] for c in clients.values())]
        most = max(max(c["counts"]["private"]) for c in clients.values())
        classes = [f"{len(names)} classes, a bar each"] if in_bars else names
        yield ["client", *(_SHARES[s] for s in shares), *classes]
        for i, client in clients.items():
            held = client["counts"]["private"]
            cells = [f"{_bar(n, most)}{'' if in_bars else n or ''}" for n in held]
            yield [i, *(str(sum(client["counts"].get(s, ()))) for s in shares), *(["".join(cells)] if in_bars else cells)]
        scale = max(test["counts"])
        cells = ["".join(_bar(n, scale) for n in test["counts"])] if in_bars else [str(n) for n in test["counts"]]
        yield ["test set", str(test["examples"]), *[""] * (len(shares) - 1), *cells]


def _table(lines: list[list[str]]) -> Table:
    """The first line as the heading; all but the first column to the right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    bars = len(lines[0]) > 1 and lines[0][-1].endswith("a bar each")
    for i, name in enumerate(lines[0]):
        last = bars and i == len(lines[0]) - 1
        table.add_column(Text(name), justify="left" if i == 0 or last else "right", no_wrap=not last, overflow="fold")
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    return table


def _bar(n: int, most: int) -> str:
    """One of eight heights, the lowest for the smallest number above 0; a dot for 0."""
    return _BARS[-(-n * 8 // most)] if n else "·"
