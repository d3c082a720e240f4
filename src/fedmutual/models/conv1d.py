"""A network for series: two convolutions along time and global average pooling.

It is a smaller form of the fully convolutional network of Wang et al., Time Series Classification from Scratch with Deep
Neural Networks, 2017, https://arxiv.org/abs/1611.06455, without BatchNorm.
"""

from torch import nn

from fedmutual.models.parts import join_halves, make_sequential

WIDTHS = (32, 64)  # channels of the convolutions
_LEAST = 2  # steps in time, which the pooling halves


def conv1d(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return convolutions of length 5 with 32 and 64 channels and one linear layer: series -> logits [B, C].

    Arrays [examples, channels, time] are examples of the shape (1, channels, time), or (channels, time) beside a user's own
    network that takes this shape; rows of a table (time,) are series of one channel. The number of parameters does not
    depend on the length of the series.

    Source: a smaller form of the network of Wang et al., 2017, https://arxiv.org/abs/1611.06455.

    Raises:
        ValueError: the examples are no series, or shorter than two steps. The message continues a sentence that begins with
            the network.
    """
    if len(shape) not in (1, 2, 3) or (len(shape) == 3 and shape[0] != 1):
        raise ValueError(
            f"takes series, as arrays [examples, channels, time] or [examples, time], not examples of shape {shape}"
        )
    if shape[-1] < _LEAST:
        raise ValueError(f"takes series of at least {_LEAST} steps, but these have {shape[-1]}")
    first, second = WIDTHS
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
