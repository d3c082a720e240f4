"""A network that ends in probabilities is found, and the user reads what to remove."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedmutual
from fedmutual.models.own import find_ending


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (nn.Softmax(1), "softmax"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Identity(), None),
        (nn.LogSoftmax(1), None),  # a second log-softmax changes nothing
        (nn.ReLU(), None),
    ],
)
def test_the_last_function_is_found(last, ending):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(12, 3), last)
    assert find_ending(net, torch.rand(2, 1, 3, 4)) == ending
    assert net.training


def test_a_network_with_a_zero_last_layer_returns_logits():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    assert find_ending(net, torch.rand(2, 1, 3, 4)) is None


def test_each_pixel_may_have_a_distribution():
    assert find_ending(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Softmax(1)), torch.rand(2, 1, 4, 6)) == "softmax"


def test_the_user_reads_which_network_ends_in_a_softmax():
    images, digits = load_digits(return_X_y=True)
    rows = images[:80].astype("float32"), digits[:80]
    wrong = nn.Sequential(nn.Linear(64, 10), nn.Softmax(1))
    sites = {"a": fedmutual.Site(train=rows, model=wrong), "b": fedmutual.Site(train=rows, model=nn.Linear(64, 10))}
    run = fedmutual.federate(sites, shared="mlp", rounds=1)
    (note,) = [line for line in (run.folder / "log.txt").read_text().splitlines() if "gives probabilities" in line]
    assert "as after a softmax, but the losses of classification take logits; remove the last function" in note
