"""Which letters of other sites a site keeps: those that an honest site can send by now, once, as declared, and no others."""

import re

import pytest
import torch

from fedmutual.sites.peers import Mailbox
from fedmutual.sites.protocol import EVALUATE, WORK, Limit, MalformedMessage, Order, SiteAnswer, pack_message
from wards import SEEDED, Federation

pytestmark = pytest.mark.sites

DECLARED = {"x": (torch.float32, (2,))}
ROUNDS = 9


def declared(place):
    """Two phases of a round, and one of the start, after which letters are sent."""
    round, phase = place
    return DECLARED if round < ROUNDS and phase < (1 if round < 0 else 2) else None


def letter(round, phase=0, x=(1.0, 2.0), kind=WORK, **fields):
    return pack_message(SiteAnswer(Order(kind, round, phase), **fields), {"x": torch.tensor(x)})


@pytest.fixture
def mail():
    return Mailbox(("b", "c"), declared, Limit(1000, 8))


def places(mail, sender="b"):
    return {(r, p) for r in range(-1, ROUNDS) for p in range(3) if isinstance(mail.read(sender, (r, p)), dict)}


def test_the_round_under_way_and_one_later_of_each_sender_are_kept(mail):
    mail.begin(3)
    for place in ((3, 0), (3, 1), (4, 0), (4, 1)):
        mail.put("b", letter(*place))
    mail.put("c", letter(7))
    assert places(mail) == {(3, 0), (3, 1), (4, 0), (4, 1)}
    assert places(mail, "c") == {(7, 0)}  # an honest one whose order came first, after a pause here
    mail.put("b", letter(8))  # b went on while this site was away
    assert places(mail) == {(3, 0), (3, 1), (8, 0)}
    mail.begin(7)
    assert places(mail) == {(8, 0)}
    assert places(mail, "c") == {(7, 0)}


def test_no_sender_and_no_server_that_goes_back_grows_a_mailbox(mail):
    for round in range(-1, ROUNDS):  # before the first order of a process one round is kept
        mail.put("b", letter(round))
        assert places(mail) == {(round, 0)}
    for round in (6, 2, 5, 1):
        mail.begin(round)
        for ahead in (round, round + 1, round + 2):
            mail.put("b", letter(ahead))
        assert places(mail) == {(round, 0), (round + 2, 0)}
    mail.begin(0)
    assert places(mail) == {(3, 0)}


REFUSED = {
    "over": (letter(2), "it is of round 3, which is over"),
    "never": (letter(ROUNDS), "it is of a phase after which sites send nothing"),
    "far": (letter(10**6), "it is of a phase after which sites send nothing"),
    "last phase": (letter(3, 2), "it is of a phase after which sites send nothing"),
    "start": (letter(-1, 1), "it is of a phase after which sites send nothing"),
    "scores": (letter(3, kind=EVALUATE), "it is of a phase after which sites send nothing"),
    "another": (letter(3, x=(1.0, 3.0)), "it differs from an earlier message of this phase"),
    "shape": (letter(3, x=(1.0,)), "declared as torch.float32 (2,), found torch.float32 (1,)"),
    "size": (letter(3, x=(1.0,) * 3), "its tensors have 12 bytes, and 8 are declared"),
    "infinite": (letter(3, x=(1.0, float("inf"))), "numbers in 'x' that are not finite"),
    "words": (letter(3, problem="x"), "its message has a header that messages between sites do not have"),
    "losses": (letter(3, train={"a": 1.0}), "its message has a header that messages between sites do not have"),
    "senders": (
        pack_message(SiteAnswer(Order(WORK, 3, 0, ("b",))), {"x": torch.zeros(2)}),
        "its message has a header that messages between sites do not have",
    ),
    "header": (letter(3, remarks=("x" * 1000,)), "bytes, and 1,000 are enough"),
    "empty": (pack_message(SiteAnswer(Order(WORK, 3, 0)), {}), "its message is empty"),
    "no bytes": (["a", "b"], "it is no message in safetensors form (TypeError)"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_is_counted_and_not_kept(why, mail):
    content, message = REFUSED[why]
    mail.begin(3)
    mail.put("b", letter(3))
    mail.put("b", letter(3))  # sent again, since nobody said that it came
    for _ in range(2):
        with pytest.raises(MalformedMessage, match=re.escape(message)):
            mail.put("b", content)
    assert places(mail) == {(3, 0)}
    assert mail.read("b", (3, 0))["x"].tolist() == [1.0, 2.0]
    assert places(mail, "c") == set()


INFINITE = (1.0, float("inf"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (letter(3, 1, x=INFINITE), {(3, 1)}),
        (letter(4, 0, x=INFINITE), {(4, 0)}),
        (letter(2, x=INFINITE), set()),
        (letter(3, 0, x=INFINITE), set()),  # a good message of this phase came before
        (b"junk", {(3, 1), (4, 0)}),  # of which phase it is, nobody knows
    ],
)
def test_why_a_message_was_refused_is_told_for_its_phase_as_often_as_the_order_is_repeated(mail, content, told):
    mail.begin(3)
    mail.put("b", letter(3))
    with pytest.raises(MalformedMessage):
        mail.put("b", content)
    for _ in range(2):
        mail.begin(3)
        assert {p for p in ((3, 0), (3, 1), (4, 0)) if isinstance(mail.read("b", p), str)} == told
    assert mail.read("c", (3, 1)) is None
    for place in told:
        mail.put("b", letter(*place))  # sent again, whole
        assert isinstance(mail.read("b", place), dict)


def test_the_reasons_of_a_sender_are_bounded_as_its_messages_are(mail):
    mail.begin(3)
    for round in range(3, ROUNDS):
        with pytest.raises(MalformedMessage):
            mail.put("b", letter(round, x=INFINITE))
    assert [r for r in range(ROUNDS) if mail.read("b", (r, 0))] == [3, ROUNDS - 1]
    mail.begin(5)
    assert mail.read("b", (3, 0)) is None


def test_strangers_are_refused_in_one_short_line(mail):
    for name in ("x", "y" * 10**6, "\n"):
        with pytest.raises(MalformedMessage, match="is none of the other sites") as caught:
            mail.put(name, letter(0))
        assert (len(str(caught.value)) < 600, str(caught.value).isprintable()) == (True, True)


def test_letters_of_rounds_that_never_come_and_of_strangers_take_no_memory(tmp_path):
    """Letters of a megabyte each, of rounds that the contract has not, and of shapes that no phase declares."""
    north = Federation(tmp_path, SEEDED, public=True)["north"]
    big = {"anything": torch.zeros(250_000)}
    for round in (*range(10), *(10**6 + k for k in range(40))):
        for sender in ("west", "north", "server", "nobody"):
            with pytest.raises(MalformedMessage):
                north.peers.receive(sender, pack_message(SiteAnswer(Order(WORK, round, 0)), big))
    assert not any(isinstance(north.peers.mail.read("west", (round, 0)), dict) for round in range(10))
