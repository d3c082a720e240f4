"""The page of `fedmutual watch`: what each role sees of recorded state folders, and requests that get nothing."""

import hashlib
import http.client
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

import fedmutual
from authority import write_startup
from fedmutual.cli.app import main
from fedmutual.errors import RunError
from fedmutual.files import JSON_LOGS, make_log_line, write_json
from fedmutual.rundir.folder import is_locked, lock_folder
from fedmutual.sites import monitor
from fedmutual.sites.flare.progress import Outcome, ProgressFile, read_progress, write_connected
from fedmutual.sites.journal import Journal
from fedmutual.sites.monitor import Monitor, find_missed_rounds
from fedmutual.sites.watch_page import Watch, WatchServer, _list_pictures, is_trusted_host
from wards import COMMON, MLPS, Federation

pytestmark = pytest.mark.sites

TOKEN = "t" * 43
ONLY_ACCURACY = {"site_tables": {"share": {"metrics": "accuracy"}}}


def make_kit(kind, name):
    """Return what the page needs of a kit."""
    return SimpleNamespace(folder=None, name=name, kind=kind, days=300)


def list_files(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """A federation after 4 rounds, of which west missed one and then left; its folder is the server's state folder."""
    folder = tmp_path_factory.mktemp("wards")
    federation = Federation(folder / "wards", COMMON | {"rounds": 4}, MLPS, **ONLY_ACCURACY)
    absent = {0: set(), 1: {"west"}, 2: set(), 3: set()}  # from the end of round 2 to the end of round 3
    federation.transport.before = lambda round, phase: setattr(federation.transport, "away", absent[round])
    federation.__class__ = type("Beside", (Federation,), {"server": federation.folder})  # beside progress.json
    progress = ProgressFile(federation.folder, federation.agreed, "job-1")
    progress.begin(tuple(MLPS))
    federation.run(progress)
    progress.end(Outcome.DONE, "all rounds are done")
    write_connected(folder, {"north": "a", "south": "b"}, {"north", "south"})
    write_connected(folder, {"north": "a", "south": "b"}, {"north"})
    return federation


def request(watch, target, method="GET", host="localhost:8080", more="", is_local=True):
    """Return (status, body) of an answer."""
    answer = watch.answer(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode(), is_local)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def open_page(watch):
    status, body = request(watch, f"/?token={TOKEN}")
    assert status == 200, body
    return body


def test_a_site_sees_its_own_scores_and_what_left_it_and_writes_nothing(wards):
    state = wards.folder / "west" / "state"
    before = list_files(state)
    with Monitor(make_kit("site", "west"), state) as of_west, lock_folder(state.parent):  # any lock
        facts, watch = of_west.read(), Watch(of_west, TOKEN)
        page, (_, numbers) = open_page(watch), request(watch, f"/metrics?token={TOKEN}")
    assert list_files(state) == before
    assert (facts["state"], facts["round"], facts["rounds"], facts["missed"]) == ("stopped", 4, 4, [(3, 3)])
    assert [(row["first"], row["what"]) for row in facts["left"]] == [
        *((1, "phase 1"), (1, "scores"), (2, "phase 1"), (4, "phase 1"), (4, "scores"))
    ]
    ledger = wards.ledger("west")
    assert facts["totals"]["server"]["bytes"] == sum(line["bytes"] for line in ledger)
    own = facts["own_scores"]["personal", "validation", "accuracy"]["west"]
    sent = facts["scores"]["personal", "validation", "accuracy"]["west"]
    assert own.keys() == sent.keys() == {1, 4}
    assert all(round(own[r], 2) == sent[r] for r in own)
    assert any(own[r] != sent[r] for r in own)
    assert "Exact scores on the site" in page
    assert f'score="accuracy",site="west"}} {sent[4]:g}' in numbers
    assert str(own[4]) not in numbers  # private scores are on the page only
    for other in ("north", "south"):
        assert other not in page + numbers


@pytest.mark.parametrize("is_written", [True, False])
def test_a_site_reads_beside_a_running_process_and_names_the_step(wards, tmp_path, is_written):
    """The journal is open for writing; the last order was begun only, or nothing was begun."""
    state = tmp_path / "state"
    folder = state / "wards"
    folder.mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl"):
        (folder / name).write_bytes((wards.folder / "north" / "state" / "wards" / name).read_bytes())
    with closing(Journal(folder)) as journal, lock_folder(state), lock_folder(folder):
        if is_written:
            journal.write("INSERT INTO phases VALUES (?, ?, ?, ?, ?)", (0, 0, "d", False, "s"))
            journal.set_fact("begun", [0, [0, 1], "d"])
        facts = monitor.read_site(make_kit("site", "north"), state, None)
        journal.set_fact("after", 1)  # the reader has left no lock
    assert facts["state"] == "takes part"
    assert (facts["round"], facts["phase"]) == ((1, "phase 2 in progress") if is_written else (0, ""))


def test_the_server_sees_the_sites_the_notes_and_disclosed_scores(wards):
    state = wards.folder.parent
    before = list_files(wards.folder)
    with lock_folder(state), Monitor(make_kit("server", "server"), state) as server:
        facts, page = server.read(), open_page(Watch(server, TOKEN))
    assert list_files(wards.folder) == before
    assert (facts["alive"], facts["state"], facts["round"]) == (True, "done", 4)
    sites = {row["site"]: row for row in facts["sites"]}
    assert {i: (row["state"], row["missed"]) for i, row in sites.items()} == {
        "north": (monitor.WAITING, []),
        "south": (monitor.LATE, []),
        "west": (monitor.LOST, [(3, 3)]),
    }
    assert sites["west"]["why"] == "round 3: site 'west' is left out: it is not connected"
    assert (sites["north"]["seen"], 0 <= sites["south"]["seen"] < 60, sites["west"]["seen"]) == (0.0, True, None)
    assert facts["scores"]["personal", "validation", "accuracy"].keys() == {"north", "south", "west"}
    assert {row["up"] for row in facts["sites"]} == {220840 * 4, 220840 * 3}
    assert "own_scores" not in facts
    assert "Private" not in page
    assert not is_locked(state)


def test_a_lead_sees_what_the_server_tells_it_and_that_it_does_not_answer(wards, monkeypatch):
    """The progress and the scores are those of the server; the clock of the server is 90 s ahead."""
    known = read_progress(wards.folder)

    class Server:
        fetched = 0

        def __init__(self, kit, timeout):
            if not hasattr(Server, "runs"):
                raise monitor.ServerLost("the server does not answer")

        def status(self, name):
            assert name == "wards"
            now = time.time() + 90
            seen = {"west": (now - 5, True)}
            return {"connected": ["north"], "progress": known, "stops": True, "seen": seen, "time": now, "gone": {}}

        def fetch(self, name, out, only):
            Server.fetched += 1
            for file in only:
                (out / file).write_bytes((wards.folder / file).read_bytes())

        def close(self):
            pass

    monkeypatch.setattr(monitor, "Session", Server)
    with Monitor(make_kit("lead", "lead@example.org"), None, "wards") as lead:
        watch = Watch(lead, TOKEN)
        assert (request(watch, "/health")[0], lead.read()["state"]) == (503, "no answer")
        Server.runs = True
        facts = [lead.read() for _ in range(3)][-1]
        assert request(watch, "/health") == (200, '{"status": "alive"}')
        page = open_page(watch)
    assert Server.fetched == 1  # once a round, however often the page is looked at
    assert facts["clock_ahead_seconds"] == pytest.approx(90, abs=5)
    assert [row["missed"] for row in facts["sites"]] == [[], [], [(3, 3)]]
    assert "disk_free_bytes" not in facts
    assert "90.0 s ahead" in page


def test_a_lead_sees_the_last_fold_that_has_begun_without_scores_of_the_one_before(wards, monkeypatch, tmp_path):
    known = read_progress(wards.folder)
    (tmp_path / "federation.toml").write_text('name = "wards"\n[split]\nfolds = 3\n')
    begun = {"wards-0"}

    class Server:
        def status(self, name):
            if name == "broken":
                raise RunError("progress.json is damaged")
            progress = known | {"job": name} if name in begun else None
            return {"connected": [], "progress": progress, "stops": False, "seen": {}, "time": None, "gone": None}

        def fetch(self, name, out, only):
            if name == "wards-0":
                (out / "metrics.jsonl").write_bytes((wards.folder / "metrics.jsonl").read_bytes())

    monkeypatch.setattr(monitor, "Session", lambda kit, timeout: Server())
    monkeypatch.setattr(Monitor, "_close_session", lambda self: None)
    kit = SimpleNamespace(folder=tmp_path, name="lead@example.org", kind="lead", days=300)
    with Monitor(kit, None) as lead:
        seen = [lead.read()]
        begun.add("wards-1")
        seen.append(lead.read())
    assert [(facts["federation"], bool(facts["scores"])) for facts in seen] == [("wards-0", True), ("wards-1", False)]
    with Monitor(kit, None, "broken") as lead:
        assert request(Watch(lead, TOKEN), "/health") == (503, "progress.json is damaged")


def test_a_lead_sees_a_federation_whose_file_leaves_the_name_open(monkeypatch, tmp_path):
    (tmp_path / "federation.toml").write_text("rounds = 3\n")
    status = {"connected": [], "progress": None, "stops": False, "seen": {}, "time": None, "gone": None}
    monkeypatch.setattr(monitor, "Session", lambda kit, timeout: SimpleNamespace(status=lambda name: status))
    monkeypatch.setattr(Monitor, "_close_session", lambda self: None)
    kit = SimpleNamespace(folder=tmp_path, name="lead@example.org", kind="lead", days=300)
    with Monitor(kit, None) as lead:
        assert lead.read()["federation"] == "run"


def test_the_names_and_notes_of_others_are_text(wards, tmp_path):
    """Names and notes with HTML, formulas of matplotlib, lines of Prometheus and control characters."""
    name = '<script>alert(1)</script>$\\frac{$"\\\n'
    known = json.loads((wards.folder / "progress.json").read_text()) | {"sites": [name, "north"]}
    known["notes"] = [{"text": f"site {name!r} is left out: <img src=x onerror=alert(1)>", "first": 1, "last": 1}]
    folder = tmp_path / "wards"
    folder.mkdir()
    write_json(folder / "progress.json", known)
    score = {"model": "personal", "client": name, "data": "validation", "accuracy": 0.5}
    for file, line in (
        ("metrics.jsonl", {"round": 1, "train": {}, "scores": [score, score | {"client": "north"}]}),
        ("ledger.jsonl", {"round": 1, "phase": "fml", "client": name, "down": 1, "up": 1}),
    ):
        (folder / file).write_text(json.dumps(line) + "\n")
    with Monitor(make_kit("server", "<b>server</b>"), tmp_path) as server:
        watch = Watch(server, TOKEN)
        page, (status, numbers) = open_page(watch), request(watch, f"/metrics?token={TOKEN}")
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert status == 200
    assert all(line.startswith(("#", "fedmutual_")) for line in numbers.splitlines())


def test_a_site_with_noise_and_masks_sees_its_budget_and_discloses_no_score(tmp_path):
    noise = {"privacy": {"nets": "both", "sigma": 2.0}, "share": {"metrics": "none"}, "server": {"sum": "masked"}}
    budget = {"privacy": {"epsilon": 50.0}}
    federation = Federation(tmp_path, COMMON | {"rounds": 2} | noise, MLPS, site_tables=budget).run()
    with Monitor(make_kit("site", "west"), tmp_path / "west" / "state") as west:
        facts, watch = west.read(), Watch(west, TOKEN)
        page, (_, numbers) = open_page(watch), request(watch, f"/metrics?token={TOKEN}")
    spent = fedmutual.Run(federation["west"].folder).summary["privacy"]["spent"]
    assert (facts["epsilon_spent"], facts["epsilon_limit"], facts["scores"]) == (spent, 50.0, {})
    assert facts["own_scores"]["personal", "validation", "accuracy"]["west"].keys() == {1, 2}
    assert {row["beside"] for row in facts["left"]} == {()}
    assert f"epsilon {spent:.3g} spent, {50 - spent:.3g} of 50 left" in page
    assert "Disclosed scores" not in page
    assert "fedmutual_epsilon_spent{" in numbers
    assert "fedmutual_score" not in numbers


REFUSED = [
    ("/", {}, 403),
    ("/?token=", {}, 403),
    (f"/?token={'u' * 43}", {}, 403),
    (f"/?token={TOKEN[:-1]}", {}, 403),
    ("/metrics", {}, 403),
    ("/health", {"is_local": False}, 403),
    ("/health", {"host": "evil.example"}, 403),
    (f"/?token={TOKEN}", {"host": "evil.example:8080"}, 403),
    (f"/?token={TOKEN}", {"host": "localhost.evil.example"}, 403),
    (f"/?token={TOKEN}", {"more": "Host: evil.example\r\n"}, 403),
    (f"/?token={TOKEN}", {"method": "POST"}, 405),
    (f"/?token={TOKEN}", {"method": "DELETE"}, 405),
    (f"/../../etc/passwd?token={TOKEN}", {}, 404),
    (f"/%2e%2e/journal.sqlite?token={TOKEN}", {}, 404),
    (f"//evil.example/?token={TOKEN}", {}, 200),  # the path is "/": an authority in the target counts for nothing
    ("/ ?token=x", {}, 400),
    ("/?" + "a=1&" * 50, {}, 400),
    ("http://[/", {}, 400),
]


@pytest.mark.parametrize(("target", "more", "status"), REFUSED)
def test_a_request_without_a_right_gets_no_content(wards, target, more, status):
    with Monitor(make_kit("site", "west"), wards.folder / "west" / "state") as of_west:
        answered, body = request(Watch(of_west, TOKEN), target, **more)
    assert answered == status
    assert status == 200 or ("west" not in body and "accuracy" not in body and "\n" not in body)


def test_numbers_without_the_package_name_it_and_another_missing_module_is_not_blamed_on_it(wards, monkeypatch):
    monkeypatch.setattr("fedmutual.sites.watch_page.make_page", lambda *values: __import__("no_such_module"))
    printed = []
    with Monitor(make_kit("site", "west"), wards.folder / "west" / "state") as of_west:
        watch = Watch(of_west, TOKEN, printed.append)
        assert request(watch, f"/?token={TOKEN}")[0] == 500
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        status, body = request(watch, f"/metrics?token={TOKEN}")
    assert (status, "pip install 'fedmutual[sites]'" in body) == (501, True)
    assert "no_such_module" in printed[0]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:80", "[::1]", "10.1.2.3:8080"])
def test_hosts_that_no_name_service_decides_are_trusted(host):
    assert is_trusted_host(host)


def test_each_answer_forbids_to_store_and_to_embed(wards):
    with Monitor(make_kit("site", "west"), wards.folder / "west" / "state") as of_west:
        watch = Watch(of_west, TOKEN)
        for target in (f"/?token={TOKEN}", f"/metrics?token={TOKEN}", "/health", "/"):
            answer = watch.answer(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), True)
            headers = http.client.parse_headers(io.BytesIO(answer.partition(b"\r\n")[2]))
            assert headers["Cache-Control"] == "no-store"
            assert headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert "unsafe" not in headers["Content-Security-Policy"]
        head = watch.answer(f"HEAD /?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), True)
    assert head.endswith(b"\r\n\r\n")


@pytest.fixture
def served(wards):
    """The page of north, served at a free port."""
    with (
        Monitor(make_kit("site", "north"), wards.folder / "north" / "state") as north,
        WatchServer(Watch(north, TOKEN), "127.0.0.1", 0) as server,
    ):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def test_long_and_slow_requests_end(served, monkeypatch):
    monkeypatch.setattr("fedmutual.sites.watch_page._PATIENCE", 0.3)
    with closing(socket.create_connection(served.server_address, 10)) as long:
        long.sendall(b"GET /" + b"a" * 100_000)
        assert long.recv(100).startswith(b"HTTP/1.1 431 ")
    slow = [socket.create_connection(served.server_address, 10) for _ in range(20)]  # more than are answered at a time
    for one in slow:
        one.sendall(b"GET / HTTP/1.1\r\n")
    ends = []
    for one in slow:
        with closing(one):
            ends.append(one.recv(100))
    assert set(ends) == {b""}
    with closing(http.client.HTTPConnection(served.host, timeout=10)) as connection:
        connection.request("GET", f"/?token={TOKEN}")
        assert connection.getresponse().status == 200


def run_command(words, out):
    os.dup2(os.open(out, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.argv = ["fedmutual", *map(str, words), "0"]
    main()


def test_the_command_prints_its_address_and_ends_at_ctrl_c(wards, tmp_path, cli):
    startup = write_startup(tmp_path / "kit" / "startup", "north")
    (startup / "fed_client.json").write_text("{}")
    about = {"format": 1, "name": "north", "kind": "site", "hosts": ["localhost"], "port": 8002}
    write_json(tmp_path / "kit" / "kit.json", about)
    words = ["watch", "--kit", tmp_path / "kit", "--state", wards.folder / "north" / "state", "--port"]
    code, _, err = cli("watch", "--kit", tmp_path / "kit")
    assert (code, "--config" in err) == (2, True)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        code, _, err = cli(*words, taken.getsockname()[1])
        assert (code, "choose others by --address and --port" in err) == (2, True)
    out = tmp_path / "out"
    out.touch()
    process = multiprocessing.get_context("fork").Process(target=run_command, args=(words, out))  # needs no new imports
    process.start()
    try:
        until = time.monotonic() + 60
        while not (found := re.match(r"http://(127\.0\.0\.1:\d+)(/\?token=[\w-]{43})  Ctrl-C ends it", out.read_text())):
            assert time.monotonic() < until, out.read_text()
            time.sleep(0.05)
        with closing(http.client.HTTPConnection(found[1], timeout=20)) as connection:
            connection.request("GET", found[2])
            assert b"Site north" in connection.getresponse().read()
        os.kill(process.pid, signal.SIGINT)
        process.join(10)
        assert process.exitcode == 130
    finally:
        process.kill()


def test_a_score_of_one_other_site_has_the_name_of_that_site():
    scores = {("global", "test", "accuracy"): {"east": {1: 0.5}}}
    labels = [[label for label, _ in next(_list_pictures(scores, name))[2]] for name in ("east", "server")]
    assert labels == [["shared"], ["east, shared"]]


def test_missed_rounds():
    assert find_missed_rounds({1, 2, 5, 9}, 7) == [(3, 4), (6, 7)]
    assert find_missed_rounds((), 3) == [(1, 3)]
    assert find_missed_rounds({1}, 0) == find_missed_rounds({1, 2, 3}, 3) == []


def test_a_log_line_as_json(monkeypatch):
    monkeypatch.setenv(JSON_LOGS, "wards")
    line = json.loads(make_log_line("round 7: <b> is 'late'", "warning"))
    assert line.pop("time")
    assert line == {"level": "warning", "event": "round 7: <b> is 'late'", "federation": "wards", "round": 7}
    assert json.loads(make_log_line("takes part", federation="other"))["federation"] == "other"


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_the_page_fits_is_quiet_and_asks_for_nothing_else(new_page, served, width, scheme):
    page, console_messages = new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    requested_urls = []
    page.on("request", lambda request: requested_urls.append(request.url))
    address = f"http://{served.host}/?token={TOKEN}"
    page.clock.install()
    page.goto(address)
    page.locator("summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    with page.expect_navigation(timeout=10_000):
        page.clock.run_for(10_500)  # the page looks again, and keeps open what is open
    assert page.locator("table").first.is_visible()
    assert page.locator(".plot").count() == 2
    assert console_messages == []
    assert set(requested_urls) <= {address, "data:,"}
