"""What crosses between the participants: bytes, and the tensors that they are of."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod

import pandas as pd

from fedmutual.errors import format_count
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv, make_missing_cell
from fedmutual.report.comparison import Method, RunComparison
from fedmutual.report.text import format_size


def make_method_bytes_table(comparison: RunComparison) -> PageTable:
    """Return a table with a line for each method: declared messages, bytes sent, and a public seed set's bytes apart."""
    counted = {m.label: [r for r in m.counted if r.ledger] for m in comparison.methods}
    seeded = any(r.ledger.seed for runs in counted.values() for r in runs)
    stepped = any((r.settings.training.local_steps or 1) > 1 for runs in counted.values() for r in runs)
    columns = [
        Column("Method", numeric=False),
        Column("A client's reply holds", numeric=False),
        Column("up", "A client in a round"),
        Column("down", "A client in a round"),
        *([Column("up", "In a local step", note=_STEPS)] if stepped else []),
        Column("up", "All clients, whole run"),
        Column("down", "All clients, whole run"),
        *([Column("once", "Public seed set", note=_SEED)] if seeded else []),
    ]
    rows, lines = [], []
    for m in comparison.methods:
        name, left = TableCell(m.label, note=POOLED_NOTE if m.is_pooled else ""), _describe_leaving(m)
        leaves = make_missing_cell("what may leave is written when a run is finished") if left == "n/a" else TableCell(left)
        if not counted[m.label]:
            rows.append((name, TableCell(left), *[make_missing_cell("the ledger is empty so far")] * (len(columns) - 2)))
            continue
        ledgers = [r.ledger for r in counted[m.label]]
        visits, n = sum(k.visits for k in ledgers) or 1, len(ledgers)
        up, down = (sum(k.sum_bytes(way, start=False) for k in ledgers) / visits for way in ("up", "down"))
        run_bytes = [sum(k.sum_bytes(way) for k in ledgers) / n for way in ("up", "down")]
        seed, steps = sum(sum(k.seed.values()) for k in ledgers) / n, counted[m.label][0].settings.training.local_steps
        step = [up / steps if steps else None] if stepped else []
        values = (up, down, *step, *run_bytes, *([seed] if seeded else []))
        rows.append(
            (
                name,
                leaves,
                *(
                    make_missing_cell("rounds are counted in epochs") if v is None else TableCell(format_size(v))
                    for v in values
                ),
            )
        )
        lines.append([m.label, up, down, up / steps if steps else None, *run_bytes, seed])
    header = ["method", "up_client_round", "down_client_round", "up_client_step", "up_run", "down_run", "seed_set"]
    caption = "Bytes of the tensors sent, means over seeds"
    return PageTable("bytes", caption, tuple(columns), tuple(rows), format_csv(header, lines), True)


_STEPS = "bytes of a round, divided by its local steps: so methods that exchange less often can be compared"
_SEED = "all clients' public data, given out once before the first round, then referred to by index; in no other column"
POOLED_NOTE = "the data of all participants are in one place; moving the data is not counted"


def make_client_bytes_table(comparison: RunComparison) -> PageTable:
    """Return a table with a line for each client: its bytes in the whole run under each method."""
    return _make_bytes_table(
        comparison, "bytes-client", "client", "Bytes of each client over the whole run, means over seeds"
    )


def make_round_bytes_table(comparison: RunComparison) -> PageTable:
    """Return a table with a line for each round, or for several equal rounds: bytes of all clients under each method."""
    return _make_bytes_table(comparison, "bytes-round", "round", "Bytes of all clients in a round, means over seeds")


def _make_bytes_table(comparison: RunComparison, id: str, key: str, caption: str) -> PageTable:
    methods = [m for m in comparison.methods if not m.is_pooled and any(r.ledger for r in m.counted)]
    ways = [(m.label, way) for m in methods for way in ("up", "down")]
    by_method = {m.label: _average_bytes(m, key) for m in methods}
    means = pd.concat(by_method, axis=1)[ways].fillna(0.0) if by_method else pd.DataFrame()
    means = means.sort_index() if key == "round" else means
    rows, lines = [], []
    for (_, values), equal in groupby(
        means.itertuples(name=None), key=lambda line: (line[0] if key == "client" else line[0] == 0, line[1:])
    ):
        first, *more = [name for name, *_ in equal]
        last = more[-1] if more else first
        head = "start" if first == 0 else str(first) if last == first else f"{first} to {last}"
        rows.append((TableCell(head), *(TableCell(format_size(v)) for v in values)))
        lines.append([first, *([last] if key == "round" else []), *values])
    columns = (Column(key.capitalize(), numeric=False), *(Column(way, label) for label, way in ways))
    header = [*(["first_round", "last_round"] if key == "round" else [key]), *(f"{label} {way}" for label, way in ways)]
    return PageTable(id, caption, columns, tuple(rows), format_csv(header, lines))


def _average_bytes(method: Method, key: str) -> pd.DataFrame:
    """Return the bytes up and down of each client or round, as means over seeds; a seed without the row counts as 0."""
    ledgers = [r.ledger for r in method.counted]
    sums = [
        pd.DataFrame(
            {way: ledger.sum_by_client(way) if key == "client" else ledger.sum_by_round(way) for way in ("up", "down")}
        )
        for ledger in ledgers
    ]
    return pd.concat(sums).groupby(level=0, sort=False).sum() / len(ledgers)


def _describe_leaving(method: Method) -> str:
    """What a reply may hold under a method."""
    if method.is_pooled:
        return "everything: all data are in one place"
    leaves = _list_leaves(method)
    has_seed_set = any(r.ledger.seed for r in method.counted)
    if leaves is None:
        return "n/a"
    if not leaves:
        return "nothing; once, before: its public data" if has_seed_set else "nothing"
    values = sum(prod(shape) for _, shape in leaves.values())
    words = f"{format_count(len(leaves), 'tensor')}, {values:,} numbers"
    if any(name.endswith("n_k") for name in leaves):
        words += ", with n_k, how many examples it trains on"
    return f"{words}; once, before: its public data" if has_seed_set else words


def make_tensor_table(comparison: RunComparison) -> PageTable | None:
    """Return the table of all tensors that may leave a client; None where nothing leaves."""
    leaves_by_method = {m.label: _list_leaves(m) or {} for m in comparison.methods if not m.is_pooled}
    leaves_by_method = {label: leaves for label, leaves in leaves_by_method.items() if leaves}
    specs = dict.fromkeys((name, *spec) for leaves in leaves_by_method.values() for name, spec in leaves.items())
    if not specs:
        return None
    marks = [
        (name, kind, shape, [leaves_by_method[label].get(name) == (kind, shape) for label in leaves_by_method])
        for name, kind, shape in specs
    ]
    rows = tuple(
        (
            TableCell(name),
            TableCell(kind),
            TableCell(_format_shape(shape)),
            *(TableCell("leaves" if yes else "–") for yes in leaves_client),
        )
        for name, kind, shape, leaves_client in marks
    )
    columns = (
        Column("Tensor", numeric=False),
        Column("type", numeric=False),
        Column("shape"),
        *(Column(m, numeric=False) for m in leaves_by_method),
    )
    lines = [[name, kind, _format_shape(shape), *map(int, leaves_client)] for name, kind, shape, leaves_client in marks]
    caption = "Tensors that may leave a client, as declared before the run"
    return PageTable("tensors", caption, columns, rows, format_csv(["tensor", "type", "shape", *leaves_by_method], lines))


def _list_leaves(method: Method) -> Mapping[str, tuple[str, tuple[int, ...]]] | None:
    """Name -> dtype, shape over all phases; None before a run is finished. A phase is named where there are several."""
    summary = next((r.summary for r in method.runs if r.summary), None)
    if summary is None or summary.leaves is None:
        return None
    several = len(summary.leaves) > 1
    return {f"{p}: {n}" if several else n: spec for p, leaves in summary.leaves.items() for n, spec in leaves.items()}


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one number"
