"""What a participant cannot do to the others, over a real network: one federation with a rogue in it, and no round."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.flare_api.api_spec import InvalidJobDefinition
from nvflare.fuel.hci.client import file_transfer

from fedmutual.errors import RunError
from fedmutual.sites.contract import read_contract
from fedmutual.sites.flare import archive
from fedmutual.sites.flare.kits import open_kit
from fedmutual.sites.flare.session import Session
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
        rogue = (Path(__file__).parents[1] / "rogue.py", kit, state, json.dumps(facts))
        words = [sys.executable, *map(str, (*rogue, folder / "answers.json", folder / "north" / "secret.csv"))]
        with (folder / "eve.log").open("wb") as log:
            federation.processes["eve"] = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        yield federation


def a_lead_has_no_shell_and_no_command_of_flares(federation: Loopback, session: Session) -> None:
    ask = session.flare.api.server_execute
    for command in FLARES:
        assert "is not authorized" in str(ask(command)), command
    for command in ("ls north", "cat north local/fedmutual.json", "shutdown client north", "process_info north"):
        assert "not allowed" in str(ask(command)), command  # FLARE leaves it to the site
    assert federation.processes["north"].poll() is None


def a_job_that_names_code_is_refused(federation: Loopback, session: Session) -> None:
    """By its contract, which is compared with the one in the server's kit before anything of it is parsed."""
    record = read_contract(federation.file).record()
    record["tables"]["algorithm"]["name"] = "evil:X"

    def change(made: Path) -> None:
        for name, content in archive.make_configs(json.dumps(record)).items():
            (made / archive.APP / name).write_bytes(content)

    message = refused(federation, session, change)
    assert 'its \'algorithm.name\' is "evil:X", and this server agreed to "fml"' in message


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
    with tempfile.TemporaryDirectory() as folder:
        made = archive.write_job(read_contract(federation.file), Path(folder))
        change(made)
        with pytest.raises(InvalidJobDefinition) as caught:
            session.flare.submit_job(str(made))
    assert not [*(federation.folder / "server" / "flare" / "jobs").iterdir()]
    return str(caught.value)


def reads(federation: Loopback, name: str, text: str) -> None:
    """What FLARE logs at a participant, or its console, says so, or will at once."""
    state = federation.folder / ("server" if name == "server" else f"{name}/state")

    def is_logged() -> bool:
        files = [federation.folder / f"{name}.log", *state.rglob("log.txt")]
        return any(text in file.read_text(errors="replace") for file in files)

    federation.wait(is_logged, 30, f"{name} reads {text!r}")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
