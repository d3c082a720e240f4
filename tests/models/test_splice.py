"""A part that crosses and an adaptor that stays: what goes where, whose random numbers they take, and what cannot be."""

import re

import pytest
import torch
from torch import nn

from fedmutual import models
from fedmutual.config import ModelConfig
from fedmutual.errors import ConfigError
from fedmutual.models.networks import make_sequential
from fedmutual.models.splice import Spliced, build_meme, find_shape_difference, list_shared_tensors, splice

IMAGE = (1, 16, 16)


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(name: str, outputs: int = 10) -> nn.Module:
    return models.build(name, IMAGE, outputs, stream(0))


def spliced(name: str, *part: str, adaptor: str = "linear", outputs: int = 7, own_seed: int = 5) -> nn.Module:
    return splice(network(name, outputs), part, adaptor, IMAGE, outputs, stream(own_seed), name)


def test_the_part_is_named_by_its_modules_with_or_without_a_dot():
    net = network("lenet5")
    names = ("features.conv1.weight", "features.conv1.bias", "features.conv2.weight", "features.conv2.bias")
    assert list_shared_tensors(net, ["features."], "lenet5") == list_shared_tensors(net, ["features"], "lenet5") == names
    assert list_shared_tensors(net, ["features.conv2", "classifier.fc3.bias"], "lenet5") == (
        *names[2:],
        "classifier.fc3.bias",
    )


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (["featurs"], "key 'model.part': 'featurs' matches nothing in network 'lenet5'; did you mean 'features'?"),
        (["x"], "key 'model.part': 'x' matches nothing in network 'lenet5'; it has 'features', 'features.conv1'"),
        (["features", "classifier"], "names all tensors of network 'lenet5'"),
    ],
)
def test_a_part_that_matches_no_tensor_or_all_is_refused(part, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        list_shared_tensors(network("lenet5"), part, "lenet5")


def test_a_tensor_with_two_names_is_shared_under_both_if_the_rest_stays():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    assert list_shared_tensors(net, ["0"], "tied", tied=True) == ("0.weight", "0.bias", "2.weight")
    assert list_shared_tensors(net, ["0"], "tied") == ("0.weight", "0.bias")


def test_a_beginning_has_its_adaptor_after_it():
    net = spliced("lenet5", "features.")
    x = torch.randn(3, *IMAGE)
    unspliced = network("lenet5", 7)
    assert [k for k in net.state_dict() if k.startswith("adaptor")] == ["adaptor.fc.weight", "adaptor.fc.bias"]
    assert torch.equal(net.get_submodule("features")(x), unspliced.get_submodule("features")(x))
    assert torch.equal(net(x), net.get_submodule("adaptor.fc")(unspliced.get_submodule("features")(x)))


def test_an_end_has_its_adaptor_before_it():
    net = spliced("mlp", "classifier")
    x = torch.randn(3, *IMAGE)
    state = net.state_dict()
    assert state["adaptor.fc.weight"].shape == (200, 256)
    hidden = x.flatten(1) @ state["adaptor.fc.weight"].T + state["adaptor.fc.bias"]
    torch.testing.assert_close(net(x), hidden @ state["classifier.weight"].T + state["classifier.bias"])


def test_modules_below_others_keep_their_names():
    net = spliced("lenet5", "features.conv1")
    assert {"features.conv1.weight", "adaptor.fc.weight"} < set(net.state_dict())
    assert net(torch.zeros(2, *IMAGE)).shape == (2, 7)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (["features.conv2"], "the module must be the first or the last of the network"),
        (["features.conv1", "features.conv2"], "names several modules"),
        (["features.conv1.weight"], "is no module"),
    ],
)
def test_an_adaptor_that_cannot_be_inferred_is_an_error(part, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        spliced("lenet5", *part)


class Odd(nn.Module):
    """A network that computes what a function of it and its inputs says."""

    def __init__(self, compute, **layers):
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs, **named):
        return self.compute(self, *inputs, **named)


def around(compute, gives_two=False):
    """A network with a part `inner` that gives two tensors or may be given two, and a layer `last`."""

    def call(part, x, other=None):
        return (part.layer(x), x) if gives_two else part.layer(x) + (0 if other is None else other)

    return Odd(compute, inner=Odd(call, layer=nn.Linear(4, 4)), last=nn.Linear(4, 2))


LAYER = nn.Linear(4, 4)
NAMED = around(lambda net, x: net.last(input=net.inner(x, other=None)))


@pytest.mark.parametrize(
    ("net", "part"),
    [
        pytest.param(make_sequential(layer=LAYER, again=LAYER, last=nn.Linear(4, 2)), "layer", id="called twice"),
        pytest.param(around(lambda net, x: net.last(net.inner(x)[0]), gives_two=True), "inner", id="gives a tuple"),
        pytest.param(around(lambda net, x: net.last(net.inner(x, other=x))), "inner", id="takes two tensors"),
        pytest.param(around(lambda net, x: net.last(x)), "inner", id="never called"),
        pytest.param(NAMED, "last", id="given its input by name"),
        # what `last` gives is the tensor that the network goes on in, and gives
        pytest.param(make_sequential(a=LAYER, last=nn.Linear(4, 2), b=nn.ReLU(inplace=True)), "last", id="not the end"),
    ],
)
def test_a_part_without_one_input_and_one_output_tensor_has_no_adaptor(net, part):
    with pytest.raises(ConfigError, match=r"cannot be inferred: the module must .*; use model\.adaptor = 'rest'"):
        splice(net, [part], "linear", (4,), 2, stream(0), "odd")


def test_a_part_may_be_given_settings_by_name():
    """As torch's transformer gives its layers a mask of None."""
    assert splice(NAMED, ["inner"], "linear", (4,), 2, stream(0), "named")(torch.zeros(3, 4)).shape == (3, 2)


def test_a_users_adaptor_receives_the_output_size_of_the_part(tmp_path, in_tmp_path):
    (tmp_path / "my_adaptors.py").write_text(
        "from torch import nn\n\n\ndef deep(features, classes):\n"
        "    channels, height, width = features\n"
        "    size = channels * height * width\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, 9), nn.ReLU(), nn.Linear(9, classes))\n\n\n"
        "def wrong(features, classes):\n    return nn.Linear(3, classes)\n"
    )
    assert spliced("lenet5", "features.conv1", adaptor="my_adaptors:deep").get_submodule("adaptor.1").out_features == 9
    with pytest.raises(ConfigError, match=r"key 'model\.adaptor': 'my_adaptors:wrong' does not fit the shared part"):
        spliced("lenet5", "features.conv1", adaptor="my_adaptors:wrong")
    with pytest.raises(ConfigError, match="'liner' is no adaptor; there are 'linear'"):
        spliced("lenet5", "features", adaptor="liner")


def test_the_part_is_the_same_for_all_and_the_adaptor_each_ones_own():
    model = ModelConfig(shared="cnn1", part=("features",))
    a, b = (build_meme(model, IMAGE, outputs, stream(0), stream(own_seed)) for outputs, own_seed in ((7, 1), (10, 2)))
    equal_net = build_meme(model, IMAGE, 7, stream(0), stream(1))
    names = list_shared_tensors(network("cnn1"), ["features"], "cnn1")
    assert isinstance(a, Spliced)
    assert all(torch.equal(a.state_dict()[k], b.state_dict()[k]) for k in names)
    assert (a(torch.zeros(2, *IMAGE)).shape, b(torch.zeros(2, *IMAGE)).shape) == ((2, 7), (2, 10))
    assert all(torch.equal(v, equal_net.state_dict()[k]) for k, v in a.state_dict().items())
    other_adaptor = build_meme(model, IMAGE, 7, stream(0), stream(3))
    assert not torch.equal(a.state_dict()["adaptor.fc.weight"], other_adaptor.state_dict()["adaptor.fc.weight"])


def test_the_rest_of_the_network_may_stay_as_it_is():
    model = ModelConfig(shared="lenet5", part=("features.conv2",), adaptor="rest")
    net = build_meme(model, IMAGE, 7, stream(0), stream(1))
    assert list(net.state_dict()) == list(network("lenet5", 7).state_dict())
    assert net(torch.zeros(2, *IMAGE)).shape == (2, 7)


def test_the_first_tensor_of_another_shape_is_found():
    names = list_shared_tensors(network("mlp"), ["features"], "mlp")
    other = models.build("mlp", (1, 8, 8), 10, stream(0))
    assert find_shape_difference(network("mlp"), other, names) == "features.fc1.weight"
    assert find_shape_difference(network("mlp"), network("mlp", 7), names) is None


def test_a_part_cannot_have_the_name_of_the_adaptor():
    ours = make_sequential(adaptor=nn.Linear(4, 4), last=nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="the part beside an adaptor cannot be called 'adaptor'"):
        splice(ours, ["adaptor"], "linear", (4,), 2, stream(0), "named")
