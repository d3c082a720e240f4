"""How the runs were made: their list, the resolved configuration, the machine; what they share, and where they differ."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import tomli_w

from fedmutual.config.reading import merge_overrides
from fedmutual.errors import format_count, join_words
from fedmutual.report.cells import Column, PageTable, TableCell, make_table
from fedmutual.results.comparison import RunComparison, format_values
from fedmutual.results.frame import RunFacts, format_setting
from fedmutual.results.scale import format_number
from fedmutual.rundir.record_files import dump_record, flatten_table
from fedmutual.rundir.schema import RecordedNetwork

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
    caption = "Keys in which the runs differ, besides the seed"
    return tomli_w.dumps(merge_overrides({}, common)), _make_method_table(comparison, tables, differing, "config", caption)


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
