"""A run that is killed and resumed ends where one does that nobody touched: the same bytes."""

import pytest

import fedmutual
from fedmutual.config import parse_config
from fedmutual.events import Noted
from kills import same, trial


@pytest.mark.process
def test_three_kills_at_random_moments(tmp_path):
    assert len(trial(tmp_path, kills=3, seed=0, rounds=50).kills) == 3


PEERS = """
name = "killed"
rounds = 40
data = { name = "digits", angles = [0, 45, 90], per_class = 20 }
partition = { kind = "domains" }
split = { private = 0.5, public = 0.2, validation = 0.1, test = 0.2 }
algorithm = { name = "fedh2l", public_batch = 8, peers = "pairs", optimizers = 2, eta = 5e-4 }
model = { personal = ["mlp", "cnn1", "mlp"] }
training = { local_steps = 2, batch_size = 16 }
optimizer = { name = "adam", amsgrad = true, lr = 1e-3 }
engine = { threads = 1, device = "cpu" }
records = { checkpoint_every = 5, evaluate_every = 20, best_by = "validation", keep_best = true }
"""


@pytest.mark.process
def test_peers_that_are_killed_lose_nothing(tmp_path):
    """Pairs, a second optimiser and the sum of local gradients come back from what was saved."""
    assert len(trial(tmp_path, kills=1, seed=0, config=PEERS).kills) == 1


TWELVE = {
    "name": "twelve",
    "rounds": 2,
    "data": {"name": "digits"},
    "partition": {"clients": 12},
    "split": {"public": 0.2, "test": 0.2},
    "algorithm": {"name": "fedh2l", "public_batch": 4},
    "model": {"personal": ["mlp"]},
    "training": {"local_steps": 1, "batch_size": 8},
    "engine": {"name": "inprocess", "device": "cpu"},
}


def test_the_owners_of_public_rows_are_known_after_a_resume(tmp_path):
    """A checkpoint sorts its tensors by name, so client 10 comes before client 2."""
    notes = []
    fedmutual.run(parse_config(TWELVE), tmp_path / "whole")
    fedmutual.run(parse_config(TWELVE | {"rounds": 1}), tmp_path / "part")
    seen = [lambda event: notes.append(event.text) if isinstance(event, Noted) else None]
    fedmutual.run(parse_config(TWELVE), tmp_path / "part", resume=True, observers=seen)
    assert notes == []
    assert same(tmp_path / "part", tmp_path / "whole") == []
