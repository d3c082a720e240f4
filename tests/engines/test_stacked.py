"""Stacked clients in whole runs: read from resident rows, resumed, several runs at once."""

import signal
import threading
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fedmutual
from fedmutual.algorithms import FedProx
from fedmutual.core import Diverged
from fedmutual.engines.group import Steps
from fedmutual.errors import DataError
from fedmutual.events import Finished, Replied
from fedmutual.studies.compare import compare
from kills import stop_and_resume, tensors
from log_lines import read_scores
from toy import client, difference, federation

pytestmark = pytest.mark.long


def loaded(small, **changes):
    return fedmutual.load_config(small, **{"engine.name": "stacked", **changes})


def test_a_step_reads_its_rate_and_counts_from_tensors(small):
    rates: dict[int, list[float]] = {}  # of each tensor that an optimiser reads

    def record_rate(optimizer, *_):
        lr = optimizer.param_groups[0]["lr"]
        rates.setdefault(id(lr), []).append(lr.item())
        assert all(state["step"].device == p.device for p, state in optimizer.state.items())

    schedule = {"start": 0.02, "end": 0.01, "shape": "linear"}
    changes = {"rounds": 2, "optimizer.name": "adam", "optimizer.lr": schedule}
    hook = register_optimizer_step_pre_hook(record_rate)
    try:
        fedmutual.run(loaded(small, **changes), "stacked")
    finally:
        hook.remove()
    trained = [steps for steps in rates.values() if len(steps) > 1]  # the engine times one step on copies
    assert len(trained) == 2  # the tensor of the memes and the tensor of the personal models, in both rounds
    for steps in trained:
        assert (steps[0], steps[-1], set(steps)) == (0.02, 0.01, {0.02, 0.01})


def test_a_stopped_run_goes_on_to_the_same_bytes(small):
    uninterrupted = fedmutual.run(loaded(small), "whole").folder
    part = stop_and_resume(loaded(small), "part", 3)
    assert difference(tensors(uninterrupted), tensors(part)) == 0.0
    assert read_scores(uninterrupted) == read_scores(part)


METHODS = ["fml", "fedavg", "fedprox", "independent"]


def watch_round_2(label, act):
    """Return a `watch` of `compare`: it calls `act` at each reply in round 2 of the run with this label."""

    def watch(name):
        return lambda event: act(event) if name == label and isinstance(event, Replied) and event.round == 2 else None

    return watch


def interrupt(event):
    raise KeyboardInterrupt


def test_all_runs_of_a_comparison_at_once_are_each_what_it_is_alone(small):
    at_once = compare(loaded(small, rounds=1), METHODS, 2, Path("together"))
    alone = compare(loaded(small, rounds=1, **{"engine.name": "inprocess"}), METHODS, 2, Path("alone"))
    for one, other in zip(at_once, alone, strict=True):
        assert one.folder.relative_to("together") == other.folder.relative_to("alone")
        assert difference(tensors(one.folder), tensors(other.folder)) < 1e-5
        assert one.config.seed == other.config.seed
        assert one.summary["bytes"] == other.summary["bytes"]


def test_one_runs_end_is_its_own(small):
    """One diverges, one is stopped by its observer, one was finished before; the others are trained to their end."""
    config = loaded(small, rounds=2)
    (finished,) = compare(config, ["independent"], 1, Path("out"))
    before = (finished.folder / "summary.json").stat().st_mtime_ns
    ended = []

    def watch(label):
        def look(event):
            if label == "fedavg, seed 1" and isinstance(event, Replied) and event.round == 2:
                raise Diverged("0", 1, 0, "made up")
            if isinstance(event, Finished):
                ended.append(label)

        return look

    with pytest.raises(Diverged, match="made up"):
        compare(config, ["fml", "fedavg", "independent"], 2, Path("out"), resume=True, watch=watch)
    assert sorted(ended) == ["fedavg, seed 0", "fml, seed 0", "fml, seed 1", "independent, seed 1"]
    assert (finished.folder / "summary.json").stat().st_mtime_ns == before
    runs = compare(config, ["fml", "fedavg", "independent"], 2, Path("out"), resume=True)
    assert all(run.finished for run in runs)


def test_a_stop_by_hand_stops_all(small, cli):
    config = loaded(small, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        compare(config, ["fml", "fedavg"], 2, Path("out"), watch=watch_round_2("fml, seed 1", interrupt))
    assert not list(Path("out").rglob("summary.json"))
    compare(config, ["fml", "fedavg"], 2, Path("out"), resume=True)
    alone = compare(config, ["fml"], 1, Path("alone"))
    assert difference(tensors(alone[0].folder), tensors(Path("out/fml/0"))) < 1e-4


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="a signal to one thread is POSIX's")
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_signal_stops_after_the_phase_that_is_under_way(small, seeds):
    """Also with a single run, which waits for no other run."""

    def send_signal(event):
        if event.answered == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    watch = watch_round_2("fml, seed 0", send_signal)
    with pytest.raises(KeyboardInterrupt):
        compare(loaded(small, rounds=60), ["fml"], seeds, Path("out"), watch=watch)
    assert not list(Path("out").rglob("summary.json"))


def test_lower_precision_computes_lower_and_keeps_weights(small):
    plain = fedmutual.run(loaded(small, rounds=1, **{"engine.name": "inprocess"}), "plain").folder
    for engine in ("inprocess", "stacked"):
        low = fedmutual.run(loaded(small, rounds=1, **{"engine.name": engine, "engine.precision": "bf16"}), engine).folder
        assert all(t.dtype != torch.bfloat16 for t in tensors(low).values())
        assert 1e-5 < difference(tensors(low), tensors(plain)) < 0.1


def test_an_error_in_a_common_step_is_raised_in_every_run(small, monkeypatch):
    from fedmutual.engines import group, stacked

    def fails(parts):
        raise DataError("row 3 cannot be read")

    monkeypatch.setattr(stacked, "check_stackable", lambda parts: None)
    monkeypatch.setattr(group, "draw_batches", fails)
    with pytest.raises(DataError, match="row 3 cannot be read"):
        compare(loaded(small), ["fml", "independent"], 2, Path("out"))
    logs = [path.read_text() for path in Path("out").rglob("log.txt")]
    assert len(logs) == 4
    assert all("DataError: row 3 cannot be read" in log for log in logs)


def test_a_run_begun_in_one_process_goes_on_stacked_with_adam(small):
    changes = {"optimizer.name": "adam", "optimizer.lr": 0.001, "engine.name": "inprocess"}
    uninterrupted = fedmutual.run(loaded(small, **changes), "whole").folder
    fedmutual.run(loaded(small, **changes, rounds=1), "part")
    part = fedmutual.run(loaded(small, **{**changes, "engine.name": "stacked"}), "part", resume=True).folder
    assert difference(tensors(uninterrupted), tensors(part)) < 1e-4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine.turns": True}, "engine.turns = true are in no stack"),
        ({"optimizer.dampening": 0.5}, "with optimizer.dampening the first step of a client differs from its later steps"),
    ],
)
def test_clients_that_no_stack_holds_have_the_bits_of_clients_one_after_the_other(small, changes, why):
    run = fedmutual.run(loaded(small, **{"engine.name": "stacked", **changes}), "run").folder
    plain = fedmutual.run(loaded(small, **{"engine.name": "inprocess", **changes}), "plain").folder
    assert f"{why}, and step one after the other" in (run / "log.txt").read_text()
    assert difference(tensors(run), tensors(plain)) == 0.0


def test_a_phase_keeps_no_copies_of_its_constants_for_clients_that_no_longer_step_together(monkeypatch):
    """FedProx's constants are a whole model of each client; every second client ends in another step."""
    step, held = Steps._step, []

    def watch(steps, *args):
        step(steps, *args)
        held.append(sum(len(const["mu"]) for const in steps._const_of.values()))

    monkeypatch.setattr(Steps, "_step", watch)
    algorithm = FedProx(mu=0.1, local_epochs=1, batch_size=5).algorithm()
    clients = [client(str(i), algorithm, n=5 * (i + 1) if i % 2 else 60) for i in range(12)]
    federation(algorithm, clients, rounds=1, engine="stacked")
    assert max(held) <= 2 * 12
