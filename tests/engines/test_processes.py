"""Worker processes: what they are handed, how they die, and that a run is the same bytes for it."""

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
from contextlib import closing
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedmutual
import forked
from fedmutual.algorithms import FML
from fedmutual.config import parse_config
from fedmutual.engines import child_process, processes
from fedmutual.engines.base import WorkerLost
from fedmutual.engines.child_process import IS_FORKED
from fedmutual.engines.processes import Processes
from fedmutual.engines.select import choose_engine
from fedmutual.engines.workers import BALANCED, Unportable, assign_clients, split_clients
from fedmutual.errors import ConfigError, RunError
from fedmutual.events import Failed, PhaseDone, Replied, Started
from fedmutual.federation.networks import Workload
from fedmutual.rundir import folder as folders
from fedmutual.rundir.checkpoint import collect_client_state
from kills import same, stop_and_resume
from toy import (
    Counted,
    Ready,
    at,
    client,
    difference,
    echo,
    federation,
    killed,
    make_dropping,
    parent_pid,
    pid,
    raise_unpicklable,
    refused,
    server,
)

pytestmark = pytest.mark.process

E = {"local_epochs": 1, "batch_size": 8}
CPU = torch.device("cpu")


def hosted(count=3, workers=2):
    algorithm = FML(**E).algorithm()
    ids = [str(i) for i in range(count)]
    clients = [client(i, algorithm) for i in ids]
    return Processes(Ready(clients), dict.fromkeys(ids, 1.0), workers=workers, threads=1)


@pytest.fixture
def engine():
    with closing(hosted()) as made:
        yield made


def test_clients_live_in_two_processes_which_are_used_again():
    engine = hosted()
    first = dict(engine.visit(pid, dict.fromkeys("012", ())))
    assert first["0"] != first["2"]
    assert first["1"] in (first["0"], first["2"]), "a client that two workers share has its state in one of them"
    assert os.getpid() not in first.values()
    engine.close()
    engine = hosted()
    again = dict(engine.visit(pid, dict.fromkeys("012", ())))
    engine.close()
    assert set(again.values()) == set(first.values())
    for worker in processes.idle_workers:
        worker.process.kill()
        worker.process.join()
    engine = hosted()
    assert not set(dict(engine.visit(pid, dict.fromkeys("012", ()))).values()) & set(first.values()), "nobody wants the dead"
    engine.close()


def test_a_killed_worker_is_named_with_its_clients(engine):
    living = dict(engine.visit(pid, {"0": ()}))["0"]
    with pytest.raises(WorkerLost, match=rf"worker process {living} with clients 0, 1 was killed by SIGKILL"):
        list(engine.visit(killed, {"0": ()}))


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot be stopped with a signal")
def test_an_engine_starts_after_the_folder_of_an_earlier_engine_was_removed(tmp_path, monkeypatch):
    (tmp_path / "earlier").mkdir()
    monkeypatch.chdir(tmp_path / "earlier")
    engine = hosted()
    before = set(dict(engine.visit(pid, dict.fromkeys("012", ()))).values())
    for worker in before:
        os.kill(worker, signal.SIGSTOP)  # so that the worker reads its last order after the folder is gone
    try:
        engine.close()
        monkeypatch.chdir(tmp_path)
        (tmp_path / "earlier").rmdir()
    finally:
        for worker in before:
            os.kill(worker, signal.SIGCONT)
    engine = hosted()
    assert set(dict(engine.visit(pid, dict.fromkeys("012", ()))).values()) == before
    engine.close()


@pytest.mark.skipif(not IS_FORKED, reason="worker processes are forks on Linux only")
def test_a_killed_fork_server_takes_no_worker_with_it_and_another_one_starts():
    engine = hosted()
    before = dict(engine.visit(pid, dict.fromkeys("012", ())))
    (server,) = set(dict(engine.visit(parent_pid, dict.fromkeys("012", ()))).values())
    assert server != os.getpid()
    os.kill(server, signal.SIGKILL)
    assert dict(engine.visit(pid, dict.fromkeys("012", ()))) == before
    with pytest.raises(WorkerLost, match="worker process"):
        list(engine.visit(killed, {"0": ()}))
    engine.close()
    engine = hosted()
    (other,) = set(dict(engine.visit(parent_pid, {"0": ()})).values())
    assert other not in (server, os.getpid())
    engine.close()


@pytest.mark.skipif(not IS_FORKED, reason="there is no fork server on this system")
def test_on_one_core_too_workers_are_forks_of_a_server_that_has_imported_torch(monkeypatch):
    preloaded = []
    monkeypatch.setattr(child_process, "count_cores", lambda: 1)
    monkeypatch.setattr(child_process.CONTEXT, "set_forkserver_preload", preloaded.extend)
    child_process.start_fork_server_early()
    assert preloaded == []
    child_process.ChildProcess(id).stop()
    assert "fedmutual.federation.experiment" in preloaded


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [(refused, ConfigError, "not 1"), (raise_unpicklable, RuntimeError, "Local: cannot cross")],
)
def test_a_client_exception_keeps_its_type_or_its_text_if_it_cannot_be_pickled(engine, do, kind, message):
    with pytest.raises(kind, match=message) as caught:
        list(engine.visit(do, {"1": ()}))
    assert f"in {do.__name__}" in caught.value.__notes__[0], "where it was raised"


def test_objects_that_cannot_be_sent_to_a_worker_are_an_error():
    with pytest.raises(Unportable, match=r"cannot be handed to worker processes .*use engine.name = 'inprocess'"):
        Processes(lambda id: None, {"0": 1.0}, workers=1, threads=1)


def test_the_heaviest_clients_are_spread_first():
    assert assign_clients({"a": 1, "b": 5, "c": 3, "d": 3}, 2) == [["b", "a"], ["c", "d"]]
    assert assign_clients({"a": 1}, 4) == [["a"]]


def test_a_client_is_split_where_whole_clients_leave_a_worker_idle():
    equal = dict.fromkeys("01234", 1.0)
    assert split_clients(equal, 2) == ([["0", "1", "2"], ["2", "3", "4"]], {"2": {0: 0.5, 1: 0.5}})
    assert split_clients(dict.fromkeys("0123", 1.0), 2) == (assign_clients(dict.fromkeys("0123", 1.0), 2), {})
    assert split_clients({"large": 5, "b": 1, "c": 1}, 2) == ([["large"], ["b", "c"]], {}), (
        "a client has one worker at a time"
    )
    assigned, split = split_clients({"a": 3, "b": 3, "c": 2}, 3)
    assert (assigned, split) == ([["a"], ["b"], ["c"]], {}), "no worker can have less to do than the largest client"


@given(costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=12), workers=st.integers(1, 6))
def test_split_clients_fill_all_workers_and_are_never_needed_twice_at_once(costs, workers):
    clients = {str(n): cost for n, cost in enumerate(costs)}
    assigned, split = split_clients(clients, workers)
    load = max(sum(costs) / len(assigned), *costs)
    ends = [0.0] * len(assigned)
    for worker, ids in enumerate(assigned):
        parts = {i: split[i][worker] if i in split else 1.0 for i in ids}
        ends[worker] = sum(clients[i] * part for i, part in parts.items())
    assert max(ends) <= BALANCED * load
    assert sum(ends) == pytest.approx(sum(costs))
    for i, shared in split.items():
        first, second = shared
        assert second == first + 1
        assert clients[i] <= load * (1 + 1e-9), "so the first part ends before the second one begins"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_phase_that_two_workers_share_has_the_bits_of_one_process(optimizer):
    algorithm = Counted(local_epochs=3, batch_size=8).algorithm()
    results = {}
    for engine in ("inprocess", "processes"):
        clients = [client(str(i), algorithm, n=29, personal=make_dropping, shared=make_dropping) for i in range(4)]
        for one in clients:
            one.optimizers = {k: optimizer(net.parameters(), lr=0.0) for k, net in one.nets.items()}
        events = []
        last = federation(algorithm, clients, start=server(make_dropping), engine=engine, events=events)
        losses = [event.train for event in events if isinstance(event, PhaseDone)]
        works = [event.work for event in events if isinstance(event, PhaseDone)]
        state = {f"{c.id}.{k}": v for c in clients for k, v in collect_client_state(c, in_phase=True).items()}
        results[engine] = last | state, losses, works
    assert results["inprocess"][1:] == results["processes"][1:]
    assert results["inprocess"][2][0]["0"].steps == 12
    assert difference(results["inprocess"][0], results["processes"][0]) == 0.0


def test_the_state_of_a_shared_client_moves_with_every_phase():
    engine = hosted(4, workers=3)
    phase = FML(**E)
    places = []
    for round in range(2):
        before = dict(engine.visit(pid, dict.fromkeys("0123", ())))
        replies = dict(engine.train(phase, at(round), dict.fromkeys("0123", server()), phase.leaves(server())))
        after = dict(engine.visit(pid, dict.fromkeys("0123", ())))
        places.append([i for i in "0123" if before[i] != after[i]])
        assert replies.keys() == set("0123")
    assert places == [["1", "2"], ["1", "2"]]
    engine.close()


@pytest.mark.parametrize(
    ("name", "workers", "seconds", "device", "picked", "why"),
    [
        ("auto", 2, 1, "cpu", ("inprocess", 1), "little to compute"),
        ("auto", 2, 900, "cpu", ("processes", 2), "seconds of work"),
        ("auto", 1, 900, "cpu", ("inprocess", 1), "one core"),
        ("auto", 2, 900, "mps", ("inprocess", 1), "mps"),
        ("inprocess", 2, 900, "cpu", ("inprocess", 1), "configured"),
        ("processes", 7, 1, "cpu", ("processes", 3), "configured"),
    ],
)
def test_auto_picks_by_the_work_and_says_why(name, workers, seconds, device, picked, why):
    work = dict.fromkeys("012", Workload(0, seconds / 3 * 4e10))
    choice = choose_engine(name, workers, torch.device(device), work)
    assert (choice.name, choice.workers) == picked
    assert why in choice.why


@pytest.mark.parametrize(
    ("flops", "picked"),
    [(225075200, "stacked"), (579563520, "stacked"), (76132909056, "inprocess")],
    ids=["mlp", "lenet5", "cnn2"],
)
def test_auto_picks_the_engine_that_is_faster_on_a_gpu_by_the_benchmark(flops, picked):
    work = dict.fromkeys("01234", Workload(40, 40 * flops))
    assert choose_engine("auto", None, torch.device("cuda"), work).name == picked


def at_work():
    """The processes of workers that hold clients."""
    idle = [worker.process for worker in processes.idle_workers]
    return [child for child in multiprocessing.active_children() if child not in idle]


def test_a_worker_killed_in_the_middle_of_a_round_costs_nothing_but_time(small, uninterrupted):
    config = fedmutual.load_config(small, **{"engine.name": "processes", "engine.workers": 2})
    events, deaths = [], []

    def kill(event):
        events.append(event)
        moments = [(1, 1), (3, 2)][len(deaths) :]
        if isinstance(event, Replied) and moments and (event.round, event.answered) == moments[0]:
            victim = at_work()[-1]
            deaths.append(victim.pid)
            victim.kill()
            victim.join()

    fedmutual.run(config, "part", observers=[kill])
    assert len(deaths) == 2
    assert same(small.parent / "part", uninterrupted) == []
    lost = [e.problem for e in events if isinstance(e, Failed)]
    assert [type(p) for p in lost] == [WorkerLost, WorkerLost]
    log = (small.parent / "part" / "log.txt").read_text()
    assert f"worker process {deaths[0]} with client" in log
    assert "all clients continue from the start" in log
    assert "all clients continue from round 2, the last saved" in log
    assert [e.done for e in events if isinstance(e, Started)] == [0, 0, 2]


def test_a_worker_that_dies_before_the_first_round_is_replaced(small, monkeypatch):
    """One that was used before, say, and was dying when it was taken."""
    environment, killed = folders.describe_environment, []

    def kill_before_environment(*about):
        if not killed:
            killed.append(at_work()[-1])
            killed[0].kill()
            killed[0].join()
        return environment(*about)

    monkeypatch.setattr(folders, "describe_environment", kill_before_environment)
    config = fedmutual.load_config(small, rounds=1, **{"engine.name": "processes", "engine.workers": 2})
    assert fedmutual.run(config, "one").summary["rounds"] == 1


def test_a_worker_that_dies_while_it_builds_its_clients_is_replaced(small, monkeypatch):
    """The network kills the first worker that builds it."""
    monkeypatch.syspath_prepend(small.parent)
    (small.parent / "deadly.py").write_text(
        "import multiprocessing, os, pathlib, signal\n"
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    died = pathlib.Path('died')\n"
        "    if multiprocessing.parent_process() is not None and not died.exists():\n"
        "        died.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    changes = {"engine.name": "processes", "engine.workers": 2, "model.shared": "deadly:net", "rounds": 1}
    run = fedmutual.run(fedmutual.load_config(small, **changes), "built")
    assert run.summary["rounds"] == 1
    assert "was killed by SIGKILL; another worker took over" in (run.folder / "log.txt").read_text()


@pytest.mark.parametrize("problem", [EOFError("unexpected EOF"), ConnectionRefusedError()])
def test_a_fork_server_that_dies_while_it_starts_a_worker_is_started_again(monkeypatch, problem):
    """multiprocessing raises these errors while the server ends: the server prints a traceback before it has ended."""
    start, pauses, failed = child_process.CONTEXT.Process.start, [], []

    def fail_without_pauses(process):
        if len(pauses) < 2:
            failed.append(process)
            raise problem
        start(process)

    monkeypatch.setattr(child_process.CONTEXT.Process, "start", fail_without_pauses)
    monkeypatch.setattr(child_process.time, "sleep", pauses.append)
    child = child_process.ChildProcess(Connection.close)
    assert failed
    assert child.describe_end() == "ended with code 0"
    child.stop()


@pytest.mark.parametrize("problem", [EOFError("unexpected EOF"), OSError(11, "Resource temporarily unavailable")])
def test_a_worker_process_that_cannot_be_started_is_one_sentence(monkeypatch, problem):
    def fail(process):
        raise problem

    monkeypatch.setattr(child_process.CONTEXT.Process, "start", fail)
    monkeypatch.setattr(child_process.time, "sleep", lambda _: None)
    with pytest.raises(
        RunError, match=r"cannot be started \(.*(EOF|unavailable)\); .*engine.name = 'inprocess' and --jobs 1"
    ):
        child_process.ChildProcess(Connection.close)


def test_a_worker_that_dies_again_and_again_stops_the_run_with_one_sentence(small):
    config = fedmutual.load_config(small, **{"engine.name": "processes", "engine.workers": 2})

    def kill(event):
        if isinstance(event, Replied) and event.round == 2:
            at_work()[-1].kill()

    with pytest.raises(RunError, match=r"part: worker process \d+ with clients? .* was killed by SIGKILL, several times"):
        fedmutual.run(config, "part", observers=[kill])
    fedmutual.run(config, "part", resume=True)


def test_a_run_goes_on_in_another_engine(small, uninterrupted):
    config = fedmutual.load_config(small, **{"engine.name": "processes", "engine.workers": 2})
    resumed = fedmutual.load_config(small, **{"engine.name": "inprocess"})
    assert same(stop_and_resume(config, small.parent / "part", 2, resumed=resumed), uninterrupted) == []


def test_a_script_without_a_guard_runs_once(small):
    script = small.parent / "script.py"
    script.write_text(
        "import fedmutual\nprint('here')\n"
        "engine = {'engine.name': 'processes', 'engine.workers': 1}\n"
        "config = fedmutual.load_config('small.toml', rounds=1, **engine)\n"
        "print(fedmutual.run(config, 'out').summary['rounds'])\n"
    )
    done = forked.run(["python", script], small.parent, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["here", "1"]), done.stderr


def test_unread_answers_do_not_block_the_next_request(engine):
    big = torch.zeros(2_000_000)
    next(engine.visit(echo, dict.fromkeys("012", (big,))))
    again = dict(engine.visit(echo, dict.fromkeys("012", (big + 1,))))
    assert all(torch.equal(t, big + 1) for t in again.values())


def test_the_next_run_imports_a_users_module_again(small, monkeypatch):
    """Workers are reused; a module that a user changed between two runs of one process must be imported again."""
    monkeypatch.syspath_prepend(small.parent)
    source = (
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, {}), nn.Linear({}, classes))\n"
    )
    sizes = []
    for width in (5, 11):
        (small.parent / "mine.py").write_text(source.format(width, width))
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        shutil.rmtree(small.parent / "__pycache__", ignore_errors=True)
        changes = {"engine.name": "processes", "engine.workers": 2, "model.shared": "mine:net", "rounds": 1}
        run = fedmutual.run(fedmutual.load_config(small, **changes), f"w{width}")
        sizes.append(run.global_model()[1].out_features)
    assert sizes == [5, 11]


def test_a_worker_used_again_finds_an_algorithm_in_another_folder(small, monkeypatch, tmp_path_factory):
    """The request names the algorithm's module, which must be found before the request can be unpickled."""
    source = "from fedmutual.algorithms import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        (folder / f"{name}_mine.py").write_text(source)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        tables = {
            "data": {"name": "digits"},
            "partition": {"clients": 2},
            "rounds": 1,
            "algorithm": {"name": f"{name}_mine:Mine"},
        }
        engine = {"name": "processes", "workers": 2, "threads": 1}
        assert fedmutual.run(parse_config(tables | {"engine": engine}), folder / "run").finished


def test_rows_that_are_not_resident_are_read_by_workers_too(small):
    changes = {"data.resident": False, "data.workers": 1, "rounds": 1}
    ours = fedmutual.run(fedmutual.load_config(small, **changes, **{"engine.name": "processes"}), "ours").folder
    theirs = fedmutual.run(fedmutual.load_config(small, **changes, **{"engine.name": "inprocess"}), "theirs").folder
    assert same(ours, theirs) == []
