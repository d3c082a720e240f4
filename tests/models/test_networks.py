"""Our own networks: their sizes by hand, their functions against PyTorch's, and what they refuse."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmutual import models
from fedmutual.errors import ConfigError
from fedmutual.models.networks import MaxPool


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(name: str, shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> nn.Module:
    return models.build(name, shape, classes, rng(seed), of_pixels=name == "unet")


# Parameters by hand: a convolution k x k from a to b channels has a b k^2 + b, a fully connected layer a b + b.
#   mlp       784 200 + 200 = 157,000;  200 200 + 200 = 40,200;  200 10 + 10 = 2,010
#   lenet5    1 6 25 + 6 = 156;  6 16 25 + 16 = 2,416;  28 + 4 - 4 = 28, 14, 10, 5: 16 5 5 = 400;
#             400 120 + 120 = 48,120;  120 84 + 84 = 10,164;  84 10 + 10 = 850.    On 3 x 32 x 32 no padding: 28, ..., 5
#             again, and 3 6 25 + 6 = 456 in the first layer, 300 more.  100 classes: 84 90 + 90 = 7,650 more.
#   cnn1      3 6 9 + 6 = 168;  6 16 9 + 16 = 880;  16 8 8 = 1,024;  1024 120 + 120 = 123,000;  120 10 + 10 = 1,210
#   cnn2      3 128 9 + 128 = 3,584;  2 (128 128 9 + 128) = 295,168;  128 4 4 = 2,048;  2048 10 + 10 = 20,490
#   conv1d    3 32 5 + 32 = 512, of one channel 32 5 + 32 = 192;  32 64 5 + 64 = 10,304;  64 4 + 4 = 260
#   unet      1 16 9 + 16 = 160;  16 16 9 + 16 = 2,320;  16 32 9 + 32 = 4,640;  32 32 9 + 32 = 9,248;
#             up 32 16 4 + 16 = 2,064;  of both 32 16 9 + 16 = 4,624;  2,320;  16 3 + 3 = 51
#   resnet18  no biases in convolutions; BatchNorm of c channels 2 c.  Stem 3 64 9 + 128 = 1,856.
#             Stage 1: 4 (64 64 9 + 128) = 147,968.  Stage of c = 128, 256, 512 from c / 2: (c/2) c 9 + 3 c c 9 + (c/2) c
#             + 5 2 c = 525,568;  2,099,712;  8,393,728.  512 10 + 10 = 5,130
SIZES = [
    ("mlp", (1, 28, 28), 10, 199_210),
    ("mlp", (784,), 10, 199_210),
    ("lenet5", (1, 28, 28), 10, 61_706),
    ("lenet5", (3, 32, 32), 10, 62_006),
    ("lenet5", (3, 32, 32), 100, 69_656),
    ("lenet5-bn", (1, 28, 28), 10, 61_706 + 2 * (6 + 16)),
    ("lenet5-tanh", (1, 28, 28), 10, 61_706),
    ("cnn1", (3, 32, 32), 10, 125_258),
    ("cnn2", (3, 32, 32), 10, 319_242),
    ("conv1d", (1, 3, 50), 4, 11_076),
    ("conv1d", (50,), 4, 10_756),
    ("unet", (1, 8, 8), 3, 25_427),
    ("resnet18", (3, 32, 32), 10, 11_173_962),
]


@pytest.mark.parametrize(("name", "shape", "classes", "parameters"), SIZES)
def test_parameters(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert sum(p.numel() for p in build(name, shape, classes).parameters()) == parameters


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 13, 40), (2, 31, 33), (4, 48, 37)])
@pytest.mark.parametrize("name", ["mlp", "lenet5", "lenet5-bn", "lenet5-tanh", "cnn1", "cnn2"])
def test_any_image_that_fits(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, shape, classes=3)(torch.zeros(5, *shape)).shape == (5, 3)


@pytest.mark.parametrize("shape", [(1,), (64,), (3, 7), (2, 3, 4, 5)])
def test_an_mlp_takes_any_shape(shape: tuple[int, ...]) -> None:
    net = build("mlp", shape, classes=2)
    assert net.features.fc1.in_features == math.prod(shape)
    assert net(torch.zeros(5, *shape)).shape == (5, 2)


@pytest.mark.parametrize(
    ("name", "least"), [("lenet5", 12), ("lenet5-bn", 12), ("lenet5-tanh", 12), ("cnn1", 4), ("cnn2", 8)]
)
def test_the_least_image(name: str, least: int) -> None:
    assert build(name, (1, least, least + 1))(torch.zeros(2, 1, least, least + 1)).shape == (2, 10)
    small = (1, least + 1, least - 1)
    with pytest.raises(ConfigError) as problem:
        models.build(name, small, 10, rng(), "clients.3.model.personal")
    assert f"{least} x {least}" in models.NAMES[name]
    assert str(problem.value) == (
        f"key 'clients.3.model.personal': network {name!r} takes images of at least {least} x {least} pixels, but "
        f"these have {least + 1} x {least - 1}; choose another network, or larger images with the key 'data.size'"
    )


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        (n, (64,), "takes images (channels, height, width), not examples of")
        for n in models.NAMES
        if n not in ("mlp", "conv1d")
    ]
    + [
        ("unet", (1, 7, 8), "takes images with even sides, but these have 7 x 8; crop or pad"),
        ("conv1d", (3, 8, 8), "takes series, as arrays"),
        ("conv1d", (1, 2, 1), "takes series of at least 2 steps"),
        ("conv1d", (1, 2, 5, 5), "takes series, as arrays"),
    ],
)
def test_inputs_of_another_form_are_refused(name: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"key 'model.shared': network {name!r} {sentence}")):
        build(name, shape)


# The papers' order, ReLU and then pooling, written out in PyTorch's functions.


def pooled(x: Tensor, w: dict[str, Tensor], layer: str, padding: int) -> Tensor:
    z = F.conv2d(x, w[f"features.{layer}.weight"], w[f"features.{layer}.bias"], padding=padding)
    return F.max_pool2d(F.relu(z), 2)


def linear(x: Tensor, w: dict[str, Tensor], layer: str) -> Tensor:
    return F.linear(x, w[f"{layer}.weight"], w[f"{layer}.bias"])


def mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    h = F.relu(linear(x.flatten(1), w, "features.fc1"))
    return linear(F.relu(linear(h, w, "features.fc2")), w, "classifier")


def lenet5(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    h = pooled(pooled(x, w, "conv1", 2 if x.shape[-1] == 28 else 0), w, "conv2", 0).flatten(1)
    h = F.relu(linear(F.relu(linear(h, w, "classifier.fc1")), w, "classifier.fc2"))
    return linear(h, w, "classifier.fc3")


def cnn1(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    h = pooled(pooled(x, w, "conv1", 1), w, "conv2", 1).flatten(1)
    return linear(F.relu(linear(h, w, "classifier.fc1")), w, "classifier.fc2")


def cnn2(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return linear(pooled(pooled(pooled(x, w, "conv1", 1), w, "conv2", 1), w, "conv3", 1).flatten(1), w, "classifier")


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("paper", [mlp, lenet5, cnn1, cnn2])
def test_pooling_before_relu_is_the_function_of_the_paper(paper, shape: tuple[int, ...]) -> None:
    net = build(paper.__name__, shape).double()
    x = torch.randn(3, *shape, generator=rng(1), dtype=torch.float64)
    weights = dict(net.named_parameters())
    ours, theirs = net(x), paper(x, weights)
    assert torch.equal(ours, theirs)
    up = torch.randn(3, 10, generator=rng(2), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((z * up).sum(), list(weights.values())) for z in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 6, 28, 28), (3, 1, 5, 4), (1, 16, 2, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_max_pooling_without_gradients_has_the_values_of_torchs(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    x = torch.randn(shape, generator=rng(0)).relu().to(memory_format=layout)  # ReLU: with equal maxima
    x[0, 0, 0, 0], x[0, 0, 1, 2] = math.nan, math.inf
    with torch.no_grad():
        ours = MaxPool()(x)
    torch.testing.assert_close(ours, F.max_pool2d(x, 2), rtol=0, atol=0, equal_nan=True)
    assert ours.is_contiguous(memory_format=layout)


def test_an_exported_network_has_torchs_max_pooling() -> None:
    with torch.no_grad():
        program = torch.export.export(build("lenet5", (1, 28, 28)).eval(), (torch.zeros(2, 1, 28, 28),))
    assert sum("max_pool2d" in str(node.target) for node in program.graph.nodes) == 2


@pytest.mark.parametrize("name", ["lenet5", "lenet5-bn", "cnn1", "cnn2", "unet"])
def test_logits_with_and_without_gradients_are_equal(name: str) -> None:
    net, x = build(name, (1, 28, 28)).eval(), torch.randn(70, 1, 28, 28, generator=rng(1))
    for layout in (torch.contiguous_format, torch.channels_last):
        net, x = net.to(memory_format=layout), x.to(memory_format=layout)
        with torch.no_grad():
            logits = net(x)
        assert torch.equal(logits, net(x))


def normalise(z: Tensor) -> Tensor:
    centred = z - z.mean((0, 2, 3), keepdim=True)
    return centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()  # scale 1 and shift 0 at the start


@pytest.mark.parametrize(
    ("name", "block", "unit", "tolerance"),
    [
        ("lenet5-bn", lambda z: split(normalise(z).relu()).amax((-3, -1)), torch.relu, 1e-9),
        ("lenet5-tanh", lambda z: split(z.tanh()).mean((-3, -1)), torch.tanh, 1e-12),
    ],
)
def test_forms_of_lenet5(name: str, block, unit, tolerance: float) -> None:
    net, x = build(name, (1, 28, 28)).double(), torch.randn(3, 1, 28, 28, generator=rng(1), dtype=torch.float64)
    w, h = dict(net.named_parameters()), x
    for layer, padding in (("conv1", 2), ("conv2", 0)):
        h = block(F.conv2d(h, w[f"features.{layer}.weight"], w[f"features.{layer}.bias"], padding=padding))
    h = unit(linear(unit(linear(h.flatten(1), w, "classifier.fc1")), w, "classifier.fc2"))
    torch.testing.assert_close(net(x), linear(h, w, "classifier.fc3"), rtol=tolerance, atol=tolerance)


def split(z: Tensor) -> Tensor:
    """The squares of 2 x 2 pixels: [B, C, H, W] -> [B, C, H / 2, 2, W / 2, 2]."""
    return z.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))


def test_resnet18_keeps_the_resolution_that_the_form_for_imagenet_gives_away() -> None:
    net = build("resnet18", (1, 32, 32))
    for size in ((1, 1), (8, 8), (13, 40)):
        assert net(torch.zeros(3, 1, *size)).shape == (3, 10)
    x = torch.zeros(2, 1, 32, 32)
    sides = {}
    for name, layer in net.features.named_children():
        x = layer(x)
        sides[name] = tuple(x.shape[1:])
    assert sides["conv1"] == (64, 32, 32)
    assert [sides[f"layer{i}"] for i in (1, 2, 3, 4)] == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
    assert sides["flatten"] == (512,)
    assert net.features.conv1.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)  # He, fan out


@pytest.mark.parametrize("name", models.NAMES)
def test_weights_come_in_two_named_halves(name: str) -> None:
    net = build(name, (1, 28, 28))
    assert {key.split(".")[0] for key in net.state_dict()} == {"features", "classifier"}
    rank = 4 if name == "unet" else 2  # of 2, a linear adaptor of one's own fits behind it
    assert net.features(torch.zeros(2, 1, 28, 28)).dim() == rank
    assert net.training


def test_a_network_for_segmentation_joins_fine_and_coarse_features():
    net = build("unet", (2, 8, 6), classes=3)
    x = torch.randn(4, 2, 8, 6, generator=rng())

    def convolve_twice(x, block):
        return F.relu(block.conv2(F.relu(block.conv1(x))))

    f = net.features
    fine = convolve_twice(x, f.down)
    coarse = f.up(convolve_twice(F.max_pool2d(fine, 2), f.middle))
    expected = net.classifier.pixel(convolve_twice(torch.cat([fine, coarse], 1), f.join))
    torch.testing.assert_close(net(x), expected)
    assert expected.shape == (4, 3, 8, 6)


@pytest.mark.parametrize(
    ("name", "of_pixels", "sentence"),
    [
        ("unet", False, "a network with logits of each pixel is for training.task = 'segmentation'"),
        ("lenet5", True, "a segmentation needs a network with logits of each pixel, for example 'unet'"),
    ],
)
def test_a_network_and_a_task_of_pixels_need_each_other(name, of_pixels, sentence):
    with pytest.raises(ConfigError, match=sentence):
        models.build(name, (1, 28, 28), 3, rng(), of_pixels=of_pixels)
    assert models.build(name, (1, 28, 28), 3, rng(), of_pixels=None)


def test_a_network_for_series_convolves_along_time():
    net = build("conv1d", (1, 3, 50), classes=2)
    x = torch.randn(4, 1, 3, 50, generator=rng())
    f, c = net.features, net.classifier
    hidden = F.max_pool1d(F.relu(F.conv1d(x[:, 0], f.conv1.weight, f.conv1.bias, padding=2)), 2)
    mean = F.relu(F.conv1d(hidden, f.conv2.weight, f.conv2.bias, padding=2)).mean(-1)
    torch.testing.assert_close(net(x), F.linear(mean, c.fc.weight, c.fc.bias))
    assert net(x[..., :20]).shape == (4, 2)
    assert torch.equal(build("conv1d", (3, 50), classes=2)(x[:, 0]), net(x))
