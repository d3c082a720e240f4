"""How the process of the command line ends: with its exit code, all its output, its exit handlers and its threads."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.run

PROGRAM = """
import os, sys
import fedmutual.__main__ as program
import fedmutual.cli

class Left:
    def __del__(self, write=os.write):
        write(1, b"teardown")

left = Left()

def main():
    import atexit, threading, time

    atexit.register(print, "handler")
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    print(100_000 * "x")
    {end}

fedmutual.cli.main = main
program.run()
"""


@pytest.mark.parametrize(
    ("end", "code", "has_teardown"),
    [
        ("pass", 0, False),
        ("sys.exit()", 0, False),
        ("sys.exit(3)", 3, False),
        ("sys.exit('a sentence')", 1, True),
        ("raise RuntimeError", 1, True),
    ],
)
def test_the_process_ends_with_its_code_and_all_that_was_printed(end, code, has_teardown):
    done = subprocess.run([sys.executable, "-c", PROGRAM.replace("{end}", end)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    printed = done.stdout.split()
    assert [len(printed[0]), *printed[1:]] == [100_000, "thread", "handler", *(["teardown"] if has_teardown else [])]
    assert ("Traceback" in done.stderr) == ("raise" in end)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_fork_of_the_process_ends_as_usual():
    """As it may have handlers of its own to run."""
    main = "pid = os.fork()\n    if pid:\n        os.waitpid(pid, 0)"
    program = PROGRAM[: PROGRAM.index("import atexit")] + main + PROGRAM[PROGRAM.index("{end}") + len("{end}") :]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "teardown"
