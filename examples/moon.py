"""MOON beside FedAvg. The method is one file, which a file of your own could be: src/fedmutual/algorithms/moon.py.

Li et al. 2021, https://arxiv.org/abs/2103.16257. Run: python examples/moon.py
"""

from sklearn.datasets import load_digits

import fedmutual
from fedmutual import Site
from fedmutual.algorithms import MOON

if __name__ == "__main__":
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 1, 8, 8)
    sites = {f"site {k}": Site(train=(x[k:900:3], y[k:900:3])) for k in range(3)}
    comparison = fedmutual.compare(
        sites, {"MOON": MOON(contrast=1.0), "FedAvg": "fedavg"}, shared="cnn1", rounds=4, batch_size=16, lr=0.05, seeds=1
    )
    print(comparison)
