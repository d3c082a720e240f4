"""The trials of the protocol: the list of values goes on past an edge, ties take the smaller value, divergence loses."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedmutual.config import parse_config

LR = "optimizer.lr"


@pytest.fixture(scope="module")
def trials() -> ModuleType:
    path = Path(__file__).parents[2] / "papers/experiments/sweeps/trials.py"
    spec = importlib.util.spec_from_file_location("trials", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_trials(module: ModuleType, accuracy: Callable[[dict[str, Any], int], Sequence[float]], out: Path) -> Any:
    """Return trials whose runs are not trained: the curve of a run is accuracy(values, rounds)."""

    class Untrained(module.Trials):
        def train(self, several: Sequence[dict[str, Any]], rounds: int) -> None:
            for values in several:
                for folder in self.find_folders(values):
                    self.curves[folder] = list(accuracy(values, rounds))
            self.tried += [values for values in several if values not in self.tried]

    config = parse_config({"rounds": 20, "partition": {"clients": 2}, "split": {"holdout": 0.1}})
    return Untrained(config, "global", out, None, rows=1000)


@pytest.mark.parametrize(
    ("best", "tried", "chosen"),
    [
        (0.03, (0.003, 0.01, 0.03, 0.1, 0.3), 0.03),
        (0.0009, (0.0003, 0.0009, 0.003, 0.01, 0.03, 0.1, 0.3), 0.0009),  # below the list, until a value is no better
        (1.0, (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), 1.0),  # above
    ],
)
def test_a_rate_at_the_edge_extends_the_list(
    trials: ModuleType, tmp_path: Path, best: float, tried: tuple[float, ...], chosen: float
) -> None:
    of = make_trials(trials, lambda values, rounds: [0.9 - 0.1 * abs(math.log10(values[LR] / best))] * rounds, tmp_path)
    of.train([{LR: rate} for rate in trials.RATES], of.half)
    of.extend(LR, {}, (0.3, 10 / 3))
    assert (sorted(v[LR] for v in of.tried), of.rank(of.tried, of.half)[0]) == (sorted(tried), {LR: chosen})


def test_a_list_of_equal_values_ends_at_once(trials: ModuleType, tmp_path: Path) -> None:
    of = make_trials(trials, lambda values, rounds: [0.5] * rounds, tmp_path)
    of.train([{LR: rate} for rate in trials.RATES], of.half)
    of.extend(LR, {}, (0.3, 10 / 3))
    assert len(of.tried) == len(trials.RATES)
    assert of.rank(of.tried, of.half)[0] == {LR: 0.003}  # of a tie the smallest


def test_the_mean_of_the_last_rounds_decides_and_divergence_loses(trials: ModuleType, tmp_path: Path) -> None:
    curves = {0.01: [0.0] * 10 + [0.8] * 10, 0.03: [0.0] * 19 + [1.0], 0.1: [0.9] * 5}  # 0.1 diverges after round 5
    of = make_trials(trials, lambda values, rounds: curves[values[LR]], tmp_path)
    of.train([{LR: rate} for rate in curves], 20)
    assert [v[LR] for v in of.rank(of.tried, 20)] == [0.01, 0.03, 0.1]


def test_every_method_has_as_many_trials(trials: ModuleType, tmp_path: Path) -> None:
    of = make_trials(trials, lambda values, rounds: [0.9 - abs(values[LR] - 0.02)] * rounds, tmp_path)
    of.train([{LR: rate} for rate in trials.RATES], of.half)
    of.refine_rate(9)
    rates = [v[LR] for v in of.tried]
    assert len(rates) == len(set(rates)) == 9
    assert all(0.01 / 3 < rate < 0.3 for rate in rates[5:])  # around the best one
