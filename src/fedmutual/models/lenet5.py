"""LeNet5, with ReLU and max pooling as in later use.

LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998, https://doi.org/10.1109/5.726791, Figure 2.
"""

from torch import nn

from fedmutual.models.parts import halves, image, named

ORIGINAL = 32  # the side that LeNet5 was drawn for; smaller images (MNIST: 28) are padded by 2, which makes 28 into 32


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions of 6 and 16 channels, then 120, 84 and C units: images [B, c, H, W] -> logits [B, C].

    Pooling comes before ReLU: the same function, because ReLU is monotone, with a quarter of the ReLUs.

    Raises:
        ValueError: images of less than 12 x 12 (12 + 4 - 4, halved, - 4, halved, leaves 1).
    """
    channels, height, width = image(shape, least=12)
    padding = 2 if min(height, width) < ORIGINAL else 0
    height, width = ((((side + 2 * padding - 4) // 2) - 4) // 2 for side in (height, width))
    features = named(
        conv1=nn.Conv2d(channels, 6, 5, padding=padding),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(6, 16, 5),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
    )
    classifier = named(
        fc1=nn.Linear(16 * height * width, 120),
        relu1=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu2=nn.ReLU(),
        fc3=nn.Linear(84, classes),
    )
    return halves(features, classifier)
