"""ResNet18 in its form for CIFAR: torchvision's, with a 3x3 stem of stride 1 and no max pooling after it.

He et al., Deep Residual Learning for Image Recognition, 2016, https://arxiv.org/abs/1512.03385.
"""

from torch import nn

from fedmutual.models.parts import halves, image, named


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Four stages of two basic blocks, 64 to 512 channels: images [B, c, H, W] of any size -> logits [B, C].

    Layers have torchvision's names, behind ``features.`` and ``classifier.``
    """
    from torchvision.models import resnet  # takes seconds to import, and only this network needs it

    channels, _, _ = image(shape)
    net = resnet.resnet18(num_classes=classes)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision starts its convolutions
    layers = dict(net.named_children()) | {"conv1": stem}
    del layers["maxpool"], layers["fc"]
    return halves(named(**layers, flatten=nn.Flatten()), net.fc)
