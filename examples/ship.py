"""Train in a notebook, export the model, and use it in a process that has neither fedmutual nor the network's code.

Run: python examples/ship.py
"""

import subprocess
import sys
import tempfile

import pandas as pd
from sklearn.datasets import load_breast_cancer
from torch import nn

import fedmutual
from fedmutual import Site

frame = load_breast_cancer(as_frame=True).frame
tables = {"north": frame[:250], "south": frame[250:500]}
sites = {name: Site(train=table, label="target") for name, table in tables.items()}
net = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
run = fedmutual.federate(sites, shared=net, rounds=5, lr=0.05)
print(run.score(frame[500:], client="north", label="target").values["accuracy"])
expected = run.predict(frame[500:], client="north")

folder = tempfile.mkdtemp() + "/shipped"
run.export(folder, client="north")
frame[500:].to_csv(f"{folder}/patients.csv", index=False)

ELSEWHERE = """
import json, pandas, torch
about = json.load(open("model.json"))
x = pandas.read_csv("patients.csv")[about["input"]["columns"]]
program = torch.export.load("model.pt2").module()
answers = program(torch.tensor(x.to_numpy(), dtype=torch.float32)).tolist()
pandas.DataFrame(answers, columns=about["output"]["classes"]).to_csv("answers.csv", index=False)
"""
subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=folder, check=True)
answers = pd.read_csv(f"{folder}/answers.csv")
print(answers.head(3), expected.head(3), sep="\n")
