"""CNN2 of FML: three wide convolutions, one fully connected layer.

Shen et al., Federated Mutual Learning, 2020, https://arxiv.org/abs/2006.16765. The paper gives no padding: 1 here.
"""

from torch import nn

from fedmutual.models.parts import halves, image, named

WIDTH = 128


def cnn2(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three 3x3 convolutions of 128 channels, then C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the same function (see lenet5), faster.

    Raises:
        ValueError: images of less than 8 x 8.
    """
    channels, height, width = image(shape, least=8)
    features = named(
        conv1=nn.Conv2d(channels, WIDTH, 3, padding=1),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        pool3=nn.MaxPool2d(2),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
    )
    return halves(features, nn.Linear(WIDTH * (height // 8) * (width // 8), classes))
