"""What a participant's processes are told they may do, and who may ask it of them."""

import json
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.private.admin_defs import Message, error_reply, ok_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.utils.site_config import project_site_config
from nvflare.security.security import COMMAND_CATEGORIES, FLAuthorizer

from fedmutual.sites.flare import workspace
from fedmutual.sites.flare.access_control import (
    PEER_TOPIC,
    JobChecks,
    is_allowed,
    refuse_false_sender,
    refuse_request,
    remove_error_text,
)
from fedmutual.sites.flare.kits import open_kit, provision
from wards import contract

pytestmark = pytest.mark.sites

JOB = "0a1b2c3d-0000-4000-8000-0123456789ab"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folders that FLARE works in, of a server and of a site."""
    folder = tmp_path_factory.mktemp("federation")
    provision(contract(folder), folder / "kits")
    (folder / "server").mkdir()
    (folder / "north").mkdir()
    return {
        name: workspace.make_workspace(open_kit(folder / "kits" / name), folder / name, {}) for name in ("server", "north")
    }


@pytest.mark.parametrize("name", ["server", "north"])
def test_what_is_not_listed_is_nobodys_right(work, name):
    authorizer = FLAuthorizer("fedmutual", json.loads((work[name] / "local" / "authorization.json").read_text()))
    asked = {*COMMAND_CATEGORIES, "byoc", "submit_job", "clone_job", "server-predeployed-flwr"}
    for role in ("lead", "project_admin", "org_admin", "member", ""):
        person = Person("somebody", "fedmutual", role)
        held = {right for right in asked if authorizer.authorize(AuthzContext(right, person, person))[0]}
        assert held == ({"submit_job", "get_job_meta"} if role == "lead" else set()), role


def test_registration_reveals_nothing_about_a_site(work):
    merged = {}
    for file in ("startup/fed_client.json", "local/resources.json"):
        merged |= json.loads((work["north"] / file).read_text())
    assert project_site_config(merged) == {"format": 1, "require_signed_jobs": True, "allow_log_streaming": False}


@pytest.mark.parametrize("name", ["server", "north"])
def test_the_folders_are_their_owners_alone(work, name):
    folders = [work[name].parent, work[name], *(path for path in work[name].rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in (work[name] / "startup").iterdir()} == {0o600}


def test_a_letter_is_taken_if_it_is_sealed_by_its_sender():
    """One that is not sealed could be the server's; the seal of a letter identifies its sender."""
    stream = {StreamHeaderKey.CHANNEL: "aux_communication", StreamHeaderKey.TOPIC: PEER_TOPIC}
    cell = SimpleNamespace(my_info=SimpleNamespace(fqcn=f"north.{JOB}"))
    for sealed in (True, False):
        headers = {MessageHeaderKey.CHANNEL: "sm__STREAM", MessageHeaderKey.TOPIC: "sm__DATA"}
        message = new_cell_message({**headers, MessageHeaderKey.ENCRYPTED: sealed, **stream})
        assert (refuse_request(cell, f"south.{JOB}", message) is None) is sealed
    for stated_name in ("south", "west", None):
        letter = Shareable()
        letter.set_peer_props({ReservedKey.IDENTITY_NAME: stated_name})
        request = new_cell_message({MessageHeaderKey.ORIGIN: f"south.{JOB}"}, letter)
        assert (refuse_false_sender(None, request) is None) is (stated_name == "south")


@pytest.mark.parametrize(
    ("order", "job", "fine"),
    [
        *(("train.deploy", JOB, False), ("train.deploy", "../wards", False), ("scheduler.check_resource", None, True)),
        *(("train.start_job", JOB, True), ("train.delete_run", JOB, False), ("sys.shell", None, False)),
        *(("train.restart", None, False), ("train.configure_job_log", JOB, False), ("info.show_errors", JOB, False)),
    ],
)
def test_what_a_server_may_order_of_a_site(order, job, fine, tmp_path):
    """To deploy what is no job of ours is refused: see test_flare_archive."""
    message = Message(topic=order, body="")
    if job is not None:
        message.set_header(RequestHeader.JOB_ID, job)
    assert (JobChecks(tmp_path).refuse_order(None, new_cell_message({}, message)) is None) is fine


def test_the_reason_of_a_failure_is_shown_to_the_sites_operator_only(capsys):
    reply = remove_error_text(new_cell_message({}, error_reply("no such file: /srv/xray/smith.png")))
    assert reply.payload.body == "refused, or could not; its operator reads why"
    assert "smith.png" in capsys.readouterr().out
    assert remove_error_text(new_cell_message({}, ok_reply(body="deployed"))).payload.body == "deployed"


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
        (f"north.{JOB}", f"south.{JOB}", "aux_communication", PEER_TOPIC, True),
        (f"north.{JOB}", f"south.{JOB}", "aux_communication", "__end_run__", False),
        (f"north.{JOB}", f"server.{JOB}", "aux_communication", PEER_TOPIC, False),
        (f"north.{JOB}", f"south.{JOB}", "return_only", f"aux_communication:{PEER_TOPIC}", True),
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
    assert is_allowed(me, asker, channel, topic) is fine


def test_a_refused_sender_cannot_write_its_own_log_line(caplog):
    """The sender chooses the text of channel and topic."""
    cell = SimpleNamespace(my_info=SimpleNamespace(fqcn="north"))
    forged = "x\n2026-01-01 12:00:00 - all is well\x1b[2J"
    for channel, topic in ((forged, "y" * 100_000), (["admin"], {"a": 1}), (None, b"z")):
        headers = {MessageHeaderKey.CHANNEL: channel, MessageHeaderKey.TOPIC: topic}
        assert refuse_request(cell, "eve\nforged", new_cell_message(headers)) is not None
    assert len(caplog.messages) == 3
    assert all(line.isprintable() and len(line) < 1000 for line in caplog.messages)
