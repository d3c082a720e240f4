"""ResNet18 in the form for CIFAR: torchvision's network with a 3x3 stem of stride 1 and without max pooling.

He et al., Deep Residual Learning for Image Recognition, 2016, https://arxiv.org/abs/1512.03385.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from fedmutual.models.parts import join_halves, make_sequential, parse_image_shape

GROUPS = 32  # of channels, in a GroupNorm layer (Wu and He, 2018, https://arxiv.org/abs/1803.08494)


def resnet18_gn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return `resnet18` with GroupNorm instead of BatchNorm: images [B, c, H, W] -> logits [B, C].

    No example's output depends on the other examples of its batch.

    Source of GroupNorm: Wu and He, 2018, https://arxiv.org/abs/1803.08494.

    Raises:
        ValueError: the examples are not images.
    """
    return resnet18(shape, classes, partial(nn.GroupNorm, GROUPS))


def resnet18(shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Return four stages of two basic blocks, 64 to 512 channels: images [B, c, H, W] of any size -> logits [B, C].

    Layers keep torchvision's names, below ``features.`` and ``classifier.``

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
