"""One hostile site of three, with real data: what of the shared model is left beside the median, and beside the mean."""

import pytest
import torch

import fedmutual
from fedmutual.events import Noted
from fedmutual.federation.evaluation import score
from fedmutual.losses import Classification
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.protocol import WORK, pack_message, read_answer, read_order
from wards import COMMON, SITES, InMemoryTransport, contract, halves

pytestmark = pytest.mark.sites

ALL_ROWS = {"split": {"preset": "v1", "test": 0.3}}  # one point of accuracy is more than one example
MLPS = {i: {**tables, "model": {"personal": "mlp"}} for i, tables in SITES.items()}
ROUNDS, POINTS = 4, 0.02


def flipped(meme, sent, round):
    """The step that the site learned, three times as far in the other direction."""
    return {k: sent[k] - 3 * (v - sent[k]) for k, v in meme.items()}


def flipped_short(meme, sent, round):
    """The step that the site learned, in the other direction."""
    return {k: 2 * sent[k] - v for k, v in meme.items()}


def flipped_far(meme, sent, round):
    """The step that the site learned, nine times as far in the other direction."""
    return {k: sent[k] - 9 * (v - sent[k]) for k, v in meme.items()}


def flipped_late(meme, sent, round):
    """The last, in the last round alone."""
    return flipped_far(meme, sent, round) if round + 1 == ROUNDS else meme


def huge(meme, sent, round):
    """Of the last round alone, which no round after it would notice."""
    return {k: torch.full_like(v, 1e30) for k, v in meme.items()} if round + 1 == ROUNDS else meme


def replaced(meme, sent, round):
    """A model that calls everything a zero, in the place of the mean of three, in the last round."""
    if round + 1 < ROUNDS:
        return meme
    wanted = {k: v.clone() for k, v in sent.items()}
    wanted["classifier.bias"][0] += 20
    return {k: sent[k] + 3 * (wanted[k] - sent[k]) for k in meme}


class Hostile(InMemoryTransport):
    """West sends something else than it learned."""

    def __init__(self, them, attack):
        super().__init__(them)
        self.attack = attack

    def ask(self, orders, deadline):
        for i, content in super().ask(orders, deadline):
            answer, message = read_answer(content)
            asked, sent = read_order(orders[i])
            if i == "west" and asked.kind == WORK and self.attack is not None:
                content = pack_message(answer, self.attack(message, sent, asked.round))
            yield i, content


def federated(folder, rule, attack=None, **table):
    """(accuracies of the shared model and of honest sites' own ones on their test rows, what was noted)."""
    common = COMMON | ALL_ROWS | {"rounds": ROUNDS, "server": {"aggregate": rule}, "share": {"metrics": "all"}}
    agreed, sites = halves(folder, contract(folder, common, MLPS, **table), MLPS)
    notes = []
    Coordinator(agreed, folder / "server").run(
        Hostile(sites, attack), [lambda e: notes.append(e) if isinstance(e, Noted) else 0]
    )
    shared, site_models = fedmutual.Run(folder / "server").global_model(), {}
    for i in ("north", "south"):
        rows = sites[i].experiment.data.test
        models = {"shared": shared, "own": fedmutual.Run(sites[i].folder).personal_model(i)}
        site_models |= {
            (name, i): score(net, rows, Classification(), i, pytest.fail)["accuracy"] for name, net in models.items()
        }
    return site_models, [note.text for note in notes]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Rule -> accuracies, without an attack."""
    return {rule: federated(tmp_path_factory.mktemp(rule), rule)[0] for rule in ("mean", "median")}


def losses(accuracies, without):
    """Whose accuracy an attack lowered by more than two points."""
    return {who: without[who] - share for who, share in accuracies.items() if share < without[who] - POINTS}


@pytest.mark.parametrize("attack", [flipped, huge, replaced])
def test_beside_the_median_two_honest_sites_of_three_lose_less_than_two_points(attack, honest, tmp_path):
    assert losses(federated(tmp_path, "median", attack)[0], honest["median"]) == {}


@pytest.mark.parametrize("attack", [huge, replaced, flipped, flipped_late, flipped_far])
def test_beside_the_mean_what_is_far_off_is_named_and_left_out(attack, honest, tmp_path):
    accuracies, notes = federated(tmp_path, "mean", attack)
    reason = "sites.refuse_opposed" if attack in (flipped, flipped_late, flipped_far) else "sites.update_limit"
    assert notes
    assert all("'west'" in note and reason in note for note in notes)
    assert losses(accuracies, honest["mean"]) == {}


def test_beside_the_mean_a_flipped_update_of_the_usual_length_costs_less_than_two_points(honest, tmp_path):
    accuracies, notes = federated(tmp_path, "mean", flipped_short)
    assert notes == []
    assert losses(accuracies, honest["mean"]) == {}


def test_without_the_rule_a_flipped_update_beside_the_mean_is_not_noticed(honest, tmp_path):
    accuracies, notes = federated(tmp_path, "mean", flipped, refuse_opposed=False)
    assert notes == []
    assert losses(accuracies, honest["mean"]).keys() == {("shared", "north"), ("shared", "south")}
