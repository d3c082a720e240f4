"""LeNet5, with ReLU and max pooling as in later use, with BatchNorm, or with tanh and average pooling.

LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998, https://doi.org/10.1109/5.726791, Figure 2.
In the paper, pooling has weights and comes before a scaled tanh, the second convolution uses a part of the channels, and
the last layer has radial basis functions. No network here has these.
"""

from collections.abc import Callable

from torch import nn

from fedmutual.models.parts import MaxPool, join_halves, make_sequential, parse_image_shape

CHANNELS = 6, 16  # of the two convolutions
ORIGINAL = 32  # image side in the paper; smaller images are padded by 2, so that 28 (MNIST) becomes 32


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return two 5x5 convolutions of 6 and 16 channels, then 120, 84 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the output is equal, because ReLU is monotone, with a quarter of the ReLUs.

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
        return {f"norm{n}": nn.BatchNorm2d(CHANNELS[n - 1]), f"pool{n}": MaxPool(), f"relu{n}": nn.ReLU()}

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
    padding = 2 if min(height, width) < ORIGINAL else 0
    height, width = ((((side + 2 * padding - 4) // 2) - 4) // 2 for side in (height, width))
    features = make_sequential(
        conv1=nn.Conv2d(channels, CHANNELS[0], 5, padding=padding),
        **make_pool(1),
        conv2=nn.Conv2d(*CHANNELS, 5),
        **make_pool(2),
        flatten=nn.Flatten(),
    )
    classifier = make_sequential(
        fc1=nn.Linear(CHANNELS[1] * height * width, 120),
        **{f"{unit}1": _UNITS[unit]()},
        fc2=nn.Linear(120, 84),
        **{f"{unit}2": _UNITS[unit]()},
        fc3=nn.Linear(84, classes),
    )
    return join_halves(features, classifier)
