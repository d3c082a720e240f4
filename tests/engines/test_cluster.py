"""A Ray cluster of three nodes: where clients are, workers that die, too few resources, and runs with the bytes of other
engines. Only this machine can connect to a cluster of our own, and only with its token; an old Ray starts none.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from ipaddress import ip_address
from types import SimpleNamespace

import pytest
import torch

import fedmutual
from fedmutual.algorithms import FML
from fedmutual.engines import ray as ray_engine
from fedmutual.engines.base import WorkerLost
from fedmutual.engines.ray import Cluster
from fedmutual.engines.workers import Unportable
from fedmutual.errors import ConfigError, RunError
from fedmutual.events import Failed, Replied, Started
from kills import same
from nodes import CPUS, start_three_nodes
from toy import Ready, client, killed, pid, raise_unpicklable, refused
from toy import cluster as hosted

pytestmark = pytest.mark.process

ALL = dict.fromkeys("012", ())


@pytest.fixture
def nodes():
    return start_three_nodes()


def clients(count=3):
    algorithm = FML(local_epochs=1, batch_size=8).algorithm()
    return [client(str(i), algorithm) for i in range(count)]


def other(make=None, ids="012", workers=2, threads=1, **where):
    return Cluster(make or Ready(clients(len(ids))), dict.fromkeys(ids, 1.0), workers=workers, threads=threads, **where)


def test_clients_are_on_all_nodes_and_their_processes_are_used_again(nodes):
    with closing(hosted(clients())) as engine:
        where, first = dict(engine.visit(node, ALL)), dict(engine.visit(pid, ALL))
        assert engine.workers == 3
    assert len(set(where.values())) == 3
    assert os.getpid() not in first.values()
    with closing(hosted(clients())) as engine:
        assert dict(engine.visit(pid, ALL)) == first


def test_a_client_exception_keeps_its_type_or_its_text_if_it_cannot_be_pickled(nodes):
    with closing(hosted(clients())) as engine:
        with pytest.raises(ConfigError, match="not 1") as caught:
            list(engine.visit(refused, {"1": ()}))
        assert "in refused" in caught.value.__notes__[0], "where it was raised"
        with pytest.raises(RuntimeError, match="Local: cannot cross"):
            list(engine.visit(raise_unpicklable, {"1": ()}))


def test_a_killed_worker_is_named_with_its_clients(nodes):
    with closing(hosted(clients())) as engine:
        living = dict(engine.visit(pid, {"0": ()}))["0"]
        with pytest.raises(WorkerLost, match=rf"worker process {living} on node [\d.:a-f]+ with client 0 died \("):
            list(engine.visit(killed, {"0": ()}))


def test_objects_that_cannot_be_sent_to_a_worker_are_an_error():
    with pytest.raises(Unportable, match=r"cannot be handed to worker processes .*use engine.name = 'inprocess'"):
        other(make=lambda id: None)


def test_a_request_above_the_clusters_resources_is_an_error(nodes, monkeypatch):
    monkeypatch.setattr(ray_engine, "PLACEMENT_LIMIT", 0.5)
    sentence = (
        rf"asks for 4 workers with {CPUS} CPU and 0 GPU each, and after 0.5 s the Ray cluster had too few free "
        r"resources: it has "
        rf"{3 * CPUS} CPU and 0 GPU, of which \d+ CPU and 0 GPU free; set engine.workers, engine.threads or engine.gpus"
    )
    with pytest.raises(ConfigError, match=sentence):
        other(ids="0123", workers=4, threads=CPUS, address=nodes.address)
    with pytest.raises(ConfigError, match=r"engine.device = 'cuda', but the Ray cluster has no GPU; set engine.device"):
        other(gpus=None, address=nodes.address)


def test_in_a_ray_of_the_callers_nothing_is_kept_and_as_many_workers_live_as_it_holds(nodes):
    import ray

    ray.shutdown()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    torch.set_default_dtype(torch.float64)
    try:
        with closing(other(workers=None, threads=CPUS)) as engine:
            assert engine.workers == 3
            assert set(dict(engine.visit(settings, ALL)).values()) == {(torch.float64, CPUS)}
        assert ray.is_initialized()
        assert ray_engine.kept_workers == []
    finally:
        torch.set_default_dtype(torch.float32)
        ray.shutdown()


class Big:
    """As Ray, with two nodes."""

    def nodes():
        one, two = {"CPU": 8.0, "GPU": 1.0}, {"CPU": 3.0}
        return [{"Alive": alive, "Resources": node} for alive, node in ((True, one), (True, two), (False, one))]


@pytest.mark.parametrize(
    ("threads", "gpus", "workers"), [(1, 0.0, 11), (2, 0.0, 5), (1, 0.25, 4), (4, 0.25, 2), (2, None, 4), (9, 0.0, 1)]
)
def test_the_nodes_hold_as_many_workers_as_have_room(threads, gpus, workers):
    assert ray_engine.count_workers(Big, threads, gpus) == workers


@pytest.mark.parametrize(
    ("workers", "gpus", "share"), [(1, 1, 1), (2, 1, 0.5), (3, 1, 0.3333), (3, 2, 0.5), (2, 4, 1), (7, 2, 0.25)]
)
def test_equal_shares_of_gpus_leave_room_for_all(workers, gpus, share):
    class Ray:
        def cluster_resources():
            return {"GPU": float(gpus)}

    assert ray_engine.choose_gpu_share(Ray, None, workers) == {"GPU": share}
    assert ray_engine.choose_gpu_share(Ray, 0.2, workers) == {"GPU": 0.2}
    assert ray_engine.choose_gpu_share(Ray, 0.0, workers) == {}


def test_without_ray_the_error_names_the_fix(small, monkeypatch, cli):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(ray_engine, "kept_workers", [])
    code, _, err = cli("run", small, "--set", "engine.name=cluster")
    assert (code, err.count("\n")) == (2, 1)
    assert "engine.name = 'cluster' needs Ray, fedmutual's extra 'ray': pip install 'ray>=2.59'" in err


def on_cluster(small, address):
    return fedmutual.load_config(small, **{"engine.name": "cluster", "engine.workers": 3, "engine.address": address})


def test_a_worker_that_dies_with_its_node_in_the_middle_of_a_round_costs_nothing_but_time(
    small, uninterrupted, nodes, monkeypatch
):
    import ray

    filled, events, deaths = [], [], []
    start = ray_engine._start_workers
    monkeypatch.setattr(
        ray_engine, "_start_workers", lambda place: (workers := start(place), filled.append((place, workers)))[0]
    )
    ray.shutdown()  # so that a place is filled
    others = nodes.list_all_nodes()[1:]  # without the head

    def kill(event):
        events.append(event)
        if isinstance(event, Replied) and (event.round, event.answered) == (3, 2) and not deaths:
            place, workers = filled[-1]
            where = ray.util.placement_group_table(place._group)["bundles_to_node_id"]
            number, node = next((n, node) for n, id in where.items() for node in others if node.node_id == id)
            nodes.remove_node(node, allow_graceful=False)
            deaths.append(workers[number].name)
            os.kill(int(deaths[0].split()[2]), signal.SIGKILL)  # with its node it would die some seconds later

    try:
        fedmutual.run(on_cluster(small, nodes.address), "part", observers=[kill])
    finally:
        nodes.add_node(num_cpus=CPUS)
    assert same(small.parent / "part", uninterrupted) == []
    log = (small.parent / "part" / "log.txt").read_text()
    assert f"{deaths[0]} with client" in log
    assert "all clients continue from round 2, the last saved" in log
    assert [type(e.problem) for e in events if isinstance(e, Failed)] == [WorkerLost]
    assert [e.done for e in events if isinstance(e, Started)] == [0, 2]


def test_a_run_folder_invisible_to_a_worker_is_an_error(small, nodes, monkeypatch):
    monkeypatch.setattr(ray_engine.Path, "touch", lambda path: None)  # the driver's file is then on no node
    with pytest.raises(RunError, match=r"part: worker process \d+ on node [\d.:a-f]+ does not see this folder, and clients"):
        fedmutual.run(on_cluster(small, nodes.address), "part")


def test_an_unreachable_cluster_is_an_error_with_its_address(small):
    pytest.importorskip("ray").shutdown()
    with pytest.raises(ConfigError, match=r"key 'engine.address': there is no Ray cluster to join at 'localhost:9' \("):
        other(address="localhost:9")
    with pytest.raises(ConfigError, match=r"engine.address': a Ray cluster is 'auto' or HOST:PORT, not 'here'"):
        on_cluster(small, "here")


def node(client):
    import ray

    return ray.get_runtime_context().get_node_id()


def settings(client):
    return torch.get_default_dtype(), torch.get_num_threads()


START = """
import json, os, psutil
from fedmutual.engines import ray as ray_engine

ray = ray_engine.import_ray()
ray_engine.start_local_cluster(ray, 1)
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
        assert ray_engine.import_ray() is found
        return
    with pytest.raises(
        ConfigError, match=rf"Ray {version} require no token, .* can run code; install Ray 2.59 or later: pip install"
    ):
        ray_engine.import_ray()


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
        ray_engine.start_local_cluster(ray, 1)
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
    ray_engine.start_local_cluster(ray, 1)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    ray_engine.start_local_cluster(ray, 1)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "token.txt")
    ray_engine.start_local_cluster(ray, 1)
    (mine, fresh, path) = init_calls
    assert (mine, path) == (("mine", False, False), (None, False, False))
    assert len(fresh[0]) == 64
    assert constants.ENABLE_RAY_CLUSTER is True
