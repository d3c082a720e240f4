"""Sites that answer nonsense, late, twice or not at all; full disks; a server that lost its state. Without any network."""

import errno
import json
import math
from dataclasses import replace

import pytest
import torch

import fedmutual
from fedmutual.engines.base import participate
from fedmutual.errors import RunError, UserError
from fedmutual.files import replace_file
from fedmutual.rundir import checkpoint
from fedmutual.rundir.file_names import LEDGER, METRICS
from fedmutual.sites import contract as contracts
from fedmutual.sites import site_journal, site_runtime
from fedmutual.sites.consent import find_difference
from fedmutual.sites.coordinator import build_server_experiment, make_first_state
from fedmutual.sites.engine import TooFew
from fedmutual.sites.protocol import (
    EVALUATE,
    WORK,
    MalformedMessage,
    Order,
    ReleasedScore,
    SiteAnswer,
    pack_message,
    read_answer,
    read_order,
)
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from log_lines import read_lines
from wards import COMMON, MLPS, TELLING, Federation, contract, find_event, halves, run_together, same, site

pytestmark = pytest.mark.sites


def tamper(federation, change, kind=WORK, round=1):
    """Change west's answer to one order on its way."""
    federation.transport.change = lambda name, order, content: (
        change(content) if (name, order.kind, order.round) == ("west", kind, round) else [content]
    )
    return federation


def with_tensor(content, change) -> bytes:
    answer, message = read_answer(content)
    name = "classifier.bias"
    return pack_message(answer, {**message, name: change(message[name])})


def with_message(content, change) -> list[bytes]:
    answer, message = read_answer(content)
    return [pack_message(answer, change(message))]


def with_words(content, **words) -> list[bytes]:
    answer, message = read_answer(content)
    return [pack_message(replace(answer, **words), message)]


ODD = {
    "numbers in 'classifier.bias' that are not finite": lambda c: [with_tensor(c, lambda t: t * torch.nan)],
    "'classifier.bias': declared as torch.float32 (10,), found torch.float32 (9,)": lambda c: [
        with_tensor(c, lambda t: t[:9])
    ],
    "its tensors have 220,880 bytes, and 220,840 are declared": lambda c: [with_tensor(c, lambda t: t.double())],
    "found torch.int32": lambda c: [with_tensor(c, lambda t: t.view(torch.int32))],
    "it is declared, but missing": lambda c: with_message(
        c, lambda m: {k: v for k, v in m.items() if k != "classifier.bias"}
    ),
    "its tensors have 220,844 bytes": lambda c: with_message(c, lambda m: {**m, "x": torch.zeros(1)}),
    "the phase declares only": lambda c: with_message(c, lambda m: {**m, "x": torch.zeros(0)}),
    "it makes 100 remarks, and 0 are possible": lambda c: with_words(c, remarks=("",) * 100),
    "it counts more bytes than the messages of a round have": lambda c: with_words(c, up=2**62),
    "bytes, and 1,0": lambda c: with_words(c, problem="x" * 2 * 10**6),
    "no message in safetensors form": lambda c: [c[:40]],
    "something else than an answer (train.ce)": lambda c: with_words(c, train={"ce": math.nan}),
    "something else than an answer (train)": lambda c: with_words(c, train=[0.5]),
    "something else than an answer (up)": lambda c: with_words(c, up=-1),
    "something else than an answer (order.round)": lambda c: with_words(c, order=Order("work", 2**63, 0)),
    "answered to another order than the last: ignored": lambda c: with_words(c, order=Order("work", 0, 0)),
    "it did not answer in time": lambda c: [],
}


def trained_rounds(federation, name="west"):
    """Return the rounds in which a site sent an update."""
    return [line["round"] for line in read_lines(federation.server / LEDGER) if line["client"] == name and line["up"]]


@pytest.mark.parametrize("why", ODD)
def test_an_invalid_answer_is_left_out_of_its_round(tmp_path, why):
    federation = tamper(Federation(tmp_path, sites=MLPS), ODD[why]).run()
    assert any(why in note for note in federation.about("west")), federation.notes
    assert trained_rounds(federation) == [1, 3]
    assert all(t.isfinite().all() for t in federation.model.values())


ODD_SCORES = {
    "values.loss": {"loss": math.nan},
    "values.error": {"error": -math.inf},
    "values.examples": {"examples": 10**400},
    "values.recall": {"recall": [0.5, "none"]},
    "values.accuracy": {"accuracy": "0.9"},
}


@pytest.mark.parametrize(("where", "round"), [*((where, 3) for where in ODD_SCORES), ("values.loss", 1)])
def test_invalid_scores_are_noted_in_their_round(tmp_path, round, where):
    """Also in the last round, after which no further order follows."""
    scores = (ReleasedScore("personal", "west", "validation", ODD_SCORES[where]),)
    federation = Federation(tmp_path, sites=MLPS)
    tamper(federation, lambda content: with_words(content, scores=scores), EVALUATE, round - 1).run()
    reason = "the scores of site 'west' are left out: its header says something else than an answer (scores.0."
    (note,) = federation.notes
    assert note.startswith(f"note in round {round}: {reason}{where}")
    lines = read_lines(federation.server / METRICS)
    assert [any(s["client"] == "west" for s in line["scores"]) for line in lines] == [r != round for r in (1, 2, 3)]


def test_a_second_answer_is_ignored(tmp_path):
    federation = tamper(Federation(tmp_path, sites=MLPS), lambda content: [content, with_tensor(content, lambda t: t + 1)])
    assert (federation.run().notes, trained_rounds(federation)) == ([], [1, 2, 3])
    assert federation.equals(run_together(tmp_path / "one", sites=MLPS))


def test_a_full_disk_excludes_the_site_from_one_round_only(tmp_path, monkeypatch):
    """Unsaved state is undone: the site continues from the round before."""
    federation, real, full = Federation(tmp_path, sites=MLPS), checkpoint.write_tensors, [False]

    def write(path, *rest):
        if full[0] and "west" in str(path):
            with replace_file(path):
                raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *rest)

    def watch(event):
        if find_event("RoundDone")(event):
            full[0] = event.round == 1

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    federation.run(watch)
    assert trained_rounds(federation) == [1, 3]
    why = "site 'west' is left out: it is paused, because its disk is full"  # no path leaves
    assert federation.notes == [f"note in round 2: {why}"]
    assert fedmutual.Run(federation["west"].folder).round == 3


def test_a_raising_user_network_excludes_the_site_from_one_round_only(tmp_path, monkeypatch):
    """The training of that round is undone, as if the site had been absent, whatever the network raises."""
    away, raised, messages = Federation(tmp_path / "away", sites=MLPS), Federation(tmp_path / "raised", sites=MLPS), []
    away.transport.before = lambda round, phase: setattr(away.transport, "silent", {"west"} if round == 1 else set())
    raised["west"].say = messages.append
    away.run()

    def fails(client, phase, inbox, declared, at, warn):
        reply = participate(client, phase, inbox, declared, at, warn)
        if (client.id, at.round) == ("west", 1):
            raise MemoryError("unable to allocate 3 GiB\nat once")
        return reply

    monkeypatch.setattr("fedmutual.sites.private_values.participate", fails)
    raised.run()
    assert trained_rounds(away) == trained_rounds(raised) == [1, 3]
    (note,) = raised.notes
    assert note.startswith("note in round 2: site 'west' is left out: its message holds numbers in ")
    assert note.endswith(" that are not finite; its operator reads why")
    assert messages[0].startswith("round 2: MemoryError: unable to allocate 3 GiB; the phase is undone")
    assert same(raised.personal("west")["west"], away.personal("west")["west"])


def test_what_cannot_be_written_down_does_not_leave(tmp_path, monkeypatch):
    north = Federation(tmp_path, sites=MLPS)["north"]

    def full(*_, **__):
        raise RunError("ledger: cannot be written (No space left on device)")

    monkeypatch.setattr(site_runtime, "record_sent", full)
    with pytest.raises(RunError, match="No space left"):
        north.carry_out(pack_message(Order("work", 0, 0), north.experiment.make_server_state()))


def test_a_meme_is_scored_as_it_was_trained_after_a_restart_too(tmp_path):
    """Between a round's work and its scores."""
    common = COMMON | TELLING | {"records": {"copies": True}}
    federation = Federation(tmp_path, common, MLPS)
    state = make_first_state(federation.agreed, build_server_experiment(federation.agreed))
    work, exam = pack_message(Order("work", 0, 0), state), pack_message(Order(EVALUATE, 0, 0), state)
    federation["north"].carry_out(work)
    anew = federation.start("north")
    anew.carry_out(work)  # answered as before
    scores = read_answer(anew.carry_out(exam))[0].scores
    (other,) = halves(tmp_path / "whole", contract(tmp_path, common, MLPS), {"north": MLPS["north"]})[1].values()
    other.carry_out(work)
    assert read_answer(other.carry_out(exam))[0].scores == scores
    assert "copy" in {score.model for score in scores}


def test_a_server_without_its_state_receives_an_error(tmp_path):
    federation, messages = Federation(tmp_path, COMMON | {"rounds": 5}, MLPS).run(), []
    north = federation.start("north", messages.append)
    answer, message = read_answer(north.carry_out(pack_message(Order("work", 0, 0), north.experiment.make_server_state())))
    assert (message, answer.problem) == ({}, site_journal.PAST)
    assert messages == [f"round 1: declined: {site_journal.PAST}"]
    assert fedmutual.Run(north.folder).round == 5  # nothing of the site's was touched


def test_too_few_sites_stop_the_rounds_and_what_is_saved_goes_on(tmp_path):
    federation = Federation(tmp_path, sites=MLPS, quorum=3)

    def watch(event):
        if find_event("RoundDone", 2)(event):
            federation.transport.away = {"west"}

    with pytest.raises(TooFew, match="2 of 3 sites did their part, and 3 are needed"):
        federation.run(watch)
    federation.transport.away, federation.notes = set(), []
    assert (federation.run().notes, trained_rounds(federation)) == ([], [1, 2, 3])
    assert federation.equals(run_together(tmp_path / "one", sites=MLPS))


def test_bytes_count_at_the_sites_to_which_they_were_sent(tmp_path):
    federation = Federation(tmp_path, sites=MLPS, quorum=2)

    def be_absent(round, phase):
        federation.transport.away = set()  # it is away until after round 1
        federation.transport.silent = {"west"} if round == 2 else set()

    federation.transport.away = {"west"}
    federation.transport.before = be_absent
    federation.run()
    size = sum(t.nbytes for t in federation.model.values())
    bytes_of_west = [
        (line["down"], line["up"]) for line in read_lines(federation.server / LEDGER) if line["client"] == "west"
    ]
    assert bytes_of_west == [(0, 0), (size, size), (size, 0)]


def test_a_client_with_seven_of_ten_classes_and_its_own_network(tmp_path):
    """Sites share a part; one site has its own outputs and an adaptor that never leaves the site."""
    common = {**COMMON, "model": {"shared": "mlp", "part": "features"}}
    data = {"name": "digits", "classes": list("0123456")}
    with pytest.raises(UserError, match="its class '7' is none of the classes"):  # three classes have no name at the site
        Federation(tmp_path, common, {**MLPS, "west": {**MLPS["west"], "data": data}})
    seven = {**MLPS["west"], "data": {**data, "labels": {"7": "6", "8": "6", "9": "6"}}}
    federation = Federation(tmp_path, common, {**MLPS, "west": seven}).run()
    names = {t["name"] for line in federation.ledger("west") for t in line["tensors"]}
    assert names == {"features.fc1.weight", "features.fc1.bias", "features.fc2.weight", "features.fc2.bias"}
    server = (federation.server / "config.toml").read_text() + json.dumps(federation.summary)
    assert "0.02" not in server  # west's learning rate
    assert federation.personal("west")["west"]["classifier.weight"].shape[0] == 7


def test_a_site_that_tells_nothing(tmp_path):
    silent = {**MLPS, "west": {**MLPS["west"], "share": {"metrics": "none"}}}
    federation = Federation(tmp_path, sites=silent).run()
    assert all(not line["told"] for line in federation.ledger("west"))
    disclosed = {s["client"] for line in read_lines(federation.server / "metrics.jsonl") for s in line["scores"]}
    assert disclosed == {"north", "south"}
    lines = read_lines(federation["west"].folder / "metrics.jsonl")
    assert ([line["round"] for line in lines], bool(lines[-1]["scores"])) == ([1, 2, 3], True)


def test_state_of_another_site_file_is_refused(tmp_path):
    federation = Federation(tmp_path, sites=MLPS)
    changed = {**MLPS["north"], "optimizer": {"lr": 0.5}}
    SiteRuntime(
        federation.agreed, read_site_file(site(tmp_path, "north", changed))
    )  # before the first order nothing is fixed
    federation.run()
    with pytest.raises(RunError, match=r"holds the state of this federation with another site\.toml"):
        SiteRuntime(federation.agreed, read_site_file(site(tmp_path, "north", changed)))


def test_what_a_site_says_moves_no_cursor_and_begins_no_line(tmp_path):
    """The text reaches consoles and logs of other participants."""
    hostile_text = "\n2026  stopped\x1b[2J" + "x" * 1000
    answer = read_answer(pack_message(SiteAnswer(Order("work", 0, 0), problem=hostile_text, remarks=(hostile_text,)), {}))[0]
    with pytest.raises(MalformedMessage) as caught:
        read_answer(pack_message(SiteAnswer(Order("work", 0, 0), train={hostile_text: math.nan}), {}))
    for words in (answer.problem, answer.remarks[0], str(caught.value)):
        assert words.isprintable()
        assert len(words) < 600
        assert "?2026  stopped?[2Jxx" in words


def test_a_newcomer_joins_and_a_site_leaves_for_good(tmp_path):
    """Another contract, of other sites, goes on with the rounds: with what each of them knows."""
    before = Federation(tmp_path, sites={i: MLPS[i] for i in ("north", "south")}).run()
    shared = before.model
    later = Federation(tmp_path, {**COMMON, "rounds": 5}, {i: MLPS[i] for i in ("north", "west")}).run()
    assert (later.notes, trained_rounds(later)) == ([], [4, 5])
    orders = ((i, *read_order(content)) for i, content, _ in reversed(later.transport.answers))
    first = {i: message for i, order, message in orders if order.kind != EVALUATE and order.round == 3}
    assert first.keys() == {"north", "west"}
    assert all(same(message, shared) for message in first.values())
    assert fedmutual.Run(later["north"].folder).round == 5
    # who did not agree to the new one refuses it
    assert "'sites.names'" in (find_difference(before.agreed.record(), later.agreed.record()) or "")


def test_a_site_that_starts_again_after_the_end_is_still_at_the_end(tmp_path):
    """A report finds its summary, whatever was started since; a longer federation removes the summary."""
    federation = Federation(tmp_path, sites=MLPS).run()
    folder, mine = federation["north"].folder, read_site_file(tmp_path / "north" / "site.toml")
    summary = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    SiteRuntime(federation.agreed, mine, check_only=True)  # a look writes nothing
    assert not (folder / "summary.json").exists()
    content = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(content + b'{"round": 4, "sco')  # a full disk cut it short
    SiteRuntime(federation.agreed, mine)
    assert (folder / "metrics.jsonl").read_bytes() == content
    assert (folder / "summary.json").read_bytes() == summary
    SiteRuntime(contracts.read_contract(contract(tmp_path, {**COMMON, "rounds": 5}, MLPS)), mine)
    assert not (folder / "summary.json").exists()
