"""What a client keeps of its last reply: the next phase finds it, the boundary refuses it, and every engine agrees."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedmutual.algorithms import FedAvg
from fedmutual.boundary import Refused
from fedmutual.core import At, Batch, Client, Message, Net, Recipe, find_head
from fedmutual.engines.base import participate
from fedmutual.stepping import make_call, trainable
from toy import at, client, difference, federation, server


@dataclass(frozen=True, kw_only=True)
class Near(FedAvg):
    """FedAvg whose clients stay near the features of the shared model and of their last own model."""

    terms: ClassVar[tuple[str, ...]] = ("meme", "near")
    keeps_reply: ClassVar[bool] = True

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        super().begin(client, inbox, at)
        last = {**inbox, **{k: v for k, v in client.previous.items() if k in inbox}}
        return {f"{model}.{k}": v.clone() for model, state in (("old", last), ("new", inbox)) for k, v in state.items()}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        x, _ = batch
        h, _ = nets["meme"].features(x)
        others = [
            nets["meme"].features(x, {k.removeprefix(model): v for k, v in const.items() if k.startswith(model)})[0]
            for model in ("old.", "new.")
        ]
        return super().loss(nets, batch, const) | {"near": sum((h - other).square().mean() for other in others)}


@dataclass(frozen=True, kw_only=True)
class Leaky(Near):
    """Sends what it sent before."""

    def end(self, client: Client, at: At) -> Message:
        return client.previous or super().end(client, at)


def test_the_features_are_the_input_of_the_last_layer_with_the_given_weights() -> None:
    one = client("0", FedAvg().algorithm()).nets["meme"]
    other = {k: v + 1 for k, v in one.state_dict().items()}
    net = Net(make_call(one), trainable(one), find_head(one))
    x = torch.randn(3, *client("0", FedAvg().algorithm()).data["private"].x.shape[1:])
    features, output = net.features(x, other)
    head = find_head(one)
    assert head is not None
    name = next(n for n, m in one.named_modules() if m is head)
    torch.testing.assert_close(output, features @ other[f"{name}.weight"].T + other[f"{name}.bias"])
    assert not torch.equal(output, net(x))


def test_a_client_finds_its_last_reply_and_must_not_send_it_again() -> None:
    phase, one, state = Near(weighting="uniform"), client("0", FedAvg().algorithm()), server()
    declared = phase.leaves(state)
    first = participate(one, phase, state, declared, at(0)).message
    assert one.previous.keys() == first.keys()
    assert all(torch.equal(one.previous[k], v) for k, v in first.items())
    second = participate(one, phase, state, declared, at(1)).message
    assert all(torch.equal(one.previous[k], v) for k, v in second.items())
    leaky = Leaky(weighting="uniform")
    with pytest.raises(Refused, match="its bytes are those of 'previous reply"):
        participate(one, leaky, state, leaky.leaves(state), at(2))
    one.recipe, one.recipe_state = Recipe(patience=1), one.recipe_state | {"stopped": torch.tensor(3)}
    one.recipe_state |= {f"meme.{k}": v for k, v in second.items()}
    one.data = {**one.data, "validation": one.data["private"]}
    again = participate(one, phase, state, declared, at(3)).message
    assert all(torch.equal(again[k], second[k]) for k in second), "a client that has stopped sends it again"


def test_engines_agree_also_where_clients_miss_rounds() -> None:
    results = {}
    for engine in ("inprocess", "disk-backed", "stacked"):
        clients = [client(str(i), Near().algorithm()) for i in range(4)]
        results[engine] = federation(Near().algorithm(), clients, 3, server(), engine, participation=0.5)
    assert difference(results["inprocess"], results["disk-backed"]) == 0
    assert difference(results["inprocess"], results["stacked"]) < 1e-5
