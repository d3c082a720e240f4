"""Short texts at four clinics, whose networks differ: two have a transformer, two an LSTM; all share an LSTM.

The transformer of the library transformers is made from a configuration: nothing is downloaded.
Run: pip install "fedmutual[text]"; python examples/notes.py
"""

import random

import pandas as pd
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import fedmutual
from fedmutual import Site

WORDS, LENGTH = 2000, 12  # numbers of the hashing tokenizer, and of tokens of a text

random.seed(0)
SIGNS = {"ill": ["fever", "cough", "pain"], "well": ["rested", "cheerful", "strong"]}
rows = []
for _ in range(500):
    diagnosis = random.choice(["ill", "well"])
    other = "well" if diagnosis == "ill" else "ill"
    words = [*random.sample(SIGNS[diagnosis], 2), random.choice(SIGNS[other]), "seen", "today"]
    rows.append({"note": " ".join(random.sample(words, len(words))), "diagnosis": diagnosis})
notes = pd.DataFrame(rows).drop_duplicates("note", ignore_index=True)


class LSTM(nn.Module):
    """Token ids and their mask, both [B, L] -> logits [B, classes], of the last token of each text."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(WORDS, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        steps, _ = self.lstm(self.embed(input_ids))
        return self.head(steps[torch.arange(steps.shape[0]), attention_mask.sum(1) - 1])


def make_transformer(classes: int) -> nn.Module:
    """Return a small BERT with random weights."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=classes, **sizes))


networks = {"north": make_transformer, "south": make_transformer, "east": LSTM, "west": LSTM}
sites = {name: Site(train=notes[k:320:4], label="diagnosis", model=net) for k, (name, net) in enumerate(networks.items())}
run = fedmutual.federate(
    sites,
    "fml",
    shared=LSTM,
    rounds=6,
    local_epochs=2,
    batch_size=16,
    optimizer="adam",
    lr=0.005,
    settings={"data.text": ["note"], "data.words": WORDS, "data.length": LENGTH},
)
print(run)
accuracies = {n: run.score(notes[320:], client=n, label="diagnosis").values["accuracy"] for n in networks}
print(accuracies)
print(run.predict(pd.DataFrame({"note": ["seen today fever pain cheerful", "rested cough strong"]}), client="north"))
