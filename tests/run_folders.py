"""Write run folders with artificial numbers, in the format that fedmutual writes."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedmutual.report.comparison import comparisons
from fedmutual.report.verdicts import judge
from fedmutual.rundir.recorded_run import read_runs
from fedmutual.rundir.transfer import transfer

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
    own: Own
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

    @property
    def finished(self) -> bool:
        return self.reached is None


def write(folder: Path, made: Made) -> Path:
    """Write the folder of a run."""
    folder.mkdir(parents=True)
    config = {
        "name": made.name,
        "seed": made.seed,
        "rounds": made.rounds,
        "algorithm": {"name": made.algorithm},
        "data": {"name": "digits"},
        "partition": {"kind": "domains"} if made.reach else SHARDS | {"clients": len(made.clients)},
        "split": {"preset": "journal", "holdout": 0.1},
        "model": {"shared": "mlp", "batchnorm": "average", "start": "own"},
        "training": {"local_epochs": 5, "batch_size": 128},
        "optimizer": {"name": "sgd", "lr": 0.01},
        **made.config,
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    partition = _partition(made)
    _json(folder / "environment.json", _environment(made))
    _json(folder / "partition.json", partition)
    rounds = [
        r
        for r in range(1, (made.reached if made.reached is not None else made.rounds) + 1)
        if r % made.every == 0 or r == made.rounds
    ]
    evaluations = [_evaluation(made, r) for r in rounds]
    _lines(folder / "metrics.jsonl", evaluations)
    _lines(folder / "ledger.jsonl", _ledger(made))
    if made.finished:
        _json(folder / "summary.json", _summary(made, partition["fingerprint"], evaluations))
    return folder


def write_all(out: Path, methods: Sequence[Made], seeds: Sequence[int]) -> list[Path]:
    """Write OUT/<method>/<seed> for every method and seed, in the layout of `compare`."""
    return [write(out / m.algorithm / str(s), replace(m, seed=s)) for m in methods for s in seeds]


def list_findings(folders: Sequence[Path]) -> list[str]:
    """Return the answer and all findings of the one comparison that the folders make."""
    (comparison,) = comparisons(read_runs(folders))
    verdict = judge(comparison)
    return [verdict.lead, *verdict.sentences]


def _partition(made: Made) -> dict[str, Any]:
    deal = made.counts or (lambda k, seed: [10 * (k + 1) if (c + k + seed) % 3 else 0 for c in range(len(made.classes))])
    counts = {i: deal(k, made.seed) for k, i in enumerate(made.clients)}
    rows = {"rows": [0, 1, 2]}
    return {
        "format": 1,
        "source": "digits",
        "kind": "domains" if made.reach else "shards",
        "seed": made.seed,
        "classes": list(made.classes),
        "fingerprint": hashlib.sha256(repr((made.seed, counts)).encode()).hexdigest(),
        "test": {"examples": made.test_examples, "counts": [made.test_examples // len(made.classes)] * len(made.classes)},
        "clients": {
            i: {
                "private": {"of": "train", **rows},
                "validation": {"of": made.validation_of, **rows},
                "holdout": {"of": "train", **rows},
                "counts": {"private": n, "validation": [k // 2 for k in n], "holdout": [k // 10 for k in n]},
            }
            for i, n in counts.items()
        },
    }


def _environment(made: Made) -> dict[str, Any]:
    own = {i: {"name": ("mlp", "cnn1", "lenet5")[k % 3], "parameters": 1000 + k} for k, i in enumerate(made.clients)}
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
        "command": f"fedmutual run --seed {made.seed}",
        "scaling": {"mean": [0.5], "std": [0.25], "augment": "none"},
        "pooled": made.algorithm == "centralised",
        "models": {
            "input": [1, 8, 8],
            "classes": len(made.classes),
            "shared": {"name": "mlp", "parameters": 16},
            "personal": own if SERVES[made.algorithm] == "personal" else {},
        },
    }


def _score(made: Made, model: str, client: str | None, data: str, accuracy: float) -> dict[str, Any]:
    return {
        "model": model,
        "client": client,
        "data": data,
        "examples": made.test_examples if data.startswith("test") else 50,
        "accuracy": accuracy,
        "loss": 1 - accuracy,
        "balanced_accuracy": accuracy / 2,
        "auroc": made.auroc(client) if client else 0.95,
        "majority": 0.5 if client else 0.25,
        "recall": [accuracy, None, accuracy / 2, *[accuracy] * len(made.classes)][: len(made.classes)],
    }


def _evaluation(made: Made, round: int) -> dict[str, Any]:
    serves = SERVES[made.algorithm]
    shared = made.shared(made.seed, round)
    scores = [] if shared is None else [_score(made, "global", None, "test", shared)]
    for i in made.clients if made.tells else ():
        score = made.own(made.seed, round, i)
        scores += [_score(made, serves, i, data, score) for data in ("validation", "holdout")]
        if made.reach:
            reached = zip(("test", "test.own", "test.others"), made.reach(made.seed, round, i), strict=True)
            scores += [_score(made, serves, i, data, share) for data, share in reached]
            scores += [_score(made, serves, i, "validation.all", score)] if made.pooled else []
        elif serves == "personal":
            scores.append(_score(made, "personal", i, "test", score / 2))
        if made.shared_own:
            model = "meme" if shared is None else "global"
            scores.append(_score(made, model, i, "validation", made.shared_own(made.seed, round, i)))
    terms = LOSSES.get(made.algorithm, ("personal",))
    who = ("pooled",) if made.algorithm == "centralised" else made.clients
    train = {i: {t: (2.0 - 0.3 * k) / (0.5 + round) for k, t in enumerate(terms)} for i in who} if made.tells else {}
    if made.projected is not None:
        train = {i: told | {"projected": made.projected} for i, told in train.items()}
    return {"round": round, "train": train, "scores": scores}


def _ledger(made: Made) -> list[dict[str, Any]]:
    sent = 0 if made.algorithm in ("independent", "centralised") else 64
    more = 8 if made.algorithm in ("fedavg", "fedprox") else 0
    rounds = range((made.reached if made.reached is not None else made.rounds) + 1)
    tell = made.sent or (lambda round, client: [(made.algorithm, sent, sent + more)] if round else [])
    return [
        {"round": r, "phase": phase, "client": i, "down": down, "up": up}
        for r in rounds
        for i in made.clients
        for phase, down, up in tell(r, i)
    ]


def _summary(made: Made, fingerprint: str, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def own(round: int) -> dict[str, Any]:
        found = {i: made.own(made.seed, round, i) for i in made.clients}
        return {"mean": sum(found.values()) / len(found), "worst": min(found.values()), "per_client": found}

    shared = {"last": made.shared(made.seed, made.rounds), "best": made.shared(made.seed, made.best_round)}
    chosen = {"best_round": made.best_round}
    best = own(made.best_round) | chosen | {"best_by": made.best_by[1]}
    return {
        "format": 1,
        "name": made.name,
        "algorithm": made.algorithm,
        "rounds": made.rounds,
        "seed": made.seed,
        "seconds": 12.5,
        "global": {"test_accuracy": None if shared["last"] is None else shared | chosen | {"best_by": made.best_by[0]}},
        "personal": {
            "model": SERVES[made.algorithm],
            "val_accuracy": {"last": own(made.rounds), "best": best} if made.tells else None,
        },
        "transfer": transfer(evaluations, SERVES[made.algorithm], "validation"),
        "projected": None
        if made.projected is None
        else {"mean": made.projected, "per_client": dict.fromkeys(made.clients, made.projected)},
        "bytes": {way: sum(line[way] for line in _ledger(made) if line["phase"] != "seed") for way in ("up", "down")}
        | {"seed": sum(line["up"] for line in _ledger(made) if line["phase"] == "seed")},
        "leaves": LEAVES[made.algorithm],
        "data": {"name": "digits", "classes": list(made.classes)},
        "fingerprint": fingerprint,
    }


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _lines(path: Path, lines: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
