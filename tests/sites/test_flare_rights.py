"""What a participant's processes are told they may do, and who may ask it of them."""

import json

import pytest
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.private.fed.utils.site_config import project_site_config
from nvflare.security.security import COMMAND_CATEGORIES, FLAuthorizer

from fedmutual.engines.sites.flare import workspace
from fedmutual.engines.sites.flare.door import LETTER, lets_in
from fedmutual.engines.sites.flare.kits import opened, provision
from wards import contract

JOB = "0a1b2c3d-0000-4000-8000-0123456789ab"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folders that FLARE works in, of a server and of a site."""
    folder = tmp_path_factory.mktemp("federation")
    provision(contract(folder), folder / "kits")
    (folder / "server").mkdir()
    (folder / "north").mkdir()
    return {name: workspace.made(opened(folder / "kits" / name), folder / name, {}) for name in ("server", "north")}


@pytest.mark.parametrize("name", ["server", "north"])
def test_what_is_not_listed_is_nobodys_right(work, name):
    authorizer = FLAuthorizer("fedmutual", json.loads((work[name] / "local" / "authorization.json").read_text()))
    asked = {*COMMAND_CATEGORIES, "byoc", "submit_job", "clone_job", "server-predeployed-flwr"}
    for role in ("lead", "project_admin", "org_admin", "member", ""):
        person = Person("somebody", "fedmutual", role)
        held = {right for right in asked if authorizer.authorize(AuthzContext(right, person, person))[0]}
        assert held == ({"submit_job", "get_job_meta"} if role == "lead" else set()), role


def test_a_site_tells_nothing_of_itself_when_it_registers(work):
    merged = {}
    for file in ("startup/fed_client.json", "local/resources.json"):
        merged |= json.loads((work["north"] / file).read_text())
    assert project_site_config(merged) == {"format": 1, "require_signed_jobs": True, "allow_log_streaming": False}


@pytest.mark.parametrize("name", ["server", "north"])
def test_the_folders_are_their_owners_alone(work, name):
    folders = [work[name].parent, work[name], *(path for path in work[name].rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in (work[name] / "startup").iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("me", "asker", "channel", "topic", "fine"),
    [
        ("north", "server", "admin", "admin", True),
        ("north", "south", "admin", "admin", False),
        ("north", f"south.{JOB}", "admin", "admin", False),
        ("north", f"north.{JOB}", "admin", "train.notify_job_status", True),
        ("north", "server", "_net_manager", "stop", False),
        ("north", "southserver", "admin", "admin", False),
        ("north", "servers", "admin", "admin", False),
        ("north", "_admin_1", "admin", "admin", False),
        (f"north.{JOB}", "server", "client_command", "show_errors", False),
        (f"north.{JOB}", "north", "client_command", "abort", True),
        (f"north.{JOB}", f"server.{JOB}", "aux_communication", "__end_run__", True),
        (f"north.{JOB}", f"south.{JOB}", "aux_communication", LETTER, True),
        (f"north.{JOB}", f"south.{JOB}", "aux_communication", "__end_run__", False),
        (f"north.{JOB}", f"south.{JOB}", "return_only", f"aux_communication:{LETTER}", True),
        (f"north.{JOB}", f"south.{JOB}", "return_only", "server_command:get_task", False),
        (f"north.{JOB}", f"south.{JOB}", "credential_manager", "key_exchange", True),
        ("server", "north", "task", "heart_beat", True),
        ("server", "north", "server_parent_listener", "update_run_status", False),
        ("server", "north", "hci_channel", "command", False),
        ("server", f"server.{JOB}", "server_parent_listener", "heartbeat", True),
        ("server", "_admin_1", "hci_channel", "command", True),
        ("server", "north", "_net_manager", "stop", False),
        (f"server.{JOB}", f"north.{JOB}", "server_command", "submit_update", True),
        (f"server.{JOB}", f"north.{JOB}", "server_command", "abort", False),
        (f"server.{JOB}", "north", "server_command", "submit_update", False),
    ],
)
def test_the_door(me, asker, channel, topic, fine):
    assert lets_in(me, asker, channel, topic) is fine
