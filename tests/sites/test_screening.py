"""What of sites' replies the server does not use: by hand, and in a federation of puppets."""

import sys

import pytest
import torch

from fedmutual.algorithms import FedAvg
from fedmutual.algorithms.fedkd import FedKD, restore_model
from fedmutual.core import Algorithm
from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint, read_state
from fedmutual.rundir.file_names import METRICS
from fedmutual.sites.coordinator import build_server_experiment, make_first_state
from fedmutual.sites.protocol import SiteAnswer
from fedmutual.sites.schema import SitesTable
from fedmutual.sites.screening import compute_norm, find_opposed, find_outliers, screen
from fedmutual.sites.server_journal import ServerJournal
from log_lines import read_lines
from puppets import Federation, element, moved
from wards import COMMON

pytestmark = pytest.mark.sites

LIMITS = SitesTable(names=("north", "south", "west"), input=(1,))
SHARED, FEDKD = FedAvg().algorithm(), FedKD().algorithm()
MESSAGES = Algorithm("messages", SHARED.phases)  # an algorithm that shares no model
FEDAVG = COMMON | {"algorithm": {"name": "fedavg"}}


def test_the_norm_of_an_update_by_hand():
    sent = {"w": torch.tensor([1.0, 1.0]), "count": torch.tensor(7)}
    reply = {"w": torch.tensor([4.0, 5.0]), "new": torch.tensor([[12.0]]), "count": torch.tensor(10**6)}
    assert compute_norm((reply, sent)) == 13.0  # the root of 3 * 3 + 4 * 4 + 12 * 12: whole numbers do not count


def test_the_largest_numbers_have_a_finite_norm():
    """The square of 1e300 is none, and a product of factors may overflow, although each of the factors is finite."""
    for dtype in (torch.float32, torch.float64):
        most = torch.finfo(dtype).max
        assert most <= compute_norm(({"w": torch.full((4,), most, dtype=dtype)}, {})) <= sys.float_info.max
    assert compute_norm(({"w": torch.tensor([float("nan")])}, {})) == sys.float_info.max


def test_outliers_by_hand():
    assert find_outliers({"a": 1.0, "b": 2.0, "c": 15.0}, 10.0) == []  # 10 times the mean of 1 and 2
    assert find_outliers({"a": 1.0, "b": 2.0, "c": 15.1}, 10.0) == ["c"]
    assert find_outliers({"a": 1.0, "b": 1.0, "c": 1e30, "d": 1e30, "e": 1.0}, 10.0) == ["c", "d"]
    assert find_outliers({"a": 0.0, "b": 0.0, "c": 1e-9}, 10.0) == ["c"]  # where nobody else moves
    assert find_outliers({"a": 0.0, "b": 0.0, "c": 0.0}, 10.0) == []
    assert find_outliers({"a": 1.0, "b": 1e30}, 10.0) == []  # of two, nothing tells which one is wrong
    assert find_outliers({"a": 1.0, "b": 1e30}, 10.0, least=2) == ["b"]


def opposed_of(**vectors):
    """Which of these updates in the plane is opposed."""
    sent = {"w": torch.tensor([1.0, 1.0])}
    return find_opposed({i: ({"w": sent["w"] + torch.tensor(v)}, sent) for i, v in vectors.items()})


def test_the_opposed_update_by_hand():
    """The cosine of (1, 1) and (1, 0) is 0.71, of (1, 0) and (0, 1) it is 0."""
    assert opposed_of(a=[1.0, 0.0], b=[1.0, 1.0], c=[-3.0, 0.0]) == "c"
    assert opposed_of(a=[1.0, 0.0], b=[1.0, 1.0], c=[-1.2, 0.0]) is None  # the median length of the others is 1.207
    assert opposed_of(a=[1.0, 0.0], b=[0.0, 1.0], c=[-3.0, -3.0]) is None  # the others do not agree
    assert opposed_of(a=[1.0, 0.0], b=[1.0, 1.0], c=[0.0, 9.0]) is None  # at a right angle to one of them
    assert opposed_of(a=[1.0, 0.0], c=[-3.0, 0.0]) is None  # of two, nothing tells which one is wrong
    assert opposed_of(a=[1.0, 0.0], b=[1.0, 1.0], c=[-3e300, 0.0], d=[-3e300, 0.0]) is None


@pytest.mark.parametrize("opposed", [True, False])
def test_the_contract_says_whether_an_opposed_update_is_used(opposed):
    sent = {"w": torch.zeros(2)}
    replies = {i: {"w": torch.tensor([n, n])} for i, n in (("north", 1.0), ("south", 1.1), ("west", -3.0))}
    refused = screen(
        replies, dict.fromkeys(replies, sent), LIMITS.model_copy(update={"refuse_opposed": opposed}), {}, SHARED
    )[0]
    assert refused.keys() == ({"west"} if opposed else set())


def test_a_compressed_update_is_measured_as_the_model_that_it_stands_for():
    """FedKD's factors: neither is large, and their product is."""
    sent = {"w": torch.zeros(8, 8)}

    def reply(size):
        return {"left.w": torch.full((8, 1), size), "right.w": torch.full((1, 8), size)}

    replies = {"north": reply(1.0), "south": reply(1.0), "west": reply(5.0)}
    assert restore_model(sent, replies["west"])["w"].max() == 25.0
    assert screen(replies, dict.fromkeys(replies, sent), LIMITS, {}, SHARED)[0] == {}  # measures the factors
    refused, norms, _ = screen(replies, dict.fromkeys(replies, sent), LIMITS, {}, FEDKD)
    assert refused.keys() == {"west"}
    assert norms == {"north": 8.0, "south": 8.0}


@pytest.mark.parametrize("update", [(-30.0, -40.0), (3e30, 4e30), (12.0, 16.0)], ids=["opposed", "too long", "longer"])
def test_a_newcomers_update_is_shortened_to_the_median_of_the_others(update):
    """The others' norms are 4 and 6; the direction stays. Any site may send such an update, so a liar gains nothing."""
    sent = {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(7)}
    updates = {"north": (0.0, 4.0), "south": (3.6, 4.8), "west": update}  # cosine 0.8
    replies = {i: {"w": sent["w"] + torch.tensor(u), "n": torch.tensor(8)} for i, u in updates.items()}
    given = replies, dict.fromkeys(replies, sent), LIMITS, {}, SHARED
    assert screen(*given)[0].keys() == ({"west"} if update[0] != 12 else set())
    refused, norms, shortened = screen(*given, ["west"])
    assert refused == {}
    assert norms["west"] == pytest.approx(5.0)
    sign = 1 if update[0] > 0 else -1
    assert torch.allclose(shortened["west"]["w"], torch.tensor([1 + 3.0 * sign, 1 + 4.0 * sign]))
    assert shortened["west"]["n"] == 8


def test_a_newcomer_hides_no_opposed_update_of_another_site():
    """West agrees with nobody yet; the others are compared without it, as before it joined."""
    sent = {"w": torch.zeros(2)}
    updates = {"north": (0.0, 4.0), "south": (1.0, 4.0), "east": (0.0, -6.0), "west": (4.0, 0.0)}
    replies = {i: {"w": torch.tensor(u)} for i, u in updates.items()}
    assert screen(replies, dict.fromkeys(replies, sent), LIMITS, {}, SHARED, ["west"])[0].keys() == {"east"}


def test_a_newcomers_false_count_is_refused():
    replies, sent = counted(west=5501, north=600, south=500)
    assert screen(replies, sent, LIMITS, {}, SHARED, ["west"])[0].keys() == {"west"}


def test_a_newcomer_is_one_for_ten_rounds():
    limits = LIMITS.model_copy(update={"joins": {"west": 30}})
    assert [r for r in range(100) if limits.is_newcomer("west", r - 1)][-1] == 39
    assert not any(limits.is_newcomer("north", r) for r in range(100))


def counted(**counts):
    """Replies that state so many examples, -> what is refused of them, with nothing sent."""
    replies = {i: {"w": torch.ones(2), "n_k": torch.tensor(n)} for i, n in counts.items()}
    return replies, {i: {"w": torch.zeros(2)} for i in replies}


def test_a_count_below_one_or_far_above_the_others_is_refused():
    """Below one, however few reply."""
    for count in (0, -1, -2000, -(2**63), 2**62, 2**63 - 1, 5501):
        for others in ({"north": 600, "south": 500}, *([{}] if count < 1 else [])):
            assert screen(*counted(west=count, **others), LIMITS, {}, SHARED)[0].keys() == {"west"}


def test_a_count_is_held_to_the_contracts_limit_where_it_has_one():
    stated = LIMITS.model_copy(update={"examples_limit": 9000})
    assert screen(*counted(west=9000, north=60, south=50), stated, {}, SHARED)[0] == {}
    refused = screen(*counted(west=9001, north=60), stated, {}, SHARED)[0]  # of two replies, too
    assert refused == {"west": "its n_k is not at least 1 and at most 9000 (sites.examples_limit)"}


def test_a_count_that_changes_is_refused():
    replies = counted(west=601, north=600, south=500)
    assert screen(*replies, LIMITS, {"west": 600, "north": 600}, SHARED)[0].keys() == {"west"}
    assert screen(*replies, LIMITS, {"west": 601}, SHARED)[0] == {}


def test_a_counter_of_batches_that_no_round_can_reach_is_refused():
    """Beside a mean the largest counter is everybody's, and the next step would take it beyond 64 bits."""
    sent = {"n": torch.tensor(7)}
    for value in (2**63 - 1, -(2**62), 2**31 + 8):
        replies = {i: {"n": torch.tensor(n)} for i, n in (("north", 17), ("south", 7_000_000), ("west", value))}
        assert screen(replies, dict.fromkeys(replies, sent), LIMITS, {}, SHARED)[0].keys() == {"west"}


def test_messages_that_are_not_updates_are_limited_by_the_square():
    """Logits of an MLP after its first epoch were seen to be 12 times as large as those of two CNNs."""
    for times, refused in ((99.0, set()), (101.0, {"west"})):
        replies = {i: {"logits": torch.ones(4) * n} for i, n in (("north", 1.0), ("south", 1.0), ("west", times))}
        refusals = screen(replies, {i: {} for i in replies}, LIMITS, {}, MESSAGES)[0]
        assert refusals.keys() == refused
        assert all("100 times" in why for why in refusals.values())


def test_prototypes_are_not_screened_as_updates():
    """A site without examples of the second class sends a zero prototype, far from the received one."""
    sent = {"prototypes": torch.tensor([[1.0], [9.0]])}
    replies = {i: {"prototypes": torch.tensor([[1.0], [n]])} for i, n in (("north", 9.1), ("south", 9.2), ("west", 0.0))}
    assert screen(replies, dict.fromkeys(replies, sent), LIMITS, {}, MESSAGES)[0] == {}
    replies["west"] = {"prototypes": torch.tensor([[1e30], [0.0]])}
    assert screen(replies, dict.fromkeys(replies, sent), LIMITS, {}, MESSAGES)[0].keys() == {"west"}


def boosted(times):
    """From round 2 on an update so many times as large as the others'."""
    return lambda asked, inbox: moved(inbox, 0.01 * (times if asked.round else 1))


def shared(federation):
    """One element of the shared model after the last saved round."""
    saved = read_checkpoint(federation.server)
    return element(read_state(federation.server / "server" / make_file_name(saved.round), saved.run, saved.round))


@pytest.mark.parametrize("times", [10.1, 1e30, -11.0])
def test_an_update_far_above_the_others_is_named_and_left_out(times, tmp_path):
    calm = Federation(tmp_path / "calm").run()
    federation = Federation(tmp_path / "found")
    federation["west"].does = boosted(times)
    federation.run()
    why = "site 'west' is left out: its update is more than 10 times the median of the others' (sites.update_limit)"
    assert federation.notes == [f"note in round {r}: {why}" for r in (2, 3)]  # one sentence, so that it is one note
    assert shared(federation) == shared(calm)  # of the others, who move by the same
    assert federation["west"].rounds() == [(0, 0), (0, 1), (0, 2)]  # it is asked again in the next round


def test_a_site_that_overstates_its_examples_does_not_outweigh_the_others(tmp_path):
    federation = Federation(tmp_path, FEDAVG)
    for i, (n, by) in {"north": (600, 0.01), "south": (200, 0.03), "west": (2**62, -0.02)}.items():
        federation[i].does = lambda asked, inbox, n=n, by=by: {**moved(inbox, by), "n_k": torch.tensor(n)}
    federation.run()
    assert len(federation.about("west")) == COMMON["rounds"]
    assert {note.count("n_k") for note in federation.notes} == {1}
    first = element(make_first_state(federation.agreed, build_server_experiment(federation.agreed)))
    assert shared(federation) - first == pytest.approx(3 * (600 * 0.01 + 200 * 0.03) / 800, rel=1e-4)


def test_a_changed_number_of_examples_is_refused_also_after_a_restart(tmp_path):
    federation = Federation(tmp_path, FEDAVG)
    for i in ("north", "south", "west"):
        federation[i].does = lambda asked, inbox, i=i: {
            **moved(inbox, 0.01),
            "n_k": torch.tensor(700 if i == "west" and asked.round > 1 else 600),
        }

    def kill(event):
        if type(event).__name__ == "RoundDone" and event.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.run(kill)
    federation.run()
    assert federation.notes == ["note in round 3: site 'west' is left out: its n_k is not the one that it stated first"]


def test_the_names_of_losses_are_those_that_the_phase_declares(tmp_path):
    """Otherwise a site could write any text into the server's log of scores."""
    federation = Federation(tmp_path, COMMON | {"share": {"metrics": "all"}})
    many = {f"loss {n}": 0.5 for n in range(3)} | {"personal": 0.5}
    federation["west"].does = lambda asked, inbox: (SiteAnswer(asked, train=many), moved(inbox, 0.01))
    federation["south"].does = lambda asked, inbox: (SiteAnswer(asked, train={"meme": 0.25}), moved(inbox, 0.01))
    federation.run()
    assert len(federation.about("west")) == COMMON["rounds"]
    assert all(
        note.endswith("losses that its phase does not declare; those are personal, meme") for note in federation.notes
    )
    assert [line["train"] for line in read_lines(federation.server / METRICS)] == [{"south": {"meme": 0.25}}] * COMMON[
        "rounds"
    ]


def test_too_few_valid_replies_do_not_repeat_the_round_forever(tmp_path):
    """With a quorum of all sites, one site can delay the others, but not forever, and the error names this site."""
    federation = Federation(tmp_path, quorum=3)
    federation["west"].does = boosted(1e30)
    for _ in range(2):  # begun anew, nobody is asked any more
        with pytest.raises(RunError, match="3 rounds failed although enough sites answered"):
            federation.run()
    assert federation["north"].rounds() == [(0, 0), (0, 1), (1, 1), (2, 1)]
    assert read_checkpoint(federation.server).round == 1
    log = (federation.server / "log.txt").read_text()
    assert log.count("the messages of west cannot be used, and 3 sites are needed") == 3
    assert ServerJournal(federation.server).setbacks == 3
