"""A Ray cluster of our own is reached from this machine alone, with its token alone; an old Ray starts none."""

import json
import os
import signal
import subprocess
import sys
from ipaddress import ip_address
from types import SimpleNamespace

import pytest

from fedmutual.engines import ray_cluster
from fedmutual.errors import ConfigError

pytestmark = pytest.mark.process

START = """
import json, os, psutil
from fedmutual.engines import ray_cluster

ray = ray_cluster.import_ray()
ray_cluster.start_local_cluster(ray, 1)
token = ray.get(ray.remote(lambda: os.environ.get("RAY_AUTH_TOKEN")).remote())
here = psutil.Process()
sockets = {
    (process.name(), found.laddr.ip)
    for process in (here, *here.children(recursive=True))
    for found in process.net_connections("inet")
    if found.status == psutil.CONN_LISTEN
}
address = ray.get_runtime_context().gcs_address
print(json.dumps({"sockets": sorted(sockets), "address": address, "token": token, "left": dict(os.environ)}), flush=True)
input()
ray.shutdown()
"""
ASK = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=30) is not None)
"""


def test_a_local_cluster_listens_on_loopback_and_asks_for_its_token():
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    given = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")} | {"RAY_gcs_server_port_wait_time_s": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", START], env=given, **pipes) as cluster:
        recorded = json.loads(next(line for line in cluster.stdout if line.startswith("{")))
        asked = {token: _ask(recorded["address"], given, token) for token in ("0" * 64, recorded["token"])}
        cluster.communicate("\n", timeout=120)
    assert {name for name, _ in recorded["sockets"]} >= {"gcs_server", "raylet"}
    assert all(_is_loopback(ip) for _, ip in recorded["sockets"]), recorded["sockets"]
    assert asked == {"0" * 64: False, recorded["token"]: True}
    assert len(recorded["token"]) == 64
    assert "RAY_AUTH_TOKEN" not in recorded["left"]  # a cluster that is joined later has another one


def _is_loopback(ip):
    address = ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _ask(address, given, token):
    """Whether the cluster tells a process with this token what it stores."""
    env = given | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    done = subprocess.run([sys.executable, "-c", ASK, address], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 or "Unauthenticated" in done.stderr, done.stderr[-500:]
    return done.returncode == 0


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("2.40.0", False), ("2.58.1", False), ("1.99.0", False), ("2.59.0", True), ("2.60.0", True), ("3.0.0.dev0", True)],
)
def test_only_a_ray_that_asks_for_a_token_is_taken(version, is_taken, monkeypatch):
    constants = SimpleNamespace(RAY_ENABLE_UV_RUN_RUNTIME_ENV=False)
    found = SimpleNamespace(__version__=version, _private=SimpleNamespace(ray_constants=constants))
    monkeypatch.setitem(sys.modules, "ray", found)
    if is_taken:
        assert ray_cluster.import_ray() is found
        return
    with pytest.raises(
        ConfigError, match=rf"Ray {version} require no token, .* can run code; install Ray 2.59 or later: pip install"
    ):
        ray_cluster.import_ray()


def test_a_local_cluster_that_ray_cannot_start_is_refused(monkeypatch):
    """For example because the temporary folder is full."""

    def fail(**options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray's own handler
        raise RuntimeError("the raylet\ndid not start")

    before = signal.getsignal(signal.SIGTERM)
    constants = SimpleNamespace(ENABLE_RAY_CLUSTER=True)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    ray = SimpleNamespace(init=fail, _private=SimpleNamespace(ray_constants=constants))
    with pytest.raises(ConfigError, match=r"engine\.name = 'cluster': .*\(the raylet did not start\)"):
        ray_cluster.start_local_cluster(ray, 1)
    assert constants.ENABLE_RAY_CLUSTER is True
    assert signal.getsignal(signal.SIGTERM) is before
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_token_of_the_users_is_left_as_it_is(monkeypatch):
    """The address that Ray uses for this node is restored after the start of the cluster."""
    init_calls = []
    constants = SimpleNamespace(ENABLE_RAY_CLUSTER=True)

    def init(**options):
        init_calls.append((os.environ.get("RAY_AUTH_TOKEN"), constants.ENABLE_RAY_CLUSTER, options["include_dashboard"]))

    ray = SimpleNamespace(init=init, _private=SimpleNamespace(ray_constants=constants))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    ray_cluster.start_local_cluster(ray, 1)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    ray_cluster.start_local_cluster(ray, 1)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "token.txt")
    ray_cluster.start_local_cluster(ray, 1)
    (mine, fresh, path) = init_calls
    assert (mine, path) == (("mine", False, False), (None, False, False))
    assert len(fresh[0]) == 64
    assert constants.ENABLE_RAY_CLUSTER is True
