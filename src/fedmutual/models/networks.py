"""fedmutual's own networks: a function for each name of `fedmutual list models`, with "_" for "-"."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedmutual.models.parts import MaxPool, join_halves, make_sequential, parse_image_shape

_CHANNELS = 6, 16  # of the two convolutions of LeNet5
_ORIGINAL = 32  # image side in the paper; smaller images are padded by 2, so that 28 (MNIST) becomes 32
_SERIES_WIDTHS = (32, 64)  # channels of the convolutions of `conv1d`
_LEAST_STEPS = 2  # steps in time, which the pooling halves
_GROUPS = 32  # of channels, in a GroupNorm layer (Wu and He, 2018, https://arxiv.org/abs/1803.08494)
_UNET_WIDTHS = (16, 32)  # channels at full and at half size


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return F-200-200-C with ReLU, for examples of any shape with F values: [B, *shape] -> logits [B, C].

    Source: McMahan et al., 2017, https://arxiv.org/abs/1602.05629, section 3 (2NN).
    """
    features = make_sequential(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(shape), 200),
        relu1=nn.ReLU(),
        fc2=nn.Linear(200, 200),
        relu2=nn.ReLU(),
    )
    return join_halves(features, nn.Linear(200, classes))


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return two 5x5 convolutions of 6 and 16 channels, then 120, 84 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the output is equal, because ReLU is monotone, with a quarter of the ReLUs. In the paper,
    pooling has weights and comes before a scaled tanh, the second convolution uses a part of the channels, and the last
    layer has radial basis functions. No network here has these.

    Source: LeCun et al., 1998, https://doi.org/10.1109/5.726791, Figure 2.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 12 x 12.
    """
    return _make_lenet5(shape, classes, "relu", lambda n: {f"pool{n}": MaxPool(), f"relu{n}": nn.ReLU()})


def lenet5_bn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return `lenet5` with BatchNorm after each convolution: images [B, c, H, W] -> logits [B, C].

    Raises:
        ValueError: the examples are not images, or the images are smaller than 12 x 12.
    """

    def make_pool(n: int) -> dict[str, nn.Module]:
        return {f"norm{n}": nn.BatchNorm2d(_CHANNELS[n - 1]), f"pool{n}": MaxPool(), f"relu{n}": nn.ReLU()}

    return _make_lenet5(shape, classes, "relu", make_pool)


def lenet5_tanh(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return LeNet5 with tanh, then average pooling of 2 x 2: images [B, c, H, W] -> logits [B, C].

    Source: LeCun et al., 1998, https://doi.org/10.1109/5.726791, Figure 2.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 12 x 12.
    """
    return _make_lenet5(shape, classes, "tanh", lambda n: {f"tanh{n}": nn.Tanh(), f"pool{n}": nn.AvgPool2d(2)})


_UNITS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def _make_lenet5(
    shape: tuple[int, ...], classes: int, unit: str, make_pool: Callable[[int], dict[str, nn.Module]]
) -> nn.Module:
    """Return LeNet5.

    unit: the activation of the fully connected layers. make_pool: returns the layers behind the n-th convolution.
    """
    channels, height, width = parse_image_shape(shape, least=12)
    padding = 2 if min(height, width) < _ORIGINAL else 0
    height, width = ((((side + 2 * padding - 4) // 2) - 4) // 2 for side in (height, width))
    features = make_sequential(
        conv1=nn.Conv2d(channels, _CHANNELS[0], 5, padding=padding),
        **make_pool(1),
        conv2=nn.Conv2d(*_CHANNELS, 5),
        **make_pool(2),
        flatten=nn.Flatten(),
    )
    classifier = make_sequential(
        fc1=nn.Linear(_CHANNELS[1] * height * width, 120),
        **{f"{unit}1": _UNITS[unit]()},
        fc2=nn.Linear(120, 84),
        **{f"{unit}2": _UNITS[unit]()},
        fc3=nn.Linear(84, classes),
    )
    return join_halves(features, classifier)


def cnn1(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return two 3x3 convolutions of 6 and 16 channels, then 120 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU, as in `lenet5`. The paper of FML gives neither the width of the first fully connected layer
    (120 here, as in LeNet5) nor the padding (1 here).

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 4 x 4.
    """
    channels, height, width = parse_image_shape(shape, least=4)
    features = make_sequential(
        conv1=nn.Conv2d(channels, 6, 3, padding=1),
        pool1=MaxPool(),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(6, 16, 3, padding=1),
        pool2=MaxPool(),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
    )
    classifier = make_sequential(
        fc1=nn.Linear(16 * (height // 4) * (width // 4), 120),
        relu1=nn.ReLU(),
        fc2=nn.Linear(120, classes),
    )
    return join_halves(features, classifier)


def cnn2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return three 3x3 convolutions of 128 channels, then C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU, as in `lenet5`. The paper of FML gives no padding: 1 here.

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 8 x 8.
    """
    channels, height, width = parse_image_shape(shape, least=8)
    features = make_sequential(
        conv1=nn.Conv2d(channels, 128, 3, padding=1),
        pool1=MaxPool(),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(128, 128, 3, padding=1),
        pool2=MaxPool(),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(128, 128, 3, padding=1),
        pool3=MaxPool(),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
    )
    return join_halves(features, nn.Linear(128 * (height // 8) * (width // 8), classes))


def conv1d(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return convolutions of length 5 with 32 and 64 channels and one linear layer: series -> logits [B, C].

    Arrays [examples, channels, time] are examples of the shape (1, channels, time), or (channels, time) beside a user's own
    network that takes this shape; rows of a table (time,) are series of one channel. The number of parameters does not
    depend on the length of the series.

    Source: a smaller form of the network of Wang et al., 2017, https://arxiv.org/abs/1611.06455, without BatchNorm.

    Raises:
        ValueError: the examples are no series, or shorter than two steps. The message continues a sentence that begins with
            the network.
    """
    if len(shape) not in (1, 2, 3) or (len(shape) == 3 and shape[0] != 1):
        raise ValueError(
            f"takes series, as arrays [examples, channels, time] or [examples, time], not examples of shape {shape}"
        )
    if shape[-1] < _LEAST_STEPS:
        raise ValueError(f"takes series of at least {_LEAST_STEPS} steps, but these have {shape[-1]}")
    first, second = _SERIES_WIDTHS
    layouts = {1: nn.Unflatten(1, (1, shape[0])), 2: nn.Identity(), 3: nn.Flatten(1, 2)}
    features = make_sequential(
        series=layouts[len(shape)],
        conv1=nn.Conv1d(1 if len(shape) == 1 else shape[-2], first, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool1d(2),
        conv2=nn.Conv1d(first, second, 5, padding=2),
        relu2=nn.ReLU(),
        mean=nn.AdaptiveAvgPool1d(1),
        flatten=nn.Flatten(),
    )
    return join_halves(features, make_sequential(fc=nn.Linear(second, classes)))


def resnet18_gn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return `resnet18` with GroupNorm instead of BatchNorm: images [B, c, H, W] -> logits [B, C].

    No example's output depends on the other examples of its batch.

    Source of GroupNorm: Wu and He, 2018, https://arxiv.org/abs/1803.08494.

    Raises:
        ValueError: the examples are not images.
    """
    return resnet18(shape, classes, partial(nn.GroupNorm, _GROUPS))


def resnet18(shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Return four stages of two basic blocks, 64 to 512 channels: images [B, c, H, W] of any size -> logits [B, C].

    The form for CIFAR: torchvision's network with a 3x3 stem of stride 1 and without max pooling. Layers keep torchvision's
    names, below ``features.`` and ``classifier.``

    Source: He et al., 2016, https://arxiv.org/abs/1512.03385.

    Raises:
        ValueError: the examples are not images.
    """
    from torchvision.models import resnet  # takes seconds to import; only this network needs it

    channels, _, _ = parse_image_shape(shape)
    net = resnet.resnet18(num_classes=classes, norm_layer=norm)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # torchvision's initialisation of convolutions
    layers = dict(net.named_children()) | {"conv1": stem}
    del layers["maxpool"], layers["fc"]
    return join_halves(make_sequential(**layers, flatten=nn.Flatten()), net.fc)


class UNetFeatures(nn.Module):
    """Images [B, channels, H, W] -> features [B, 16, H, W]: half the size, back, and joined with the features before."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide, deep = _UNET_WIDTHS
        self.down = _convolve_twice(channels, wide)
        self.pool = MaxPool()
        self.middle = _convolve_twice(wide, deep)
        self.up = nn.ConvTranspose2d(deep, wide, 2, stride=2)
        self.join = _convolve_twice(2 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, 16, H, W]."""
        before = self.down(x)
        joined: Tensor = self.join(torch.cat([before, self.up(self.middle(self.pool(before)))], 1))
        return joined


def unet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a U-Net of two levels with 16 and 32 channels: images [B, channels, H, W] -> logits [B, classes, H, W].

    Convolutions are padded, and there is no BatchNorm.

    Source: a smaller form of the network, with five levels, of Ronneberger et al., 2015, https://arxiv.org/abs/1505.04597.

    Raises:
        ValueError: the examples are no images, or a side is odd. The message continues a sentence that begins with the
            network.
    """
    channels, height, width = parse_image_shape(shape, 2)
    if height % 2 or width % 2:
        raise ValueError(f"takes images with even sides, but these have {height} x {width}; crop or pad images and masks")
    return join_halves(UNetFeatures(channels), make_sequential(pixel=nn.Conv2d(_UNET_WIDTHS[0], classes, 1)))


def _convolve_twice(channels: int, width: int) -> nn.Sequential:
    return make_sequential(
        conv1=nn.Conv2d(channels, width, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(width, width, 3, padding=1),
        relu2=nn.ReLU(),
    )
