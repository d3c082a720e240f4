"""A lead and a server's operator who together mean harm: none of their code runs at a site. One real federation."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from nvflare.fuel.hci.client import file_transfer

from fedmutual.sites.contract import read_contract
from fedmutual.sites.flare import archive
from fedmutual.sites.flare.kits import open_kit
from fedmutual.sites.flare.session import Session
from fedmutual.sites.flare.workspace import JOB
from loopback import LEAD, Loopback, loopback
from wards import COMMON, SITES

pytestmark = pytest.mark.sites

WORKER = "nvflare.private.fed.app.client.worker_process"
MARK = "import os, pathlib\npathlib.Path({mark!r}).write_text(os.getcwd())\n"
ENDLESS = "import time\ntime.sleep(600)\n"


def test_no_code_of_a_lead_and_a_server_runs_at_a_site(tmp_path, monkeypatch):
    with federated(tmp_path) as federation:
        with Session(open_kit(tmp_path / "kits" / LEAD), timeout=60) as session:
            code_beside_the_configuration_is_not_unpacked(federation, session)
            a_contract_that_names_code_is_not_parsed(federation, session)
            monkeypatch.setattr(file_transfer, "sign_folders", lambda *_, **__: None)
            a_job_that_nobody_signed_is_not_unpacked(federation, session)
        federation.wait(lambda: not folders_of_jobs(tmp_path / "north" / "state" / "flare"), 60, "the site tidies up")
        assert not (tmp_path / "mark").exists()
        assert federation.processes["north"].poll() is None


@contextmanager
def federated(folder: Path) -> Iterator[Loopback]:
    """A hostile server, and a site. A module lies wherever the site's processes work; a mark says that it was imported.

    The server's operator lists a module of the same name, which does not end: a job that ends at the server ends at the
    site, too, perhaps before the site has looked at the contract.
    """
    with loopback(folder, {**COMMON, "rounds": 1}, {"north": SITES["north"]}) as federation:
        kit, state = folder / "kits" / "server", folder / "server"
        state.mkdir()
        (folder / "operator").mkdir()
        (folder / "operator" / "evil.py").write_text(ENDLESS)
        facts = {
            "state": str(state),
            "contracts": [read_contract(federation.file).record(), make_evil_record(federation)],
            "files": [str(folder / "operator" / "federation.toml")],
            "modules": ["evil"],
        }
        words = [sys.executable, *map(str, (Path(__file__).parents[1] / "rogue_server.py", kit, state, json.dumps(facts)))]
        with (folder / "server.log").open("wb") as log:
            federation.processes["server"] = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        federation.start("north")
        federation.wait(lambda: "site 'north' is connected" in federation.log("server"), 120, "north is there")
        for place in (folder, folder / "north" / "state" / "flare"):
            (place / "evil.py").write_text(MARK.format(mark=str(folder / "mark")))
        yield federation


def code_beside_the_configuration_is_not_unpacked(federation: Loopback, session: Session) -> None:
    def change(made: Path) -> None:
        (made / archive.APP / "config" / "evil.py").write_text(MARK.format(mark=str(federation.folder / "mark")))

    assert ended(federation, session, submitted(federation, session, change)) == "FINISHED:FAILED_TO_RUN"
    assert "it has unexpected files" in federation.log("north")
    assert not list((federation.folder / "north" / "state").glob("flare/*-*/**/evil.py"))


def a_contract_that_names_code_is_not_parsed(federation: Loopback, session: Session) -> None:
    """Signed, and of the form that fedmutual writes. The job's process searches no folder of those above."""

    def change(made: Path) -> None:
        for name, content in archive.make_configs(json.dumps(make_evil_record(federation))).items():
            (made / archive.APP / name).write_bytes(content)

    began: list[list[str]] = []

    def refuses() -> bool:
        for process in federation.job("north"):
            with suppress(psutil.Error):  # it has ended, or is about to
                began.append(process.cmdline())
        return 'its \'algorithm.name\' is "evil:X", and this site agreed to "fml"' in federation.log("north")

    number = submitted(federation, session, change)
    federation.wait(refuses, 120, "the site refuses")
    assert {tuple(words[1:4]) for words in began if WORKER in words} == {("-P", "-E", "-m")}
    federation.kill_job("server")
    ended(federation, session, number)


def make_evil_record(federation: Loopback) -> dict[str, Any]:
    """Return the contract with an algorithm of the module `evil`."""
    record = read_contract(federation.file).record()
    record["tables"]["algorithm"]["name"] = "evil:X"
    return record


def a_job_that_nobody_signed_is_not_unpacked(federation: Loopback, session: Session) -> None:
    number = submitted(federation, session, lambda made: None)
    assert ended(federation, session, number) == "FINISHED:FAILED_TO_RUN"
    assert federation.log("north").count("refused, or could not: a job: the job's archive") == 2


def submitted(federation: Loopback, session: Session, change: Callable[[Path], Any]) -> str:
    """The number of a job that a lead changed before signing it."""
    with tempfile.TemporaryDirectory() as folder:
        made = archive.write_job(read_contract(federation.file), Path(folder))
        change(made)
        return str(session.flare.submit_job(str(made)))


def ended(federation: Loopback, session: Session, number: str) -> str:
    """How a job ended."""
    status = [""]

    def over() -> bool:
        status[0] = str(session.flare.get_job_meta(number).get("status"))
        return status[0].startswith("FINISHED")

    federation.wait(over, 120, "the end of the job")
    return status[0]


def folders_of_jobs(work: Path) -> list[Path]:
    return [path for path in work.iterdir() if JOB.fullmatch(path.name)]
