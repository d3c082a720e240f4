"""MLP: two hidden layers of 200 units.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017,
https://arxiv.org/abs/1602.05629, section 3 (2NN).
"""

import math

from torch import nn

from fedmutual.models.parts import join_halves, make_sequential

HIDDEN = 200


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return F-200-200-C with ReLU, for examples of any shape with F values: [B, *shape] -> logits [B, C].

    Source: McMahan et al., 2017, https://arxiv.org/abs/1602.05629, section 3 (2NN).
    """
    features = make_sequential(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(shape), HIDDEN),
        relu1=nn.ReLU(),
        fc2=nn.Linear(HIDDEN, HIDDEN),
        relu2=nn.ReLU(),
    )
    return join_halves(features, nn.Linear(HIDDEN, classes))
