"""The Python interface: the names of `fedmutual.__all__`, and the functions that are promised to outside checks."""

import dataclasses
import inspect
import math
from types import FunctionType

import numpy as np
import pytest
import torch

import fedmutual
from fedmutual.aggregation import mean
from fedmutual.data.partition import shards
from fedmutual.gradients import project
from fedmutual.losses import kl, mutual

pytestmark = pytest.mark.long

PROMISED = {
    "fedmutual.aggregation.mean": mean,
    "fedmutual.data.partition.shards": shards,
    "fedmutual.gradients.project": project,
    "fedmutual.losses.kl": kl,
    "fedmutual.losses.mutual": mutual,
}


def describe(public_object):
    """A function's parameters; of a class its bases, the parameters of a call, its own public methods and properties."""
    if not inspect.isclass(public_object):
        return parameters(public_object)
    described = {"bases": [base.__name__ for base in public_object.__mro__[1:] if _is_public(base)]}
    if dataclasses.is_dataclass(public_object) or "__init__" in vars(public_object):
        described["call"] = parameters(public_object)
    for name, member in vars(public_object).items():
        if not name.startswith("_") and isinstance(member, property | FunctionType):
            described[name] = "property" if isinstance(member, property) else parameters(member)
    return described


def parameters(function):
    """A signature without annotations, which each version of Python writes in its own way."""
    signature = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _is_public(base):
    return base is not object and (base.__module__ == "builtins" or base.__name__ in fedmutual.__all__)


def test_the_names_of_the_package(snapshots):
    now = {name: describe(getattr(fedmutual, name)) for name in fedmutual.__all__}
    snapshots.check("python", "fedmutual", now)


def test_the_promised_functions(snapshots):
    snapshots.check("python", "promised", {name: parameters(function) for name, function in PROMISED.items()})


def test_an_unknown_name_of_the_package_is_an_error():
    with pytest.raises(AttributeError, match="nonsense"):
        fedmutual.nonsense  # noqa: B018


def test_kl():
    """KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 ln(3/2) + 1/4 ln(1/2), and 0 of equal ones."""
    log_p = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    log_q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    torch.testing.assert_close(kl(log_p, log_q), torch.tensor([0.75 * math.log(1.5) - 0.25 * math.log(2), 0.0]))


def test_mutual():
    """Logits (0, ln 3) of the personal model, (0, 0) of the meme, label 1.

    Cross entropies: ln(4/3) and ln 2. KL(meme || personal) = 1/2 ln(1/2 / 1/4) + 1/2 ln(1/2 / 3/4) = ln 2 - 1/2 ln 3;
    KL(personal || meme) = 1/4 ln(1/2) + 3/4 ln(3/2) = 3/4 ln 3 - ln 2.
    """
    personal, meme = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)
    losses = mutual(personal, meme, torch.tensor([1]), alpha=0.4, beta=0.9)
    personal_loss = 0.4 * math.log(4 / 3) + 0.6 * (math.log(2) - 0.5 * math.log(3))
    meme_loss = 0.9 * math.log(2) + 0.1 * (0.75 * math.log(3) - math.log(2))
    torch.testing.assert_close(losses, (torch.tensor(personal_loss), torch.tensor(meme_loss)))


def test_project():
    """(1, 1) without its part against (-2, 0) is (0, 1); (1, 1) is not against (2, 0)."""
    public = {"w": torch.tensor([1.0, 1.0])}
    assert project(public, {"w": torch.tensor([-2.0, 0.0])})["w"].tolist() == [0.0, 1.0]
    assert project(public, {"w": torch.tensor([2.0, 0.0])})["w"].tolist() == [1.0, 1.0]


def test_mean():
    """Floats are averaged, counters take the maximum."""
    replies = {"0": {"w": torch.tensor([1.0]), "n": torch.tensor(3)}, "1": {"w": torch.tensor([4.0]), "n": torch.tensor(5)}}
    assert {name: value.tolist() for name, value in mean(replies).items()} == {"w": [2.5], "n": 5}
    assert mean(replies, {"0": 2, "1": 1})["w"].tolist() == [2.0]


def test_shards():
    """Every row goes to one client, and each client has two of the four classes."""
    labels = np.repeat(np.arange(4), 6)
    parts = shards(labels, 2, 2, np.random.default_rng(0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(24))
    assert [len(set(labels[part])) for part in parts] == [2, 2]
