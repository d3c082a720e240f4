"""The tables of `fedmutual ledger`: the messages that left a site."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedmutual.cli.terminal import make_table
from fedmutual.sites import ledger


def make_ledger_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table with one line for each kind of message, with the rounds in which messages of this kind left."""
    table = make_table("round", "what", "to", "messages", "tensors", "bytes each", texts=3, padding=(0, 1, 0, 0))
    table.add_column("beside them", overflow="fold")
    table.add_column("bytes in all", justify="right", no_wrap=True)
    for row in rows:
        first, last = row["first"], row["last"]
        rounds = f"{first}-{last}" if last > first else str(first) if first else "start"
        size, count = f"{row['size']:,}" if row["tensors"] else "-", str(row["tensors"] or "-")
        beside = escape(", ".join(row["beside"])) or "-"
        texts = map(escape, (rounds, row["what"], row["to"]))
        table.add_row(*texts, f"{row['messages']:,}", count, size, beside, f"{row['bytes']:,}")
    return table


def make_tensor_table(lines: Sequence[ledger.Line]) -> Table:
    """Return a table with one line for each tensor of each message."""
    table = make_table("round", "phase", "to", "tensor", "type", "shape", "bytes", "sha256", texts=6, padding=(0, 1, 0, 0))
    for line in lines:
        for tensor in line["tensors"]:
            shape = "x".join(map(str, tensor["shape"])) or "one"
            texts = map(escape, (str(line["round"]), str(line["phase"]), line["to"], tensor["name"], tensor["dtype"], shape))
            table.add_row(*texts, f"{tensor['bytes']:,}", tensor["sha256"])
    return table


def describe_total(lines: Sequence[ledger.Line]) -> Iterable[str]:
    """Yield a sentence for each receiver: the number of messages, and their bytes."""
    for to, counts in ledger.count_totals(lines).items():
        messages = f"{counts['messages']:,} message{'s' if counts['messages'] > 1 else ''}"
        yield f"to {to}: {messages} of {counts['bytes']:,} bytes, of which tensors {counts['tensors']:,}"
