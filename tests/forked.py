"""Run `fedmutual ...` and `python ...` in separate processes, without the 5 s of imports.

A server process imports the slow modules once, and never trains. A command is a fork of the server with the command's
folder, environment, arguments and `__main__`. On systems other than Linux, where forks are not safe, a command is a new
process.
"""

import atexit
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np

from fedmutual.engines import child_process

COSTLY = (
    "sklearn.datasets",
    "fedmutual.cli",
    "fedmutual.studies.run",
    "fedmutual.studies.predict",
    "fedmutual.report.adaptation",
)


class Fork:
    """A running command, with the methods of `subprocess.Popen`."""

    def __init__(self, order: Mapping[str, object], modules: tuple[str, ...]) -> None:
        with TemporaryDirectory() as place:
            status = Path(place, "status")
            os.mkfifo(status)
            self._status = os.open(status, os.O_RDONLY | os.O_NONBLOCK)
            server = _server(modules)
            server.stdin.write(json.dumps({**order, "status": str(status)}).encode() + b"\n")
            self.pid = int(server.stdout.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the command and return its exit code."""
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the server has reaped the command, and not reported its end yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(os.read(self._status, 100) or -signal.SIGKILL)
            os.close(self._status)
        return self.returncode


def start(
    words: Sequence[object],
    folder: Path,
    out: Path,
    err: Path,
    env: Mapping[str, str] | None = None,
    append: bool = False,
    session: bool = False,
    modules: tuple[str, ...] = COSTLY,
    jobs: int = 0,
) -> Fork | subprocess.Popen[bytes]:
    """Start a command in a folder: `python`, or an installed script, and arguments. Its output goes into two files.

    append: after what the files hold. session: in a session of its own. modules: what the server has imported.
    jobs: how many jobs of NVIDIA FLARE run in forks made before the command starts (on Linux); later jobs are new processes.
    """
    env = dict(os.environ if env is None else env)
    python = Path(sys.executable)
    program = python if words[0] == "python" else python.with_name(str(words[0]))
    command = [str(word) for word in (program, *words[1:])]
    if sys.platform == "linux":
        arguments = command[program == python :]
        for file in (out, err):
            file.touch() if append else file.write_bytes(b"")  # a test may read the file before the fork runs
        places = {"folder": str(folder), "out": str(out), "err": str(err)}
        return Fork({"arguments": arguments, **places, "env": env, "session": session, "jobs": jobs}, modules)
    mode = "ab" if append else "wb"
    with open(out, mode) as out_file, open(err, mode) as err_file:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=session,
        )


def run(
    words: Sequence[object],
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    modules: tuple[str, ...] = COSTLY,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its result, as `start`; kill the command after the time limit."""
    with TemporaryDirectory() as folder_name:
        out, err = Path(folder_name, "out"), Path(folder_name, "err")
        process = start(words, folder, out, err, env, modules=modules)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


@cache
def _server(modules: tuple[str, ...]) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pipe = subprocess.PIPE  # without buffers: what was read and what is still in the pipe are never confused
    return subprocess.Popen([sys.executable, __file__, *modules], bufsize=0, stdin=pipe, stdout=pipe, env=env)


def _serve(modules: Sequence[str]) -> None:
    """Read one command a line until the end of input; start it, and write its process id."""
    for name in modules:
        import_module(name)
    if "PYTEST_VERSION" in os.environ:  # not in a benchmark
        os.fsync = lambda file: None  # as in tests/conftest.py
    child_process.count_cores = lambda: 1  # only a command with worker processes starts a fork server, which imports again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of a process that has watched a command
    for line in sys.stdin:
        if os.fork() == 0:
            _watch(json.loads(line))


def _watch(order: dict[str, Any]) -> NoReturn:
    """Start a command as a child, write its process id, wait for its end, and write its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = os.open(order.pop("status"), os.O_WRONLY)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _end(_become, order)
    os.write(1, f"{pid}\n".encode())
    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _end(become: Callable[..., None], order: dict[str, Any]) -> NoReturn:
    """Exit as Python does, but without the second that it takes to free all imported modules."""
    code: object = 1
    try:
        become(**order)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(arguments: list[str], folder: str, out: str, err: str, env: dict[str, str], session: bool, jobs: int) -> None:
    if session:
        os.setsid()
    new = os.O_WRONLY | os.O_APPEND
    for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, out, new), (2, err, new)):
        os.dup2(os.open(path, how), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    _fork_jobs(jobs)
    _reseed()
    path = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    match arguments:
        case ["-m", module, *_]:
            sys.argv, sys.path[:1] = arguments[1:], [folder, *path]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *_]:
            sys.argv, sys.path[:1] = ["-c", *arguments[2:]], [folder, *path]
            exec(code, {"__name__": "__main__"})
        case [script, *_]:
            sys.argv, sys.path[:1] = arguments, [str(Path(script).parent.resolve()), *path]
            runpy.run_path(script, run_name="__main__")


def _fork_jobs(count: int) -> None:
    """Fork processes for FLARE's next jobs before FLARE starts threads; a fork with threads is not safe."""
    if not count:
        return
    from nvflare.app_common.job_launcher import process_launcher
    from nvflare.utils.process_utils import ProcessAdapter

    waiting: list[tuple[int, int]] = []
    for _ in range(count):
        order, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            for _, other in [*waiting, (pid, end)]:
                os.close(other)
            _end(_become_job, {"order": order})
        os.close(order)
        waiting.append((pid, end))
    start_new = process_launcher.spawn_process

    def start_job(command: list[str], env: Mapping[str, str]) -> ProcessAdapter:
        if not waiting:
            return start_new(command, env)
        pid, end = waiting.pop()
        with open(end, "w") as pipe:
            json.dump({"command": command, "folder": os.getcwd(), "env": dict(env)}, pipe)
        deadline = time.monotonic() + 60
        while os.getsid(pid) != pid:  # FLARE ends a job with the job's process group, which must not be this process's
            assert time.monotonic() < deadline, "the fork does not start"
            time.sleep(0.001)
        return ProcessAdapter(pid=pid)

    process_launcher.spawn_process = start_job


def _become_job(order: int) -> None:
    """Wait for the command of a job, and run it; end if the parent process ends first."""
    with open(order) as pipe:
        text = pipe.read()
    if not text:
        return
    job = json.loads(text)
    os.setsid()
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["env"])
    _reseed()
    _, *options, module = job["command"][:5]
    assert options == ["-P", "-E", "-m"], options
    sys.argv, sys.path[:1] = job["command"][4:], []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _reseed() -> None:
    """Seed the global generators of numpy and Python anew; a fork has the state of its parent."""
    np.random.seed()  # noqa: NPY002
    random.seed()


if __name__ == "__main__":
    _serve(sys.argv[1:])
