"""Where a method that is FedAvg with keys of [model] must coincide with FedAvg it does, to the last bit."""

import pytest
import torch

import fedmutual

EVERYTHING = ["features", "classifier"]


def train(small, name, folder, **overrides):
    """The server's tensors after three rounds."""
    config = fedmutual.load_config(small, **{"algorithm.name": name, "engine.name": "inprocess", **overrides})
    run = fedmutual.run(config, folder)
    return {name: tensor for client in "012" for name, tensor in run.meme(client).state_dict().items()}


@pytest.mark.filterwarnings("ignore:algorithm ")
@pytest.mark.parametrize("name", ["lg-fedavg", "fedper", "fedrep"])
def test_a_part_that_is_everything_would_be_fedavg_and_is_refused(small, name):
    with pytest.raises(fedmutual.ConfigError, match="remove the key to share the whole network"):
        train(small, name, "ours", **{"model.part": EVERYTHING})


@pytest.mark.filterwarnings("ignore:algorithm ")
@pytest.mark.parametrize("name", ["lg-fedavg", "fedper"])
def test_a_part_that_stays_home_makes_another_method(small, name):
    ours, theirs = train(small, name, "ours"), train(small, "fedavg", "theirs")
    assert not all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.filterwarnings("ignore:algorithm ")
def test_fedbn_without_batchnorm_is_fedavg(small):
    ours, theirs = train(small, "fedbn", "ours"), train(small, "fedavg", "theirs")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.filterwarnings("ignore:algorithm ")
def test_fedbn_with_batchnorm_is_not_fedavg(small, tmp_path):
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n\n\ndef net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    network = {"model.shared": "normed:net"}
    ours, theirs = (train(small, name, name, **network) for name in ("fedbn", "fedavg"))
    assert not torch.equal(ours["2.running_mean"], theirs["2.running_mean"])
