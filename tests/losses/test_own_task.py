"""A task of the user's own: an error or a wrong result is one sentence with the class and the line."""

import pickle
import sys

import pytest
import torch

from fedmutual import tasks
from fedmutual.errors import AlgorithmError, ConfigError

MODULE = """
import torch.nn.functional as F

class Kind:
    tells = ("accuracy",)
    outputs = None
    metric = "any"

    def fit(self, output, target):
        return F.cross_entropy(output, target)

    def mutual(self, personal, meme, target, alpha, beta, temperature):
        return self.fit(personal, target), self.fit(meme, target)

    def score(self, output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean().item()}

class Changed(Kind):
    """
OUTPUT = torch.zeros(4, 2, requires_grad=True)
TARGET = torch.tensor([0, 1, 0, 1])
SETTINGS = (torch.tensor(0.5), torch.tensor(0.5), 1.0)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that returns the task of MODULE with one changed line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def make(line: str = "pass"):
        (tmp_path / "own_kinds.py").write_text(MODULE + line)
        sys.modules.pop("own_kinds", None)
        return tasks.make_task("own_kinds:Changed")

    yield make
    sys.modules.pop("own_kinds", None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit = lambda s, o, t: F.cross_entropy(o.T, t)", "raised ValueError: Expected input batch_size (2)"),
        ("fit = lambda s, o, t: F.cross_entropy(o.T, t)", "(line 19 of own_kinds.py)"),
        (
            "fit = lambda s, o, t: F.cross_entropy(o, t, reduction='none')",
            "of your task own_kinds:Changed returned a tensor (float32 [4])",
        ),
        ("fit = lambda s, o, t: F.cross_entropy(o, t).item()", "returned float; return a loss as a tensor []"),
        ("fit = lambda s, o, t: (o.argmax(1) == t).sum()", "returned a tensor (int64 []); return a loss"),
        ("fit = lambda s, o, t: F.cross_entropy(o, t).detach()", "without a gradient"),
        ("fit = lambda s, o, t: None", "returned NoneType; return a loss"),
    ],
)
def test_a_loss_that_cannot_be_used(make, line, words):
    task = make(line)
    for call in (lambda: task.fit(OUTPUT, TARGET), lambda: task.mutual(OUTPUT, OUTPUT, TARGET, *SETTINGS)):
        with pytest.raises(AlgorithmError) as problem:
            call()
        assert words in str(problem.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "mutual = lambda s, *a: s.fit(a[0], a[2])",
            "mutual of your task own_kinds:Changed returned a tensor (float32 [])",
        ),
        ("mutual = lambda s, *a: (s.fit(a[0], a[2]),)", "return two losses"),
    ],
)
def test_two_losses_are_needed(make, line, words):
    with pytest.raises(AlgorithmError) as problem:
        make(line).mutual(OUTPUT, OUTPUT, TARGET, *SETTINGS)
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("score = lambda s, o, t: 0.5", "score of your task own_kinds:Changed returned float; return a dictionary"),
        (
            "score = lambda s, o, t: {'accuracy': o.mean()}",
            "returned a tensor (float32 []) for 'accuracy'; return a number",
        ),
        ("score = lambda s, o, t: {'accuracy': [t]}", "returned list for 'accuracy'"),
        ("score = lambda s, o, t: {'accuracy': s.no}", "has no attribute 'no' (line 19 of own_kinds.py)"),
    ],
)
def test_a_score_that_cannot_be_used(make, line, words):
    with pytest.raises(AlgorithmError) as problem:
        make(line).score(OUTPUT, TARGET)
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit = None", "'fit' of the task 'own_kinds:Changed' must be a method"),
        ("tells = 'accuracy'", "'tells' of the task 'own_kinds:Changed' must be a tuple"),
        ("outputs = '3'", "'outputs' of the task 'own_kinds:Changed' must be the number of outputs"),
    ],
)
def test_a_member_of_a_wrong_kind(make, line, words):
    with pytest.raises(ConfigError) as problem:
        make(line)
    assert words in str(problem.value)


def test_a_task_without_a_fault_keeps_its_results_and_members(make):
    task = pickle.loads(pickle.dumps(make()))
    assert task.fit(OUTPUT, TARGET).item() == pytest.approx(0.6931, abs=1e-4)
    assert [loss.item() for loss in task.mutual(OUTPUT, OUTPUT, TARGET, *SETTINGS)] == pytest.approx([0.6931] * 2, abs=1e-4)
    assert task.score(OUTPUT, TARGET) == {"accuracy": 0.5}
    assert (task.tells, task.metric, getattr(task, "targets", "classes")) == (("accuracy",), "any", "classes")
