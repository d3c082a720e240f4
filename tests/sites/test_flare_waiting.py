"""How long the server waits for a site that took an order and is silent. With a FLARE of a few lines."""

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from fedmutual.sites.flare import presence
from fedmutual.sites.flare.controller import BODY, TaskTransport

pytestmark = pytest.mark.sites

SITES = ("north", "south", "west")
DEADLINE = 0.6


class Flare:
    """Hands tasks to sites: who is well answers at once, who is deaf takes none, who is dumb takes it and is silent."""

    def __init__(self):
        self._engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=i) for i in SITES])
        self.communicator = SimpleNamespace(get_client_disconnect_time=lambda i: None)
        self.deaf, self.dumb = set(), set()

    def broadcast(self, task, context, targets, min_responses):
        (site,) = targets
        if site in self.deaf:
            return
        task.before_task_sent_cb(client_task=None, fl_ctx=None)
        if site not in self.dumb:
            reply = Shareable()
            reply[BODY] = site.encode()
            reply.set_return_code(ReturnCode.OK)
            threading.Timer(0.05, lambda: task.result_received_cb(SimpleNamespace(result=reply), None)).start()

    def cancel_task(self, task, fl_ctx):
        pass


def make_transport(folder, flare, quorum=2):
    presence.write_members(folder, dict.fromkeys(SITES, "1"))
    return TaskTransport(flare, None, SimpleNamespace(triggered=False), folder / "wards", quorum)


def round_(transport):
    """Who answered, and in how many seconds."""
    began = time.monotonic()
    answered = {i for i, _ in transport.ask(dict.fromkeys(SITES, b""), DEADLINE)}
    return answered, time.monotonic() - began


def test_a_site_that_hangs_costs_one_deadline_and_not_every_round(tmp_path):
    flare = Flare()
    transport = make_transport(tmp_path, flare)
    assert round_(transport)[0] == set(SITES)
    flare.dumb = {"south"}  # it takes the order, and hangs
    answered, took = round_(transport)
    assert (answered, took >= DEADLINE) == ({"north", "west"}, True)
    flare.deaf = {"south"}  # it hangs, and takes no other
    answered, took = round_(transport)
    assert (answered, took < DEADLINE) == ({"north", "west"}, True)
    assert transport.list_late() == ("south",)
    flare.deaf, flare.dumb = set(), set()
    assert round_(transport)[0] == set(SITES)  # it takes orders again, and is waited for
    assert transport.list_late() == ()


def test_late_sites_are_waited_for_if_the_quorum_needs_them(tmp_path):
    flare = Flare()
    transport = make_transport(tmp_path, flare, quorum=3)
    flare.dumb = flare.deaf = {"south"}
    for _ in range(2):
        answered, took = round_(transport)
        assert (answered, took >= DEADLINE) == ({"north", "west"}, True)
