"""What a rogue site, a rogue lead and a rogue server cannot do to the others, over a real network."""

import json
import shutil
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

from nvflare.fuel.flare_api.api_spec import InvalidJobDefinition
from nvflare.fuel.hci.client import file_transfer

from fedmutual.errors import RunError
from fedmutual.sites.contract import read_contract
from fedmutual.sites.flare import archive
from fedmutual.sites.flare.kits import open_kit
from fedmutual.sites.flare.session import Session
from fedmutual.sites.flare.workspace import JOB
from loopback import LEAD, Loopback, loopback
from wards import COMMON, SITES

pytestmark = pytest.mark.sites

SECRET = "patient,age\nSmith,61\n"
FLARES = (  # commands of FLARE that a lead of ours has no right to
    *("ls server", "cat server log.txt", "grep server a log.txt", "tail server log.txt", "pwd server"),
    *("sys_info server", "report_env north", "check_status server", "restart server", "shutdown server"),
    *("remove_client north", "configure_site_log server DEBUG", "list_jobs", "show_scopes server"),
)


def test_no_participant_gets_more_rights_than_its_role(tmp_path, monkeypatch):
    with federated(tmp_path) as federation:
        federation.wait(lambda: "site 'eve' is connected" in federation.log("server"), 60, "the rogue is there")
        (tmp_path / "answers.go").touch()
        with Session(open_kit(tmp_path / "kits" / LEAD)) as session:
            a_lead_has_no_shell_and_no_command_of_flares(federation, session)
            a_job_that_names_code_is_refused(federation, session)
            monkeypatch.setattr(file_transfer, "sign_folders", lambda *_, **__: None)
            a_job_that_nobody_signed_is_refused(federation, session)
        a_site_cannot_pass_as_a_lead(federation)
        a_site_with_a_true_kit_gets_nothing_out_of_another_one(federation)


@contextmanager
def federated(folder: Path) -> Iterator[Loopback]:
    """A server, a site, and another one that is a rogue."""
    sites = {"north": SITES["north"], "eve": SITES["south"]}
    with loopback(folder, COMMON, sites) as federation:
        (folder / "north" / "secret.csv").write_text(SECRET)
        (folder / "north" / "state" / "wards").mkdir(parents=True)
        (folder / "north" / "state" / "wards" / "kept").write_text("as of a run")
        federation.start("server", "north")
        federation.wait(lambda: "site 'north' is connected" in federation.log("server"), 60, "north is there")
        facts = {
            "config": str(federation.configs["eve"]),
            "contracts": [read_contract(federation.file).record()],
            "rounds": COMMON["rounds"],
        }
        kit, state = folder / "kits" / "eve", folder / "eve" / "state"
        state.mkdir()
        files = (folder / "answers.json", folder / "north" / "secret.csv")
        start_rogue(federation, "eve", "rogue.py", kit, state, json.dumps(facts), *files)
        yield federation


def start_rogue(federation: Loopback, name: str, script: str, *arguments: Any) -> None:
    """Start a script of tests/ as a participant."""
    words = [sys.executable, *map(str, (Path(__file__).parents[1] / script, *arguments))]
    with (federation.folder / f"{name}.log").open("wb") as log:
        federation.processes[name] = subprocess.Popen(
            words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def a_lead_has_no_shell_and_no_command_of_flares(federation: Loopback, session: Session) -> None:
    ask = session.flare.api.server_execute
    for command in FLARES:
        assert "is not authorized" in str(ask(command)), command
    for command in ("ls north", "cat north local/fedmutual.json", "shutdown client north", "process_info north"):
        assert "not allowed" in str(ask(command)), command  # FLARE leaves it to the site
    assert federation.processes["north"].poll() is None


def a_job_that_names_code_is_refused(federation: Loopback, session: Session) -> None:
    """By its contract, which is compared with the one in the server's kit before anything of it is parsed."""
    message = refused(federation, session, lambda made: set_contract(made, make_evil_record(federation)))
    assert 'its \'algorithm.name\' is "evil:X", and this server agreed to "fml"' in message


def make_evil_record(federation: Loopback) -> dict[str, Any]:
    """Return the contract with an algorithm of the module `evil`."""
    record = read_contract(federation.file).record()
    record["tables"]["algorithm"]["name"] = "evil:X"
    return record


def set_contract(made: Path, record: dict[str, Any]) -> None:
    """Give a job another contract, in the form that fedmutual writes."""
    for name, content in archive.make_configs(json.dumps(record)).items():
        (made / archive.APP / name).write_bytes(content)


def a_job_that_nobody_signed_is_refused(federation: Loopback, session: Session) -> None:
    assert "it has unexpected files" in refused(federation, session, lambda made: None)


def a_site_cannot_pass_as_a_lead(federation: Loopback) -> None:
    """FLARE lets any certificate of the federation log in."""
    kits, kit = federation.folder / "kits", federation.folder / "false"
    shutil.copytree(kits / LEAD, kit)
    for file in ("client.crt", "client.key"):
        shutil.copy(kits / "eve" / "startup" / file, kit / "startup" / file)
    edit(kit / "kit.json", lambda about: about | {"name": "eve"})
    edit(kit / "startup" / "fed_admin.json", lambda about: about | {"admin": about["admin"] | {"username": "eve"}})
    with Session(open_kit(kit)) as session:
        for command in ("fedmutual_lead status wards", "cells", "list_jobs", "show_config_vars server", "get_job_meta 1"):
            assert "only a lead may" in str(session.flare.api.server_execute(command)), command
        with pytest.raises(RunError):
            session.status("wards")


def a_site_with_a_true_kit_gets_nothing_out_of_another_one(federation: Loopback) -> None:
    answers = federation.folder / "answers.json"
    federation.wait(answers.exists, 60, "the rogue's report")
    recorded = json.loads(answers.read_text())
    assert len(recorded) == 10
    for what, answer in recorded.items():
        refused = "unauthenticated: not allowed" in answer or answer.startswith("timeout")
        assert refused, (what, answer)
    reads(federation, "north", "refused a request of 'eve': admin/admin")
    assert federation.processes["north"].poll() is None
    assert (federation.folder / "north" / "state" / "wards" / "kept").is_file()


def refused(federation: Loopback, session: Session, change: Callable[[Path], Any]) -> str:
    """Why the server does not take a job that somebody changed before a lead signed it; nothing of it is kept."""
    with pytest.raises(InvalidJobDefinition) as caught:
        submit_changed(federation, session, change)
    assert not [*(federation.folder / "server" / "flare" / "jobs").iterdir()]
    return str(caught.value)


def submit_changed(federation: Loopback, session: Session, change: Callable[[Path], Any]) -> str:
    """Submit a job that a lead changed before signing it, and return its id."""
    with tempfile.TemporaryDirectory() as folder:
        made = archive.write_job(read_contract(federation.file), Path(folder))
        change(made)
        return str(session.flare.submit_job(str(made)))


def reads(federation: Loopback, name: str, text: str) -> None:
    """What FLARE logs at a participant, or its console, says so, or will at once."""
    state = federation.folder / ("server" if name == "server" else f"{name}/state")

    def is_logged() -> bool:
        files = [federation.folder / f"{name}.log", *state.rglob("log.txt")]
        return any(text in file.read_text(errors="replace") for file in files)

    federation.wait(is_logged, 30, f"{name} reads {text!r}")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


WORKER = "nvflare.private.fed.app.client.worker_process"
MARK = "import os, pathlib\npathlib.Path({mark!r}).write_text(os.getcwd())\n"
ENDLESS = "import time\ntime.sleep(600)\n"


def test_no_code_of_a_lead_and_a_server_runs_at_a_site(tmp_path, monkeypatch):
    with hostile_server(tmp_path) as federation:
        with Session(open_kit(tmp_path / "kits" / LEAD), timeout=60) as session:
            code_beside_the_configuration_is_not_unpacked(federation, session)
            a_contract_that_names_code_is_not_parsed(federation, session)
            monkeypatch.setattr(file_transfer, "sign_folders", lambda *_, **__: None)
            a_job_that_nobody_signed_is_not_unpacked(federation, session)
        federation.wait(lambda: not folders_of_jobs(tmp_path / "north" / "state" / "flare"), 60, "the site tidies up")
        assert not (tmp_path / "mark").exists()
        assert federation.processes["north"].poll() is None


@contextmanager
def hostile_server(folder: Path) -> Iterator[Loopback]:
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
        start_rogue(federation, "server", "rogue_server.py", kit, state, json.dumps(facts))
        federation.start("north")
        federation.wait(lambda: "site 'north' is connected" in federation.log("server"), 120, "north is there")
        for place in (folder, folder / "north" / "state" / "flare"):
            (place / "evil.py").write_text(MARK.format(mark=str(folder / "mark")))
        yield federation


def code_beside_the_configuration_is_not_unpacked(federation: Loopback, session: Session) -> None:
    def change(made: Path) -> None:
        (made / archive.APP / "config" / "evil.py").write_text(MARK.format(mark=str(federation.folder / "mark")))

    assert ended(federation, session, submit_changed(federation, session, change)) == "FINISHED:FAILED_TO_RUN"
    assert "it has unexpected files" in federation.log("north")
    assert not list((federation.folder / "north" / "state").glob("flare/*-*/**/evil.py"))


def a_contract_that_names_code_is_not_parsed(federation: Loopback, session: Session) -> None:
    """Signed, and of the form that fedmutual writes. The job's process searches no folder of those above."""
    began: list[list[str]] = []

    def refuses() -> bool:
        for process in federation.job("north"):
            with suppress(psutil.Error):  # it has ended, or is about to
                began.append(process.cmdline())
        return 'its \'algorithm.name\' is "evil:X", and this site agreed to "fml"' in federation.log("north")

    number = submit_changed(federation, session, lambda made: set_contract(made, make_evil_record(federation)))
    federation.wait(refuses, 120, "the site refuses")
    assert {tuple(words[1:4]) for words in began if WORKER in words} == {("-P", "-E", "-m")}
    federation.kill_job("server")
    ended(federation, session, number)


def a_job_that_nobody_signed_is_not_unpacked(federation: Loopback, session: Session) -> None:
    number = submit_changed(federation, session, lambda made: None)
    assert ended(federation, session, number) == "FINISHED:FAILED_TO_RUN"
    assert federation.log("north").count("refused, or could not: a job: the job's archive") == 2


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
