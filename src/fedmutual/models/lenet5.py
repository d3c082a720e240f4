"""LeNet5, with ReLU and max pooling as in later use, or with tanh and average pooling.

LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998, https://doi.org/10.1109/5.726791, Figure 2.
There pooling has weights and comes before a scaled tanh, the second convolution sees some of the channels, and the last
layer is of radial basis functions: neither network has these.
"""

from collections.abc import Callable

from torch import nn

from fedmutual.models.parts import halves, image, named

ORIGINAL = 32  # the side that LeNet5 was drawn for; smaller images (MNIST: 28) are padded by 2, which makes 28 into 32


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions of 6 and 16 channels, then 120, 84 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the same function, because ReLU is monotone, with a quarter of the ReLUs.

    Raises:
        ValueError: images of less than 12 x 12 (12 + 4 - 4, halved, - 4, halved, leaves 1).
    """
    return _lenet5(shape, classes, "relu", lambda n: {f"pool{n}": nn.MaxPool2d(2), f"relu{n}": nn.ReLU()})


def lenet5_tanh(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same with tanh, and then the mean of 2 x 2.

    Raises:
        ValueError: as `lenet5`.
    """
    return _lenet5(shape, classes, "tanh", lambda n: {f"tanh{n}": nn.Tanh(), f"pool{n}": nn.AvgPool2d(2)})


_UNITS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def _lenet5(shape: tuple[int, ...], classes: int, unit: str, pooled: Callable[[int], dict[str, nn.Module]]) -> nn.Module:
    """unit: of the fully connected layers; pooled: the layers behind the n-th convolution."""
    channels, height, width = image(shape, least=12)
    padding = 2 if min(height, width) < ORIGINAL else 0
    height, width = ((((side + 2 * padding - 4) // 2) - 4) // 2 for side in (height, width))
    features = named(
        conv1=nn.Conv2d(channels, 6, 5, padding=padding),
        **pooled(1),
        conv2=nn.Conv2d(6, 16, 5),
        **pooled(2),
        flatten=nn.Flatten(),
    )
    classifier = named(
        fc1=nn.Linear(16 * height * width, 120),
        **{f"{unit}1": _UNITS[unit]()},
        fc2=nn.Linear(120, 84),
        **{f"{unit}2": _UNITS[unit]()},
        fc3=nn.Linear(84, classes),
    )
    return halves(features, classifier)
