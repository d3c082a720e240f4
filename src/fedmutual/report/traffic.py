"""What crosses between the participants: bytes, and the tensors that they are of."""

from collections.abc import Mapping
from functools import partial
from math import prod

import pandas as pd

from fedmutual.errors import format_count
from fedmutual.report.cells import Column, PageTable, TableCell, make_table
from fedmutual.results.comparison import Line, RunComparison
from fedmutual.results.estimate import Missing
from fedmutual.results.scale import format_size

Leaves = Mapping[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> its dtype and shape

POOLED_NOTE = "the data of all participants are in one place; moving the data is not counted"
_STEPS = "bytes of a round, divided by its local steps: so methods that exchange less often can be compared"
_SEED = "all clients' public data, given out once before the first round, then referred to by index; in no other column"


def make_method_bytes_table(comparison: RunComparison) -> PageTable:
    """Return a table with a line for each method: declared messages, bytes sent, and a public seed set's bytes apart."""
    runs = [run for m in comparison.methods for run in m.counted if len(run.work)]
    stepped = any((run.settings.local_steps or 1) > 1 for run in runs)
    seeded = any(run.seed_bytes for run in runs)
    sums = {m: _sum_bytes(m) for m in comparison.methods}

    def make_column(name: str, group: str, key: str, note: str = "") -> Column:
        def read(method: Line) -> float | Missing:
            return sums[method].get(key, Missing("the ledger is empty so far"))

        return Column(name, group, note=note, keys=(key,), read=read, form=lambda size: TableCell(format_size(size)))

    columns = [
        Column(
            "Method",
            numeric=False,
            keys=("method",),
            form=lambda m: TableCell(m.method, note=POOLED_NOTE if m.is_pooled else ""),
            numbers=lambda m: (m.method,),
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


def _sum_bytes(method: Line) -> dict[str, float | Missing]:
    """Return the bytes of a method by the key of their column, as means over seeds; empty if nothing was sent so far."""
    runs = [run for run in method.counted if len(run.work)]
    if not runs:
        return {}
    work = pd.concat(pd.DataFrame(run.messages).assign(seed=run.seed) for run in runs)
    steps, n = runs[0].settings.local_steps, len(runs)
    later = work[work["round"] > 0]
    visits = len(later[["seed", "round", "client"]].drop_duplicates()) or 1  # how often a client took part in a round
    up, down = (int(later[way].sum()) / visits for way in ("up", "down"))
    return {
        "up_client_round": up,
        "down_client_round": down,
        "up_client_step": up / steps if steps else Missing("rounds are counted in epochs"),
        **{f"{way}_run": int(work[way].sum()) / n for way in ("up", "down")},
        "seed_set": sum(run.seed_bytes for run in runs) / n,
    }


def _describe_leaving(method: Line) -> str | Missing:
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
    return f"{words}; once, before: its public data" if any(r.seed_bytes for r in method.counted) else words


def make_tensor_table(comparison: RunComparison) -> PageTable | None:
    """Return the table of all tensors that may leave a client; None where nothing leaves."""
    leaves_by_method = {m.method: leaves for m in comparison.methods if not m.is_pooled and (leaves := _list_leaves(m))}
    specs = dict.fromkeys((name, *spec) for leaves in leaves_by_method.values() for name, spec in leaves.items())
    columns = [
        Column("Tensor", numeric=False, keys=("tensor",), read=lambda spec: spec[0]),
        Column("type", numeric=False, keys=("type",), read=lambda spec: spec[1]),
        Column("shape", keys=("shape",), read=lambda spec: " × ".join(map(str, spec[2])) or "one number"),
    ]
    for label, leaves in leaves_by_method.items():
        read = partial(lambda leaves, spec: int(leaves.get(spec[0]) == spec[1:]), leaves)  # 1: the tensor may leave
        columns.append(
            Column(label, numeric=False, keys=(label,), read=read, form=lambda n: TableCell("leaves" if n else "–"))
        )
    caption = "Tensors that may leave a client, as declared before the run"
    return make_table("tensors", caption, columns, specs) if specs else None


def _list_leaves(method: Line) -> Leaves | None:
    """Name -> dtype, shape over all phases; None before a run is finished. A phase is named where there are several."""
    summary = next((r.summary for r in method.runs if r.summary), None)
    if summary is None or summary.leaves is None:
        return None
    several = len(summary.leaves) > 1
    return {f"{p}: {n}" if several else n: spec for p, leaves in summary.leaves.items() for n, spec in leaves.items()}
