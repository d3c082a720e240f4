"""A run that is killed and resumed ends where one does that nobody touched: the same bytes."""

from kills import trial


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


def test_peers_that_are_killed_lose_nothing(tmp_path):
    """Pairs, a second optimiser and the sum of local gradients come back from what was saved."""
    assert len(trial(tmp_path, kills=1, seed=0, config=PEERS).kills) == 1
