"""`sweep` as its users type it."""

import json
import shlex
from pathlib import Path

import pytest

import fedmutual
from fedmutual.studies import side_by_side

pytestmark = pytest.mark.run


def test_a_sweep_ends_with_a_table_and_a_command_that_runs(held_out_config, cli):
    given = ("--set", "optimizer.lr=1e-6,0.1", "--set", "algorithm.alpha={start=0.9,end=0.5},0.4", "--set", "rounds=2")
    out, _ = cli.run("sweep", held_out_config, *given)
    assert out.count("lr=") >= 4
    assert "local-only, points" in out
    assert "on rows held out of the clients' training data (24 in all)" in out
    (line,) = [line for line in out.splitlines() if line.startswith("chosen: ")]
    command = shlex.split(line.partition("run it: ")[2])
    assert command[:3] == ["fedmutual", "run", str(held_out_config)]
    recorded = json.loads(Path("runs/small-sweep/sweep.json").read_text())
    assert command[3:] == [word for key, value in recorded["chosen"].items() for word in ("--set", f"{key}={value}")]
    cli.run(*command[1:], "--out", "best")
    config = fedmutual.Run("best").config
    assert (config.optimizer.lr, config.rounds) == (0.1, 2)
    assert "runs/small-sweep/sweep.json" in out


def test_no_row_of_test_or_validation_data_is_scored(held_out_config, cli):
    _, err = cli.run("sweep", held_out_config, "--set", "optimizer.lr=1e-6,0.1", "--out", "s")
    assert "on hold-out" in err
    assert "worst" not in err
    metrics = [json.loads(line) for p in Path("s").rglob("metrics.jsonl") for line in p.read_text().splitlines()]
    assert {s["data"] for m in metrics for s in m["scores"]} == {"holdout"}
    assert "test" not in json.dumps(json.loads(Path("s/sweep.json").read_text())["settings"])
    code, _, err = cli("report", "s")
    assert code != 0
    assert (
        "s/independent,lr=0.1/0: hold-out rows alone were scored (records.evaluate_on), as `sweep` does, so there is" in err
    )


def test_the_chosen_run_is_reported_and_the_sweeps_own_is_not(held_out_config, cli):
    """Both runs have one setting and one seed, and only the chosen run has numbers."""
    cli.run("sweep", held_out_config, "--set", "optimizer.lr=1e-6,0.1", "--set", "rounds=1", "--out", "s")
    cli.run("run", held_out_config, "--set", "optimizer.lr=0.1", "--set", "rounds=1", "--out", "chosen")
    out, _ = cli.run("report", "s", "chosen")
    remarks = [line for line in out.splitlines() if line.startswith("left out, only their hold-out rows were scored: s/")]
    assert len(remarks) == 1
    assert out.replace(f"{remarks[0]}\n", "") == cli("report", "chosen")[1]


def test_all_diverged(held_out_config, cli):
    code, out, err = cli("sweep", held_out_config, "--set", "optimizer.lr=1e30,1e31", "--out", "s")
    assert code == 3
    assert out.count("diverged") >= 2
    assert err.splitlines()[-1].startswith("error: every setting diverged")
    assert Path("s/sweep.json").exists()


def test_resume_by_the_command_that_a_stop_prints(held_out_config, cli, monkeypatch):
    trained = []
    real = side_by_side.train_run

    def stopped(config, folder, resume, observers):
        trained.append(folder)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return real(config, folder, resume, observers)

    monkeypatch.setattr(side_by_side, "train_run", stopped)
    code, _, err = cli(
        "sweep", held_out_config, "--set", "optimizer.lr=0.05,0.1", "--set", "rounds=1", "--by", "global", "--out", "s"
    )
    assert code == 130
    command = shlex.split(err.partition("resume with: ")[2])
    assert command[-3:] == ["--out", "s", "--resume"]
    assert "--by" in command
    out, err = cli.run(*command[1:])
    assert "run 2 of 4  lr=0.1, seed 0" in err
    assert "  lr=0.05, seed 0" not in err
    assert "Accuracy of the shared model on rows" in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "there is nothing to choose from; give a key several values: --set optimizer.lr=0.003,0.01,0.03"),
        (("--set", "optimizer.lr="), "--set optimizer.lr=: the key has no value"),
    ],
)
def test_bad_input_is_one_sentence(held_out_config, cli, given, message):
    code, out, err = cli("sweep", held_out_config, *given)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not Path("runs").exists()
