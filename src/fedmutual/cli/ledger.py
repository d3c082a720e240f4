"""The tables of `fedmutual ledger`: what left a site."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.sites import ledger


def make_ledger_table(rows: Iterable[ledger.Row]) -> Table:
    """A line for each kind of message, over the rounds in which it left."""
    drawn = _table("round", "what", "to", "messages", "tensors", "bytes each", "beside them", "bytes in all")
    for row in rows:
        rounds = f"{row.first}-{row.last}" if row.last > row.first else str(row.first) if row.first else "start"
        kind = row.kind
        each, beside = (f"{kind.bytes:,}" if kind.tensors else "-"), ", ".join(kind.told) or "-"
        what, count = escape(ledger.describe_message(kind)), str(len(kind.tensors) or "-")
        drawn.add_row(rounds, what, escape(kind.to), f"{row.messages:,}", count, each, beside, f"{row.bytes:,}")
    return drawn


def make_tensor_table(lines: Sequence[ledger.Line]) -> Table:
    """A line for each tensor of each message."""
    drawn = _table("round", "phase", "to", "tensor", "type", "shape", "bytes", "sha256")
    for line in lines:
        for tensor in line["tensors"]:
            shape = "x".join(map(str, tensor["shape"])) or "one"
            place = (str(line["round"]), str(line["phase"]), escape(line["to"]))
            drawn.add_row(*place, escape(tensor["name"]), tensor["dtype"], shape, f"{tensor['bytes']:,}", tensor["sha256"])
    return drawn


def describe_total(lines: Sequence[ledger.Line]) -> Iterable[str]:
    """What went to whom, in words."""
    for to, counts in ledger.count_totals(lines).items():
        messages = f"{counts['messages']:,} message{'s' if counts['messages'] > 1 else ''}"
        yield f"to {to}: {messages} of {counts['bytes']:,} bytes, of which tensors {counts['tensors']:,}"


def _table(*columns: str) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        right = name.startswith(("messages", "tensors", "bytes"))
        drawn.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right or name == "sha256")
    return drawn
