"""A federation of real processes on this machine: server, sites and a lead, with functions to observe and to disturb it."""

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import tomli_w

import fedmutual
import forked
from wards import same, site

LEAD = "lead@example.org"
IMPORTED = (  # by the server of forked.py: a process of FLARE imports for seconds
    "sklearn.datasets",
    "fedmutual.cli",
    "fedmutual.sites.contract",
    "fedmutual.sites.site_runtime",
    "fedmutual.sites.flare.session",
    "fedmutual.sites.flare.kits",
    "nvflare.private.fed.app.server.server_train",
    "nvflare.private.fed.app.server.runner_process",
    "nvflare.private.fed.app.client.client_train",
    "nvflare.private.fed.app.client.worker_process",
    "nvflare.fuel.flare_api.flare_api",
    "nvflare.lighter.provision",
    "nvflare.fuel.f3.mpm",
)
JOBS = 2  # forked jobs of each server and site: a federation in the tests begins two jobs at most


def free_port() -> int:
    """Return a free port below those that systems give to outgoing connections: another test cannot get it by chance."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class Loopback:
    """The files of a federation in a folder, and its processes, each in a session of its own."""

    def __init__(
        self,
        folder: Path,
        common: dict[str, Any],
        sites: dict[str, Any],
        modules: Mapping[str, str] | None = None,
        server: Mapping[str, Any] | None = None,
        **sites_table: Any,
    ) -> None:
        """modules: code that all participants trust: name -> source. server: additional keys of the table [server]."""
        self.modules = modules or {}
        self.folder, self.name, self.port = folder, common["name"], free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "federation.toml"
        table = {"names": list(sites), "input": [1, 8, 8], "wait": 30.0, "baseline": False, **sites_table}
        self.file.write_text(tomli_w.dumps({**common, "server": {"port": self.port, **(server or {})}, "sites": table}))
        trust = {"trust": {"modules": [*self.modules]}} if self.modules else {}
        self.configs = {i: site(folder, i, tables, **trust) for i, tables in sites.items()}
        for place in (folder, *(config.parent for config in self.configs.values())):
            for name, source in self.modules.items():
                (place / f"{name}.py").write_text(source)
        self.processes: dict[str, forked.Fork | subprocess.Popen[bytes]] = {}
        self.cli("provision", self.file, "--out", folder / "kits")

    def cli(self, *words: Any, wait: float = 120) -> str:
        """Run a command to its end and return its output."""
        done = forked.run(_command(*words), self.folder, timeout=wait, modules=IMPORTED)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *names: str, jobs: int = 0) -> None:
        """Start the server ("server"), or sites. jobs: as for `forked.start`."""
        for name in names:
            kit = ("--kit", self.folder / "kits" / name)
            trust = ["--contract", self.file] if self.modules else []
            trust += [word for module in self.modules for word in ("--trust-module", module)]
            words = ("server", *kit, *trust) if name == "server" else ("site", *kit, "--config", self.configs[name])
            self._begin(name, *words, jobs=jobs)

    def submit(self, name: str = "submit", out: str = "result") -> None:
        """Start the lead's command, which follows the federation."""
        kit = self.folder / "kits" / LEAD
        self._begin(name, "submit", self.file, "--kit", kit, "--out", self.folder / out)

    def _begin(self, name: str, *words: Any, jobs: int = 0) -> None:
        log = self.folder / f"{name}.log"
        self.processes[name] = forked.start(
            _command(*words), self.folder, log, log, append=True, session=True, modules=IMPORTED, jobs=jobs
        )

    def log(self, name: str) -> str:
        """Return the output of a process until now."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def job(self, name: str) -> list[psutil.Process]:
        """Return the processes of the jobs at the server or a site, with the processes that the jobs started."""
        try:
            children = psutil.Process(self.processes[name].pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in children if not _shares_session(process.pid, self.processes[name].pid)]

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, but not the processes that it started."""
        self.processes[name].kill()
        self.processes[name].wait()

    def kill_job(self, name: str) -> None:
        """Kill the process of the job with SIGKILL."""
        for process in self.job(name):
            process.kill()

    def freeze(self, name: str, how: signal.Signals) -> None:
        """Send SIGSTOP or SIGCONT to a process and its job."""
        for process in [psutil.Process(self.processes[name].pid), *self.job(name)]:
            process.send_signal(how)

    def progress(self) -> dict[str, Any]:
        """Return the server's record of the progress; empty before the start."""
        path = self.folder / "server" / self.name / "progress.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def wait(self, is_met: Callable[[], Any], seconds: float, reason: str) -> float:
        """Wait until a condition is true and return the seconds of waiting."""
        began = time.monotonic()
        while not is_met():
            if time.monotonic() - began > seconds:
                logs = "\n".join(f"== {name}\n{self.log(name)[-2000:]}" for name in (*self.processes,))
                raise AssertionError(f"not in {seconds:g} s: {reason}\n{self.progress()}\n{logs}")
            time.sleep(0.05)
        return time.monotonic() - began

    def round(self, number: int, seconds: float = 120) -> float:
        """Wait until a round is saved."""
        return self.wait(lambda: self.progress().get("round", 0) >= number, seconds, f"round {number}")

    def done(self, seconds: float = 300) -> float:
        """Wait until the federation has finished without an error."""
        took = self.wait(lambda: self.progress().get("outcome") in ("done", "failed", "stopped"), seconds, "the end")
        assert self.progress()["outcome"] == "done", self.progress()
        return took

    def alike(self, run: fedmutual.Run) -> bool:
        """Return whether all models, with the shared model if there is one, have the bits of a run in one process."""
        pairs = []
        for i, config in self.configs.items():
            mine = fedmutual.Run(config.parent / "state" / self.name)
            pairs.append((mine.personal_model(i), run.personal_model(i)))
        if run.config.algorithm["name"] != "fedh2l":
            pairs.append((fedmutual.Run(self.folder / "server" / self.name).global_model(), run.global_model()))
        return all(same(site_model.state_dict(), expected_model.state_dict()) for site_model, expected_model in pairs)

    def close(self) -> None:
        """End all processes of the federation."""
        left = [p for name in self.processes for p in self.job(name)]
        for process in self.processes.values():
            _kill_group(process.pid)
            process.kill()  # it may be in the group of the tests
            process.wait()
        for child in left:
            if child.is_running():
                child.kill()
        for process in psutil.process_iter(["cmdline", "cwd"]):
            words = [*(process.info["cmdline"] or ()), process.info["cwd"] or ""]
            if any(str(self.folder) in word for word in words) and process.pid != os.getpid():
                process.kill()  # a job whose parent was killed before


def _command(*words: Any) -> list[str]:
    return ["python", "-m", "fedmutual", *map(str, words)]


def _shares_session(pid: int, leader: int) -> bool:
    """Return whether a process is in the session that `leader` leads. A fork that waits for a job is; a job is not."""
    try:
        return os.getsid(pid) == leader
    except ProcessLookupError:
        return True


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def loopback(folder: Path, common: dict[str, Any], sites: dict[str, Any], **given: Any) -> Iterator[Loopback]:
    """Yield a federation, and end it afterwards."""
    federation = Loopback(folder, common, sites, **given)
    try:
        yield federation
    finally:
        federation.close()
