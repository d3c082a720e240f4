"""Worker processes end with their parent process."""

import os
import subprocess
import sys
import time

import pytest

from fedmutual.engines.child_process import IS_FORKED

pytestmark = pytest.mark.process

SERVE = """
import time
from fedmutual.engines.child_process import prepare_child_process

def serve(connection):
    prepare_child_process()
    connection.send(1)
    time.sleep(600)
"""
PARENT = """
import os, signal
import orphan
from fedmutual.engines.child_process import ChildProcess

child = ChildProcess(orphan.serve)
child.connection.recv()
print(child.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not IS_FORKED, reason="worker processes are no forks here")
def test_a_worker_at_work_ends_when_its_parent_is_killed(tmp_path):
    """The worker does not finish its work first: a resumed run would have to share the cores with the worker."""
    (tmp_path / "orphan.py").write_text(SERVE)
    (tmp_path / "parent.py").write_text(PARENT)
    done = subprocess.run([sys.executable, "parent.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    worker, until = int(done.stdout), time.monotonic() + 20
    while is_alive(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(worker)
