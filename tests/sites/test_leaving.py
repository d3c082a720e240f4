"""A site that leaves in good order, and the word for how each site stands."""

import json
import re
import shutil
import signal
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from fedmutual.cli.sites import _run_until_stopped
from fedmutual.errors import RunError
from fedmutual.sites import leaving, monitor
from fedmutual.sites.flare.controller import find_left
from fedmutual.sites.flare.progress import read_connected, write_connected
from fedmutual.sites.journal import FILE, OLD_LEDGER, Journal
from fedmutual.sites.leaving import Leave, close_state, has_answered, has_left, note_told, read_leave, write_leave
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.protocol import LEAVES, read_answer
from fedmutual.sites.server_journal import LEFT, read_gone
from loopback import JOBS, LEAD, loopback
from wards import COMMON, MLPS, Federation, same

pytestmark = pytest.mark.sites

FOUR = {**COMMON, "rounds": 4}


def leave_in(federation, round, wipe=False, **more):
    """At this round, from 0, of a federation, west's operator gives `fedmutual leave`."""
    state = federation.folder / "west" / "state"

    def before(now, phase):
        if now == round and phase == 0 and read_leave(state) is None:
            write_leave(state, Leave(runs=("wards",), wipe=wipe))

    federation.transport.before = before
    return state


@pytest.fixture(scope="module", params=["float", "masked"])
def left(request, tmp_path_factory):
    """A federation whose site west leaves in round 3, with plain and with masked sums; and the state folder of west."""
    four = {**MLPS, "east": MLPS["north"]}
    given = FOUR | {"server": {"sum": request.param}}
    federation = Federation(tmp_path_factory.mktemp("left") / "fed", given, four)
    state = leave_in(federation, 2, wipe=True)
    return federation.run(), state, (given, four)


def test_the_others_go_on_as_if_the_site_were_absent(left, tmp_path):
    federation, _, (given, four) = left
    absent = Federation(tmp_path / "absent", given, four)
    last = 5 if absent.agreed.is_masked else 0  # the last phase of a round
    absent.transport.before = lambda *place: absent.transport.away.add("west") if place == (1, last) else None
    absent.run()
    assert same(federation.model, absent.model)
    told = "site 'west' left the federation in good order, and gets no more orders"
    assert federation.about("west") == [f"note in round 3: {told}"]
    assert read_gone(federation.server) == {"west": LEFT}
    assert not any("broken" in note for note in federation.notes)
    assert {line["round"] for line in federation.ledger("north")} == {1, 2, 3, 4}


def test_the_ledger_is_closed_and_the_state_wiped(left, monkeypatch):
    federation, state, _ = left
    runtime, lines = federation["west"], federation.ledger("west")
    assert (lines[-1]["round"], lines[-1]["told"]) == (3, {"problem": "it leaves the federation"})
    _, order, answer = next(entry for entry in federation.transport.answers[::-1] if entry[0] == "west")
    assert runtime.carry_out(order) == answer  # a lost answer is given again
    _, earlier, _ = next(entry for entry in federation.transport.answers if entry[0] == "west")
    assert read_answer(runtime.carry_out(earlier))[0].problem == LEAVES  # the first answer is not given again
    assert federation.ledger("west") == lines
    assert [has_answered(state, run) for run in ("wards", "others")] == [True, False]  # also before the server is told
    assert not has_left(state, ["wards"])
    with pytest.raises(RunError, match=r"this site left federation 'wards' after round 2; take part in one of another name"):
        federation.start("west")
    note_told(state)
    assert has_left(state, ["wards"])
    assert not has_left(state, ["others"])
    runtime.close()
    with monkeypatch.context() as patch:
        patch.setattr(leaving.shutil, "rmtree", Mock(side_effect=PermissionError(13, "no rights")))
        with pytest.raises(RunError, match=r"cannot be removed \(no rights\)"):
            close_state(state)
    close_state(state)
    assert {path.name for path in runtime.folder.iterdir()} <= {OLD_LEDGER, ".lock"}
    assert read_ledger(runtime.folder) == lines
    close_state(state)  # a second time, after a kill in between
    with pytest.raises(RunError, match="this site left the federation"):
        federation.start("west")


def test_a_wipe_that_is_given_again_keeps_the_ledger_of_a_killed_site(tmp_path, monkeypatch):
    journal, state = Journal(tmp_path / "killed" / "wards"), tmp_path / "state"
    about = {"phase": 1, "what": "work", "to": "server", "tensors": [], "told": {}, "bytes": 3}
    lines = [{"round": number, **about} for number in (1, 2, 3)]
    journal.write("INSERT INTO sent (line) VALUES (?)", *((json.dumps(line),) for line in lines))
    shutil.copytree(tmp_path / "killed", state)  # as a kill leaves it: the lines are in SQLite's log of changes
    write_leave(state, Leave(runs=("wards",), wipe=True, is_told=True))
    (state / "wards" / "zz").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(leaving.shutil, "rmtree", Mock(side_effect=PermissionError(13, "no rights")))
        with pytest.raises(RunError, match=r"cannot be removed \(no rights\)"):
            close_state(state)
    close_state(state)
    assert read_ledger(state / "wards") == lines


def test_a_state_that_is_kept_stays_whole(tmp_path):
    federation = Federation(tmp_path / "fed", {**COMMON, "rounds": 2}, MLPS)
    state = leave_in(federation, 1)
    federation.run()
    note_told(state)
    close_state(state)
    assert (state / "wards" / FILE).exists()
    assert federation.personal("west")["west"]


def test_a_federation_ends_where_too_few_sites_are_left(tmp_path):
    federation = Federation(tmp_path / "fed", FOUR, MLPS, quorum=3)
    leave_in(federation, 1)
    with pytest.raises(RunError, match="3 sites are needed, and of 3 these left or are excluded for good: west"):
        federation.run()


def test_a_site_that_left_one_run_of_a_contract_left_the_others(tmp_path):
    contracts = [{"name": "wards", "tables": {"split": {"folds": 2}}}, {"name": "other", "tables": {}}]
    federation = Federation(tmp_path / "wards-0", {**COMMON, "rounds": 2}, MLPS)
    leave_in(federation, 1)
    federation.run()
    (tmp_path / "wards-0" / "server").rename(tmp_path / "server-0")
    (tmp_path / "state").mkdir()
    (tmp_path / "server-0").rename(tmp_path / "state" / "wards-0")
    assert find_left(tmp_path / "state", "wards-1", contracts) == {"west"}
    assert find_left(tmp_path / "state", "other", contracts) == set()


RUNNING = {"outcome": "running", "sites": ["west"], "in": ["west"], "late": [], "outside": [], "notes": []} | {
    "round": 3,
    "joins": {},
    "evaluators": [],
}
STATES = [  # changes of the progress, whether west is connected, its last heartbeat, why it is gone -> its word
    ({}, True, None, None, "takes part"),
    ({"in": []}, True, None, None, "paused"),  # it answered that it could not do its part, as with a full disk
    ({"in": []}, True, (20.0, False), None, "late"),
    ({"in": [], "late": ["west"]}, True, None, None, "late"),
    ({"in": [], "outside": ["west"]}, True, None, None, "restarting"),
    ({"outcome": "again"}, True, None, None, "restarting"),
    ({"outcome": "broken"}, True, None, None, "restarting"),
    ({"outcome": "done"}, True, None, None, "waiting"),
    ({"outcome": "short", "in": []}, True, None, None, "waiting"),
    ({"in": []}, False, (20.0, True), None, "paused"),
    ({"in": []}, False, (20.0, False), None, "lost"),
    ({"in": []}, False, None, None, "lost"),
    ({"in": [], "joins": {"west": 5}}, False, None, None, "joins later"),
    ({"joins": {"west": 4}}, True, None, None, "takes part"),
    ({"in": [], "joins": {"west": 4}}, True, None, None, "joins later"),  # its first round is under way
    ({"in": [], "joins": {"west": 3}}, True, None, None, "paused"),
    ({"in": [], "late": ["west"], "outside": ["west"]}, True, None, None, "restarting"),  # it was late before it connected
    ({"in": [], "evaluators": ["west"]}, True, None, None, "evaluates"),
    ({"in": [], "evaluators": ["west"]}, False, None, None, "lost"),
    ({"in": []}, False, (20.0, True), LEFT, "left"),
    ({"in": []}, True, None, "most sites say that it has another public seed set", "excluded"),
]


@pytest.mark.parametrize(("changes", "is_connected", "seen", "why", "word"), STATES)
def test_the_word_of_a_site(changes, is_connected, seen, why, word):
    status = {"progress": RUNNING | changes, "connected": ["west"] if is_connected else [], "time": 1000.0}
    status |= {"seen": {"west": (1000.0 - seen[0], seen[1])} if seen else {}, "gone": {"west": why} if why else {}}
    past = seen[0] if seen else 0.0 if is_connected else None
    assert [*monitor.describe_sites(status)] == [{"site": "west", "state": word, "seen": past, "why": why or ""}]
    assert word in monitor.SITE_WORDS


def test_an_end_in_good_order_is_no_lost_connection(tmp_path):
    """North ends, and says so; the heartbeat of south is overdue first; west comes back; then the server starts again."""
    three = {"north": "1", "south": "2", "west": "3"}
    write_connected(tmp_path, three, three)
    write_connected(tmp_path, {i: three[i] for i in ("south", "west")}, ["west"], three)
    assert {i: ended for i, (_, ended) in read_connected(tmp_path)[2].items()} == {"north": True, "south": False}
    write_connected(tmp_path, {}, [], ("south", "west"))
    assert {i: ended for i, (_, ended) in read_connected(tmp_path)[2].items()} == {
        "north": True,
        "south": False,
        "west": True,
    }
    write_connected(tmp_path, {"north": "4"}, ["north"])
    assert read_connected(tmp_path)[2].keys() == {"south", "west"}
    write_connected(tmp_path, {}, [])
    assert read_connected(tmp_path)[2]["north"][1] is False


def test_the_process_of_a_site_ends_when_the_server_knows(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(leaving.os, "kill", lambda *words: ended.append(words))
    monkeypatch.setattr(leaving, "_TICK", 0.01)
    write_leave(tmp_path, Leave(runs=("wards-0", "wards-1"), wipe=False, is_told=True))
    thread = leaving.end_in_time(datetime.max.replace(tzinfo=UTC), lambda: has_left(tmp_path, ["wards-1"]))
    thread.join(5)
    leaving.end_in_time(datetime.now(UTC)).join(5)  # the certificate has ended
    assert len(ended) == 2


def test_the_process_ends_with_0_where_a_contract_has_several_runs(tmp_path, monkeypatch, capsys):
    write_leave(tmp_path, Leave(runs=("wards-0", "wards-1"), wipe=False, is_told=True))
    monkeypatch.setattr("fedmutual.sites.flare.workspace.run_process", lambda *words: words[-1](KeyboardInterrupt()))
    monkeypatch.setattr("fedmutual.sites.flare.kits.check_valid", Mock(side_effect=[None, RunError("it is old")]))
    _run_until_stopped(None, tmp_path, {"contracts": [{"name": "wards"}]}, ["wards-0", "wards-1"])
    assert "this site has left the federation" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        _run_until_stopped(None, tmp_path, {"contracts": [{"name": "other"}]}, ["other"])
    with pytest.raises(SystemExit) as ended:
        _run_until_stopped(None, tmp_path, {}, ["other"])
    assert (ended.value.code, capsys.readouterr().out) == (2, "it is old. Saved rounds are kept\n")


def test_a_real_site_leaves_ends_with_0_and_status_has_the_words(tmp_path):
    """Over TLS: west leaves, south is ended by Ctrl-C, and north and east go on in the same job."""
    sites = {**MLPS, "east": MLPS["north"]}
    with loopback(tmp_path / "fed", {**COMMON, "rounds": 500}, sites, quorum=2, deadline=20.0) as fed:
        fed.start("server", *sites, jobs=JOBS)
        fed.submit()
        fed.round(2)
        of_west = ("--kit", fed.folder / "kits" / "west", "--config", fed.configs["west"])
        job = fed.progress()["job"]
        out = fed.cli("leave", *of_west, "--state", "wipe")
        assert "this site has left federation 'wards'" in out
        assert fed.processes["west"].wait(10) == 0
        assert "its ledger is closed" in fed.log("west")
        fed.processes["south"].send_signal(signal.SIGINT)
        fed.wait(lambda: "site 'south' is disconnected" in fed.log("server"), 30, "the server knows that south ended")
        fed.round(fed.progress()["round"] + 3)
        status = fed.cli("status", fed.file, "--kit", fed.folder / "kits" / LEAD)
        words = dict(re.findall(r"^  (\w+): ([a-z ]+)", status, re.MULTILINE))
        assert words == {"north": "takes part", "east": "takes part", "south": "paused", "west": "left"}
        assert "broken" not in status + fed.log("server") + fed.log("submit")
        assert fed.progress()["job"] == job
        assert "problem" in fed.cli("ledger", fed.configs["west"], "--json")
        fed.start("west")
        assert fed.processes["west"].wait(60) == 2
        assert "this site left federation 'wards'" in fed.log("west")
