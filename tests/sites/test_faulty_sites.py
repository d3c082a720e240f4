"""Sites that answer nonsense, late, twice or not at all; full disks; a server that lost its state. Without any network."""

import json
import math
from dataclasses import replace

import pytest
import torch

import fedmutual
from fedmutual.config import parse_config
from fedmutual.core import Message
from fedmutual.engines.base import participate
from fedmutual.errors import RunError, UserError
from fedmutual.events import Noted
from fedmutual.rundir.file_names import LEDGER, METRICS
from fedmutual.rundir.text import describe_event
from fedmutual.sites import contract as contracts
from fedmutual.sites import ledger, site_journal, site_runtime
from fedmutual.sites.consent import find_difference
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.engine import TooFew
from fedmutual.sites.protocol import (
    EVALUATE,
    MalformedMessage,
    Order,
    ReleasedScore,
    SiteAnswer,
    pack_message,
    read_answer,
    read_order,
)
from fedmutual.sites.server_experiment import build_server_experiment, make_first_state
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from log_lines import read_lines
from wards import COMMON, SITES, TELLING, InMemoryTransport, contract, halves, same, site, together

pytestmark = pytest.mark.sites

MLPS = {i: {**tables, "model": {"personal": "mlp"}} for i, tables in SITES.items()}


class Tampered(InMemoryTransport):
    """West's answer to one order of work is changed on its way."""

    def __init__(self, sites, change, round=1):
        super().__init__(sites)
        self._change, self._round = change, round

    def ask(self, orders, deadline):
        for i, content in super().ask(orders, deadline):
            order, _ = read_order(orders[i])
            if i == "west" and order.round == self._round and order.kind != EVALUATE:
                yield from ((i, c) for c in self._change(content))
            else:
                yield i, content


def with_tensor(content, change) -> bytes:
    answer, message = read_answer(content)
    name = "classifier.bias"
    return pack_message(answer, {**message, name: change(message[name])})


def with_words(content, **words) -> bytes:
    answer, message = read_answer(content)
    return pack_message(replace(answer, **words), message)


def older(content) -> bytes:
    answer, message = read_answer(content)
    return pack_message(
        type(answer)(Order(answer.order.kind, answer.order.round - 1, answer.order.phase), answer.train), message
    )


def without(message: Message, name: str) -> Message:
    return {k: v for k, v in message.items() if k != name}


ODD = {
    "numbers in 'classifier.bias' that are not finite": lambda c: [with_tensor(c, lambda t: t * torch.nan)],
    "'classifier.bias': declared as torch.float32 (10,), found torch.float32 (9,)": lambda c: [
        with_tensor(c, lambda t: t[:9])
    ],
    "its tensors have 220,880 bytes, and 220,840 are declared": lambda c: [with_tensor(c, lambda t: t.double())],
    "found torch.int32": lambda c: [with_tensor(c, lambda t: t.view(torch.int32))],
    "it is declared, but missing": lambda c: [
        pack_message(read_answer(c)[0], without(read_answer(c)[1], "classifier.bias"))
    ],
    "its tensors have 220,844 bytes": lambda c: [
        pack_message(read_answer(c)[0], {**read_answer(c)[1], "x": torch.zeros(1)})
    ],
    "the phase declares only": lambda c: [pack_message(read_answer(c)[0], {**read_answer(c)[1], "x": torch.zeros(0)})],
    "it makes 100 remarks, and 0 are possible": lambda c: [with_words(c, remarks=("",) * 100)],
    "it counts more bytes than the messages of a round have": lambda c: [with_words(c, up=2**62)],
    "bytes, and 10,": lambda c: [with_words(c, problem="x" * 10**6)],
    "no message in safetensors form": lambda c: [c[:40]],
    "something else than an answer (train.ce)": lambda c: [with_words(c, train={"ce": math.nan})],
    "something else than an answer (train)": lambda c: [with_words(c, train=[0.5])],
    "something else than an answer (up)": lambda c: [with_words(c, up=-1)],
    "something else than an answer (order.round)": lambda c: [with_words(c, order=Order("work", 2**63, 0))],
    "answered to another order than the last: ignored": lambda c: [older(c)],
    "it did not answer in time": lambda c: [],
}


def run(folder, transport, agreed, watch=lambda event: None):
    notes = []

    def observe(event):
        watch(event)
        if isinstance(event, Noted):
            notes.extend(describe_event(event))

    Coordinator(agreed, folder / "server").run(transport, [observe])
    ledger = read_lines(folder / "server" / LEDGER)
    return notes, [line["round"] for line in ledger if line["client"] == "west" and line["up"]]


@pytest.mark.parametrize("why", ODD)
def test_an_invalid_answer_is_left_out_of_its_round(tmp_path, why):
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=MLPS), MLPS)
    notes, rounds = run(tmp_path, Tampered(sites, ODD[why]), agreed)
    assert any("'west'" in note and why in note for note in notes), notes
    assert rounds == [1, 3]
    assert all(t.isfinite().all() for t in fedmutual.Run(tmp_path / "server").global_model().state_dict().values())


ODD_SCORES = {
    "values.loss": {"loss": math.nan},
    "values.error": {"error": -math.inf},
    "values.examples": {"examples": 10**400},
    "values.recall": {"recall": [0.5, "none"]},
    "values.accuracy": {"accuracy": "0.9"},
}


@pytest.mark.parametrize("where", ODD_SCORES)
@pytest.mark.parametrize("round", [1, 3])
def test_invalid_scores_are_noted_in_their_round(tmp_path, round, where):
    """Also in the last round, after which no further order follows."""
    agreed, sites = halves(tmp_path, contract(tmp_path, {**COMMON, "rounds": 3}, MLPS), MLPS)

    class Scored(InMemoryTransport):
        def ask(self, orders, deadline):
            for i, content in super().ask(orders, deadline):
                answer, _ = read_answer(content)
                is_spoilt = i == "west" and (answer.order.kind, answer.order.round) == (EVALUATE, round - 1)
                spoilt_answer = replace(answer, scores=(ReleasedScore("personal", "west", "validation", ODD_SCORES[where]),))
                yield i, pack_message(spoilt_answer, {}) if is_spoilt else content

    notes, _ = run(tmp_path, Scored(sites), agreed)
    (note,) = notes
    reason = "the scores of site 'west' are left out: its header says something else than an answer (scores.0."
    assert note.startswith(f"note in round {round}: {reason}{where}")
    lines = read_lines(tmp_path / "server" / METRICS)
    assert [any(s["client"] == "west" for s in line["scores"]) for line in lines] == [r != round for r in (1, 2, 3)]


def test_a_second_answer_is_ignored(tmp_path):
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=MLPS), MLPS)
    twice = Tampered(sites, lambda content: [content, with_tensor(content, lambda t: t + 1)])
    assert run(tmp_path, twice, agreed) == ([], [1, 2, 3])
    one = fedmutual.run(parse_config(together(sites=MLPS)), tmp_path / "one")
    assert same(fedmutual.Run(tmp_path / "server").global_model().state_dict(), one.global_model().state_dict())


def test_a_full_disk_excludes_the_site_from_one_round_only(tmp_path, monkeypatch):
    """Unsaved state is undone: the site continues from the round before."""
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=MLPS), MLPS)
    real, full = site_journal.write_tensors, [False]

    def write(path, *rest):
        if full[0] and "west" in str(path):
            raise RunError(f"{path}: cannot be written (No space left on device)")
        real(path, *rest)

    def watch(event):
        if type(event).__name__ == "RoundDone":
            full[0] = event.round == 1

    monkeypatch.setattr(site_journal, "write_tensors", write)
    notes, rounds = run(tmp_path, InMemoryTransport(sites), agreed, watch)
    assert rounds == [1, 3]
    assert notes == ["note in round 2: site 'west' is left out: it could not do its part; its operator reads why"]
    assert "/" not in notes[0]  # no path leaves
    assert fedmutual.Run(sites["west"].folder).round == 3


def test_a_raising_user_network_excludes_the_site_from_one_round_only(tmp_path, monkeypatch):
    """The training of that round is undone, as if the site had been absent, whatever the network raises."""
    models, messages = {}, []

    def fails(client, phase, inbox, declared, at, warn):
        reply = participate(client, phase, inbox, declared, at, warn)
        if (client.id, at.round) == ("west", 1):
            raise MemoryError("unable to allocate 3 GiB\nat once")
        return reply

    class Away(InMemoryTransport):
        def ask(self, orders, deadline):
            gone = {i for i, content in orders.items() if i == "west" and read_order(content)[0].round == 1}
            return super().ask({i: content for i, content in orders.items() if i not in gone}, deadline)

    for case, transport in (("away", Away), ("raised", InMemoryTransport)):
        (tmp_path / case).mkdir()
        agreed, sites = halves(tmp_path / case, contract(tmp_path / case, sites=MLPS), MLPS)
        sites["west"].say = messages.append
        notes, rounds = run(tmp_path / case, transport(sites), agreed)
        assert rounds == [1, 3]
        models[case] = fedmutual.Run(sites["west"].folder).personal_model("west").state_dict()
        monkeypatch.setattr("fedmutual.sites.private_values.participate", fails)
    (note,) = notes
    assert note.startswith("note in round 2: site 'west' is left out: its message holds numbers in ")
    assert note.endswith(" that are not finite; its operator reads why")
    assert messages[0].startswith("round 2: MemoryError: unable to allocate 3 GiB; the phase is undone")
    assert same(models["raised"], models["away"])


def test_what_cannot_be_written_down_does_not_leave(tmp_path, monkeypatch):
    _, sites = halves(tmp_path, contract(tmp_path, sites=MLPS), MLPS)
    north = sites["north"]

    def full(*_, **__):
        raise RunError("ledger: cannot be written (No space left on device)")

    monkeypatch.setattr(site_runtime, "record_sent", full)
    with pytest.raises(RunError, match="No space left"):
        north.carry_out(pack_message(Order("work", 0, 0), north.experiment.make_server_state()))


def test_asked_again_answers_as_before_and_trains_nothing_twice(tmp_path):
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=MLPS), MLPS)
    north, server = sites["north"], sites["north"].experiment.make_server_state()
    asked = pack_message(Order("work", 0, 0), server)
    first = north.carry_out(asked)
    again = SiteRuntime(agreed, read_site_file(site(tmp_path, "north", MLPS["north"])))  # started anew
    assert again.carry_out(asked) == north.carry_out(asked) == first
    assert len(ledger.read_ledger(north.folder)) == 3  # every answer that left, the repeated ones too


def test_a_meme_is_scored_as_it_was_trained_after_a_restart_too(tmp_path):
    """Between a round's work and its scores."""
    common = COMMON | TELLING | {"records": {"copies": True}}
    agreed, sites = halves(tmp_path, contract(tmp_path, common, MLPS), MLPS)
    state = make_first_state(agreed, build_server_experiment(agreed))
    work, exam = pack_message(Order("work", 0, 0), state), pack_message(Order(EVALUATE, 0, 0), state)
    sites["north"].carry_out(work)
    anew = SiteRuntime(agreed, read_site_file(tmp_path / "north" / "site.toml"))
    anew.carry_out(work)  # answered as before
    scores = read_answer(anew.carry_out(exam))[0].scores
    (other,) = halves(tmp_path / "whole", contract(tmp_path, common, MLPS), {"north": MLPS["north"]})[1].values()
    other.carry_out(work)
    assert read_answer(other.carry_out(exam))[0].scores == scores
    assert "copy" in {score.model for score in scores}


def test_a_server_without_its_state_receives_an_error(tmp_path):
    agreed, sites = halves(tmp_path, contract(tmp_path, COMMON | {"rounds": 5}, MLPS), MLPS)
    run(tmp_path, InMemoryTransport(sites), agreed)
    messages = []
    north = SiteRuntime(agreed, read_site_file(site(tmp_path, "north", MLPS["north"])), messages.append)
    answer, message = read_answer(north.carry_out(pack_message(Order("work", 0, 0), north.experiment.make_server_state())))
    assert (message, answer.problem) == ({}, site_journal.PAST)
    assert messages == [f"round 1: declined: {site_journal.PAST}"]
    assert fedmutual.Run(north.folder).round == 5  # nothing of the site's was touched


def test_too_few_sites_stop_the_rounds_and_what_is_saved_goes_on(tmp_path):
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=MLPS, quorum=3), MLPS)
    transport = InMemoryTransport(sites)

    def watch(event):
        transport.away = {"west"} if type(event).__name__ == "RoundDone" and event.round == 2 else transport.away

    with pytest.raises(TooFew, match="2 of 3 sites did their part, and 3 are needed"):
        run(tmp_path, transport, agreed, watch)
    transport.away = set()
    assert run(tmp_path, transport, agreed) == ([], [1, 2, 3])
    one = fedmutual.run(parse_config(together(sites=MLPS)), tmp_path / "one")
    assert same(fedmutual.Run(tmp_path / "server").global_model().state_dict(), one.global_model().state_dict())


def test_a_client_with_seven_of_ten_classes_and_its_own_network(tmp_path):
    """Sites share a part; one site has its own outputs and an adaptor that never leaves the site."""
    common = {**COMMON, "model": {"shared": "mlp", "part": "features"}}
    seven = {**MLPS["west"], "data": {"name": "digits", "classes": list("0123456")}}
    mine = {**MLPS, "west": seven}
    path = contract(tmp_path, common, mine)
    agreed = contracts.read_contract(path)
    with pytest.raises(UserError, match="its class '7' is none of the classes"):  # three classes have no name at the site
        halves(tmp_path, path, mine)
    labels = {"7": "6", "8": "6", "9": "6"}
    mine["west"] = {**seven, "data": {**seven["data"], "labels": labels}}
    runtimes = {i: SiteRuntime(agreed, read_site_file(site(tmp_path, i, mine[i]))) for i in mine}
    run(tmp_path, InMemoryTransport(runtimes), agreed)
    names = {t["name"] for line in ledger.read_ledger(runtimes["west"].folder) for t in line["tensors"]}
    assert names == {"features.fc1.weight", "features.fc1.bias", "features.fc2.weight", "features.fc2.bias"}
    server = (tmp_path / "server" / "config.toml").read_text() + json.dumps(fedmutual.Run(tmp_path / "server").summary)
    assert "0.02" not in server  # west's learning rate
    assert fedmutual.Run(runtimes["west"].folder).personal_model("west").state_dict()["classifier.weight"].shape[0] == 7


def test_a_site_that_tells_nothing(tmp_path):
    silent = {**MLPS, "west": {**MLPS["west"], "share": {"metrics": "none"}}}
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=silent), silent)
    run(tmp_path, InMemoryTransport(sites), agreed)
    assert all(not line["told"] for line in ledger.read_ledger(sites["west"].folder))
    disclosed = {s["client"] for line in read_lines(tmp_path / "server" / "metrics.jsonl") for s in line["scores"]}
    assert disclosed == {"north", "south"}
    lines = read_lines(sites["west"].folder / "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert lines[-1]["scores"]


def test_state_of_another_site_file_is_refused(tmp_path):
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=MLPS), MLPS)
    changed = {**MLPS["north"], "optimizer": {"lr": 0.5}}
    SiteRuntime(agreed, read_site_file(site(tmp_path, "north", changed)))  # before the first order nothing is fixed
    run(tmp_path, InMemoryTransport(sites), agreed)
    with pytest.raises(RunError, match=r"holds the state of this federation with another site\.toml"):
        SiteRuntime(agreed, read_site_file(site(tmp_path, "north", changed)))


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


def test_an_order_that_is_none(tmp_path):
    _, sites = halves(tmp_path, contract(tmp_path, sites=MLPS), MLPS)
    with pytest.raises(MalformedMessage):
        sites["north"].carry_out(b"nonsense")


def test_a_newcomer_joins_and_a_site_leaves_for_good(tmp_path):
    """Another contract, of other sites, goes on with the rounds: with what each of them knows."""
    two = {i: MLPS[i] for i in ("north", "south")}
    agreed, sites = halves(tmp_path, contract(tmp_path, sites=two), two)
    run(tmp_path, InMemoryTransport(sites), agreed)
    shared = fedmutual.Run(tmp_path / "server").global_model().state_dict()

    others = {i: MLPS[i] for i in ("north", "west")}
    longer, later = halves(tmp_path, contract(tmp_path, {**COMMON, "rounds": 5}, others), others)
    orders = []

    class Seen(InMemoryTransport):
        def ask(self, asked, deadline):
            orders.extend((i, *read_order(content)) for i, content in asked.items())
            return super().ask(asked, deadline)

    assert run(tmp_path, Seen(later), longer) == ([], [4, 5])
    first = {i: message for i, order, message in reversed(orders) if order.kind != EVALUATE and order.round == 3}
    assert first.keys() == {"north", "west"}
    assert all(same(message, shared) for message in first.values())
    assert fedmutual.Run(later["north"].folder).round == 5
    assert "'sites.names'" in (
        find_difference(agreed.record(), longer.record()) or ""
    )  # who did not agree to the new one refuses it


def test_a_site_that_starts_again_after_the_end_is_still_at_the_end(tmp_path):
    """A report finds its summary, whatever was started since; a longer federation removes the summary."""
    path = contract(tmp_path, sites=MLPS)
    agreed, sites = halves(tmp_path, path, MLPS)
    run(tmp_path, InMemoryTransport(sites), agreed)
    folder = sites["north"].folder
    summary = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    mine = read_site_file(tmp_path / "north" / "site.toml")
    SiteRuntime(agreed, mine, check_only=True)  # a look writes nothing
    assert not (folder / "summary.json").exists()
    content = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(content + b'{"round": 4, "sco')  # a full disk cut it short
    SiteRuntime(agreed, mine)
    assert (folder / "metrics.jsonl").read_bytes() == content
    assert (folder / "summary.json").read_bytes() == summary
    SiteRuntime(contracts.read_contract(contract(tmp_path, {**COMMON, "rounds": 5}, MLPS)), mine)
    assert not (folder / "summary.json").exists()
