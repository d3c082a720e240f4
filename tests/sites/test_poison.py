"""One hostile site of three, with real data: what of the shared model is left beside the median, and beside the mean."""

import pytest
import torch

import fedmutual
from fedmutual.federation.evaluation import score
from fedmutual.losses import Classification
from fedmutual.sites.protocol import WORK, pack_message, read_answer
from wards import COMMON, MLPS, Federation

pytestmark = pytest.mark.sites

ALL_ROWS = {"split": {"preset": "v1", "test": 0.3}}  # one point of accuracy is more than one example
ROUNDS, POINTS = 4, 0.02


def flip(times):
    """The step that the site learned, so many times as far in the other direction."""
    return lambda meme, sent: {k: sent[k] - times * (v - sent[k]) for k, v in meme.items()}


def replaced(meme, sent):
    """A model that calls everything a zero, in the place of the mean of three."""
    wanted = {k: v.clone() for k, v in sent.items()}
    wanted["classifier.bias"][0] += 20
    return {k: sent[k] + 3 * (wanted[k] - sent[k]) for k in meme}


ATTACKS = {  # what west sends, and whether in the last round alone, which no round after it would notice
    "flipped": (flip(3), False),
    "flipped short": (flip(1), False),
    "flipped far": (flip(9), False),
    "flipped late": (flip(9), True),
    "huge": (lambda meme, sent: {k: torch.full_like(v, 1e30) for k, v in meme.items()}, True),
    "replaced": (replaced, True),
}


def federated(folder, rule, attack=None, **table):
    """(accuracies of the shared model and of honest sites' own ones on their test rows, what was noted)."""
    common = COMMON | ALL_ROWS | {"rounds": ROUNDS, "server": {"aggregate": rule}, "share": {"metrics": "all"}}
    federation = Federation(folder, common, MLPS, **table)
    sent = {}

    def remember(site, order, inbox):
        sent[site] = inbox
        return order, inbox

    def change(site, order, content):
        answer, message = read_answer(content)
        spoil, is_late = ATTACKS.get(attack, (None, False))
        if spoil is None or (site, order.kind) != ("west", WORK) or (is_late and order.round + 1 < ROUNDS):
            return [content]
        return [pack_message(answer, spoil(message, sent[site]))]

    federation.transport.alter, federation.transport.change = remember, change
    federation.run()
    shared, accuracies = fedmutual.Run(federation.server).global_model(), {}
    for i in ("north", "south"):
        rows = federation[i].experiment.data.test
        for name, net in (("shared", shared), ("own", fedmutual.Run(federation[i].folder).personal_model(i))):
            accuracies[name, i] = score(net, rows, Classification(), i, pytest.fail)["accuracy"]
    return accuracies, federation.notes


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Rule -> accuracies, without an attack."""
    return {rule: federated(tmp_path_factory.mktemp(rule), rule)[0] for rule in ("mean", "median")}


def losses(accuracies, without):
    """Whose accuracy an attack lowered by more than two points."""
    return {who: without[who] - share for who, share in accuracies.items() if share < without[who] - POINTS}


CASES = [  # rule, attack, more of the table `sites`, why west is named, whose accuracy is lowered
    *(("median", attack, {}, ...) for attack in ("flipped", "huge", "replaced")),
    *(("mean", attack, {}, "sites.update_limit") for attack in ("huge", "replaced")),
    *(("mean", attack, {}, "sites.refuse_opposed") for attack in ("flipped", "flipped late", "flipped far")),
    ("mean", "flipped short", {}, None),
    ("mean", "flipped", {"refuse_opposed": False}, None),  # not noticed
]


@pytest.mark.parametrize(("rule", "attack", "table", "reason"), CASES)
def test_honest_sites_lose_less_than_two_points_unless_the_rule_is_switched_off(
    rule, attack, table, reason, honest, tmp_path
):
    """reason: why west is left out in a note; None: there are no notes; ...: any."""
    accuracies, notes = federated(tmp_path, rule, attack, **table)
    assert losses(accuracies, honest[rule]).keys() == ({("shared", "north"), ("shared", "south")} if table else set())
    if reason is not ...:
        assert bool(notes) == (reason is not None)
        assert all("'west'" in note and reason in note for note in notes)


@pytest.mark.parametrize("attack", ["flipped", "flipped far", "replaced"])
def test_a_hostile_newcomer_counts_no_more_than_another_site(attack, tmp_path):
    """Its update is not refused, and the shared model loses a few points; with ten times the others' norm it lost 18."""
    accuracies, notes = federated(tmp_path, "mean", attack, joins={"west": 2})
    assert min(accuracies["shared", i] for i in ("north", "south")) > 0.9
    assert notes
    assert all("site 'west' joined lately, and its update is shortened to the median norm" in note for note in notes)
