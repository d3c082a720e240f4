"""Survival without pooled data: time to arrest after release from prison (Rossi et al. 1980, in lifelines), in four prisons.

The concordance on the same test rows of the shared network that four clients train, of the network that is trained on all
rows, and of a Cox model of lifelines on all rows. Run: pip install "fedmutual[survival]"; python examples/survival.py
"""

import numpy as np
import torch
from lifelines import CoxPHFitter
from lifelines.datasets import load_rossi
from lifelines.utils import concordance_index

import fedmutual

LABEL = ["week", "arrest"]
SETTINGS = {"data.times": [13, 26, 39, 52]}


class Risk(torch.nn.Module):
    """One linear risk, and a constant for each interval of time: proportional hazards, as Cox has them. [B, 7] -> [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.risk, self.constants = torch.nn.Linear(7, 1, bias=False), torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the hazards, up to constants."""
        return self.risk(x) + self.constants


table = load_rossi()
features = table.columns.drop(LABEL)
table[features] = (table[features] - table[features].mean()) / table[features].std()
order = np.random.default_rng(0).permutation(len(table))
test, train = table.iloc[order[:130]], table.iloc[order[130:]]

cox = CoxPHFitter().fit(train, "week", "arrest")
of_cox = concordance_index(test["week"], -cox.predict_partial_hazard(test), test["arrest"])
concordances = {"Cox of lifelines, pooled": of_cox}

sites = {f"prison {k}": fedmutual.Site(train=train.iloc[k::4], test=test, label=LABEL) for k in range(4)}
pooled = {"all": fedmutual.Site(train=train, test=test, label=LABEL)}
for name, clients, method in (("pooled", pooled, "fedavg"), ("fedavg", sites, "fedavg"), ("fml", sites, "fml")):
    run = fedmutual.federate(
        clients, method, shared=Risk(), task="survival", rounds=20, lr=0.2, batch_size=512, settings=SETTINGS
    )
    scores = run.history()
    last = scores[(scores["metric"] == "concordance") & (scores["round"] == scores["round"].max())]
    concordances |= {f"{name}, {model}": of["value"].mean() for model, of in last.groupby("model")}
for name, value in concordances.items():
    print(f"{name:26} {value:.3f}")
