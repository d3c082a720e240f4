"""What the participants hold, and what crosses between them: examples by class, bytes, tensors."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod

from fedmutual.report.cells import Cell, Column, Table, csv_text, missing
from fedmutual.report.comparison import POOLED, Comparison, Method
from fedmutual.report.runs import Run
from fedmutual.report.text import count, size

LARGE = 500  # cells


def who_has_what(comparison: Comparison) -> list[Table]:
    """Clients by classes, shaded by the number of training examples: a table for each seed that has its own partition.

    Of large ones only the first: each costs about 30 bytes a class and client.
    """
    runs = sorted(comparison.runs, key=lambda r: r.seed, reverse=True)
    distinct = {str({i: c.counts.training for i, c in r.partition.clients.items()}): r for r in runs}
    found = sorted(distinct.values(), key=lambda r: r.seed)
    tables = [_holdings(r, "Training examples" + (f", seed {r.seed}" if len(found) > 1 else "")) for r in found]
    return tables if len(comparison.classes) * len(comparison.first.partition.clients) <= LARGE else tables[:1]


def _holdings(run: Run, caption: str) -> Table:
    classes, clients = run.partition.classes, run.partition.clients
    counts = {i: c.counts.training for i, c in clients.items()}
    most = max(1, *(n for row in counts.values() for n in row))
    totals = {i: sum(row) for i, row in counts.items()}
    if len(clients) <= len(classes):  # the longer side runs down the page
        columns = (Column("Class", numeric=False), *(Column(i, "Client") for i in clients))
        body = [(Cell(name), *(_held(counts[i][k], most) for i in clients)) for k, name in enumerate(classes)]
        rows = [*body, (Cell("all"), *(Cell(f"{totals[i]:,}") for i in clients))]
    else:
        columns = (Column("Client", numeric=False), *(Column(name, "Class") for name in classes), Column("all"))
        rows = [(Cell(i), *(_held(n, most) for n in counts[i]), Cell(f"{totals[i]:,}")) for i in clients]
    parts = ("private", "public", "validation", "holdout", "test")
    lines = [
        [i, part, *found] for i, c in clients.items() for part in parts if (found := getattr(c.counts, part)) is not None
    ]
    return Table(f"holdings-{run.seed}", caption, columns, tuple(rows), csv_text(["client", "part", *classes], lines))


def _held(n: int, most: int) -> Cell:
    return Cell(f"{n:,}", shade=n / most) if n else Cell("·")


def bytes_by_method(comparison: Comparison) -> Table:
    """A line a method: what left a client, as declared, and the bytes that crossed."""
    rows, lines = [], []
    for m in comparison.methods:
        runs = [r for r in m.counted if r.transfers]
        if not runs:
            rows.append((Cell(m.label), Cell(_leaving(m)), *[missing("the ledger is empty so far")] * 4))
            continue
        visits = sum(len({(t.round, t.client) for t in r.transfers}) for r in runs)
        up, down = (sum(getattr(t, way) for r in runs for t in r.transfers) for way in ("up", "down"))
        name = Cell(m.label, note=POOLED_NOTE if m.algorithm == POOLED else "")
        values = (up / visits, down / visits, up / len(runs), down / len(runs))
        left = _leaving(m)
        leaves = missing("what may leave is written when a run is finished") if left == "n/a" else Cell(left)
        rows.append((name, leaves, *(Cell(size(v)) for v in values)))
        lines.append([m.label, *values])
    columns = (
        Column("Method", numeric=False),
        Column("A client's reply holds", numeric=False),
        Column("up", "A client in a round"),
        Column("down", "A client in a round"),
        Column("up", "All clients, whole run"),
        Column("down", "All clients, whole run"),
    )
    header = ["method", "up_client_round", "down_client_round", "up_run", "down_run"]
    return Table("bytes", "Bytes of the tensors sent, means over seeds", columns, tuple(rows), csv_text(header, lines), True)


POOLED_NOTE = "all participants' data lie in one place here; moving them there is not counted"


def bytes_by_client(comparison: Comparison) -> Table:
    """A line a client: bytes over the whole run under every method."""
    return _bytes(comparison, "bytes-client", "client", "Bytes of each client over the whole run, means over seeds")


def bytes_by_round(comparison: Comparison) -> Table:
    """A line a round, equal neighbours in one: bytes of all clients under every method."""
    return _bytes(comparison, "bytes-round", "round", "Bytes of all clients in a round, means over seeds")


def _bytes(comparison: Comparison, id: str, key: str, caption: str) -> Table:
    methods = [m for m in comparison.methods if m.algorithm != POOLED and any(r.transfers for r in m.counted)]
    sums: dict[str | int, dict[tuple[str, str], float]] = {}
    for m in methods:
        for run in m.counted:
            for t in run.transfers:
                row = sums.setdefault(getattr(t, key), {})
                for way in ("up", "down"):
                    row[m.label, way] = row.get((m.label, way), 0.0) + getattr(t, way) / len(m.counted)
    ways = [(m.label, way) for m in methods for way in ("up", "down")]
    names = sorted(sums) if key == "round" else list(sums)
    lines = [(name, tuple(sums[name].get(way, 0.0) for way in ways)) for name in names]
    rows = []
    for values, equal in groupby(lines, key=lambda line: line[1]):
        of = [name for name, _ in equal]
        heads = [f"{of[0]} to {of[-1]}"] if key == "round" and len(of) > 1 else [str(name) for name in of]
        rows += [(Cell(head), *(Cell(size(v)) for v in values)) for head in heads]
    columns = (Column(key.capitalize(), numeric=False), *(Column(way, label) for label, way in ways))
    header = [key, *(f"{label} {way}" for label, way in ways)]
    return Table(id, caption, columns, tuple(rows), csv_text(header, [[name, *values] for name, values in lines]))


def _leaving(method: Method) -> str:
    """What a reply may hold under a method."""
    if method.algorithm == POOLED:
        return "everything: all data lie in one place"
    leaves = _leaves(method)
    if leaves is None:
        return "n/a"
    if not leaves:
        return "nothing"
    values = sum(prod(shape) for _, shape in leaves.values())
    told = f"{count(len(leaves), 'tensor')}, {values:,} numbers"
    if any(name.endswith("n_k") for name in leaves):
        told += ", with n_k, how many examples it trains on"
    return told


def tensors(comparison: Comparison) -> Table | None:
    """Every tensor that may leave a client, by name; None where nothing leaves."""
    found = {m.label: _leaves(m) or {} for m in comparison.methods if m.algorithm != POOLED}
    found = {label: leaves for label, leaves in found.items() if leaves}
    specs = dict.fromkeys((name, *spec) for leaves in found.values() for name, spec in leaves.items())
    if not specs:
        return None
    marks = [
        (name, kind, shape, [found[label].get(name) == (kind, shape) for label in found]) for name, kind, shape in specs
    ]
    rows = tuple(
        (Cell(name), Cell(kind), Cell(_shape(shape)), *(Cell("leaves" if yes else "–") for yes in there))
        for name, kind, shape, there in marks
    )
    columns = (
        Column("Tensor", numeric=False),
        Column("type", numeric=False),
        Column("shape"),
        *(Column(m, numeric=False) for m in found),
    )
    lines = [[name, kind, _shape(shape), *map(int, there)] for name, kind, shape, there in marks]
    caption = "Tensors that may leave a client, as declared before the run"
    return Table("tensors", caption, columns, rows, csv_text(["tensor", "type", "shape", *found], lines))


def _leaves(method: Method) -> Mapping[str, tuple[str, tuple[int, ...]]] | None:
    """Name -> dtype, shape over all phases; None before a run is finished. A phase is named where there are several."""
    summary = next((r.summary for r in method.runs if r.summary), None)
    if summary is None or summary.leaves is None:
        return None
    several = len(summary.leaves) > 1
    return {f"{p}: {n}" if several else n: spec for p, leaves in summary.leaves.items() for n, spec in leaves.items()}


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one number"
