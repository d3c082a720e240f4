"""The runs that folders stand for: folds of a split are one run, and the training of real sites alone is a second run."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedmutual.results.frame import EARLIER_METHODS, RunFacts
from fedmutual.role import ALONE, LOCAL_ONLY
from fedmutual.rundir.file_names import SUMMARY
from fedmutual.rundir.record_files import check_record, flatten_table
from fedmutual.rundir.schema import Evaluation, RecordedPartition, ScoreRow, Summary
from fedmutual.rundir.summary import summarise_scores


def split_baseline(run: RunFacts) -> list[RunFacts]:
    """Return a run, and as a second run the local-only training beside it, if it has scores of that (`sites.baseline`).

    The second run has the same seed, split and folder, sends nothing, and scores its networks as "personal".
    """
    if not any(row.model == ALONE for line in run.evaluations for row in line.rows):
        return [run]
    federated, alone = list[Evaluation](), list[Evaluation]()
    for line in run.evaluations:
        rows = tuple(row.model_copy(update={"model": "personal"}) for row in line.rows if row.model == ALONE)
        federated.append(line.model_copy(update={"rows": tuple(row for row in line.rows if row.model != ALONE)}))
        alone.append(line.model_copy(update={"rows": rows, "train": {}}))
    work = run.work.copy()
    work["down"] = work["up"] = 0
    local_only = replace(
        run,
        settings=run.settings.model_copy(update={"algorithm": LOCAL_ONLY}),
        config={**run.config, "algorithm": {"name": LOCAL_ONLY}},
        environment=run.environment.model_copy(update={"algorithm": EARLIER_METHODS[LOCAL_ONLY]}),
        evaluations=tuple(alone),
        work=work,
        summary=run.summary and _summarise(run, alone, {"algorithm": LOCAL_ONLY, "leaves": {}, "privacy": None}),
    )
    return [replace(run, evaluations=tuple(federated)), local_only]


def _summarise(run: RunFacts, evaluations: Sequence[Evaluation], more: Mapping[str, Any]) -> Summary:
    """Return the summary of a finished run with the scores of other evaluations. more: other values of keys."""
    assert run.summary is not None
    scores = summarise_scores(run.config.get("records", {}).get("best_by"), evaluations, run.metric)
    return check_record(run.folder / SUMMARY, Summary, {**run.summary.model_dump(by_alias=True), **scores, **more})


def join_folds(runs: Sequence[RunFacts], round: int | None = None) -> list[RunFacts]:
    """Return the runs with the folds of one configuration and seed as one run; a fold without the others stays as it is.

    A score of the joined run is the mean over the folds, weighted by the scored examples; its work is that of the first
    fold. Unless all folds are finished it has no scores. Settings that trials chose for each fold may differ.

    round: if all folds have reached this round, the joined run has scores, although some folds may train further.
    """
    groups, copies = dict[tuple[str, int], list[RunFacts]](), Counter[tuple[str, int | None]]()
    for run in runs:
        split = dict(run.config.get("split", {}))
        fold = split.pop("fold", None)
        ignored = {"name"} if round is None else {"name", "rounds"}
        compared = {key: value for key, value in run.config.items() if key not in ignored}
        settings = dict(flatten_table(compared | {"split": split}))
        settings = {key: value for key, value in settings.items() if key not in run.tuned} if "folds" in split else {}
        text = json.dumps(settings or str(run.folder), sort_keys=True, default=str)
        groups.setdefault((text, copies[text, fold]), []).append(run)
        copies[text, fold] += 1  # the same fold in a further folder belongs to a further run
    return [_join(group, round) if len(group) > 1 else group[0] for group in groups.values()]


def _join(runs: Sequence[RunFacts], round: int | None) -> RunFacts:
    runs = sorted(runs, key=lambda run: int(run.config["split"]["fold"]))
    first, number = runs[0], int(runs[0].config["split"]["folds"])
    config = {**first.config, "split": {k: v for k, v in first.config["split"].items() if k != "fold"}}
    joined = replace(
        next((run for run in runs if not run.finished), first),
        config=config,
        partition=_join_partitions([run.partition for run in runs]),
        evaluations=(),
        work=first.work,
        summary=None,
        of_folds=tuple(runs),
    )
    is_ready = all(run.finished or (round is not None and run.reached >= round) for run in runs)
    if len(runs) < number or not is_ready:
        return joined
    own_test = first.partition.test is not None and first.partition.test.rows is None
    by_round = ([e for run in runs for e in run.evaluations if e.round == line.round] for line in first.evaluations)
    evaluations = tuple(_join_evaluations(folds, own_test) for folds in by_round if len(folds) == number)
    return replace(joined, evaluations=evaluations, summary=first.summary and _summarise(first, evaluations, {}))


def _join_partitions(folds: Sequence[RecordedPartition]) -> RecordedPartition:
    """Return the partition of the first fold, with a fingerprint of all folds, and the validation rows of all folds."""
    first, prints = folds[0], "".join(fold.fingerprint for fold in folds)
    clients = {}
    for i, client in first.clients.items():
        counts = [fold.clients[i].counts.get("validation") for fold in folds if i in fold.clients]
        scored = {"validation": tuple(map(sum, zip(*filter(None, counts), strict=True)))} if all(counts) else {}
        clients[i] = client.model_copy(update={"counts": {**client.counts, **scored}})
    return first.model_copy(update={"fingerprint": hashlib.sha256(prints.encode()).hexdigest(), "clients": clients})


def _join_evaluations(folds: Sequence[Evaluation], own_test: bool) -> Evaluation:
    """Return the scores of one round. own_test: whether the data have a test set, whose rows are those of every fold."""
    by_place = [{(row.model, row.client, row.data): row for row in fold.rows} for fold in folds]
    joined_rows = []
    for place, row in by_place[0].items():
        rows = [of_fold[place] for of_fold in by_place if place in of_fold]
        if len(rows) == len(folds):
            values = dict(_average(row, rows, own_test and row.data == "test"))
            joined_rows.append(ScoreRow(model=row.model, client=row.client, data=row.data, **values))
    train = {
        i: {term: value for term in terms if (value := _mean([f.train.get(i, {}).get(term) for f in folds])) is not None}
        for i, terms in folds[0].train.items()
    }
    return folds[0].model_copy(update={"rows": tuple(joined_rows), "train": train})


def _average(first: ScoreRow, rows: Sequence[ScoreRow], same_rows: bool) -> Iterator[tuple[str, Any]]:
    """Yield each score that all folds have: its mean, weighted by the scored examples; of `examples` the sum."""
    weights = [row.values.get("examples") or 0 for row in rows]
    for name in first.values:
        values = [row.values.get(name) for row in rows]
        if name == "examples":
            yield name, weights[0] if same_rows else sum(weights)
        elif isinstance(values[0], list):
            yield name, [_mean(of_class, weights) for of_class in zip(*values, strict=True)] if all(values) else None
        else:
            yield name, _mean(values, weights)


def _mean(values: Sequence[Any], weights: Sequence[float] = ()) -> float | None:
    """Return the mean of numbers; None where one is missing."""
    if not all(isinstance(value, int | float) for value in values):
        return None
    weights = weights if sum(weights) else [1] * len(values)
    return float(sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights))
