"""The tables of `fedmutual ledger`: the messages that left a site."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.sites import ledger


def make_ledger_table(rows: Iterable[ledger.Row]) -> Table:
    """Return a table with one line for each kind of message, with the rounds in which messages of this kind left."""
    table = _make_table("round", "what", "to", "messages", "tensors", "bytes each", "beside them", "bytes in all")
    for row in rows:
        rounds = f"{row.first}-{row.last}" if row.last > row.first else str(row.first) if row.first else "start"
        kind = row.kind
        size, others = (f"{kind.bytes:,}" if kind.tensors else "-"), ", ".join(kind.value_kinds) or "-"
        name, count = escape(ledger.describe_message(kind)), str(len(kind.tensors) or "-")
        table.add_row(rounds, name, escape(kind.to), f"{row.messages:,}", count, size, others, f"{row.bytes:,}")
    return table


def make_tensor_table(lines: Sequence[ledger.Line]) -> Table:
    """Return a table with one line for each tensor of each message."""
    table = _make_table("round", "phase", "to", "tensor", "type", "shape", "bytes", "sha256")
    for line in lines:
        for tensor in line["tensors"]:
            shape = "x".join(map(str, tensor["shape"])) or "one"
            place = (str(line["round"]), str(line["phase"]), escape(line["to"]))
            table.add_row(*place, escape(tensor["name"]), tensor["dtype"], shape, f"{tensor['bytes']:,}", tensor["sha256"])
    return table


def describe_total(lines: Sequence[ledger.Line]) -> Iterable[str]:
    """Yield a sentence for each receiver: the number of messages, and their bytes."""
    for to, counts in ledger.count_totals(lines).items():
        messages = f"{counts['messages']:,} message{'s' if counts['messages'] > 1 else ''}"
        yield f"to {to}: {messages} of {counts['bytes']:,} bytes, of which tensors {counts['tensors']:,}"


def _make_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        is_number = name.startswith(("messages", "tensors", "bytes"))
        table.add_column(
            name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number or name == "sha256"
        )
    return table
