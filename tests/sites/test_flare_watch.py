"""For whom a job is begun anew: a site that is heard, and not a dead connection; what a lead reads of a refusal."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from fedmutual.engines.loop import Paused
from fedmutual.engines.sites.flare import members, workspace
from fedmutual.engines.sites.flare.controller import _pause
from fedmutual.engines.sites.flare.session import Lost, _answer
from fedmutual.engines.sites.flare.watch import _connected, _heard


def engine(**seen):
    """A server to which sites gave their last sign of life so many seconds ago."""
    clients = [SimpleNamespace(name=i, token=f"of {i}", last_connect_time=time.time() - ago) for i, ago in seen.items()]
    return SimpleNamespace(get_clients=lambda: clients)


def test_who_is_overdue_is_connected_and_not_heard():
    found = engine(north=1, south=3 * workspace.HEARTBEAT)
    assert set(_connected(found)) == {"north", "south"}
    assert set(_heard(found)) == {"north"}


def test_no_job_is_begun_anew_for_a_dead_connection(tmp_path):
    """South's connection was cut while the job began: it is not in it, and the server has not noticed."""
    folder = tmp_path / "wards"
    post = SimpleNamespace(began={"north": "1"}, check=lambda: None)
    members.note(tmp_path, {"north": "1", "south": "1"}, ["south"])
    _pause(folder, post)
    members.note(tmp_path, {"north": "1", "south": "1"})
    with pytest.raises(Paused, match="south came, or came back"):
        _pause(folder, post)


def test_nobody_is_there_before_the_server_looked(tmp_path):
    assert members.there(tmp_path) == members.heard(tmp_path) == {}


def test_a_lead_reads_why_the_server_does_not_do_it():
    """FLARE gives the status of the transfer, and says why in the data."""
    refused = {"status": "SUCCESS", "details": "", "data": [{"type": "error", "data": "not authorized"}]}
    with pytest.raises(Lost, match=r"did not answer \(not authorized\)"):
        _answer(refused)
    with pytest.raises(Lost, match="TIMEOUT"):
        _answer({"status": "TIMEOUT"})
    assert _answer({"data": [{"type": "string", "data": "x"}, {"type": "dict", "data": {"there": []}}]}) == {"there": []}
