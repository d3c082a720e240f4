"""Sites with a public seed set, in one process: FedH2L from site to site, FedMD and aggregate by the server."""

import hashlib
from dataclasses import replace

import pytest
import torch

from fedmutual.algorithms import ProxyFL
from fedmutual.algorithms.peers import PEER, make_proxy_state
from fedmutual.algorithms.proxyfl import MASS
from fedmutual.core import At
from fedmutual.engines.loop import receive_usable
from fedmutual.events import PhaseDone
from fedmutual.rundir.file_names import LEDGER
from fedmutual.sites import contract as contracts
from fedmutual.sites.protocol import (
    EVALUATE,
    WORK,
    Order,
    SiteAnswer,
    pack_message,
    read_answer,
    read_order,
)
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from log_lines import read_lines
from wards import SEEDED, TELLING, Federation, find_event, run_together, same

pytestmark = pytest.mark.sites

B, C, OTHERS, ROUNDS = 8, 10, 2, SEEDED["rounds"]
LETTER = 4 * B + 4 * B * C + 4  # bytes: which samples, posteriors, an accuracy
AGREED = 32 + 8 + 8 * C  # of the start: digest, rows, counts


def fedh2l(**more):
    return SEEDED | {"algorithm": SEEDED["algorithm"] | more}


CASES = {
    "fedh2l": SEEDED,
    "fedh2l, pairs": fedh2l(peers="pairs"),
    "fedh2l, two optimisers": fedh2l(optimizers=2),
    "fedh2l, unlabelled": fedh2l(labels=False),
    "fedh2l, strictest": fedh2l(labels=False, confidence=False, local_data="private"),
    "fedh2l, augmented": SEEDED | {"data": SEEDED["data"] | {"augment": "crop-flip"}},
    "fedmd": SEEDED | {"algorithm": {"name": "fedmd", "public_batch": B, "transfer_epochs": 1}},
    "aggregate": SEEDED | {"algorithm": {"name": "aggregate"}},
}


def federate(folder, common=SEEDED, carry=None):
    return Federation(folder, common, public=True, carry=carry)


def count_bytes(federation, way, phase):
    """Return the bytes of each site in a phase, by round."""
    lines = read_lines(federation.server / LEDGER)
    return [{x["client"]: x[way] for x in lines if (x["round"], x["phase"]) == (r, phase)} for r in range(ROUNDS + 1)]


def place(letter):
    """Of which round and phase a letter is."""
    about = read_answer(letter)[0].order
    return about.round, about.phase


def terms(asked):
    """What is told of training, beside the message."""
    if asked.kind == EVALUATE or asked.round < 0:
        return set()
    return {"kl", "ce", "projected"} if asked.phase else {"local", "projected"} if asked.round else {"local"}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process(case, tmp_path):
    common = CASES[case] | TELLING
    federation = federate(tmp_path, common).run()
    assert federation.notes == []
    run = run_together(tmp_path / "one", common, {i: drop(tables, "public") for i, tables in federation.sites.items()})
    for i, weights in federation.personal().items():
        assert same(weights, run.personal_model(i).state_dict()), i
    summary = federation.summary
    for key in ("personal", "transfer", "projected", "leaves"):
        assert summary[key] == run.summary[key], key
    ours, relayed = summary["bytes"], run.summary["bytes"]
    assert {way: ours[way] for way in ("seed", "down")} == {way: relayed[way] for way in ("seed", "down")}
    assert ours["up"] == (relayed["down"] if case.startswith("fedh2l") else relayed["up"])  # a relay is sent to once


def drop(tables, key):
    return {k: v for k, v in tables.items() if k != key}


def test_a_site_sends_only_declared_tensors(tmp_path):
    federation = federate(tmp_path, SEEDED | TELLING).run()
    start = {"digest": (torch.uint8, (32,)), "rows": (torch.int64, ()), "counts": (torch.int64, (C,))}
    rounds = {"index": (torch.int32, (B,)), "posterior": (torch.float32, (B, C)), "accuracy": (torch.float32, ())}
    sent = {(i, to, *place(letter)): letter for i, to, letter in federation.transport.letters}
    assert len(sent) == len(federation.transport.letters) == 3 * OTHERS * (1 + ROUNDS)
    for (sender, to, round, _), letter in sent.items():
        _, message = read_answer(letter)
        assert {k: (v.dtype, tuple(v.shape)) for k, v in message.items()} == (start if round < 0 else rounds)
        assert letter == pack_message(SiteAnswer(Order(WORK, round, 0)), message)  # and no byte more
        assert sender != to
        if round >= 0:
            positions = federation[sender].experiment.data.public.owners[sender]
            assert all(int(k) in positions for k in message["index"])  # of its own public rows it speaks
    for i, asked, content in federation.transport.answers:
        about, what = read_answer(content)[0], read_order(asked)[0]
        assert content == pack_message(about, {})
        assert (about.order, about.remarks, about.problem, about.accused) == (what, (), None, ())
        assert set(about.train) == terms(what)
        assert {(s.client, s.data) for s in about.scores} == ({(i, "validation")} if what.kind == EVALUATE else set())
    for i in federation.sites:
        written = [(line["to"], line["sha256"]) for line in federation.ledger(i) if line["to"] != "server"]
        mine = [(to, hashlib.sha256(letter).hexdigest()) for one, to, letter in federation.transport.letters if one == i]
        assert written == mine
    sites = dict.fromkeys(federation.sites, 0)
    assert count_bytes(federation, "up", "agree")[0] == dict.fromkeys(sites, OTHERS * AGREED)
    assert count_bytes(federation, "down", "compare")[0] == dict.fromkeys(sites, OTHERS * AGREED)
    for round in range(1, ROUNDS + 1):
        assert count_bytes(federation, "up", "local")[round] == dict.fromkeys(sites, OTHERS * LETTER)
        assert count_bytes(federation, "down", "local")[round] == sites
        assert count_bytes(federation, "up", "mutual")[round] == sites
        assert count_bytes(federation, "down", "mutual")[round] == dict.fromkeys(sites, OTHERS * LETTER)
    public_bytes = federation.agreed.public["bytes"]  # of each site's part of the seed set
    assert count_bytes(federation, "up", "seed")[0] == public_bytes
    assert count_bytes(federation, "down", "seed")[0] == {
        i: sum(public_bytes.values()) - public_bytes[i] for i in public_bytes
    }


def test_pairs_exchange_messages_only_with_each_other(tmp_path):
    federation = federate(tmp_path, fedh2l(peers="pairs")).run()
    for round in range(ROUNDS):
        met = {(i, to) for i, to, letter in federation.transport.letters if place(letter) == (round, 0)}
        assert len(met) == 2
        assert {(to, i) for i, to in met} == met
        up = count_bytes(federation, "up", "local")[round + 1]
        assert {i for i, n in up.items() if n} == {i for i, _ in met}
        assert set(up.values()) == {0, LETTER}


def holding(change):
    """What becomes of a letter: it holds other tensors."""
    return lambda letter: pack_message(read_answer(letter)[0], change(read_answer(letter)[1]))


SPOILT = {
    "lost": (lambda letter: None, "its message did not arrive"),
    "cut short": (lambda letter: letter[:-5], "it is no message in safetensors form (SafetensorError)"),
    "no letter": (lambda letter: b"\x00" * 40, "it is no message in safetensors form"),
    "not finite": (
        holding(lambda m: m | {"posterior": m["posterior"] * torch.nan}),
        "numbers in 'posterior' that are not f",
    ),
    "no posterior": (holding(lambda m: m | {"posterior": m["posterior"] * 2}), "its posteriors are not"),
    "other shape": (holding(lambda m: m | {"index": m["index"][:-1]}), "because of 'index': declared as torch.int32 (8,)"),
    "other type": (
        holding(lambda m: m | {"accuracy": m["accuracy"].view(torch.int32)}),
        "refused because of 'accuracy': declared as torch.",
    ),
    "wrong accuracy": (holding(lambda m: m | {"accuracy": torch.tensor(1.5)}), "its accuracy is not between 0 and 1"),
    "no such rows": (holding(lambda m: m | {"index": m["index"] + 999}), "an index that is not of one of its own"),
    "another's rows": (holding(lambda m: m | {"index": m["index"] % 84}), "an index that is not of one of its own"),
    "rows twice": (holding(lambda m: m | {"index": m["index"][:1].repeat(B)}), "it contains an index twice"),
    "more": (holding(lambda m: m | {"x": torch.zeros(1)}), "its tensors have 360 bytes, and 356 are declared"),
    "more names": (holding(lambda m: m | {"x": torch.zeros(0)}), "refused because of 'x': the phase declares only accuracy"),
    "wider": (holding(lambda m: m | {"accuracy": m["accuracy"].double()}), "its tensors have 360 bytes, and 356 are"),
    "many names": (holding(lambda m: m | {f"x{k}": torch.zeros(0) for k in range(1000)}), " bytes, and "),
    "words": (
        lambda letter: pack_message(replace(read_answer(letter)[0], problem="x"), read_answer(letter)[1]),
        "its message has a header that messages between sites do not have",
    ),
    "less": (
        holding(lambda m: {"index": m["index"]}),
        "its message is refused because of 'accuracy': it is declared, but missing",
    ),
    "empty": (holding(lambda m: {}), "its message is empty"),
}


@pytest.fixture(scope="module")
def undisturbed_models(tmp_path_factory):
    return federate(tmp_path_factory.mktemp("good") / "ward", SEEDED | {"rounds": 1}).run().personal()


@pytest.mark.parametrize("case", SPOILT)
def test_the_receiver_names_the_sender_of_an_invalid_message_and_the_others_continue(case, undisturbed_models, tmp_path):
    spoil, reason = SPOILT[case]

    def carry(sender, to, letter):
        return spoil(letter) if (sender, to, *place(letter)) == ("south", "north", 0, 0) else letter

    federation, lines = federate(tmp_path, SEEDED | {"rounds": 1}, carry), []
    federation["north"].say = lines.append
    federation.run()
    if case == "lost":
        assert federation.notes == [f"note in round 1: site 'north' left out the message of 'south': {reason}"]
    else:  # only the operator of the receiver reads why a message cannot be used; the server does not
        assert federation.notes == []
        (line,) = [line for line in lines if "is left out" in line]
        assert line.startswith("round 1: the message of 'south' is left out: ")
        assert reason in line
    assert {i: same(weights, undisturbed_models[i]) for i, weights in federation.personal().items()} == {
        "north": False,  # it heard one peer less
        "south": True,
        "west": True,
    }
    received = LETTER if case == "lost" else 2 * LETTER
    assert count_bytes(federation, "down", "mutual")[1] == {"north": received, "south": 2 * LETTER, "west": 2 * LETTER}


def test_an_absent_site_gets_no_letter_and_delays_no_site(tmp_path):
    federation = federate(tmp_path)

    def watch(event):
        if find_event("RoundDone")(event):
            federation.transport.away = {"west"} if event.round == 1 else set()

    federation.run(watch)
    assert federation.notes == ["note in round 2: site 'west' is left out: it is not connected"] * 2
    # of both halves; it is not asked to score
    delivered = {(i, to) for i, to, letter in federation.transport.letters if place(letter) == (1, 0)}
    assert delivered == {("north", "south"), ("south", "north")}
    assert count_bytes(federation, "up", "local")[2] == {"north": LETTER, "south": LETTER, "west": 0}
    assert count_bytes(federation, "up", "local")[3] == dict.fromkeys(federation.sites, 2 * LETTER)


@pytest.mark.parametrize(("late", "notes"), [(("north", "south", "west"), 0), (("west",), 2)])
def test_late_sites_get_messages_where_the_round_waits_for_them(tmp_path, late, notes):
    """Otherwise sites that are all slow at the start compare no seed sets. A quorum does not wait for the late site."""
    federation = federate(tmp_path, SEEDED | {"rounds": 1})
    federation.transport.late = late
    federation.transport.before = lambda round, phase: setattr(federation.transport, "late", ())
    federation.run()
    assert (
        federation.notes
        == [
            f"note at the start: site 'west' left out the message of {i!r}: its message did not arrive"
            for i in ("north", "south")
        ][:notes]
    )


def test_a_site_that_returns_within_a_round_receives_no_messages(tmp_path):
    federation = federate(tmp_path)

    def watch(event):
        if find_event("RoundDone", 1)(event):
            federation.transport.away = {"west"}
        if isinstance(event, PhaseDone) and (event.round, event.phase) == (2, "local"):
            federation.transport.away = set()

    federation.run(watch)
    assert federation.notes == ["note in round 2: site 'west' is left out: it is not connected"]
    assert count_bytes(federation, "down", "mutual")[2] == {"north": LETTER, "south": LETTER, "west": 0}


class Killed(BaseException):
    """A process dies."""


@pytest.mark.parametrize("phase", ["agree", "local", "mutual"])
def test_a_crash_of_all_between_two_phases_loses_nothing(phase, tmp_path):
    uninterrupted = federate(tmp_path / "whole").run()
    cut = federate(tmp_path / "cut")

    def kill(event):
        if isinstance(event, PhaseDone) and (event.round, event.phase) == (0 if phase == "agree" else 2, phase):
            raise Killed

    with pytest.raises(Killed):
        cut.run(kill)
    cut.restart()
    assert cut.run().notes == []
    ends = uninterrupted.personal()
    assert all(same(weights, ends[i]) for i, weights in cut.personal().items())
    assert drop(cut.summary, "seconds") == drop(uninterrupted.summary, "seconds")


def test_a_site_that_dies_within_a_round_names_the_missed_peers(tmp_path):
    federation = federate(tmp_path)

    def kill(event):
        if isinstance(event, PhaseDone) and (event.round, event.phase) == (2, "local"):
            federation.restart("west")

    federation.run(kill)
    missed = "note in round 2: site 'west' left out the message of {!r}: its message did not arrive"
    assert federation.notes == [missed.format("north"), missed.format("south")]


def test_asked_again_a_site_writes_the_same_letters(tmp_path):
    federation = federate(tmp_path, SEEDED | {"rounds": 1})
    north, all_ = federation["north"], tuple(federation.sites)
    for phase in range(2):
        north.carry_out(pack_message(Order(WORK, -1, phase, senders=() if phase else None, asked=all_), {}))
    order = pack_message(Order(WORK, 0, 0, asked=all_), {})
    answer, letters = north.carry_out(order), north.make_peer_messages(order)
    assert letters.keys() == {"south", "west"}
    assert len(set(letters.values())) == 1
    north.carry_out(pack_message(Order(WORK, 0, 1, senders=all_, asked=all_), {}))
    restarted = federation.start("north")
    for half in (north, restarted):  # as it is, and after a crash
        assert (half.carry_out(order), half.make_peer_messages(order)) == (answer, letters)
    fewer = pack_message(Order(WORK, 0, 0, asked=("north", "west")), {})
    assert restarted.carry_out(fewer) == answer  # nothing is trained anew for it
    assert restarted.make_peer_messages(fewer) == {"west": letters["west"]}
    undone_order = pack_message(Order(WORK, 0, 2, asked=all_), {})
    assert restarted.make_peer_messages(undone_order) == {}  # what was not done goes nowhere


def test_a_site_that_starts_does_not_know_the_contract_of_the_job_yet(tmp_path):
    """The site has FEDERATION.toml and the state of earlier jobs; the next job brings the description of the public set."""
    federation = federate(tmp_path, SEEDED | {"rounds": 1}).run()
    known = contracts.read_contract(tmp_path / "federation.toml")
    assert known.public is None
    starting = SiteRuntime(known, read_site_file(tmp_path / "north" / "site.toml"))
    assert starting.list_leaves() == federation["north"].list_leaves()


def test_no_letter_is_sent_to_an_unresponsive_site(tmp_path):
    """Senders would wait in each phase. The server keeps asking the site, which takes part as soon as it answers."""
    federation = federate(tmp_path)
    federation.transport.late = ("west",)
    federation.run()
    assert {to for _, to, letter in federation.transport.letters if place(letter)[0] >= 0} == {"north", "south"}
    assert {site for site, _, _ in federation.transport.answers} == {"north", "south", "west"}


@pytest.mark.parametrize(("mass", "is_used"), [(0.0, True), (2.0, True), (-1.0, False), (1e38, False)])
def test_a_mass_of_proxyfl_is_a_share_of_the_mass_of_all(mass, is_used):
    """With a mass of -1 the weights of a mixture sum to 0, and the receiver's proxy would hold no finite number."""
    learn = ProxyFL().algorithm().phases[0]
    state, replies, faults = make_proxy_state("ab", 2, {}), {i: {MASS: torch.tensor(1.0)} for i in "ab"}, {}
    replies["b"][MASS] = torch.tensor(mass)
    used = receive_usable(learn, state, replies, At(0, 0, 1), faults.__setitem__)
    assert (f"b{PEER}{MASS}" in used, f"a{PEER}{MASS}" in used) == (is_used, True)
    assert faults == ({} if is_used else {"b": "its mass is not between 0 and 2, the number of peers"})
