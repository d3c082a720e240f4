"""Kits and workspaces: keys that are closed to other users of the host, and how long a message FLARE takes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra `sites` is not installed")

from fedmutual.errors import ConfigError, RunError
from fedmutual.sites import contract as contracts
from fedmutual.sites.coordinator import find_longest_message
from fedmutual.sites.flare import kits, workspace
from wards import COMMON, SEEDED, contract

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


def test_no_key_lies_in_a_folder_that_others_can_open(tmp_path, monkeypatch):
    written = {}

    def noted(function, key):
        def call(*arguments, **named):
            target = Path(arguments[key])
            folders = [p for p in target.parents if tmp_path in p.parents]
            written[target.name] = any(p.stat().st_mode & 0o077 == 0 for p in folders if p.exists())
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(kits.shutil, "copyfile", noted(shutil.copyfile, 1))
    monkeypatch.setattr(kits, "write_bytes", noted(kits.write_bytes, 0))
    kits.provision(contract(tmp_path), tmp_path / "kits")
    monkeypatch.setattr(workspace.shutil, "copytree", noted(shutil.copytree, 1))
    workspace.make_workspace(kits.open_kit(tmp_path / "kits" / "north"), tmp_path / "state", {})
    assert {"cert.json", "server.key", "client.key", "startup"} <= written.keys()
    assert all(written.values()), written


def test_what_a_killed_provisioning_left_is_removed_and_no_link_is_followed(tmp_path):
    """A kit's part had a name that anybody could foresee."""
    (tmp_path / "kits" / "authority").mkdir(parents=True)
    (tmp_path / "kits" / "authority" / "federation.json").write_text('{"format": 1, "name": "wards"}')
    (tmp_path / "kits" / ".north.0.part" / "startup").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kits" / ".north.part").symlink_to(tmp_path / "elsewhere")
    kits.provision(contract(tmp_path), tmp_path / "kits")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (tmp_path / "kits" / ".north.0.part").exists()


def test_a_site_with_the_name_of_the_server_s_host_is_refused(tmp_path):
    """The site's certificate would also be valid for the server."""
    path = contract(tmp_path, COMMON | {"server": {"hosts": ["north"]}})
    with pytest.raises(ConfigError, match=r"'north' has the name of the server's host"):
        kits.provision(path, tmp_path / "kits")


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory):
    """The folder of a federation's file and of its kits. Not to be changed."""
    folder = tmp_path_factory.mktemp("provisioned")
    kits.provision(contract(folder), folder / "kits")
    return folder


@pytest.fixture
def copied(provisioned, tmp_path):
    """A copy of that folder, to damage."""
    return shutil.copytree(provisioned, tmp_path / "copied")


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[" * 200_000,
        {"hosts": None},
        {"hosts": []},
        {"hosts": "localhost"},
        {"port": None},
        {"port": "many"},
        {"port": 70_000},
        {"kind": "guest"},
        {"kind": ["site"]},
        {"name": 3},
    ],
    ids=lambda damage: str(damage)[:30],
)
def test_a_damaged_kit_file_is_named(copied, damage):
    """None: the key is missing."""
    file = copied / "kits" / "north" / "kit.json"
    if isinstance(damage, dict):
        changed = json.loads(file.read_text()) | damage
        damage = json.dumps({k: v for k, v in changed.items() if v is not None})
    file.write_text(damage)
    with pytest.raises(RunError, match=r"north/kit\.json: is damaged.*; use the kit as you received it"):
        kits.open_kit(file.parent)


@pytest.mark.parametrize("text", ["", "[1]", '{"format": 1, "na'])
def test_a_damaged_file_of_the_authority_or_of_flare_is_named_and_no_kit_changes(copied, tmp_path, text):
    files = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}

    def renew():
        kits.provision(copied / "federation.toml", copied / "kits", renew=("north",))

    def start():
        workspace.make_workspace(kits.open_kit(copied / "kits" / "north"), tmp_path / "state", {})

    cases = {"authority/federation.json": renew, "authority/cert.json": renew, "north/startup/fed_client.json": start}
    for file, command in cases.items():
        (copied / "kits" / file).write_text(text)
        with pytest.raises(RunError, match=rf"{file}: is damaged"):
            command()
        (copied / "kits" / file).write_bytes(files[copied / "kits" / file])
        assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == files


def test_the_longest_message_follows_from_the_contract(tmp_path):
    """Of FML the order: an inbox is made of the shared model, and has no more than all that the sites sent of it."""
    ten = [f"site{k}" for k in range(10)]
    longest = find_longest_message(contracts.read_contract(contract(tmp_path, sites=ten)))
    assert (1 + len(ten)) * MEME < longest < (1 + len(ten)) * MEME + 2**16
    peers = find_longest_message(contracts.read_contract(contract(tmp_path, SEEDED, public="public")))
    assert 2**20 < peers < 2**20 + 2**16  # of peers, the scores: what they send each other has some hundred bytes


@pytest.mark.parametrize(("longest", "most"), [(0, 2**26), (10**9, 10**9 + 2**21), (2**32, 2**32 + 2**21)])
def test_what_is_longer_is_not_taken(provisioned, tmp_path, longest, most):
    work = workspace.make_workspace(kits.open_kit(provisioned / "kits" / "north"), tmp_path, {"longest": longest})
    about = json.loads((work / "local" / "comm_config.json").read_text())
    options = dict(about["grpc"]["options"])
    assert about["streaming_max_blob_size"] == most
    frame = min(most, 2**31 - 2**21)  # of gRPC, which has no longer one
    assert (options["grpc.max_receive_message_length"], options["grpc.max_send_message_length"]) == (frame, frame)


def test_flare_refuses_a_longer_one_before_it_is_whole(provisioned, tmp_path):
    """A message of exactly the limit is accepted, and later messages too."""
    work = workspace.make_workspace(kits.open_kit(provisioned / "kits" / "north"), tmp_path, {"longest": 0})
    sizes = [10, 2**26, 2**26 + 1, 10**8, 20]
    words = [sys.executable, "-c", SEND, str(work / "local" / "comm_config.json"), *map(str, sizes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    came = next(line for line in done.stdout.splitlines() if line.startswith("came"))
    assert json.loads(came.removeprefix("came")) == [10, 2**26, 20], done.stderr[-500:]
