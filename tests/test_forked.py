"""What docs and kills are tried with: a fork must be like a new process, and tell when it fails."""

import os
import subprocess
import sys

import pytest

import forked

pytestmark = pytest.mark.process

SCRIPT = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["COLOUR"], sys.path[0], "pytest" in sys.modules)
import beside, further
print("to err", file=sys.stderr)
raise SystemExit(beside.code)
"""


def test_a_script_has_its_own_folder_arguments_environment_and_exit_code(tmp_path):
    inside, further = tmp_path / "inside", tmp_path / "further"
    for folder in (inside, further):
        folder.mkdir()
    (inside / "script.py").write_text(SCRIPT)
    (inside / "beside.py").write_text("code = 3")
    (further / "further.py").write_text("")
    env = os.environ | {"COLOUR": "red", "PYTHONPATH": str(further)}
    done = forked.run(["python", "inside/script.py", "a b"], tmp_path, env)
    assert done.stdout.split("\n")[0] == f"__main__ ['inside/script.py', 'a b'] {tmp_path} red {inside} False"
    assert (done.returncode, done.stderr) == (3, "to err\n")


def test_errors_reach_the_caller(tmp_path):
    result = forked.run(["fedmutual", "run", "none.toml"], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: none.toml")
    result = forked.run(["python", "-c", "1 / 0"], tmp_path)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert forked.run(["python", "-m", "fedmutual", "--version"], tmp_path).returncode == 0


def test_a_process_that_is_late_or_forgotten_is_killed(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(["python", "-c", "import time; time.sleep(60)"], tmp_path, timeout=0.1)
    forgotten = forked.start(["python", "-c", "import time; time.sleep(60)"], tmp_path, tmp_path / "out", tmp_path / "err")
    assert forgotten.poll() is None
    assert forked.run(["python", "-c", "print(1)"], tmp_path).stdout == "1\n"
    forgotten.kill()
    assert forgotten.wait() == -9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
def test_a_signal_to_a_command_that_has_just_ended_is_no_error(tmp_path, monkeypatch):
    process = forked.start(["python", "-c", "pass"], tmp_path, tmp_path / "out", tmp_path / "err")
    process.wait(60)
    monkeypatch.setattr(process, "poll", lambda: None)  # as until its end is reported
    process.kill()
