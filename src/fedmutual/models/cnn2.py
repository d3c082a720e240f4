"""CNN2 of FML: three wide convolutions, one fully connected layer.

Shen et al., Federated Mutual Learning, 2020, https://arxiv.org/abs/2006.16765. The paper gives no padding: 1 here.
"""

from torch import nn

from fedmutual.models.parts import MaxPool, join_halves, make_sequential, parse_image_shape

WIDTH = 128


def cnn2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return three 3x3 convolutions of 128 channels, then C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the output is equal (see lenet5), and the computation is faster.

    Source: Shen et al., 2020, https://arxiv.org/abs/2006.16765.

    Raises:
        ValueError: the examples are not images, or the images are smaller than 8 x 8.
    """
    channels, height, width = parse_image_shape(shape, least=8)
    features = make_sequential(
        conv1=nn.Conv2d(channels, WIDTH, 3, padding=1),
        pool1=MaxPool(),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        pool2=MaxPool(),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        pool3=MaxPool(),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
    )
    return join_halves(features, nn.Linear(WIDTH * (height // 8) * (width // 8), classes))
