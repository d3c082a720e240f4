"""Alpha and beta that move over the rounds: from the file to the loss, for each client, by hand; stopped and resumed too."""

from pathlib import Path

import pytest

import fedmutual
from fedmutual.algorithms import FML
from kills import stop_and_resume

ROUNDS = 4
SHAPES = {  # from 0.9 to 0.3
    "linear": [0.9, 0.7, 0.5, 0.3],
    "cosine": [0.9, 0.75, 0.45, 0.3],  # (1 - cos(pi k / 3)) / 2 = 0, 1/4, 3/4, 1 of the way
    "step": [0.9, 0.9, 0.3, 0.3],
}
OWN = [0.2, 0.8, 0.8, 0.8]  # client 1's alpha: a step after a quarter of the rounds


@pytest.fixture
def losses(monkeypatch):
    """(client, round from 0) -> the alpha and beta that its loss was given."""
    weights_by_client = {}
    begin = FML.begin

    def look(phase, client, inbox, at):
        const = begin(phase, client, inbox, at)
        weights_by_client[client.id, at.round] = (const["alpha"].item(), const["beta"].item())
        return const

    monkeypatch.setattr(FML, "begin", look)
    return weights_by_client


def moving(path, shape, engine):
    path.write_text(
        path.read_text().replace(
            "alpha = 0.4, beta = 0.6 }",
            f'alpha = {{ start = 0.9, end = 0.3, shape = "{shape}" }}, '
            f'beta = {{ start = 0.3, end = 0.9, shape = "{shape}" }} }}',
        )
        + '\n[clients.1.algorithm]\nalpha = { start = 0.2, end = 0.8, shape = "step", at = 0.25 }\n'
    )
    return fedmutual.load_config(path, rounds=ROUNDS, **{"engine.name": engine})


def expected(shape):
    falls = SHAPES[shape]
    return {
        (client, round): pytest.approx((OWN[round] if client == "1" else falls[round], 1.2 - falls[round]))
        for client in ("0", "1", "2")
        for round in range(ROUNDS)
    }


@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_reaches_the_loss_and_goes_on_after_a_stop(small, losses, shape, engine):
    config = moving(small, shape, engine)
    fedmutual.run(config, "whole")
    assert losses == expected(shape)
    losses.clear()
    stop_and_resume(config, "part", 3)
    assert losses == expected(shape)
    for name in ("server/round-4.safetensors", "clients/1/round-4.safetensors", "metrics.jsonl"):
        assert (Path("whole") / name).read_bytes() == (Path("part") / name).read_bytes()


def test_a_schedule_is_not_in_a_message(small):
    """A client's own settings never cross, moving or not."""
    run = fedmutual.run(moving(small, "cosine", "inprocess"), "out")
    assert not any("alpha" in name or "beta" in name for name in run.summary["leaves"]["fml"])
