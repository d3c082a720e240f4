"""A run that is killed and resumed ends where one does that nobody touched: the same bytes."""

from kills import trial


def test_three_kills_at_random_moments(tmp_path):
    assert len(trial(tmp_path, kills=3, seed=0, rounds=150)) == 3
