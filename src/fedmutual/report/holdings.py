"""What the participants hold: examples by class."""

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual.report.comparison import RunComparison
from fedmutual.rundir.recorded_run import RecordedRun

LARGE = 500  # cells


def make_holdings_tables(comparison: RunComparison) -> list[PageTable]:
    """Return tables of training examples, clients by classes: one for each seed that has its own partition.

    Of large ones only the first: each costs about 30 bytes a class and client. None where sites keep it to themselves.
    """
    known = [r for r in comparison.runs if r.partition.clients]
    runs = sorted(known, key=lambda r: r.seed, reverse=True)
    distinct = {str({i: c.counts.training for i, c in r.partition.clients.items()}): r for r in runs}
    shown = sorted(distinct.values(), key=lambda r: r.seed)
    tables = [_make_holdings_table(r, "Training examples" + (f", seed {r.seed}" if len(shown) > 1 else "")) for r in shown]
    return tables if len(comparison.classes) * len(comparison.first.partition.clients) <= LARGE else tables[:1]


def _make_holdings_table(run: RecordedRun, caption: str) -> PageTable:
    classes, clients = run.partition.classes, run.partition.clients
    counts = {i: c.counts.training for i, c in clients.items()}
    most = max(1, *(n for row in counts.values() for n in row))
    totals = {i: sum(row) for i, row in counts.items()}
    if len(clients) <= len(classes):  # the longer side runs down the page
        columns = (Column("Class", numeric=False), *(Column(i, "Client") for i in clients))
        body = [(TableCell(name), *(_format_held(counts[i][k], most) for i in clients)) for k, name in enumerate(classes)]
        rows = [*body, (TableCell("all"), *(TableCell(f"{totals[i]:,}") for i in clients))]
    else:
        columns = (Column("Client", numeric=False), *(Column(name, "Class") for name in classes), Column("all"))
        rows = [(TableCell(i), *(_format_held(n, most) for n in counts[i]), TableCell(f"{totals[i]:,}")) for i in clients]
    parts = ("private", "public", "validation", "holdout", "test")
    lines = [
        [i, part, *examples]
        for i, c in clients.items()
        for part in parts
        if (examples := getattr(c.counts, part)) is not None
    ]
    return PageTable(f"holdings-{run.seed}", caption, columns, tuple(rows), format_csv(["client", "part", *classes], lines))


def _format_held(n: int, most: int) -> TableCell:
    return TableCell(f"{n:,}", shade=n / most) if n else TableCell("·")
