"""Four hospitals and scikit-learn's breast cancer data: does each hospital gain from federated training?

The tables have empty cells, and one hospital lacks a column. Each row is scored once, by models that did not train on it.
Run: python examples/hospitals.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

import fedmutual

home = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
bunch = load_breast_cancer(as_frame=True)
table = bunch.data[["mean radius", "mean texture", "mean smoothness", "mean concavity"]].copy()
table.loc[rng.random(len(table)) < 0.1, "mean texture"] = np.nan
table["diagnosis"] = bunch.target_names[bunch.target]
for k, hospital in enumerate(["north", "south", "east", "west"]):
    part = table.iloc[k::4]
    part = part.drop(columns="mean concavity") if hospital == "west" else part
    part.to_csv(home / f"{hospital}.csv", index=False)

(home / "hospitals.toml").write_text("""
name = "hospitals"
rounds = 5
split = { folds = 5 }
model = { shared = "mlp" }
training = { local_epochs = 2, batch_size = 16 }

[data]
name = "csv"
label = "diagnosis"
classes = ["malignant", "benign"]

[data.columns]
"mean radius" = "number"
"mean texture" = "number"
"mean smoothness" = "number"
"mean concavity" = { kind = "number", fill = 0.09, indicator = true } # one more feature: 1 where the cell is empty

[clients]
north = { data = { root = "north.csv" } }
south = { data = { root = "south.csv" } }
east = { data = { root = "east.csv" } }
west = { data = { root = "west.csv" } }
""")
command = [sys.executable, "-m", "fedmutual", "compare", "hospitals.toml", "--methods", "fml,independent", "--seeds", "1"]
subprocess.run([*command, "--out", "compared"], cwd=home, check=True)

scores = fedmutual.read(home / "compared").scores
last = scores[scores["last"] & (scores["model"] == "personal") & (scores["metric"] == "accuracy")]
gains = last.pivot(index=["client", "examples"], columns="method", values="value").reset_index("examples")
gains["gain"] = gains["fml"] - gains["independent"]
print(gains.round(3))
