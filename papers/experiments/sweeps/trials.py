"""Choose the settings of each method by the trials of docs/reproduction/protocol.md, and write them into this folder.

    python papers/experiments/sweeps/trials.py tuned-mnist-mlp-iid --out runs/trials --jobs 2

NAME.toml has the rounds that are judged, the hold-out rows and the first of three seeds. The command writes NAME-METHOD.json
for each method. To resume after a stop or a kill, give the command again.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import fedmutual
from fedmutual.config import Config, load_config, override_config, replace_algorithm
from fedmutual.config.grid import LEARNING_RATE, format_value, make_folder_name, make_label
from fedmutual.core import Diverged
from fedmutual.engines.child_process import expect_workers
from fedmutual.errors import ConfigError
from fedmutual.files import write_json
from fedmutual.results.frame import read_run
from fedmutual.rundir.file_names import CONFIG
from fedmutual.studies.study import Setting, Study, list_seeds, train_runs
from fedmutual_papers.collect import get_command
from fedmutual_papers.measures import ENDPOINT, ENDS

Values = Mapping[str, Any]
"""Dotted key -> value, of one trial."""

SEEDS = 3
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
MU, BETA, START = "algorithm.mu", "algorithm.beta", "model.start"
# Method -> (the model that is judged, its setting in the trials of the rate, the trials of its setting at the best rate).
METHODS: dict[str, tuple[str, Values, tuple[Values, ...]]] = {
    "fedavg": ("global", {}, ()),
    "fedprox": ("global", {MU: 0.01}, tuple({MU: mu} for mu in (0.001, 0.01, 0.1, 1.0))),
    "fml": (
        "global",
        {BETA: 0.5, START: "own"},
        ({BETA: 0.25}, {BETA: 0.75}, {START: "server", BETA: 0.5}, {START: "server", BETA: 0.75}),
    ),
    "independent": ("personal", {}, ()),
}


@dataclass
class Trials:
    """The trials of one method."""

    config: Config  # of the method
    model: str  # the model that is judged
    out: Path
    jobs: int | None
    tried: list[Values] = field(default_factory=list)
    curves: dict[Path, list[float]] = field(default_factory=dict)  # of each run: the accuracy after each round
    seconds: dict[Path, float] = field(default_factory=dict)
    rows: int = 0  # hold-out rows of all clients

    @property
    def half(self) -> int:
        """Return half of the judged rounds."""
        return self.config.rounds // 2

    def make_study(self, several: Sequence[Values], rounds: int) -> Study:
        """Return the study of some settings."""
        labels = [make_label(values) for values in several]
        configs = [override_config(self.config, {**values, "rounds": rounds}) for values in several]
        named = zip(labels, configs, several, strict=True)
        settings = [Setting(label, config, make_folder_name(label), values) for label, config, values in named]
        return Study(settings, list_seeds(self.config, SEEDS), self.out)

    def train(self, several: Sequence[Values], rounds: int) -> None:
        """Train the settings for a number of rounds, and read the curves; runs that have the rounds are left as they are."""
        wanted = [v for v in several if any(len(self.read(folder)) < rounds for folder in self.find_folders(v))]
        if wanted:
            train_runs(self.make_study(wanted, rounds).runs, resume=True, jobs=self.jobs, tolerated=(Diverged,))
            for folder in (folder for values in wanted for folder in self.find_folders(values)):
                self.read(folder)
        self.tried += [values for values in several if values not in self.tried]

    def find_folders(self, values: Values) -> list[Path]:
        """Return the run folders of a setting, one for each seed."""
        study = self.make_study([values], self.half)
        return [*study.find_folders(study.settings[0]).values()]

    def read(self, folder: Path) -> list[float]:
        """Return the judged model's accuracy on hold-out rows, the mean over clients, after each round of a run so far."""
        if (folder / CONFIG).exists():
            run, curve = read_run(folder), list[float]()
            for evaluation in run.evaluations:
                rows = run.get_rows(evaluation.round, self.model, "holdout").values()
                curve.append(fmean(row.find_number("accuracy") or 0.0 for row in rows))
                self.rows = int(sum(row.find_number("examples") or 0 for row in rows))
            self.curves[folder] = curve
            self.seconds[folder] = run.summary.seconds if run.summary and run.summary.seconds else 0.0
        return self.curves.get(folder, [])

    def score(self, values: Values, rounds: int) -> list[float]:
        """Return the score of each seed after a number of rounds; -inf for a run in which a client diverged before."""
        curves = [self.curves.get(folder, []) for folder in self.find_folders(values)]
        return [ENDS["mean"](curve[:rounds]) if len(curve) >= rounds else -math.inf for curve in curves]

    def rank(self, several: Sequence[Values], rounds: int) -> list[Values]:
        """Return the settings, the best first. Of settings within one row, the one with smaller values is better."""
        left = sorted(several, key=lambda values: [(isinstance(v, str), v) for v in values.values()])
        ranked = []
        while left:
            means = [fmean(self.score(values, rounds)) for values in left]
            ranked.append(left.pop(next(n for n, mean in enumerate(means) if mean >= max(means) - 1 / self.rows)))
        return ranked

    def is_tie(self, first: Values, second: Values, rounds: int) -> bool:
        """Return whether the scores of two settings differ by at most one hold-out row."""
        return abs(fmean(self.score(first, rounds)) - fmean(self.score(second, rounds))) <= 1 / self.rows

    def extend(self, key: str, others: Values, factors: tuple[float, float] | None = None) -> None:
        """Continue the list of values of a key, below or above, while the value at an edge is better than its neighbour.

        others: the other values of the trials. factors: of the next value (below, above); None: those of the list's ends.
        """
        while True:
            of_key = {v[key]: v for v in self.tried if {**v, key: None} == {**others, key: None}}
            listed = sorted(of_key)
            best = self.rank([*of_key.values()], self.half)[0][key]
            below, above = factors or (listed[0] / listed[1], listed[-1] / listed[-2])
            neighbour, factor = {listed[0]: (listed[1], below), listed[-1]: (listed[-2], above)}.get(best, (None, 0.0))
            if neighbour is None or self.is_tie(of_key[best], of_key[neighbour], self.half):
                return
            following = float(f"{best * factor:.1g}" if factors else f"{best * factor:.2g}")
            try:
                override_config(self.config, {**others, key: following})
            except ConfigError:  # the end of what is possible
                return
            self.train([{**others, key: following}], self.half)

    def refine_rate(self, wanted: int) -> None:
        """Try rates around the best one until there are `wanted` trials."""
        best = self.rank(self.tried, self.half)[0]
        for n in count(1):
            steps = [sign * k / (6 * n) for k in range(1, 2 * n + 1) for sign in (-1, 1)]  # up to 10 ** (1/3) each way
            rates = (float(f"{best[LEARNING_RATE] * 10**step:.2g}") for step in steps)
            new = [values for rate in rates if (values := {**best, LEARNING_RATE: rate}) not in self.tried]
            self.train(new[: wanted - len(self.tried)], self.half)
            if len(self.tried) >= wanted:
                return

    def describe(self, name: str) -> dict[str, Any]:
        """Return the content of NAME-METHOD.json: all trials, the two of all rounds, and the chosen one."""
        first, second, *_ = self.rank(self.tried, self.half)
        finalists = [first, second]
        self.train(finalists, self.config.rounds)
        chosen = self.rank(finalists, self.config.rounds)[0]

        def describe_scores(values: Values, rounds: int) -> dict[str, Any]:
            scores = [score if math.isfinite(score) else None for score in self.score(values, rounds)]
            return {"rounds": rounds, "seeds": scores, "mean": None if None in scores else fmean(self.score(values, rounds))}

        return {
            "format": 1,
            "name": name,
            "seeds": [*list_seeds(self.config, SEEDS)],
            "by": self.model,
            "holdout": self.config.split.holdout,
            "holdout_rows": self.rows,
            "score": f"accuracy on hold-out rows, the mean over clients and over the last {ENDPOINT} evaluated rounds",
            "settings": [
                {
                    "label": make_label(values),
                    "set": {key: format_value(value) for key, value in values.items()},
                    "half": describe_scores(values, self.half),
                    "full": describe_scores(values, self.config.rounds) if values in finalists else None,
                }
                for values in self.tried
            ],
            "tie": self.is_tie(first, second, self.config.rounds),
            "chosen": {key: format_value(value) for key, value in chosen.items()},
            "seconds": round(sum(self.seconds.values())),
            "command": get_command(),
            "version": fedmutual.__version__,
            "torch": torch.__version__,
        }


def main() -> None:
    """Train the trials of all methods of one file, and write the choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a file of this folder, without .toml")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--jobs", type=int, help="runs side by side")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="the folder of NAME-METHOD.json")
    arguments = parser.parse_args()
    expect_workers(["inprocess"], arguments.jobs)
    config = load_config(Path(__file__).with_name(f"{arguments.name}.toml"))
    methods = {}
    for method, (model, first, own) in METHODS.items():
        place = arguments.out / arguments.name / method
        trials = methods[method] = Trials(replace_algorithm(config, method)[0], model, place, arguments.jobs)
        trials.train([{LEARNING_RATE: rate, **first} for rate in RATES], trials.half)
        trials.extend(LEARNING_RATE, first, (0.3, 10 / 3))
        best = trials.rank(trials.tried, trials.half)[0]
        trials.train([{**best, **values} for values in own], trials.half)
        for key in own[0] if own else ():
            trials.extend(key, trials.rank(trials.tried, trials.half)[0])
        if not own:
            trials.refine_rate(len(trials.tried) + 4)
        print(f"{method}: {len(trials.tried)} trials", flush=True)
    most = max(len(trials.tried) for trials in methods.values())
    for method, trials in methods.items():
        trials.refine_rate(most)
        write_json(arguments.to / f"{arguments.name}-{method}.json", trials.describe(arguments.name))
        print(f"{method}: chosen of {len(trials.tried)} trials", flush=True)


if __name__ == "__main__":
    main()
