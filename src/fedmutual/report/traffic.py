"""What crosses between the participants: bytes, and the tensors that they are of."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod

import pandas as pd

from fedmutual.errors import format_count
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv, make_table
from fedmutual.results.comparison import Method, RunComparison
from fedmutual.results.estimate import Missing
from fedmutual.results.text import format_size

Leaves = Mapping[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> its dtype and shape


def make_method_bytes_table(comparison: RunComparison) -> PageTable:
    """Return a table with a line for each method: declared messages, bytes sent, and a public seed set's bytes apart."""
    runs = [run for m in comparison.methods for run in m.counted if run.ledger]
    stepped = any((run.local_steps or 1) > 1 for run in runs)
    seeded = any(run.ledger.seed for run in runs)
    sums = {m.label: _sum_bytes(m) for m in comparison.methods}

    def make_column(name: str, group: str, key: str, note: str = "") -> Column:
        def read(method: Method) -> float | Missing:
            return sums[method.label].get(key, Missing("the ledger is empty so far"))

        return Column(name, group, note=note, keys=(key,), read=read, form=lambda bytes: TableCell(format_size(bytes)))

    columns = [
        Column(
            "Method",
            numeric=False,
            keys=("method",),
            form=lambda m: TableCell(m.label, note=POOLED_NOTE if m.is_pooled else ""),
            numbers=lambda m: (m.label,),
        ),
        Column("A client's reply holds", numeric=False, read=_describe_leaving),
        make_column("up", "A client in a round", "up_client_round"),
        make_column("down", "A client in a round", "down_client_round"),
        make_column("up" if stepped else "", "In a local step", "up_client_step", _STEPS),
        make_column("up", "All clients, whole run", "up_run"),
        make_column("down", "All clients, whole run", "down_run"),
        make_column("once" if seeded else "", "Public seed set", "seed_set", _SEED),
    ]
    return make_table("bytes", "Bytes of the tensors sent, means over seeds", columns, comparison.methods, cards=True)


def _sum_bytes(method: Method) -> dict[str, float | Missing]:
    """Return the bytes of a method by the key of their column, as means over seeds; empty if nothing was sent so far."""
    runs = [run for run in method.counted if run.ledger]
    if not runs:
        return {}
    ledgers, steps = [run.ledger for run in runs], runs[0].local_steps
    visits, n = sum(k.visits for k in ledgers) or 1, len(ledgers)
    up, down = (sum(k.sum_bytes(way, start=False) for k in ledgers) / visits for way in ("up", "down"))
    return {
        "up_client_round": up,
        "down_client_round": down,
        "up_client_step": up / steps if steps else Missing("rounds are counted in epochs"),
        **{f"{way}_run": sum(k.sum_bytes(way) for k in ledgers) / n for way in ("up", "down")},
        "seed_set": sum(sum(k.seed.values()) for k in ledgers) / n,
    }


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


def _describe_leaving(method: Method) -> str | Missing:
    """What a reply may hold under a method."""
    if method.is_pooled:
        return "everything: all data are in one place"
    leaves = _list_leaves(method)
    if leaves is None:
        return Missing("what may leave is written when a run is finished")
    words = "nothing"
    if leaves:
        values = sum(prod(shape) for _, shape in leaves.values())
        words = f"{format_count(len(leaves), 'tensor')}, {values:,} numbers"
        words += ", with n_k, how many examples it trains on" if any(name.endswith("n_k") for name in leaves) else ""
    return f"{words}; once, before: its public data" if any(r.ledger.seed for r in method.counted) else words


def make_tensor_table(comparison: RunComparison) -> PageTable | None:
    """Return the table of all tensors that may leave a client; None where nothing leaves."""
    leaves_by_method = {m.label: leaves for m in comparison.methods if not m.is_pooled and (leaves := _list_leaves(m))}
    specs = dict.fromkeys((name, *spec) for leaves in leaves_by_method.values() for name, spec in leaves.items())
    columns = [
        Column("Tensor", numeric=False, keys=("tensor",), read=lambda spec: spec[0]),
        Column("type", numeric=False, keys=("type",), read=lambda spec: spec[1]),
        Column("shape", keys=("shape",), read=lambda spec: _format_shape(spec[2])),
    ]
    for label, leaves in leaves_by_method.items():
        read = partial(_find_leaving, leaves)
        columns.append(Column(label, numeric=False, keys=(label,), read=read, form=_make_leaving_cell))
    caption = "Tensors that may leave a client, as declared before the run"
    return make_table("tensors", caption, columns, specs) if specs else None


def _find_leaving(leaves: Leaves, spec: tuple[str, str, tuple[int, ...]]) -> int:
    """Return 1 if a tensor may leave, else 0."""
    name, *of_tensor = spec
    return int(leaves.get(name) == tuple(of_tensor))


def _make_leaving_cell(leaving: int) -> TableCell:
    return TableCell("leaves" if leaving else "–")


def _list_leaves(method: Method) -> Leaves | None:
    """Name -> dtype, shape over all phases; None before a run is finished. A phase is named where there are several."""
    summary = next((r.summary for r in method.runs if r.summary), None)
    if summary is None or summary.leaves is None:
        return None
    several = len(summary.leaves) > 1
    return {f"{p}: {n}" if several else n: spec for p, leaves in summary.leaves.items() for n, spec in leaves.items()}


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one number"
