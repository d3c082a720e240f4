"""Write run folders with artificial numbers, in the format that fedmutual writes."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console, RenderableType

from fedmutual.config import Config
from fedmutual.metric import ACCURACY, Metric
from fedmutual.report.cells import PageTable, TableCell
from fedmutual.report.verdicts import judge
from fedmutual.results.comparison import RunComparison, make_comparisons
from fedmutual.results.frame import RunFacts, read_runs
from fedmutual.rundir.schema import Evaluation, LedgerLine
from fedmutual.rundir.summary import measure_transfer, summarise

Own = Callable[[int, int, str], float]  # (seed, round, client) -> accuracy on the client's own validation data
Shared = Callable[[int, int], float | None]  # (seed, round) -> accuracy of the shared model on the test set
Reach = Callable[[int, int, str], tuple[float, float, float]]  # (seed, round, node) -> ACC, BWT, FWT
Sent = Callable[[int, str], Sequence[tuple[str, int, int]]]  # (round, client) -> (phase, bytes down, bytes up); 0: the start

CLASSES = ("0", "1", "2")
SHARDS: dict[str, Any] = {"kind": "shards", "classes_per_client": 2}
WEIGHTS = {"layers.0.weight": ["float32", [4, 3]], "layers.0.bias": ["float32", [4]]}
SERVES = {
    **dict.fromkeys(("fml", "fedh2l", "fedmd", "aggregate", "independent"), "personal"),
    **dict.fromkeys(("fedavg", "fedprox", "centralised"), "global"),
}
LEAVES: dict[str, Any] = {
    "fml": {"fml": WEIGHTS},
    "fedavg": {"fedavg": {**WEIGHTS, "n_k": ["int64", []]}},
    "fedprox": {"fedprox": {**WEIGHTS, "n_k": ["int64", []]}},
    "independent": {"independent": {}},
    "centralised": {"independent": {}},
    "aggregate": {"aggregate": {}},
    "fedh2l": {"local": {"rows": ["int32", [32]], "p": ["float32", [32, 3]], "accuracy": ["float32", []]}, "mutual": {}},
    "fedmd": {"announce": {"logits": ["float32", [32, 3]]}, "digest": {}, "revisit": {}},
}
LOSSES = {
    "fml": ("personal", "meme"),
    "fedavg": ("meme",),
    "fedprox": ("meme", "proximal"),
    "fedh2l": ("local", "kl", "ce"),
    "fedmd": ("digest", "revisit"),
}


@dataclass(frozen=True)
class Made:
    """A run to write."""

    algorithm: str
    own_score: Own
    shared: Shared = lambda seed, round: None
    shared_own: Own | None = None  # of the shared model beside personal ones; of the forks, where there is none
    seed: int = 0
    rounds: int = 2
    reached: int | None = None  # evaluated rounds, where the run is unfinished
    every: int = 1
    clients: tuple[str, ...] = ("0", "1", "2")
    classes: tuple[str, ...] = CLASSES
    best_by: tuple[str, str] = ("holdout", "holdout")  # of the shared model, of the clients' own
    best_round: int = 1
    validation_of: str = "train"
    tells: bool = True
    auroc: Callable[[str], float | None] = lambda client: 0.9
    config: Mapping[str, Any] = field(default_factory=dict)  # tables that replace the usual ones
    counts: Callable[[int, int], list[int]] | None = None  # (client's number, seed) -> private examples per class
    name: str = "made"
    test_examples: int = 300
    reach: Reach | None = None  # where clients are domains
    pooled: bool = True  # the validation data of all nodes are scored too
    projected: float | None = None
    sent: Sent | None = None  # unset: the same bytes in every round
    steps: int | None = None  # gradient steps of a client in a round

    @property
    def finished(self) -> bool:
        return self.reached is None


ALONE = {"0": 0.8, "1": 0.7, "2": 0.6}


def plus(*gains: float) -> Own:
    """Return local-only training's accuracies plus these, client by client, in every seed."""
    return lambda seed, round, client: ALONE[client] + gains[int(client)]


alone = Made("independent", plus(0, 0, 0))


def make_two_models(personal: Sequence[float], common: Sequence[float], shared: Shared = lambda s, r: 0.7) -> Made:
    """Return FML with gains over local-only training, client by client: of its personal models, and of its shared one."""
    return Made("fml", plus(*personal), shared, shared_own=plus(*common))


def write(folder: Path, method: Made) -> Path:
    """Write the folder of a run."""
    folder.mkdir(parents=True)
    config = {
        "name": method.name,
        "seed": method.seed,
        "rounds": method.rounds,
        "algorithm": {"name": method.algorithm},
        "data": {"name": "digits"},
        "partition": {"kind": "domains"} if method.reach else SHARDS | {"clients": len(method.clients)},
        "split": {"preset": "journal", "holdout": 0.1},
        "model": {"shared": "mlp", "batchnorm": "average", "start": "own"},
        "training": {"local_epochs": 5, "batch_size": 128},
        "optimizer": {"name": "sgd", "lr": 0.01},
        **method.config,
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    partition = _partition(method)
    _json(folder / "environment.json", _environment(method))
    _json(folder / "partition.json", partition)
    rounds = [
        r
        for r in range(1, (method.reached if method.reached is not None else method.rounds) + 1)
        if r % method.every == 0 or r == method.rounds
    ]
    evaluations = [_evaluation(method, r) for r in rounds]
    _lines(folder / "metrics.jsonl", evaluations)
    _lines(folder / "ledger.jsonl", _ledger(method))
    if method.finished:
        _json(folder / "summary.json", _summary(method, partition["fingerprint"], evaluations))
    return folder


def write_all(out: Path, methods: Sequence[Made], seeds: Sequence[int]) -> list[Path]:
    """Write OUT/<method>/<seed> for every method and seed, in the layout of `compare`."""
    return [write(out / m.algorithm / str(s), replace(m, seed=s)) for m in methods for s in seeds]


def summarise_lines(
    config: Config, metrics: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]], metric: Metric = ACCURACY
) -> dict[str, Any]:
    """Return the scores and bytes of summary.json from lines of the logs."""
    return summarise(config, read_evaluations(metrics), map(LedgerLine.model_validate, ledger), metric)


def read_evaluations(metrics: Sequence[Mapping[str, Any]]) -> list[Evaluation]:
    """Return lines of metrics.jsonl as records."""
    return [Evaluation.model_validate_json(json.dumps(line)) for line in metrics]


def compare_folders(folders: Sequence[Path | RunFacts]) -> list[RunComparison]:
    """Return the comparisons that run folders make."""
    return make_comparisons(read_runs(folders))


def make_comparison(folders: Sequence[Path | RunFacts]) -> RunComparison:
    """Return the one comparison that run folders make."""
    (comparison,) = compare_folders(folders)
    return comparison


def read_table(table: PageTable) -> list[dict[str, str]]:
    """Return the rows of the CSV file of a table."""
    return list(csv.DictReader(io.StringIO(table.csv)))


def list_findings(folders: Sequence[Path]) -> list[str]:
    """Return the answer and all findings of the one comparison that the folders make."""
    verdict = judge(make_comparison(folders))
    return [verdict.lead, *verdict.sentences]


def get_cell(table: PageTable, line: int, column: str) -> TableCell:
    """Return the cell of a line, from 0, in the column with this title: "Group: name", or the name without a group."""
    return table.rows[line][[c.title for c in table.columns].index(column)]


def get_texts(table: PageTable, line: int) -> dict[str, str]:
    """Return title of a column -> the text of a line, from 0, with half the width of its interval."""
    return {c.title: f"{cell.text} {cell.spread}".rstrip() for c, cell in zip(table.columns, table.rows[line], strict=True)}


def print_table(table: RenderableType, width: int = 120) -> str:
    """Return tables as a terminal of this width shows them."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def _partition(method: Made) -> dict[str, Any]:
    deal = method.counts or (lambda k, seed: [10 * (k + 1) if (c + k + seed) % 3 else 0 for c in range(len(method.classes))])
    counts = {i: deal(k, method.seed) for k, i in enumerate(method.clients)}
    rows = {"rows": [0, 1, 2]}
    return {
        "format": 1,
        "source": "digits",
        "kind": "domains" if method.reach else "shards",
        "seed": method.seed,
        "classes": list(method.classes),
        "fingerprint": hashlib.sha256(repr((method.seed, counts)).encode()).hexdigest(),
        "test": {
            "examples": method.test_examples,
            "counts": [method.test_examples // len(method.classes)] * len(method.classes),
        },
        "clients": {
            i: {
                "private": {"of": "train", **rows},
                "validation": {"of": method.validation_of, **rows},
                "holdout": {"of": "train", **rows},
                "counts": {"private": n, "validation": [k // 2 for k in n], "holdout": [k // 10 for k in n]},
            }
            for i, n in counts.items()
        },
    }


def _environment(method: Made) -> dict[str, Any]:
    personal_networks = {
        i: {"name": ("mlp", "cnn1", "lenet5")[k % 3], "parameters": 1000 + k} for k, i in enumerate(method.clients)
    }
    return {
        "format": 1,
        "fedmutual": "0.1.0",
        "python": "3.12.1",
        "torch": "2.15.0",
        "torchvision": "0.29.0",
        "platform": "Linux",
        "cpus": 2,
        "threads": 1,
        "device": "cpu",
        "command": f"fedmutual run --seed {method.seed}",
        "scaling": {"mean": [0.5], "std": [0.25], "augment": "none"},
        "pooled": method.algorithm == "centralised",
        "models": {
            "input": [1, 8, 8],
            "classes": len(method.classes),
            "shared": {"name": "mlp", "parameters": 16},
            "personal": personal_networks if SERVES[method.algorithm] == "personal" else {},
        },
    }


def _score(method: Made, model: str, client: str | None, data: str, accuracy: float) -> dict[str, Any]:
    return {
        "model": model,
        "client": client,
        "data": data,
        "examples": method.test_examples if data.startswith("test") else 50,
        "accuracy": accuracy,
        "loss": 1 - accuracy,
        "balanced_accuracy": accuracy / 2,
        "auroc": method.auroc(client) if client else 0.95,
        "majority": 0.5 if client else 0.25,
        "recall": [accuracy, None, accuracy / 2, *[accuracy] * len(method.classes)][: len(method.classes)],
    }


def _evaluation(method: Made, round: int) -> dict[str, Any]:
    serves = SERVES[method.algorithm]
    shared = method.shared(method.seed, round)
    scores = [] if shared is None else [_score(method, "global", None, "test", shared)]
    for i in method.clients if method.tells else ():
        score = method.own_score(method.seed, round, i)
        scores += [_score(method, serves, i, data, score) for data in ("validation", "holdout")]
        if method.reach:
            reached = zip(("test", "test.own", "test.others"), method.reach(method.seed, round, i), strict=True)
            scores += [_score(method, serves, i, data, share) for data, share in reached]
            scores += [_score(method, serves, i, "validation.all", score)] if method.pooled else []
        elif serves == "personal":
            scores.append(_score(method, "personal", i, "test", score / 2))
        if method.shared_own:
            model = "meme" if shared is None else "global"
            scores.append(_score(method, model, i, "validation", method.shared_own(method.seed, round, i)))
    terms = LOSSES.get(method.algorithm, ("personal",))
    trained_clients = ("pooled",) if method.algorithm == "centralised" else method.clients
    train = (
        {i: {t: (2.0 - 0.3 * k) / (0.5 + round) for k, t in enumerate(terms)} for i in trained_clients}
        if method.tells
        else {}
    )
    if method.projected is not None:
        train = {i: client_terms | {"projected": method.projected} for i, client_terms in train.items()}
    return {"round": round, "train": train, "scores": scores}


def _ledger(method: Made) -> list[dict[str, Any]]:
    sent = 0 if method.algorithm in ("independent", "centralised") else 64
    extra_bytes = 8 if method.algorithm in ("fedavg", "fedprox") else 0
    rounds = range((method.reached if method.reached is not None else method.rounds) + 1)
    tell = method.sent or (lambda round, client: [(method.algorithm, sent, sent + extra_bytes)] if round else [])
    return [
        {"round": r, "phase": phase, "client": i, "down": down, "up": up}
        | ({} if method.steps is None else {"steps": method.steps})
        for r in rounds
        for i in method.clients
        for phase, down, up in tell(r, i)
    ]


def _summary(method: Made, fingerprint: str, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def average_own(round: int) -> dict[str, Any]:
        own_scores = {i: method.own_score(method.seed, round, i) for i in method.clients}
        return {
            "mean": sum(own_scores.values()) / len(own_scores),
            "worst": min(own_scores.values()),
            "per_client": own_scores,
        }

    shared = {"last": method.shared(method.seed, method.rounds), "best": method.shared(method.seed, method.best_round)}
    chosen = {"best_round": method.best_round}
    best = average_own(method.best_round) | chosen | {"best_by": method.best_by[1]}
    return {
        "format": 1,
        "name": method.name,
        "algorithm": method.algorithm,
        "rounds": method.rounds,
        "seed": method.seed,
        "seconds": 12.5,
        "global": {"test_accuracy": None if shared["last"] is None else shared | chosen | {"best_by": method.best_by[0]}},
        "personal": {
            "model": SERVES[method.algorithm],
            "val_accuracy": {"last": average_own(method.rounds), "best": best} if method.tells else None,
        },
        "transfer": measure_transfer(read_evaluations(evaluations), SERVES[method.algorithm], "validation"),
        "projected": None
        if method.projected is None
        else {"mean": method.projected, "per_client": dict.fromkeys(method.clients, method.projected)},
        "bytes": {way: sum(line[way] for line in _ledger(method) if line["phase"] != "seed") for way in ("up", "down")}
        | {"seed": sum(line["up"] for line in _ledger(method) if line["phase"] == "seed")},
        "leaves": LEAVES[method.algorithm],
        "data": {"name": "digits", "classes": list(method.classes)},
        "fingerprint": fingerprint,
    }


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _lines(path: Path, lines: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
