"""Server and sites end when they are told to, with all that they started, and saved rounds are kept."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.protocol import WORK
from log_lines import read_lines
from loopback import JOBS, loopback
from wards import COMMON, SITES

pytestmark = pytest.mark.sites

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

TWO = {"north": SITES["north"], "south": SITES["south"]}


def test_ctrl_c_and_sigterm_end_them_in_the_middle_of_a_round(tmp_path):
    with loopback(tmp_path / "fed", {**COMMON, "rounds": 2000}, TWO) as fed:
        fed.start("server", *TWO, jobs=JOBS)
        fed.submit()
        fed.round(2)
        for name, sent_signal, code, message in (
            ("south", signal.SIGINT, 130, "stopped by hand; saved rounds are kept"),
            ("server", signal.SIGTERM, 143, "stopped by SIGTERM; saved rounds are kept"),
            ("north", signal.SIGINT, 130, "stopped by hand; saved rounds are kept"),  # whose server is gone
        ):
            jobs = fed.job(name)
            assert jobs or name == "north", f"{name} was to be in a job"
            fed.processes[name].send_signal(sent_signal)
            fed.wait(lambda name=name: fed.processes[name].poll() is not None, 30, f"{name} ends")
            assert fed.processes[name].returncode == code
            assert message in fed.log(name)
            assert "Traceback" not in fed.log(name)
            fed.wait(lambda jobs=jobs: not any(map(alive, jobs)), 30, f"the job of {name} ends")
            if name == "south":
                fed.wait(lambda: find_answered(fed) <= find_saved(fed), 30, "the last answer of south counts")
                fed.wait(lambda: not fed.job("server"), 60, "the server waits for south")
                fed.start("south")
                fed.round(fed.progress()["round"] + 2)


def find_answered(fed):
    """Return the rounds that south trained."""
    lines = read_ledger(fed.configs["south"].parent / "state" / "wards")
    return {line["round"] for line in lines if line["what"] == WORK and line["tensors"]}


def find_saved(fed):
    """Return the rounds that the server saved with south."""
    lines = read_lines(fed.folder / "server" / "wards" / "ledger.jsonl")
    return {line["round"] for line in lines if line["client"] == "south" and line["up"]}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_job_is_left_of_server_and_sites_that_end_in_the_middle_of_a_step(tmp_path, end):
    long = {**COMMON, "training": {**COMMON["training"], "local_epochs": 20_000}}
    with loopback(tmp_path / "fed", long, TWO) as fed:
        fed.start("server", *TWO, jobs=JOBS)
        fed.submit()
        fed.wait(lambda: all("takes part" in fed.log(name) for name in TWO), 120, "the sites take part")
        time.sleep(2)  # the step has begun
        jobs = [job for name in ("server", *TWO) for job in fed.job(name)]
        assert len(jobs) == 3
        for name in ("server", *TWO):
            fed.processes[name].send_signal(end)
        fed.wait(lambda: not any(map(alive, jobs)), 10, "the jobs end")
        fed.wait(lambda: all(fed.processes[name].poll() is not None for name in ("server", *TWO)), 10, "the processes end")


def test_ctrl_c_ends_a_server_whose_output_is_closed(tmp_path):
    """For example because the same Ctrl-C ended `| tee`."""
    with loopback(tmp_path / "fed", COMMON, TWO) as fed:
        command = [sys.executable, "-m", "fedmutual", "server", "--kit", str(fed.folder / "kits/server")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=fed.folder)
        fed.processes["server"] = process
        assert process.stdout
        assert process.stderr
        assert b"Ctrl-C ends it" in process.stdout.readline()
        fed.wait(lambda: (fed.folder / "server/flare/log.txt").exists(), 60, "FLARE begins")
        process.stdout.close()
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
