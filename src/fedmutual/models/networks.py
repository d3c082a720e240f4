"""fedmutual's own networks: a function for each name of `fedmutual list models`, with "_" for "-"; and their parts."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

NAMES: dict[str, str] = {
    "mlp": "two hidden layers of 200 units; any shape",
    "lenet5": "two 5x5 convolutions (6, 16), then 120 and 84 units; images from 12 x 12",
    "lenet5-bn": "lenet5 with BatchNorm after each convolution, for example for fedbn; images from 12 x 12",
    "lenet5-tanh": "lenet5 with tanh and average pooling, closer to the network of 1998; images from 12 x 12",
    "cnn1": "two 3x3 convolutions (6, 16), then 120 units; images from 4 x 4",
    "cnn2": "three 3x3 convolutions of 128 channels, one fully connected layer; images from 8 x 8",
    "conv1d": "two convolutions of length 5 along time (32, 64 channels); series [channels, time]",
    "resnet18": "residual network in the form for CIFAR (3x3 stem, no max pooling); images of any size; "
    "torchvision's own is torchvision:resnet18",
    "resnet18-gn": "resnet18 with GroupNorm instead of BatchNorm, for privacy.nets",
    "unet": "U-Net of two levels (16, 32 channels) for training.task = 'segmentation'; images with even sides",
}
"""fedmutual's networks, with descriptions. torchvision's networks keep their names; users add "module:factory"."""

_ORIGINAL = 32  # image side in the paper of LeNet5; smaller images are padded by 2, so that 28 (MNIST) becomes 32
_SERIES_WIDTHS = (32, 64)  # channels of the convolutions of `conv1d`
_LEAST_STEPS = 2  # steps in time, which the pooling halves
_GROUPS = 32  # of channels, in a GroupNorm layer (Wu and He, 2018, https://arxiv.org/abs/1803.08494)
_UNET_WIDTHS = (16, 32)  # channels at full and at half size


def parse_image_shape(shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """Return the shape of one example as (channels, height, width).

    Raises:
        ValueError: no image, or an image below `least` x `least`. The message continues a sentence that begins with the
            network.
    """
    if len(shape) != 3:
        raise ValueError(f"takes images (channels, height, width), not examples of shape {shape}; 'mlp' takes any shape")
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(describe_too_small(shape, least))
    return channels, height, width


def describe_too_small(shape: tuple[int, ...], least: int) -> str:
    """Return the error text for images (channels, height, width) below a network's least side, with the fix."""
    fix = "choose another network, or larger images with the key 'data.size'"
    return f"takes images of at least {least} x {least} pixels, but these have {shape[1]} x {shape[2]}; {fix}"


class MaxPool(nn.MaxPool2d):
    """Max pooling of 2 x 2 pixels: [B, C, H, W] -> [B, C, H // 2, W // 2].

    Without gradients on a CPU, the layer computes the maximum of even and odd rows, then of even and odd columns. The values
    are those of `nn.MaxPool2d`, in a seventh of the time for six channels. An exported program has torch's own pooling.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled images [..., height // 2, width // 2] of x [..., height, width]."""
        if torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_exporting():
            pooled: Tensor = super().forward(x)
            return pooled
        height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
        rows = torch.maximum(x[..., 0:height:2, :width], x[..., 1:height:2, :width])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])


def make_sequential(**layers: nn.Module) -> nn.Sequential:
    """Return layers in a row; the keywords name the layers, and so the weights in files and messages."""
    return nn.Sequential(OrderedDict(layers))


def _join_halves(features: nn.Module, classifier: nn.Module) -> nn.Module:
    """Return a network of ``features.`` [B, ...] -> [B, F] and ``classifier.`` [B, F] -> logits [B, C]."""
    return make_sequential(features=features, classifier=classifier)


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return F-200-200-C with ReLU, for examples of any shape with F values: [B, *shape] -> logits [B, C].

    Source: McMahan et al., 2017, https://arxiv.org/abs/1602.05629, section 3 (2NN).
    """
    features = make_sequential(
        flatten=nn.Flatten(), fc1=nn.Linear(math.prod(shape), 200), relu1=nn.ReLU(), fc2=nn.Linear(200, 200), relu2=nn.ReLU()
    )
    return _join_halves(features, nn.Linear(200, classes))


Block = Callable[[int, int], dict[str, nn.Module]]
"""The layers after a convolution, from its number (from 1) and its channels; they halve the sides."""


def _pool_relu(n: int, channels: int) -> dict[str, nn.Module]:
    return {f"pool{n}": MaxPool(), f"relu{n}": nn.ReLU()}


def _norm_pool_relu(n: int, channels: int) -> dict[str, nn.Module]:
    return {f"norm{n}": nn.BatchNorm2d(channels), **_pool_relu(n, channels)}


def _tanh_pool(n: int, channels: int) -> dict[str, nn.Module]:
    return {f"tanh{n}": nn.Tanh(), f"pool{n}": nn.AvgPool2d(2)}


def _make_convolutional(
    shape: tuple[int, int, int],
    widths: tuple[int, ...],
    units: tuple[int, ...],
    kernel: int = 3,
    paddings: tuple[int, ...] = (1, 1, 1),
    block: Block = _pool_relu,
    unit: type[nn.Module] = nn.ReLU,
) -> nn.Module:
    """Return square convolutions, each with a block, then fully connected layers; the last of the `units` are the classes.

    unit: the activation between fully connected layers.
    """
    channels, *sides = shape
    features: dict[str, nn.Module] = {}
    for n, (width, padding) in enumerate(zip(widths, paddings, strict=False), 1):
        features |= {f"conv{n}": nn.Conv2d(channels, width, kernel, padding=padding), **block(n, width)}
        channels, sides = width, [(side + 2 * padding - kernel + 1) // 2 for side in sides]
    sizes = channels * math.prod(sides), *units
    layers = [nn.Linear(*pair) for pair in zip(sizes, units, strict=False)]
    classifier: dict[str, nn.Module] = {}
    for n, layer in enumerate(layers[:-1], 1):
        classifier |= {f"fc{n}": layer, f"{unit.__name__.lower()}{n}": unit()}
    last = layers[-1] if len(layers) == 1 else make_sequential(**classifier, **{f"fc{len(layers)}": layers[-1]})
    return _join_halves(make_sequential(**features, flatten=nn.Flatten()), last)


def lenet5(shape: tuple[int, ...], classes: int, block: Block = _pool_relu, unit: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Return two 5x5 convolutions of 6 and 16 channels, then 120, 84 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the output is equal, because ReLU is monotone, with a quarter of the ReLUs. In the paper,
    pooling has weights and comes before a scaled tanh, the second convolution uses a part of the channels, and the last
    layer has radial basis functions. No network here has these.

    Source: LeCun et al., 1998, https://doi.org/10.1109/5.726791, Figure 2.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 12 x 12.
    """
    image = parse_image_shape(shape, least=12)
    paddings = 2 if min(image[1:]) < _ORIGINAL else 0, 0
    return _make_convolutional(image, (6, 16), (120, 84, classes), 5, paddings, block, unit)


def lenet5_bn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return `lenet5` with BatchNorm after each convolution: images [B, c, H, W] -> logits [B, C]. Raises as `lenet5`."""
    return lenet5(shape, classes, _norm_pool_relu)


def lenet5_tanh(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return `lenet5` with tanh, then average pooling of 2 x 2: images [B, c, H, W] -> logits [B, C]. Raises as `lenet5`."""
    return lenet5(shape, classes, _tanh_pool, nn.Tanh)


def cnn1(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return two 3x3 convolutions of 6 and 16 channels, then 120 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU, as in `lenet5`. The paper of FML gives neither the width of the first fully connected layer
    (120 here, as in LeNet5) nor the padding (1 here).

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 4 x 4.
    """
    return _make_convolutional(parse_image_shape(shape, least=4), (6, 16), (120, classes))


def cnn2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return three 3x3 convolutions of 128 channels, then C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU, as in `lenet5`. The paper of FML gives no padding: 1 here.

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 8 x 8.
    """
    return _make_convolutional(parse_image_shape(shape, least=8), (128, 128, 128), (classes,))


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
    return _join_halves(features, make_sequential(fc=nn.Linear(second, classes)))


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
    return _join_halves(make_sequential(**layers, flatten=nn.Flatten()), net.fc)


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
    return _join_halves(UNetFeatures(channels), make_sequential(pixel=nn.Conv2d(_UNET_WIDTHS[0], classes, 1)))


def _convolve_twice(channels: int, width: int) -> nn.Sequential:
    return make_sequential(
        conv1=nn.Conv2d(channels, width, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(width, width, 3, padding=1),
        relu2=nn.ReLU(),
    )
