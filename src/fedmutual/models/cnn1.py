"""CNN1 of FML: two small convolutions, two fully connected layers.

Shen et al., Federated Mutual Learning, 2020, https://arxiv.org/abs/2006.16765. The paper gives the layers but neither
the width of the first fully connected layer (120 here, as in LeNet5) nor the padding (1 here).
"""

from torch import nn

from fedmutual.models.parts import MaxPool, join_halves, make_sequential, parse_image_shape

HIDDEN = 120


def cnn1(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return two 3x3 convolutions of 6 and 16 channels, then 120 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the output is equal (see lenet5), and the computation is faster.

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
        fc1=nn.Linear(16 * (height // 4) * (width // 4), HIDDEN),
        relu1=nn.ReLU(),
        fc2=nn.Linear(HIDDEN, classes),
    )
    return join_halves(features, classifier)
