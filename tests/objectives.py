"""Write participants that differ in data, model and objective into a folder, for tests of what they may share."""

from pathlib import Path

CODE = '''
"""A network, a data set and a task of one's own."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Wide(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        size = torch.Size(shape).numel()
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, x):
        return self.hidden(x)


def ten(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 10))


def pick(first, last, classes):
    """Rows first to last of the digits below `classes`, as images [n, 8, 8] of 0 to 1."""
    found = load_digits()
    kept = [i for i in range(first, last) if found.target[i] < classes]
    return (found.images[kept] / 16).astype("float32"), found.target[kept]


def north():
    x, y = pick(0, 300, 10)
    return {"x": x, "y": y}


def south():
    x, y = pick(300, 600, 10)
    return {"x": x, "y": y}


def seven():
    x, y = pick(600, 900, 7)
    return {"x": x, "y": y}


def brightness():
    x, _ = pick(900, 1200, 10)
    return {"x": x, "y": 10 * x.mean((1, 2))}


def marks():
    """Three labels of a digit: even, above four, and with more ink than the mean."""
    x, y = pick(1200, 1500, 10)
    ink = x.mean((1, 2))
    return {"x": x, "y": np.stack([y % 2 == 0, y > 4, ink > ink.mean()], 1), "classes": ["even", "high", "dark"]}


@dataclass(frozen=True)
class Absolute:
    """Regression by the mean absolute error."""

    tells: tuple = ("examples", "mae")
    outputs: int = 1

    def fit(self, output, target):
        return F.l1_loss(output.squeeze(-1), target)

    def mutual(self, personal, meme, target, alpha, beta, temperature):
        return (
            alpha * self.fit(personal, target) + (1 - alpha) * F.l1_loss(personal, meme.detach()),
            beta * self.fit(meme, target) + (1 - beta) * F.l1_loss(meme, personal.detach()),
        )

    def score(self, output, target):
        return {"examples": len(target), "mae": self.fit(output, target).item()}
'''

CONFIG = """
name = "objectives"
rounds = 3
data = { size = [16, 16], mean = [0.3], std = [0.4] }
algorithm = { name = "fml" }
training = { local_epochs = 1, batch_size = 16 }
optimizer = { lr = 0.05 }
engine = { threads = 1, device = "cpu" }

[model]
shared = "cnn1"
part = "features"
adaptor = "linear"

[clients.north]
data = { name = "own_objectives:north" }
model = { personal = "mlp" }

[clients.south]
data = { name = "own_objectives:south" }
model = { personal = "lenet5" }

[clients.seven]
data = { name = "own_objectives:seven" }
model = { personal = "own_objectives:Wide" }
"""

NUMBERS = """
[clients.light]
data = { name = "own_objectives:brightness" }
model = { personal = "own_objectives:Wide" }
training = { task = "regression" }
optimizer = { lr = 0.002 }
"""

LABELS = """
[clients.marks]
data = { name = "own_objectives:marks" }
model = { personal = "own_objectives:Wide" }
training = { task = "multilabel" }
"""


def write(folder: Path, more: str = "") -> Path:
    """Write the experiment and its code; return the path of its file."""
    (folder / "own_objectives.py").write_text(CODE)
    path = folder / "objectives.toml"
    path.write_text(CONFIG + more)
    return path
