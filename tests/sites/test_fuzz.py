"""The protocol under mutated orders, answers and letters: nothing raises but a refusal, nothing grows beyond its bounds,
nothing is left half-written, and honest messages are answered afterwards as before.

The examples are the same ones each time, and so many that all of them take less than two minutes.
"""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import puppets
from fedmutual.algorithms import FedH2L
from fedmutual.algorithms.peers import make_agreed_state as owned_by
from fedmutual.errors import UserError
from fedmutual.rundir.file_names import METRICS
from fedmutual.sites import engine
from fedmutual.sites.coordinator import Coordinator, build_server_experiment, make_first_state
from fedmutual.sites.engine import TooFew
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.peers import Mailbox
from fedmutual.sites.protocol import (
    EVALUATE,
    LONGEST_TEXT,
    WORK,
    MalformedMessage,
    Order,
    SiteAnswer,
    pack_message,
    read_answer,
    read_order,
)
from fedmutual.sites.sizes import MessageSizes, limit_message
from log_lines import read_lines
from wards import COMMON, MLPS, InMemoryTransport, contract, halves, same

pytestmark = pytest.mark.sites

ONE_ROUND = COMMON | {"rounds": 1}


def fuzz(examples):
    """As many examples, the same ones each time, however slow the machine."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


# --- mutations --------------------------------------------------------------------------------------------------------

DEEP = 50_000
RAW = [  # in the place of a value of a header: what parsers take differently, or not at all
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "9" * 5000,
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    '"\\ud800"',
    '"\\u0000"',
    '"' + "x" * 100_000 + '"',
    "[" + ",".join(["0"] * 20_000) + "]",
    "tru",
    "",
    '{"a":1,"a":2}',
]
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))
GROWN_WORDS = [
    {"remarks": ["x"] * 20_000},
    {"problem": "x" * 10**6},
    {"train": {f"term{k}": 0.5 for k in range(20_000)}},
    {"scores": [{"model": "m", "client": None, "data": "d", "values": {"a": 0.5}}] * 5000},
    {"scores": [{"model": "m", "client": None, "data": "d", "values": {"a" * 1000: 0.5, "b\n": 1}}]},
    {"senders": [f"site{k}" for k in range(20_000)]},
    {"asked": ["x" * 10**6]},
    {"up": 2**62, "down": 2**62},
]
GROWN_TENSORS = [
    {"x": torch.zeros(10**6)},
    {"w": torch.zeros(300, 200)},
    {f"x{k}": torch.zeros(0) for k in range(5000)},
    {"w": torch.zeros(3, 2, dtype=torch.float64)},
    {"classifier.bias": torch.full((10,), 1e30)},
]
TOKEN = "@@"  # stands where a raw text will


@st.composite
def replaced(draw, table):
    """A table with one value, at any depth, that is another; or one key more, or fewer -> its text."""
    raw, place = draw(st.none() | st.sampled_from(RAW)), table
    while True:
        key = draw(st.sampled_from(sorted(place)) if isinstance(place, dict) and place else st.just(None))
        inner = place.get(key) if isinstance(place, dict) else None
        if key is None or not isinstance(inner, dict) or draw(st.booleans()):
            break
        place = inner
    what = draw(st.sampled_from(["change", "remove", "add"]))
    if what == "remove" and key is not None:
        del place[key]
    else:
        place[key if what == "change" and key is not None else draw(st.text(max_size=8))] = TOKEN if raw else draw(values)
    text = json.dumps(table)
    return text.replace(json.dumps(TOKEN), raw) if raw else text


@st.composite
def mutated(draw, content):
    """A message that somebody changed: its bytes, its length, its header, its words; or a sound one with more in it."""
    size = int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8 : 8 + size]), content[8 + size :]
    kind = draw(st.sampled_from(["bytes", "cut", "more", "length", "noise", "tensors", *["header", "words", "grown"] * 2]))
    if kind == "grown":
        words = json.loads(header["__metadata__"]["fedmutual"]) | draw(st.just({}) | st.sampled_from(GROWN_WORDS))
        more = draw(st.just({}) | st.sampled_from(GROWN_TENSORS))
        return save(load(content) | more, metadata={"fedmutual": json.dumps(words)})
    if kind == "bytes":
        spoilt = bytearray(content)
        for _ in range(draw(st.integers(1, 4))):
            spoilt[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
        return bytes(spoilt)
    if kind == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if kind == "more":
        return content + draw(st.binary(min_size=1, max_size=100)) * draw(st.sampled_from([1, 10_000]))
    if kind == "length":
        return draw(st.integers(0, 2**64 - 1) | st.integers(0, len(content))).to_bytes(8, "little") + content[8:]
    if kind == "noise":
        return draw(st.binary(max_size=200))
    if kind == "tensors":
        return content[: 8 + size] + draw(st.binary(min_size=1, max_size=8)) * (len(tensors) // 8)
    if kind == "words":
        words = draw(replaced(json.loads(header["__metadata__"]["fedmutual"])))
        header["__metadata__"]["fedmutual"] = words
        text = json.dumps(header)
    else:
        text = draw(replaced(header))
    head = text.encode("utf-8", "surrogatepass")
    return len(head).to_bytes(8, "little") + head + tensors


# --- what reads messages ----------------------------------------------------------------------------------------------

SHAPES = {"w": (torch.float32, (3, 2)), "n": (torch.int64, ())}
TENSORS = {"w": torch.ones(3, 2), "n": torch.tensor(1)}
SAID = SiteAnswer(Order(WORK, 2, 1, ("a",), ("a", "b")), {"ce": 0.5}, up=3, remarks=("'b': late",))
ROOM = limit_message([SHAPES], 2000)


@fuzz(400)
@given(data=st.data())
def test_a_mutated_message_is_read_or_refused(data):
    read, header = data.draw(st.sampled_from([(read_order, SAID.order), (read_answer, SAID)]))
    content = data.draw(mutated(pack_message(header, TENSORS)))
    refusal = ""
    try:
        content_read, message = read(content, ROOM)
    except MalformedMessage as problem:
        refusal = str(problem)
    if refusal:
        assert refusal.isprintable()
        assert len(refusal) < LONGEST_TEXT + 200
        return
    assert isinstance(content_read, type(header))
    assert sum(t.nbytes for t in message.values()) <= ROOM.tensors
    assert len(json.dumps(repr(content_read))) < 10 * ROOM.header


class Letters:
    """Honest letters of two senders, and their mutations."""

    ROUNDS, SENDERS, ROOM = 4, ("a", "b"), limit_message([SHAPES], 300)

    @classmethod
    def declared(cls, place):
        return SHAPES if place[0] < cls.ROUNDS and place[1] < 2 else None


@fuzz(60)
@given(data=st.data())
def test_mutated_letters_fill_no_mailbox(data):
    mail, refusals = Mailbox(Letters.SENDERS, Letters.declared, Letters.ROOM), 0
    for _ in range(data.draw(st.integers(1, 15))):
        if data.draw(st.booleans()):
            mail.begin(data.draw(st.integers(-1, Letters.ROUNDS)))
        place = data.draw(st.integers(-1, Letters.ROUNDS + 1)), data.draw(st.integers(0, 3))
        content = pack_message(
            SiteAnswer(Order(WORK, *place)), {"w": torch.full((3, 2), data.draw(st.floats(width=32))), "n": TENSORS["n"]}
        )
        if data.draw(st.booleans()):
            content = data.draw(mutated(content))
        sender = data.draw(st.sampled_from(["a", "b", "c", ""]))
        try:
            mail.put(sender, content)
        except MalformedMessage:
            refusals += 1
    read = ((i, r, mail.read(i, (r, p))) for r in range(-1, 9) for p in range(9) for i in Letters.SENDERS)
    held = [(i, r, m) for i, r, m in read if isinstance(m, dict)]
    for sender in Letters.SENDERS:
        assert len({round for i, round, _ in held if i == sender}) <= 2
        assert sum(i == sender for i, _, _ in held) <= 4
    assert all({k: (t.dtype, tuple(t.shape)) for k, t in m.items()} == SHAPES for _, _, m in held)
    assert all(m["w"].isfinite().all() for _, _, m in held)


# --- who acts on them -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A federation of one round, its sites, and what each honestly answers."""
    folder = tmp_path_factory.mktemp("fuzz")
    agreed, sites = halves(folder, contract(folder, ONE_ROUND, MLPS), MLPS)
    state = make_first_state(agreed, build_server_experiment(agreed))
    asked = pack_message(Order(WORK, 0, 0), state)
    answers = {i: half.carry_out(asked) for i, half in sites.items()}
    return folder, agreed, sites, asked, answers


def files(folder):
    """What lies in a folder: name -> bytes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@fuzz(80)
@given(data=st.data())
def test_a_site_outlives_mutated_orders(federation, data):
    _, _, sites, asked, _ = federation
    north, state = sites["north"], read_order(asked)[1]
    base = data.draw(st.sampled_from([asked, pack_message(Order(EVALUATE, 0, 0), state)]))
    content, before, refusal = data.draw(mutated(base)), files(north.folder), ""
    try:
        answer, message = read_answer(north.carry_out(content))
        assert answer.problem is not None or not message or message.keys() == state.keys()
        north.make_peer_messages(content)
    except (MalformedMessage, UserError) as problem:
        refusal = str(problem)
    after = files(north.folder)
    assert "\n" not in refusal
    assert not refusal or after == before
    new = {name for name in after.keys() - before.keys() if name not in (METRICS, "summary.json")}
    assert not [name for name in after if name.endswith(".part")]
    assert all(name.startswith(("clients/", "server/")) for name in new), new
    assert len(after) < 20
    assert all(len(json.dumps(line)) < 5000 for line in read_ledger(north.folder)[-3:])  # the digest of each tensor


def test_after_them_a_site_answers_an_honest_order_as_before(federation):
    _, _, sites, asked, answers = federation
    one, other = read_answer(sites["north"].carry_out(asked)), read_answer(answers["north"])
    assert same(one[1], other[1])
    assert one[0] == other[0]


class Replayed:
    """A site that answers what it answered before, changed."""

    def __init__(self, reply, change=lambda content: content):
        self._reply, self._change = reply, change

    def carry_out(self, content):
        order = read_order(content)[0]
        return self._change(self._reply if order.kind == WORK else pack_message(SiteAnswer(order), {}))

    def make_peer_messages(self, content):
        return {}


@fuzz(25)
@given(data=st.data())
def test_a_server_outlives_mutated_answers(federation, tmp_path_factory, data):
    _, agreed, _, _, answers = federation
    folder, refusal = tmp_path_factory.mktemp("server") / "wards", ""
    sites = {i: Replayed(reply) for i, reply in answers.items()}
    sites["west"] = Replayed(answers["west"], lambda content: data.draw(mutated(content)))
    try:
        Coordinator(agreed, folder).run(InMemoryTransport(sites))
    except (TooFew, UserError) as problem:
        refusal = str(problem)
    assert "\n" not in refusal
    names = files(folder)
    assert not [name for name in names if name.endswith(".part")]
    assert names["log.txt"] < 5000
    assert names.get(METRICS, 0) < 5000
    for log in folder.glob("*.jsonl"):
        assert all(isinstance(line["round"], int) for line in read_lines(log))


def test_the_logs_of_a_federation_take_so_many_words_of_a_site_and_no_more(tmp_path):
    """A site that says something else in every phase: the rounds go on, and the rest of its words is not written down."""
    rounds, talker = 40, puppets.Federation(tmp_path, COMMON | {"rounds": 40})
    talker["west"].does = lambda order, inbox: SiteAnswer(order, problem=f"{order.round} " + "x" * LONGEST_TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_LOG_LIMIT", 10 * LONGEST_TEXT)
        talker.run()
    log = (talker.server / "log.txt").read_text()
    assert sum("x" * 100 in line for line in log.splitlines()) == 9
    assert log.count("site 'west' is left out") == rounds
    assert len(log) < 20 * LONGEST_TEXT + rounds * 300


def test_the_largest_honest_messages_are_within_their_sizes(federation):
    """Names of any script, and as many words as there may be: what is honest is never refused by its length."""
    _, agreed, _, _, _ = federation
    names = tuple(c * 60 for c in ("a", "é", "字", "😀"))
    phase = agreed.algorithm.phases[0]
    state = make_first_state(agreed, build_server_experiment(agreed))
    sizes = MessageSizes(agreed.algorithm, state, names)
    order = Order(WORK, 2**62, 0, names, names)
    read_order(pack_message(order, state), sizes.order)
    words = "😀" * (LONGEST_TEXT + 3)
    full = SiteAnswer(order, dict.fromkeys(phase.terms, -1.2345678901234568e-300), (), 0, 0, (), words, names)
    assert sizes.open_answer(order, pack_message(full, state))[0].accused == names
    later = replace(order, phase=1)  # of peers: a remark on each sender of the phase before
    peers = FedH2L(batch_size=8, public_batch=4).algorithm()
    letters = MessageSizes(peers, owned_by(dict.fromkeys(names, range(9)), 10), names)
    assert (
        letters.open_answer(later, pack_message(SiteAnswer(later, remarks=(words,) * 4), {}))[0].remarks[0].startswith("😀")
    )
