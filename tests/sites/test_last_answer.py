"""A site that is told to stop between its training and its answer sends the answer first, in a bounded time."""

import json
import re
import threading
import time
from contextlib import closing
from unittest.mock import MagicMock

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from fedmutual.rundir.folder import is_locked, lock_folder
from fedmutual.sites import contract as contracts
from fedmutual.sites.flare import executor
from fedmutual.sites.journal import Journal
from fedmutual.sites.protocol import WORK, Order, pack_message, read_answer
from fedmutual.user_code import plugins
from wards import COMMON, MLPS, contract, site

pytestmark = pytest.mark.sites


class Context:
    """As much of FLARE's as a site asks for when a job begins: its workspace."""

    def __init__(self, folder):
        self.get_prop = lambda key: self
        self.get_root_dir = lambda: str(folder)


def begin_job(tmp_path, monkeypatch):
    """Return (the job of a site, FLARE's context, FLARE's workspace) after the start of the job."""
    monkeypatch.setattr(plugins, "process_rule", None)  # a site confines its process
    agreed, work = contracts.read_contract(contract(tmp_path, COMMON, MLPS)), tmp_path / "north" / "state" / "flare"
    (work / "local").mkdir(parents=True)
    config = site(tmp_path, "north", MLPS["north"])
    about = {"config": str(config), "contracts": [agreed.record()], "rounds": COMMON["rounds"]}
    (work / "local" / "fedmutual.json").write_text(json.dumps(about))
    job, context = executor.SiteExecutor(json.dumps(agreed.record())), Context(work)
    job.handle_event("_start_run", context)
    return job, context, work


def make_task(round):
    task = executor.Shareable()
    task[executor.BODY] = pack_message(Order(WORK, round, 0), {})
    return task


def test_a_site_whose_disk_is_full_says_so_and_goes_on_when_there_is_space(tmp_path, monkeypatch, capsys):
    job, context, _ = begin_job(tmp_path, monkeypatch)
    database = job._runtime._journal._database
    ((pages,),) = database.execute("PRAGMA page_count")
    for most, problem in (*3 * [(pages, "it is paused, because its disk is full")], (2**30, None)):
        database.execute(f"PRAGMA max_page_count = {most}").fetchall()
        answer = job.execute("do", make_task(0), context, None)
        assert read_answer(answer[executor.BODY])[0].problem == problem
    assert len(re.findall("  round 1: .* disk is full", capsys.readouterr().out)) == 1
    job.handle_event("_end_run", context)


def test_each_failure_has_a_line_in_the_ledger_and_its_reason_is_said_once(tmp_path, monkeypatch, capsys):
    job, context, _ = begin_job(tmp_path, monkeypatch)
    monkeypatch.setattr(job._runtime, "_do", MagicMock(side_effect=ValueError("of the site's own code")))
    for _ in range(3):
        job.execute("do", make_task(0), context, None)
    lines = [json.loads(line) for (line,) in job._runtime._journal.read("SELECT line FROM sent ORDER BY number")]
    assert [line["round"] for line in lines if "problem" in line["told"]] == [1, 1, 1]
    out = capsys.readouterr().out
    assert (out.count("of the site's own code"), "round 1 done" in out) == (1, False)
    monkeypatch.undo()
    job.execute("do", make_task(0), context, None)
    assert "round 1 done" in capsys.readouterr().out
    job.handle_event("_end_run", context)


def test_a_job_holds_the_lock_from_an_order_until_its_answer_is_sent(tmp_path, monkeypatch):
    job, context, work = begin_job(tmp_path, monkeypatch)
    for round in range(2):  # an answer that was never sent does not block the next order
        job.execute("do", make_task(round), context, None)
        assert is_locked(work)
    job.handle_event(executor.EventType.AFTER_SEND_TASK_RESULT, context)
    assert not is_locked(work)
    monkeypatch.setattr(executor.os, "getppid", lambda: 1)  # the process of the site has ended: nothing is trained
    assert executor.BODY not in job.execute("do", make_task(2), context, None)
    job.handle_event("_end_run", context)
    with closing(Journal(tmp_path / "north" / "state" / "wards", read_only=True)) as journal:
        assert [round for (round,) in journal.read("SELECT round FROM phases")] == [0, 1]


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_site_signs_out_after_its_answer_or_after_a_limit(is_sent, tmp_path, monkeypatch):
    client, events = MagicMock(), []
    client.logout_client = lambda context: events.append("signed out")
    monkeypatch.setattr(executor, "_client", client)
    monkeypatch.setattr(executor, "_LAST_ANSWER", 5.0 if is_sent else 0.2)
    is_begun, is_over = threading.Event(), threading.Event()

    def answer():
        with lock_folder(tmp_path):
            is_begun.set()
            is_over.wait(0.3 if is_sent else 30)
            events.append("answered")

    thread = threading.Thread(target=answer)
    thread.start()
    is_begun.wait()
    began = time.monotonic()
    executor.sign_out(tmp_path)
    assert time.monotonic() < began + 5
    assert events == (["answered", "signed out"] if is_sent else ["signed out"])
    assert is_locked(tmp_path)  # the job begins no other order
    is_over.set()
    thread.join()
    executor._last.close()
