"""An algorithm of one's own that goes wrong: one sentence says in which phase and hook, and the log has the traceback."""

import re
import sys
from dataclasses import dataclass

import pytest
import torch

import fedmutual
from fedmutual.algorithms import FML, FedAvg
from fedmutual.engines.base import check_state
from fedmutual.errors import AlgorithmError

pytestmark = pytest.mark.run

HEAD = """
from dataclasses import dataclass

import torch

from fedmutual.algorithms import FedAvg
from fedmutual.core import At, Message


@dataclass(frozen=True, kw_only=True)
class Odd(FedAvg):
    "FedAvg, but for one hook."
"""
WHO = "error: phase 'odd' of your algorithm (my_odd:Odd): "
LOG = "; log.txt has the traceback"


def settings(folder, hook, **changes):
    """Write the algorithm with this hook; the settings of the command line that choose it."""
    lines = "".join(f"    {line}\n" for line in hook.strip().splitlines())
    (folder / "my_odd.py").write_text(HEAD + "\n" + lines)
    small = folder / "small.toml"
    small.write_text(small.read_text().replace(", alpha = 0.4, beta = 0.6", ""))
    changes = {"algorithm.name": "my_odd:Odd", "engine.name": "inprocess", **changes}
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(autouse=True)
def forget_module():
    """Each test has a module of its own under the one name."""
    yield
    sys.modules.pop("my_odd", None)


def failed(err):
    """The one sentence."""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err
    return line


HOOKS = {
    "leaves": "def leaves(self, server):\n    return 1 // 0",
    "send": "def send(self, server, to, at):\n    return 1 // 0",
    "begin": "def begin(self, client, inbox, at):\n    return 1 // 0",
    "batches": "def batches(self, client, inbox, at):\n    yield 1 // 0",
    "loss": "def loss(self, nets, batch, const):\n    return 1 // 0",
    "edit": "def edit(self, grads, memory):\n    return 1 // 0",
    "end": "def end(self, client, at):\n    return 1 // 0",
    "receive": "def receive(self, server, replies, at):\n    return 1 // 0",
}
CLIENTS = ("begin", "batches", "loss", "edit", "end")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_named_with_its_line(small, cli, hook):
    code, _, err = cli("run", small, *settings(small.parent, HOOKS[hook]), "--out", "run")
    at = " at client '0'" if hook in CLIENTS else ""
    raised = f"{hook}{at} raised ZeroDivisionError: integer division or modulo by zero (line 15 of my_odd.py)"
    assert (code, failed(err)) == (2, WHO + raised + LOG)
    log = (small.parent / "run" / "log.txt").read_text()
    assert "stopped in round 1: AlgorithmError: phase 'odd'" in log
    assert "Traceback (most recent call last)" in log
    assert f'my_odd.py", line 15, in {hook}' in log


@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_so_it_is_on_other_engines(small, cli, engine):
    changes = {"engine.name": engine} | ({"engine.workers": 2} if engine == "processes" else {})
    err = cli.fail("run", small, *settings(small.parent, HOOKS["edit"], **changes), "--out", "run")
    raised = r"edit at client '\d' raised ZeroDivisionError: .*\(line 15 of my_odd.py\)"
    assert re.fullmatch(re.escape(WHO) + raised + LOG, failed(err))
    assert 'my_odd.py", line 15, in edit' in (small.parent / "run" / "log.txt").read_text()


RECEIVE = "def receive(self, server, replies, at):\n    "
FC1 = "'features.fc1.weight'"


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        (RECEIVE + "pass", "receive returned NoneType; return a dictionary, name -> tensor"),
        (RECEIVE + "return server | {'x': 1}", "receive returned int for 'x'; return a tensor"),
        (
            RECEIVE + "return {k: v[None] for k, v in server.items()}",
            f"receive returned float32 [1, 200, 64] for {FC1} of the shared model; return float32 [200, 64]",
        ),
        (
            RECEIVE + "return {k: v.double() for k, v in server.items()}",
            f"receive returned float64 [200, 64] for {FC1} of the shared model; return float32 [200, 64]",
        ),
        (RECEIVE + "return {}", f"receive returned nothing for {FC1} of the shared model; return float32 [200, 64]"),
        (
            RECEIVE + "return super().receive(server, {i: {} for i in replies}, at)",
            f"receive raised KeyError: 'n_k' (line 15 of my_odd.py){LOG}",
        ),
        (
            "def begin(self, client, inbox, at):\n    return super().begin(client, {}, at)",
            f"begin at client '0' raised KeyError: {FC1} (line 15 of my_odd.py){LOG}",
        ),
        (
            "def loss(self, nets, batch, const):\n    return {'meme': nets['meme'](batch[0])}",
            f"its work at client '0' raised RuntimeError: grad can be implicitly created only for scalar outputs{LOG}",
        ),
    ],
)
def test_an_unusable_return_value_of_a_hook_is_an_error(small, cli, hook, sentence):
    err = cli.fail("run", small, *settings(small.parent, hook))
    assert failed(err) == WHO + sentence


def test_what_the_server_remembers_beside_the_model_may_have_any_form():
    @dataclass(frozen=True, kw_only=True)
    class Mine(FedAvg):
        pass

    phase, sent = Mine(), {"w": torch.zeros(2), "seen": torch.zeros(1)}
    declared = {"w": (torch.float32, (2,)), "n_k": (torch.int64, ())}
    check_state(phase, {"w": torch.ones(2), "seen": torch.zeros(7)}, declared, sent, shared=True)
    check_state(phase, {"logits": torch.zeros(7)}, declared, sent, shared=False)
    with pytest.raises(AlgorithmError, match=r"receive returned float32 \[3\] for 'w' of the shared model"):
        check_state(phase, {"w": torch.ones(3)}, declared, sent, shared=True)


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        (
            "def algorithm(self):\n    return 1 // 0",
            "key 'algorithm.name': algorithm() of 'my_odd:Odd' raised ZeroDivisionError: ",
        ),
        ("def __post_init__(self):\n    self.nowhere", "key 'algorithm': 'Odd' object has no attribute 'nowhere'"),
    ],
)
def test_an_invalid_algorithm_is_an_error_before_anything_is_written(small, cli, hook, sentence):
    err = cli.fail("run", small, *settings(small.parent, hook))
    assert sentence in failed(err)
    assert not (small.parent / "runs").exists()


def test_what_ours_raises_and_what_is_a_sentence_already_stay_as_they_are(small, cli, monkeypatch):
    def broken(self, nets, batch, const):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(FML, "loss", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        fedmutual.run(fedmutual.load_config(small, **{"engine.name": "inprocess"}), "ours")
    hook = "def end(self, client, at):\n    return super().end(client, at) | {'extra': torch.zeros(3)}"
    code, _, err = cli("run", small, *settings(small.parent, hook))
    assert code == 4
    assert "client '0' must not send 'extra'" in failed(err)


def test_in_python_it_is_a_user_error_with_its_cause(small):
    settings(small.parent, HOOKS["receive"])
    config = fedmutual.load_config(small, **{"algorithm.name": "my_odd:Odd", "engine.name": "inprocess"})
    with pytest.raises(fedmutual.UserError, match="receive raised ZeroDivisionError") as caught:
        fedmutual.run(config, "run")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


MOMENTUM = """
def leaves(self, server):
    return super().leaves({k: v for k, v in server.items() if k != "rounds done"})

def receive(self, server, replies, at):
    done = server.get("rounds done", torch.tensor(0))
    return super().receive(server, replies, at) | {"rounds done": done + 1}
"""


def test_a_server_may_remember_more_than_the_model(cli, small, monkeypatch):
    """The model is still scored, saved and returned."""
    monkeypatch.chdir(small.parent)
    cli.run("run", small.name, *settings(small.parent, MOMENTUM, rounds=2), "--out", "run")
    run = fedmutual.Run("run")
    assert run.complete
    assert run.summary["global"]["test_accuracy"]["last"] > 0
    assert "rounds done" not in run.global_model().state_dict()
