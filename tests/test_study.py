"""A study trains settings x seeds into folders: their names, and what an error of one run does to the others."""

from pathlib import Path

import pytest

from fedmutual.config import parse_config
from fedmutual.core import Diverged
from fedmutual.errors import RunError
from fedmutual.studies import side_by_side
from fedmutual.studies.run import can_stack
from fedmutual.studies.study import Setting, Study, format_run, train_runs

LABELS = ["slow, seed 3", "slow, seed 4", "fast, seed 3", "fast, seed 4"]


@pytest.fixture
def study(tmp_path):
    slow, fast = (parse_config({}, overrides={"optimizer.lr": lr, "data.name": "digits"}) for lr in (0.01, 0.1))
    return Study([Setting("slow", slow, "lr=0.01"), Setting("fast", fast, "lr=0.1")], [3, 4], tmp_path)


@pytest.fixture
def trained(study, monkeypatch):
    """The labels of the runs that are trained; the run "slow, seed 4" diverges."""
    labels = {folder: format_run(key) for folder, (key, _) in study.runs.items()}
    seen = []

    def train(config, folder, resume, observers):
        seen.append(labels[folder])
        if labels[folder] == "slow, seed 4":
            raise Diverged("0", 1, 0, "made up")

    monkeypatch.setattr(side_by_side, "train_run", train)
    return seen


def test_runs_are_named_by_setting_and_seed(study, tmp_path):
    assert [format_run(key) for key, _ in study.runs.values()] == LABELS
    configs = [(config.seed, config.optimizer.lr) for _, config in study.runs.values()]
    assert configs == [(3, 0.01), (4, 0.01), (3, 0.1), (4, 0.1)]
    assert [folder.relative_to(tmp_path) for folder in study.runs] == [
        Path(setting, seed) for setting in ("lr=0.01", "lr=0.1") for seed in "34"
    ]


def test_after_a_tolerated_error_the_other_runs_are_trained(study, trained):
    problems = train_runs(study.runs, resume=False, jobs=1, tolerated=(Diverged,))
    assert trained == LABELS
    assert {folder: str(problem).partition(" in ")[0] for folder, problem in problems.items()} == {
        [*study.runs][1]: "client '0' diverged"
    }


def test_another_error_stops_the_other_runs(study, trained):
    with pytest.raises(Diverged):
        train_runs(study.runs, resume=False, jobs=1, tolerated=(RunError,))
    assert trained == LABELS[:2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}, {}], True),
        ([{"optimizer.lr": 0.01}, {"optimizer.lr": 0.1}], True),
        ([{}], False),
        ([{}, {"engine.compile": True}], False),
    ],
)
def test_several_runs_with_equal_engines_train_in_common_stacks(changes, expected):
    configs = [parse_config({"engine": {"name": "stacked", "device": "cpu"}}, overrides=change) for change in changes]
    assert can_stack(configs) is expected
