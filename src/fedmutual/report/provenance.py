"""How the runs were made: their list, the resolved configuration, the machine, where they differ, and what was sent."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import pandas as pd
import tomli_w

from fedmutual.errors import format_count, join_words
from fedmutual.report.cells import Column, PageTable, TableCell, make_table
from fedmutual.results.comparison import Line, RunComparison, format_values
from fedmutual.results.estimate import Missing
from fedmutual.results.frame import RunFacts, format_setting
from fedmutual.results.scale import format_number, format_size
from fedmutual.rundir.record_files import dump_record, flatten_table
from fedmutual.rundir.schema import RecordedNetwork

Leaves = Mapping[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> its dtype and shape

POOLED_NOTE = "the data of all participants are in one place; moving the data is not counted"
_STEPS = "bytes of a round, divided by its local steps: so methods that exchange less often can be compared"
_SEED = "all clients' public data, given out once before the first round, then referred to by index; in no other column"
_MOST_CHANNELS = 4  # the longest list of means or standard deviations that is printed in full


def make_subtitle(comparison: RunComparison) -> str:
    """Return the line below the title of a report: data, division, and numbers of clients, rounds and seeds."""
    run = comparison.first
    rounds = sorted({r.settings.rounds for r in comparison.runs})
    participants = format_count(len(run.partition.clients), "client")
    if comparison.at_sites:
        participants = format_count(len(run.environment.clients), "site")
    classes = f", {len(comparison.classes)} classes" if len(comparison.classes) > 1 else ""
    return " · ".join(
        (
            f"{'real sites' if comparison.at_sites else run.partition.source}{classes}",
            describe_partition(run),
            participants,
            f"{join_words([str(r) for r in rounds], 'or')} rounds",
            format_count(len({r.seed for r in comparison.runs}), "seed"),
        )
    )


def list_facts(comparison: RunComparison) -> list[tuple[str, str]]:
    """Return the facts of the runs: (term, description)."""
    models = [r.environment.models for r in comparison.runs]
    networks = {
        "shared": [m.shared for m in models if m.shared],
        "personal": [n for m in models for n in m.personal.values()],
    }
    sizes = (f"{kind} {_format_networks(recorded)}" for kind, recorded in networks.items() if recorded)
    weights = dict.fromkeys(n.weights for recorded in networks.values() for n in recorded if n.weights)
    return [
        ("Methods", join_words([m.method for m in comparison.methods])),
        ("Networks", "; ".join(sizes) or "not recorded"),
        ("First weights", "; ".join(weights) or "not recorded"),
        ("Inputs", describe_scaling(comparison.first)),
    ]


def describe_partition(run: RunFacts) -> str:
    """Return in a clause how the data were partitioned among the clients."""
    kind, partition_keys = run.partition.kind, run.config.get("partition", {})
    words = {
        "iid": "dealt at random (iid)",
        "shards": f"{partition_keys.get('classes_per_client')} of {len(run.partition.classes)} classes a client (shards)",
        "dirichlet": f"class mix drawn from Dirichlet({partition_keys.get('alpha')})",
        "pfllib": f"PFLlib's protocol, Dirichlet({partition_keys.get('alpha')})",
        "domains": "a client for each domain",
        "file": "partition given by a file",
        "sites": "each with data of its own, which nobody else knows",
    }
    return words.get(kind, kind)


def describe_scaling(run: RunFacts) -> str:
    """Return in a clause how the inputs were scaled; see `RecordedScaling`."""
    recorded = run.environment.scaling
    if recorded is None:
        return "not recorded"
    if any(client.scaling != recorded for client in run.environment.clients.values()):
        return "scaled by each client in its own way, as the environment below lists"
    mean, std = recorded.mean, recorded.std
    scaled = [f"divided by {recorded.divisor:g}"] if recorded.divisor != 1 else []
    if len(mean) > _MOST_CHANNELS:
        scaled.append(f"scaled by {len(mean)} means and standard deviations, which the environment below lists")
    elif mean and std:
        numbers = (", ".join(f"{v:.4g}" for v in values) for values in (mean, std))
        scaled.append("minus mean ({}), over standard deviation ({})".format(*numbers))
    if recorded.columns:
        scaled.append(f"{len(recorded.columns)} columns encoded by data.columns, as the environment below lists")
    augment = recorded.augment if "augment" in recorded.model_fields_set else "not recorded"
    return f"{', '.join(scaled) or 'not scaled'}; augmentation: {augment}"


def list_runs(comparison: RunComparison) -> PageTable:
    """Return the table of all runs: state, time, partition and folder."""
    columns = (
        Column("Method", numeric=False, keys=("method",), read=lambda line: line[0].method),
        Column("Seed", keys=("seed",), read=lambda line: line[1].seed),
        Column("State", numeric=False, keys=("state",), read=lambda line: line[1].state),
        Column(
            "Time",
            keys=("seconds",),
            read=lambda line: line[1].summary and line[1].summary.seconds,
            form=lambda n: TableCell("n/a" if n is None else f"{format_number(n, 1 if n < 100 else 0)} s"),
        ),
        Column(
            "Partition's fingerprint",
            numeric=False,
            keys=("fingerprint",),
            read=lambda line: line[1].partition.fingerprint,
            form=lambda fingerprint: TableCell(fingerprint[:12]),
        ),
        Column("Folder", numeric=False, keys=("folder",), read=lambda line: "/".join(line[1].folder.resolve().parts[-3:])),
    )
    caption = f"The runs; partition: {comparison.first.partition.kind}"
    return make_table("runs", caption, columns, [(m, run) for m in comparison.methods for run in m.runs])


def list_run_notes(comparison: RunComparison) -> list[str]:
    """Return the notes of the runs' logs, each with its methods (where not all have it) and its rounds."""
    runs_by_note = dict[str, list[tuple[str, set[int]]]]()  # note -> of each run that has it its method, and the rounds
    for m in comparison.methods:
        for note, rounds in (noted for r in m.runs for noted in r.notes.items()):
            runs_by_note.setdefault(note, []).append((m.method, rounds))
    sentences = []
    for note, runs in runs_by_note.items():
        labels = list(dict.fromkeys(label for label, _ in runs))
        prefix = "" if len(labels) == len(comparison.methods) else f"{join_words(labels)}: "
        sentences.append(f"{prefix}{note}{_describe_rounds([rounds for _, rounds in runs])}")
    return [*sentences, *_describe_tuning(comparison)]


def _describe_tuning(comparison: RunComparison) -> Iterator[str]:
    """One sentence for each method whose settings trials on hold-out rows chose."""
    for m in comparison.methods:
        for values in dict.fromkeys(tuple(run.tuned.items()) for run in m.runs if run.tuned):
            settings = ", ".join(f"{key} = {value}" for key, value in values)
            yield f"{m.method}: {settings}, chosen on hold-out rows before these runs"


def _describe_rounds(of_runs: Sequence[set[int]]) -> str:
    """Return the rounds of a note in words: " (in 4 rounds of 2 runs, from the start to round 7)"; "" without rounds."""
    rounds = sorted(r for rounds in of_runs for r in rounds)
    if not rounds:
        return ""
    first, last = (f"round {r}" if r else "the start" for r in (rounds[0], rounds[-1]))
    if first == last:
        return f" (in {first})" if rounds[0] else f" (at {first})"
    runs = f" of {len(of_runs)} runs" if len(of_runs) > 1 else ""
    return f" (in {len(rounds)} rounds{runs}, from {first} to {last})"


def make_configuration_tables(comparison: RunComparison) -> tuple[str, PageTable | None]:
    """Return the resolved configurations: equal keys as TOML, the others in a table with a column for each method.

    None: nothing differs.
    """
    tables = [{k: v for k, v in flatten_table(r.config) if k != "seed"} for r in comparison.runs]
    common, differing = _split(tables)
    nested: dict[str, Any] = {}  # without config.merge_overrides, whose import takes as long as that of torch
    for key, value in common.items():
        *path, last = key.split(".")
        table = nested
        for name in path:
            table = table.setdefault(name, {})
        table[last] = value
    caption = "Keys in which the runs differ, besides the seed"
    return tomli_w.dumps(nested), _make_method_table(comparison, tables, differing, "config", caption)


def make_environment_tables(comparison: RunComparison) -> tuple[str, PageTable | None]:
    """Return the environments of the runs, machine, versions and sizes of the models: as `make_configuration_tables`."""
    tables = [dict(_flatten_environment(dump_record(r.environment))) for r in comparison.runs]
    common, differing = _split(tables)
    text = "\n".join(f"{k} = {format_setting(v)}" for k, v in common.items())
    caption = "Where the runs' environments differ"
    return text, _make_method_table(comparison, tables, differing, "environment", caption)


def _flatten_environment(environment: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the keys of an environment that the page shows; a client's scaling only where it differs from the run's."""
    run_scaling = environment.get("scaling")
    yield from flatten_table({k: v for k, v in environment.items() if k not in ("format", "command", "clients")})
    for id, client in (environment.get("clients") or {}).items():
        same = client.get("scaling") == run_scaling
        yield from flatten_table({"clients": {id: {k: v for k, v in client.items() if k != "scaling" or not same}}})


def _split(tables: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return (the keys and values that are equal in all tables, the other keys)."""
    keys = dict.fromkeys(k for t in tables for k in t)
    alike = {k: tables[0][k] for k in keys if all(k in t and t[k] == tables[0][k] for t in tables) if k in tables[0]}
    return alike, [k for k in keys if k not in alike]


def _make_method_table(
    comparison: RunComparison, tables: Sequence[Mapping[str, Any]], keys: Sequence[str], id: str, caption: str
) -> PageTable | None:
    """A line a key, a column a method; where seeds differ, all their values."""
    columns = [Column("Key", numeric=False, keys=("key",))]
    for m in comparison.methods:
        own_tables = [t for t, r in zip(tables, comparison.runs, strict=True) if r in m.runs]
        read = partial(format_values, own_tables, missing="–")
        columns.append(Column(m.method, numeric=False, keys=(m.method,), read=read))
    return make_table(f"{id}-differs", caption, columns, keys) if keys else None


def _format_networks(recorded: Sequence[RecordedNetwork]) -> str:
    """Return the networks and their sizes in words: "mlp and cnn1 (1,000 to 2,000 parameters)"."""
    names = list(dict.fromkeys(n.name for n in recorded))
    sizes = sorted({n.parameters for n in recorded if n.parameters is not None})
    span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}" if sizes else "unknown number of"
    return f"{join_words(names)} ({span} parameters)"


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
