"""Tasks by name, and a task of the user's own: an error or a wrong result is one sentence with the class and the line."""

import pickle
import re
import sys

import pytest
import torch

from fedmutual import tasks
from fedmutual.core import get_metric, get_target_kind
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


LOSS, MUTUAL, SCORE = ("fit", "mutual"), ("mutual",), ("score",)


@pytest.mark.parametrize(
    ("line", "methods", "words"),
    [
        ("fit = lambda s, o, t: F.cross_entropy(o.T, t)", LOSS, "raised ValueError: Expected input batch_size (2)"),
        ("fit = lambda s, o, t: F.cross_entropy(o.T, t)", LOSS, "(line 19 of own_kinds.py)"),
        ("fit = lambda s, o, t: F.cross_entropy(o, t, reduction='none')", LOSS, "returned a tensor (float32 [4])"),
        ("fit = lambda s, o, t: F.cross_entropy(o, t).item()", LOSS, "returned float; return a loss as a tensor []"),
        ("fit = lambda s, o, t: (o.argmax(1) == t).sum()", LOSS, "returned a tensor (int64 []); return a loss"),
        ("fit = lambda s, o, t: F.cross_entropy(o, t).detach()", LOSS, "without a gradient"),
        ("fit = lambda s, o, t: None", LOSS, "returned NoneType; return a loss"),
        ("mutual = lambda s, *a: s.fit(a[0], a[2])", MUTUAL, "mutual of your task own_kinds:Changed returned a tensor"),
        ("mutual = lambda s, *a: (s.fit(a[0], a[2]),)", MUTUAL, "return two losses"),
        ("score = lambda s, o, t: 0.5", SCORE, "score of your task own_kinds:Changed returned float; return a dict"),
        ("score = lambda s, o, t: {'accuracy': o.mean()}", SCORE, "a tensor (float32 []) for 'accuracy'; return a number"),
        ("score = lambda s, o, t: {'accuracy': [t]}", SCORE, "returned list for 'accuracy'"),
        ("score = lambda s, o, t: {'accuracy': s.no}", SCORE, "has no attribute 'no' (line 19 of own_kinds.py)"),
    ],
)
def test_a_result_that_cannot_be_used(make, line, methods, words):
    task = make(line)
    for method in methods:
        arguments = (OUTPUT, OUTPUT, TARGET, *SETTINGS) if method == "mutual" else (OUTPUT, TARGET)
        with pytest.raises(AlgorithmError, match=re.escape(words)):
            getattr(task, method)(*arguments)


def test_a_loss_without_a_gradient_is_found_in_a_stack_of_clients(make):
    task, outputs = make("fit = lambda s, o, t: F.cross_entropy(o, t).detach()"), torch.stack([OUTPUT, OUTPUT])
    with pytest.raises(AlgorithmError, match="without a gradient"):
        torch.vmap(task.fit)(outputs, torch.stack([TARGET, TARGET]))
    assert torch.vmap(make().fit)(outputs, torch.stack([TARGET, TARGET])).shape == (2,)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit = None", "'fit' of the task 'own_kinds:Changed' must be a method"),
        ("tells = 'accuracy'", "'tells' of the task 'own_kinds:Changed' must be a tuple"),
        ("outputs = '3'", "'outputs' of the task 'own_kinds:Changed' must be the number of outputs"),
    ],
)
def test_a_member_of_a_wrong_kind(make, line, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make(line)


def test_a_task_without_a_fault_keeps_its_results_and_members(make):
    task = pickle.loads(pickle.dumps(make()))
    assert task.fit(OUTPUT, TARGET).item() == pytest.approx(0.6931, abs=1e-4)
    assert [loss.item() for loss in task.mutual(OUTPUT, OUTPUT, TARGET, *SETTINGS)] == pytest.approx([0.6931] * 2, abs=1e-4)
    assert task.score(OUTPUT, TARGET) == {"accuracy": 0.5}
    assert (task.tells, task.metric, getattr(task, "targets", "classes")) == (("accuracy",), "any", "classes")


@pytest.mark.parametrize(
    ("name", "kind", "metric", "is_fraction", "is_higher_better"),
    [
        ("classification", "classes", "accuracy", True, True),
        ("regression", "numbers", "mean_absolute_error", False, False),
        ("multilabel", "labels", "auroc", True, True),
        ("segmentation", "masks", "dice", True, True),
        ("ordinal", "classes", "quadratic_kappa", False, True),
        ("survival", "times", "concordance", True, True),
        ("cox", "times", "concordance", True, True),
    ],
)
def test_a_task_declares_its_targets_and_its_main_metric(name, kind, metric, is_fraction, is_higher_better):
    task = tasks.make_task(name)
    found = get_metric(task)
    assert get_target_kind(task) == kind
    assert (found.name, found.is_fraction, found.is_higher_better) == (metric, is_fraction, is_higher_better)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("regresion", "did you mean 'regression'?"),
        (
            "other",
            "there are classification, regression, multilabel, segmentation, ordinal, survival, cox, and your own as",
        ),
        ("my_tasks:Half", "is no task, because it lacks 'fit'; see fedmutual.core.Task"),
        ("my_tasks:broken", "'my_tasks:broken' cannot be made: OSError: no"),
    ],
)
def test_a_task_that_does_not_exist_or_cannot_be_made(tmp_path, in_tmp_path, name, sentence):
    (tmp_path / "my_tasks.py").write_text("class Half:\n    tells = ()\n\n\ndef broken():\n    raise OSError('no')\n")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        tasks.make_task(name)
