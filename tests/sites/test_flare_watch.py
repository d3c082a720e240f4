"""For whom a job is begun anew: a site that is heard, and no connection that is dead and not yet known to be."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from fedmutual.engines.loop import Paused
from fedmutual.engines.sites.flare import members, workspace
from fedmutual.engines.sites.flare.controller import _pause
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
