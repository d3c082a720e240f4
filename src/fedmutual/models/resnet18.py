"""ResNet18 in its form for CIFAR: torchvision's, with a 3x3 stem of stride 1 and no max pooling after it.

He et al., Deep Residual Learning for Image Recognition, 2016, https://arxiv.org/abs/1512.03385.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from fedmutual.models.parts import halves, image, named

GROUPS = 32  # of channels, in a GroupNorm layer (Wu and He, 2018, https://arxiv.org/abs/1803.08494)


def resnet18_gn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """`resnet18` with GroupNorm in the place of BatchNorm: no example's output depends on the others of its batch."""
    return resnet18(shape, classes, partial(nn.GroupNorm, GROUPS))


def resnet18(shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Four stages of two basic blocks, 64 to 512 channels: images [B, c, H, W] of any size -> logits [B, C].

    Layers have torchvision's names, behind ``features.`` and ``classifier.``
    """
    from torchvision.models import resnet  # takes seconds to import, and only this network needs it

    channels, _, _ = image(shape)
    net = resnet.resnet18(num_classes=classes, norm_layer=norm)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision starts its convolutions
    layers = dict(net.named_children()) | {"conv1": stem}
    del layers["maxpool"], layers["fc"]
    return halves(named(**layers, flatten=nn.Flatten()), net.fc)
