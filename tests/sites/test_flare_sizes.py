"""How long a message FLARE takes: no longer than one of the federation can be, and refused by the length that it states."""

import json
import subprocess
import sys

import pytest

from fedmutual.sites import contract as contracts
from fedmutual.sites.server_experiment import find_longest_message
from wards import COMMON, SEEDED, contract

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

from fedmutual.sites.flare import workspace
from fedmutual.sites.flare.kits import open_kit, provision

pytestmark = pytest.mark.sites

MEME = 4 * (64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10)  # bytes of the shared "mlp" for 8 x 8 pixels, 10 classes
SEND = """
import json, os, socket, sys
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.comm_config import CommConfigurator

CommConfigurator._config_loaded, CommConfigurator._configuration = True, json.load(open(sys.argv[1]))
with socket.socket() as free:
    free.bind(("localhost", 0))
    url = f"grpc://localhost:{free.getsockname()[1]}"
came = []
server, site = Cell("server", url, False, {}), Cell("north", url, False, {})
taken = lambda request: came.append(len(request.payload)) or make_reply(ReturnCode.OK)
server.register_request_cb(channel="orders", topic="answer", cb=taken)
server.start()
site.start()
for size in map(int, sys.argv[2:]):
    request = new_cell_message({}, bytes(size))
    site.send_request(channel="orders", target="server", topic="answer", request=request, timeout=60.0)
print("came", json.dumps(came), flush=True)
os._exit(0)
"""


def test_the_longest_message_follows_from_the_contract(tmp_path):
    """Of FML the order: an inbox is made of the shared model, and has no more than all that the sites sent of it."""
    ten = [f"site{k}" for k in range(10)]
    longest = find_longest_message(contracts.read_contract(contract(tmp_path, sites=ten)))
    assert (1 + len(ten)) * MEME < longest < (1 + len(ten)) * MEME + 2**16
    peers = find_longest_message(contracts.read_contract(contract(tmp_path, SEEDED, public="public")))
    assert 2**20 < peers < 2**20 + 2**15  # of peers, the scores: what they send each other has some hundred bytes


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    provision(contract(folder, COMMON), folder / "kits")
    return folder / "kits"


@pytest.mark.parametrize(("longest", "most"), [(0, 2**26), (10**9, 10**9 + 2**21), (2**32, 2**32 + 2**21)])
def test_what_is_longer_is_not_taken(kits, tmp_path, longest, most):
    work = workspace.make_workspace(open_kit(kits / "north"), tmp_path, {"longest": longest})
    about = json.loads((work / "local" / "comm_config.json").read_text())
    options = dict(about["grpc"]["options"])
    assert about["streaming_max_blob_size"] == most
    frame = min(most, 2**31 - 2**21)  # of gRPC, which has no longer one
    assert (options["grpc.max_receive_message_length"], options["grpc.max_send_message_length"]) == (frame, frame)


def test_flare_refuses_a_longer_one_before_it_is_whole(kits, tmp_path):
    """A message of exactly the limit is accepted, and later messages too."""
    work = workspace.make_workspace(open_kit(kits / "north"), tmp_path, {"longest": 0})
    sizes = [10, 2**26, 2**26 + 1, 10**8, 20]
    words = [sys.executable, "-c", SEND, str(work / "local" / "comm_config.json"), *map(str, sizes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    came = next(line for line in done.stdout.splitlines() if line.startswith("came"))
    assert json.loads(came.removeprefix("came")) == [10, 2**26, 20], done.stderr[-500:]
