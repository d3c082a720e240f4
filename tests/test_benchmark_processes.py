"""The benchmarks' own accounting of the processors' time."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SPIN = "import time\nwhile time.process_time() < 0.6: pass"
LEAVE_AN_ORPHAN = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SPIN!r}])"
MEASURE = f"""
import subprocess, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from common import adopt_orphans, read_children_seconds
adopt_orphans()
subprocess.run([sys.executable, "-c", {LEAVE_AN_ORPHAN!r}], check=True)
until = time.monotonic() + 30
while read_children_seconds() < 0.5 and time.monotonic() < until:
    time.sleep(0.1)
print(read_children_seconds())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_the_time_of_a_process_whose_parent_has_ended_counts_as_the_benchmarks():
    output = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True, timeout=60).stdout
    assert float(output) >= 0.5  # the clock counts in steps of 10 ms
