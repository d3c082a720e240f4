"""For whom a job is begun anew: a site that is heard, and not a dead connection; what a lead reads of a refusal."""

import base64
import errno
import json
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint
from nvflare.fuel.flare_api.api_spec import AuthenticationError, InternalError, NoConnection, SessionClosed
from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.server.reg import ServerCommandRegister

from fedmutual.engines.loop import Paused
from fedmutual.errors import ConfigError, RunError
from fedmutual.sites import contract as contracts
from fedmutual.sites.flare import progress, workspace
from fedmutual.sites.flare.access_control import guard
from fedmutual.sites.flare.controller import TaskTransport, pause_for_changes, write_refusal
from fedmutual.sites.flare.progress import read_connected, write_connected
from fedmutual.sites.flare.session import ServerLost, Session, read_server_answer
from fedmutual.sites.flare.watch import Watch, list_connected, make_lead_command
from fedmutual.sites.monitor import describe_sites
from wards import COMMON, contract

pytestmark = pytest.mark.sites


def test_no_site_takes_part_after_a_restart_of_the_server_until_the_job_runs(tmp_path, progress_file):
    progress_file.begin(("north",))
    watch = Watch()
    watch._state = tmp_path
    watch._stop.set()
    watch._run(MagicMock())
    recorded = progress.read_progress(tmp_path / "wards")
    status = {"progress": recorded, "connected": ["north"], "seen": {}, "time": None, "gone": None}
    assert {site["state"] for site in describe_sites(status)} == {"restarting", "lost"}
    assert recorded["said"] == "the server started again"


def test_an_overdue_site_is_connected_but_not_alive():
    seen = {"north": time.time() - 1, "south": time.time() - 3 * workspace.HEARTBEAT}
    clients = [SimpleNamespace(name=i, token=f"of {i}", last_connect_time=at) for i, at in seen.items()]
    connected, alive = list_connected(SimpleNamespace(get_clients=lambda: clients))
    assert (set(connected), set(alive)) == ({"north", "south"}, {"north"})


def test_a_second_process_of_a_site_is_reported(capsys, monkeypatch):
    watch, clock = Watch(), [0.0]
    monkeypatch.setattr("fedmutual.sites.flare.watch.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(SfmEndpoint, "add_connection", SfmEndpoint.add_connection)
    guard(SfmEndpoint, "add_connection", watch.note_connection)
    north, lead, job = (SfmEndpoint(Endpoint(name)) for name in ("north", "_admin_1", "north.J1"))
    printed = []
    for clock[0] in (0, 20, 40, 60, 80, 1000):
        for endpoint in (north, lead, job):
            endpoint.add_connection(MagicMock())
        printed.append(capsys.readouterr().out)
    assert len(north.connections) == 1  # FLARE closed the others
    assert "two processes use its kit" in printed.pop(3)
    assert printed == [""] * 5


def job(*inside):
    """A job in which these sites take part."""
    return SimpleNamespace(list_connected=lambda: inside, check=lambda: None, list_late=tuple)


NAMES = ("north", "south", "west")


@pytest.fixture
def progress_file(tmp_path):
    """The progress file of a running job."""
    return progress.ProgressFile(tmp_path / "wards", contracts.read_contract(contract(tmp_path)), "J1")


def test_a_dead_connection_restarts_no_job(tmp_path, progress_file):
    """South's connection was cut at the start of the job: South does not take part, and the server has not noticed."""
    write_connected(tmp_path, {"north": "1", "south": "1"}, ["north"])
    pause_for_changes(progress_file, job("north"), NAMES)
    for connection in "12":  # south was started anew before the second one
        write_connected(tmp_path, {"north": "1", "south": connection}, NAMES)
        with pytest.raises(Paused, match="south connected"):
            pause_for_changes(progress_file, job("north"), NAMES)
        pause_for_changes(progress_file, job("north"), NAMES)  # it was in vain: not at once again
    write_connected(tmp_path, {"north": "1", "east": "1"}, ["north", "east"])
    pause_for_changes(progress_file, job("north"), NAMES)  # east is no longer in sites.names, and its process still runs


def test_in_vain_for_one_waits_longer_each_time(tmp_path, progress_file):
    outside, begun = {"south": "1"}, []
    for now in range(0, 20_000, 10):
        if progress_file.list_due_sites(outside, ("north",), now):
            begun.append(now)
            progress_file = progress.ProgressFile(tmp_path / "wards", contracts.read_contract(contract(tmp_path)), "J1")
    assert begun[:6] == [0, 60, 180, 420, 900, 1860]
    assert begun[6:8] == [3780, 7380]  # never more than an hour
    assert progress_file.list_due_sites({}, NAMES, 20_000) == []  # it takes part, and what was in vain is over
    assert progress_file.list_due_sites(outside, ("north",), 20_001) == ["south"]


def test_a_job_that_waits_for_its_quorum_does_not_end_the_scheduler():
    """FLARE takes 2 to the power of the tries times the first interval: with a float that overflows."""
    (scheduler,) = (c for c in workspace.make_server_resources(Path("x"))["components"] if c["id"] == "job_scheduler")
    assert all(isinstance(value, int) for value in scheduler["args"].values())
    assert min(scheduler["args"]["max_schedule_interval"], 2**100_000 * scheduler["args"]["min_schedule_interval"]) == 5


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '{"format": 1}', '{"format": 1, "sites": 3}', "\x00" * 100])
def test_a_missing_or_damaged_list_of_sites_is_written_again(tmp_path, text):
    """The server writes what differs from the file, twice a second: an error would keep it from writing."""
    if text is not None:
        (tmp_path / progress.CONNECTED).write_text(text)
    assert read_connected(tmp_path)[:2] == ({}, {})
    write_connected(tmp_path, {"north": "1", "south": "2"}, ["north"])
    assert read_connected(tmp_path)[:2] == ({"north": "1", "south": "2"}, {"north": "1"})


def write_progress(folder, name, job, **changes):
    agreed = contracts.read_contract(contract(folder, COMMON | {"name": name}))
    progress.ProgressFile(folder / name, agreed, job).begin(())
    progress.change_progress(folder / name, **changes)


@pytest.fixture(params=[lambda text: text[:-20], lambda text: '{"format": 1}'], ids=["cut", "incomplete"])
def two_federations(tmp_path, request):
    """A server's folder with two federations under way, of which the first one's progress file is damaged."""
    for name in ("lab", "wards"):
        write_progress(tmp_path, name, f"job of {name}")
    damaged = tmp_path / "lab" / progress.FILE
    damaged.write_text(request.param(damaged.read_text()))
    return tmp_path


def test_a_damaged_progress_file_stops_no_other_federation(two_federations, capsys, clock):
    """The operator reads it once, and no archive of a job is removed meanwhile. The other one has no job for 5 s: its state
    was copied from another host without FLARE's files.
    """
    watch, engine = Watch(), Jobs().engine()
    for clock[0], outcome in ((0.0, "running"), (6.0, "stopped"), (7.0, "stopped")):
        assert not watch.check_federations(engine, two_federations, {})
        assert progress.read_progress(two_federations / "wards")["outcome"] == outcome
    output = capsys.readouterr().out
    assert output.count(f"{two_federations / 'lab' / progress.FILE}: is damaged") == 1
    assert output.count("but no job; submit the federation again") == 1
    (two_federations / "lab" / progress.FILE).unlink()
    assert watch.check_federations(engine, two_federations, {})


class Jobs:
    """A server's job store: the ids of its jobs, which have ended, and clones of them, which wait for their start."""

    def __init__(self, *ids):
        self.ids, self.clones = [*ids], 0

    def get_job(self, job_id, context):
        meta = {"job_id": job_id, "status": "SUBMITTED" if "clone" in job_id else "FINISHED:EXECUTION_EXCEPTION"}
        return SimpleNamespace(job_id=job_id, meta=meta) if job_id in self.ids else None

    def clone(self, job_id, meta, context):
        self.clones += 1
        self.ids.append(f"clone {self.clones} of {job_id}")
        return meta | {"job_id": self.ids[-1]}

    def delete(self, job_id, context):
        self.ids.remove(job_id)

    def get_jobs_by_status(self, status, context):
        return []

    def engine(self):
        """A server with these jobs, and no sites."""
        runner = SimpleNamespace(running_jobs={})
        known = {"new_context": nullcontext, "get_component": lambda name: self, "get_clients": list}
        return SimpleNamespace(**known, run_processes={}, job_runner=runner)


@pytest.fixture
def ended(tmp_path):
    """A server's folder with a federation whose second job has died."""
    write_progress(tmp_path, "wards", "J2", outcome=progress.Outcome.BROKEN, said="it died", old=["J1"])
    return tmp_path


def check_two_minutes(clock, watch, jobs, folder):
    """Let a server check its federations for two minutes, with all sites connected."""
    for _ in range(240):
        clock[0] += 0.5
        watch.check_federations(jobs.engine(), folder, dict.fromkeys(NAMES, "1"))


def refuse_replacement(monkeypatch, allowed=0):
    """Let no file be replaced, after `allowed` replacements."""
    replace, replaced = os.replace, []

    def refuse(part, path):
        if len(replaced) >= allowed:
            raise OSError(errno.ENOSPC, "No space left on device")
        replaced.append(path)
        replace(part, path)

    monkeypatch.setattr(os, "replace", refuse)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that `time.monotonic` returns, in a list."""
    seconds = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    return seconds


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_restart_that_cannot_be_written_leaves_no_job(ended, monkeypatch, capsys, clock, allowed):
    """The operator reads the error once, and the job is restarted when the file can be written again."""
    jobs, watch = Jobs("J1", "J2"), Watch()
    with monkeypatch.context() as patched:
        refuse_replacement(patched, allowed)
        check_two_minutes(clock, watch, jobs, ended)
    assert (jobs.ids, jobs.clones) == (["J1", "J2"], allowed)
    assert progress.read_progress(ended / "wards")["job"] == "J2"
    lines = capsys.readouterr().out.splitlines()
    assert [str(ended / "wards" / progress.FILE) in line for line in lines] == [True]
    check_two_minutes(clock, watch, jobs, ended)
    new_job = f"clone {allowed + 1} of J2"
    assert jobs.ids == ["J2", new_job]
    assert progress.read_progress(ended / "wards")["job"] == new_job


@pytest.mark.parametrize("outcome", [progress.Outcome.BROKEN, progress.Outcome.SHORT])
def test_a_federation_whose_rounds_always_fail_ends_after_its_retries(ended, clock, outcome):
    """Enough sites are connected, and too few do their part: their budgets are spent, or they refuse the contract."""
    jobs, watch = Jobs("J2"), Watch()
    for number in range(6):  # each job ends without a round
        progress.change_progress(ended / "wards", outcome=outcome, said="it failed", job="J2", old=[])
        for clock[0] in range(1000 * number, 1000 * number + 500, 10):
            watch.check_federations(jobs.engine(), ended, {})
        assert jobs.clones == number  # waiting until enough sites are connected is no restart
        check_two_minutes(clock, watch, jobs, ended)
    state = progress.read_progress(ended / "wards")
    assert (jobs.clones, state["outcome"]) == (5, "failed")
    assert state["said"] == "restarted 5 times without success: it failed"


@pytest.mark.parametrize("jobs", [Jobs(), Jobs("J1", "J2")], ids=["no job", "too many tries"])
def test_the_end_of_a_federation_that_cannot_be_written_is_printed_once(ended, monkeypatch, capsys, clock, jobs):
    progress.change_progress(ended / "wards", tries=1000)
    refuse_replacement(monkeypatch)
    check_two_minutes(clock, Watch(), jobs, ended)
    lines = capsys.readouterr().out.splitlines()
    assert [str(ended / "wards" / progress.FILE) in line for line in lines] == [True]


def test_a_refused_job_is_marked_although_another_progress_file_is_damaged(two_federations):
    write_refusal(two_federations, "job of wards", "another contract")
    state = progress.read_progress(two_federations / "wards")
    assert (state["outcome"], state["said"]) == ("failed", "another contract")


@pytest.fixture
def send(two_federations):
    """A function that gives a lead's command to the server of `two_federations`, and returns the reply."""
    register = ServerCommandRegister(None)
    register.register_module_spec(make_lead_command(two_federations, Jobs().engine()))
    register.finalize()

    def send(*words):
        connection = Connection()
        register.process_command(connection, " ".join([progress.COMMAND, *words]))
        return json.loads(json.dumps(connection.buffer.output))

    return send


@pytest.mark.parametrize("command", ["status", "stop", "result"])
def test_a_damaged_progress_file_of_the_server_is_no_lost_connection(send, command):
    """A lead who takes it for one logs in again every 2 s, for ten minutes."""
    with pytest.raises(RunError, match=r"lab/progress\.json: is damaged") as caught:
        read_server_answer(send(command, "lab"))
    assert not isinstance(caught.value, ServerLost)
    assert "error" not in read_server_answer(send(command, "wards"))
    for name in ("..", ".", "wards/../wards", workspace.WORK_FOLDER):
        with pytest.raises(RunError, match="does not name a federation"):
            read_server_answer(send(command, name))


ESCAPE = "\x1b[2J\nerror: "


class Lead(Session):
    """A session with a server of a few lines: it says one status after the other."""

    def __init__(self, *statuses):
        self._statuses = list(statuses)

    def _send_command(self, command, *words):
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]


def says(outcome=None, stops=False, job=None, contract="", version="0.2.0"):
    limits = {"quorum": 1, "wait": 1.0, "retries": 1}
    state = {"format": 1, "job": "J1", "submitted": "J1", "outcome": outcome, "contract": contract, "sites": []}
    state |= {"limits": limits}
    return {"connected": [], "progress": outcome and state, "stops": stops, "job": job, "version": version}


def test_a_federation_that_is_under_way_is_looked_on_and_not_submitted_again(tmp_path):
    agreed = contracts.read_contract(contract(tmp_path))
    running = says("running", contract=agreed.imprint)
    assert Lead(running).find_job(agreed) == "J1"
    assert Lead(says()).find_job(agreed) is None
    assert Lead(says("done")).find_job(agreed) is None
    assert Lead(says("done", job="J2")).find_job(agreed) == "J2"  # it was submitted, and has not begun
    assert Lead(running | {"stops": True}, says("stopped")).find_job(agreed) is None  # once it has stopped
    with pytest.raises(RunError, match="is running with another contract; give `fedmutual stop` first"):
        Lead(says("running", contract="another")).find_job(agreed)
    with pytest.raises(ConfigError, match=r"the server has fedmutual 0\.1\.0, and this host has 0\.2\.0"):
        Lead(says(version="0.1.0")).status("wards")


STARTS = [  # what FLARE answers about a job that has not started: its record, or an error -> the error of the lead
    *((kind(ESCAPE), ServerLost, "did not answer") for kind in (NoConnection, SessionClosed, InternalError)),
    ({"status": "FINISHED:ABANDONED"}, RunError, "the server restarted before the job started"),
    ({"status": "FINISHED:x", "job_deploy_detail": [f"north: {ESCAPE}"]}, RunError, "the status FINISHED:x: north: "),
    ({"status": "FINISHED:x", "job_deploy_detail": 3}, RunError, r"\(key job_deploy_detail\)"),
    ({"status": 3}, RunError, r"\(key status\)"),
    ([ESCAPE], RunError, r"\(key job\)"),
]


@pytest.mark.parametrize(("answer", "kind", "text"), STARTS)
def test_a_job_that_ended_before_its_start_or_a_server_that_is_gone_is_one_sentence(answer, kind, text):
    """After ServerLost the display of `submit` opens a new session."""

    def get_job_meta(job_id):
        if isinstance(answer, Exception):
            raise answer
        return answer

    lead = Lead(says())
    lead.flare = SimpleNamespace(get_job_meta=get_job_meta)
    with pytest.raises(RunError, match=text) as caught:
        next(lead.watch("wards", "J1"))
    assert (type(caught.value), str(caught.value).isprintable()) == (kind, True)


def test_a_refused_login_is_printable(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AuthenticationError(ESCAPE)  # FLARE takes the text from the server's answer

    kit = SimpleNamespace(name="lead@example.org", hosts=("localhost",), port=8002, startup=tmp_path)
    api = SimpleNamespace(new_secure_session=refuse)
    for name, value in {"import_nvflare": api, "check_valid": None, "find_obstacle": None}.items():
        monkeypatch.setattr(f"fedmutual.sites.flare.session.{name}", lambda *_, value=value: value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ServerLost, match=r"rejects the login of 'lead@example\.org'") as caught:
        Session(kit)
    assert str(caught.value).isprintable()


NO_RESULTS = ["../config.toml", "/tmp/config.toml", "clients/north/round-1.safetensors", "server/../log.txt", "..", ""]


@pytest.mark.parametrize("name", [*NO_RESULTS, "server/round-.safetensors", f"server/round-{'1' * 5000}.safetensors"])
def test_a_server_cannot_name_where_a_lead_writes(tmp_path, name):
    """A lead trusts it to average, and not with its own files."""
    with pytest.raises(RunError, match="names a file that is not a result of a federation"):
        Lead({"files": ["config.toml", name]}).fetch("wards", tmp_path / "out")
    assert not list(tmp_path.iterdir())


STRANGE = {
    "nothing": {},
    "who is connected": says() | {"connected": 3},
    "the version": says() | {"version": 5},
    "a list": says() | {"progress": [1]},
    "no outcome": says() | {"progress": {"round": 1}},
    "bytes": says() | {"progress": says("running")["progress"] | {"bytes": {"up": "x", "down": []}}},
    "notes": says() | {"progress": says("running")["progress"] | {"notes": [1]}},
}


RESULTS = [
    [{"files": 3}],
    [{"files": ["log.txt"]}, {}],
    [{"files": ["log.txt"]}, {"body": "@@@"}],
    [{"files": [f"server/round-{k}.safetensors" for k in range(10_000)]}],
]


@pytest.mark.parametrize(
    ("command", "answers"), [*(("status", [a]) for a in STRANGE.values()), *(("fetch", a) for a in RESULTS)]
)
def test_a_server_that_says_what_none_would_is_one_sentence(tmp_path, command, answers):
    lead = Lead(*answers)
    with pytest.raises(RunError, match="no server of fedmutual sends"):
        lead.status("wards") if command == "status" else lead.fetch("wards", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_server_moves_no_cursor_of_a_leads():
    note = {"text": ESCAPE, "first": 1, "last": 1}
    state = says("running")["progress"] | {"said": ESCAPE, "scores": ESCAPE, "in": [ESCAPE], "notes": [note]}
    status = Lead(says() | {"connected": [ESCAPE], "progress": state}).status("wards")
    shown = [*status["connected"], *status["progress"]["in"], status["progress"]["notes"][0]["text"]]
    assert all(text.isprintable() for text in (*shown, status["progress"]["said"], status["progress"]["scores"]))


REPLIES = [  # of FLARE, which gives the status of the transfer, and says why in the data
    ({"status": "SUCCESS", "data": [{"type": "error", "data": "not authorized"}]}, r"did not answer \(not authorized\)"),
    ({"status": "TIMEOUT"}, "TIMEOUT"),
    ({"data": [{"type": "error", "data": ESCAPE}]}, "did not answer"),
    ({"data": 3}, "did not answer"),
    ({"data": [{"type": "dict", "data": [ESCAPE]}]}, "did not answer"),
    *(
        ({"data": [{"type": "dict", "data": {"error": error}}]}, "the server reports an error")
        for error in (ESCAPE, [ESCAPE], {ESCAPE: 1}, "x" * 10**6)
    ),
]


@pytest.mark.parametrize(("reply", "text"), REPLIES, ids=range(len(REPLIES)))
def test_a_lead_reads_why_the_server_does_not_do_it(reply, text):
    with pytest.raises(RunError, match=text) as caught:
        read_server_answer(reply)
    assert isinstance(caught.value, ServerLost) == ("reports" not in text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000
    assert read_server_answer({"data": [{"type": "string"}, {"type": "dict", "data": {"stops": 1}}]}) == {"stops": 1}


def test_a_lead_has_what_the_server_may_give(tmp_path):
    """The files of a run folder, without those of clients."""
    folder = tmp_path / "there"
    for file in ("config.toml", "ledger.jsonl", "server/round-12.safetensors", "clients/north/round-12.safetensors"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"x")
    result_files = progress.list_result_files(folder, 12)
    assert sorted(result_files) == ["config.toml", "ledger.jsonl", "server/round-12.safetensors"]
    body = {"body": base64.b64encode(b"x").decode()}
    fetched = Lead({"files": sorted(result_files)}, *[body] * 3).fetch("wards", tmp_path / "out")
    assert [file.relative_to(tmp_path / "out").as_posix() for file in fetched] == sorted(result_files)
    assert all(file.read_bytes() == b"x" for file in fetched)


DEADLINE = 0.6


class Flare:
    """Hands tasks to sites: who is well answers at once, who is deaf takes none, who is dumb takes it and is silent."""

    def __init__(self):
        self._engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=i) for i in NAMES])
        self.communicator = SimpleNamespace(get_client_disconnect_time=lambda i: None)
        self.deaf, self.dumb = set(), set()

    def broadcast(self, task, context, targets, min_responses):
        (site,) = targets
        if site in self.deaf:
            return
        task.before_task_sent_cb(client_task=None, fl_ctx=None)
        if site not in self.dumb:
            reply = Shareable()
            reply[workspace.BODY] = site.encode()
            reply.set_return_code(ReturnCode.OK)
            threading.Timer(0.05, lambda: task.result_received_cb(SimpleNamespace(result=reply), None)).start()

    def cancel_task(self, task, fl_ctx):
        pass


def make_transport(folder, flare, quorum=2):
    write_connected(folder, dict.fromkeys(NAMES, "1"), NAMES)
    return TaskTransport(flare, None, SimpleNamespace(triggered=False), folder / "wards", quorum)


def round_(transport):
    """Who answered, and in how many seconds."""
    began = time.monotonic()
    answered = {i for i, _ in transport.ask(dict.fromkeys(NAMES, b""), DEADLINE)}
    return answered, time.monotonic() - began


def test_a_site_that_hangs_costs_one_deadline_and_not_every_round(tmp_path):
    flare = Flare()
    transport = make_transport(tmp_path, flare)
    assert round_(transport)[0] == set(NAMES)
    flare.dumb = {"south"}  # it takes the order, and hangs
    answered, took = round_(transport)
    assert (answered, took >= DEADLINE) == ({"north", "west"}, True)
    flare.deaf = {"south"}  # it hangs, and takes no other
    answered, took = round_(transport)
    assert (answered, took < DEADLINE) == ({"north", "west"}, True)
    assert transport.list_late() == ("south",)
    flare.deaf, flare.dumb = set(), set()
    assert round_(transport)[0] == set(NAMES)  # it takes orders again, and is waited for
    assert transport.list_late() == ()


def test_late_sites_are_waited_for_if_the_quorum_needs_them(tmp_path):
    flare = Flare()
    transport = make_transport(tmp_path, flare, quorum=3)
    flare.dumb = flare.deaf = {"south"}
    for _ in range(2):
        answered, took = round_(transport)
        assert (answered, took >= DEADLINE) == ({"north", "west"}, True)
