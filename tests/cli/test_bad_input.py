"""What a user gets wrong is one sentence with the file, the key or the client, and the fix; nothing is written half."""

import json
import os
import pickle
import shlex
import subprocess
import sys

import pytest
import torch

from fedmutual.tensor_files import read_tensors, write_tensors

pytestmark = pytest.mark.run


RUNS = [
    (["optimiser.lr=1"], "unknown key 'optimiser'; did you mean 'optimizer'?"),
    (["model.shared=lenet6"], "did you mean 'lenet5'?"),
    (["data.name=mnits"], "did you mean 'mnist'?"),
    (["model.shared=nowhere:net"], "key 'model.shared'"),
    (["model.personal=nowhere:net"], "key 'model.personal'"),
    (["clients.9.algorithm.alpha=0.3"], "key 'clients.9': there is no such client; there are 0, 1, 2"),
    (["partition.classes_per_client=11"], "the 10 classes that have training examples; lower partition.classes_per_client"),
    (["engine.device=cuda:99"], "key 'engine.device'"),
    (["model.start=server", "model.personal=cnn1"], "client '0' has the personal network 'cnn1', which cannot start"),
    (["data.name=mnist", "data.root=nowhere"], "nowhere"),
    (["model.personal=ice:net"], "the personal network of client '0' has no trainable parameter"),
]
OF = " (of algorithms fml, fedprox)"
COMPARISONS = [
    ("fml,fedagv", None, "there is no algorithm 'fedagv'; did you mean 'fedavg'?"),
    ("fml, fml", None, "--methods names 'fml' twice"),
    (",", None, "--methods names no algorithm"),
    ("", None, "--methods names no algorithm"),
    ("fml,fedprox", "algorithm.muu=0.1", f"unknown key 'algorithm.muu'; did you mean 'algorithm.mu'?{OF}"),
    ("fml,fedprox", "algorithm.alpah=0.1", f"unknown key 'algorithm.alpah'; did you mean 'algorithm.alpha'?{OF}"),
    ("fml,fedprox", "algorithm.mu=-1", "key 'algorithm.mu' must be at least 0, not -1"),
    ("fml,fedprox", "algorithm.mu=much", "key 'algorithm.mu' must be a number, not \"much\""),
    ("fml,fedprox", "algorithm.lr=0.1", f"unknown key 'algorithm.lr'; did you mean 'optimizer.lr'?{OF}"),
    ("fml,fedprox", "fedprox.mu=0.1", "unknown key 'fedprox'"),
    # a key without effect is refused, also alpha of the file's own algorithm, fml
    ("fedavg,independent", "algorithm.alpha=0.1", "'algorithm.alpha' is a setting of fml and proxyfl, and the methods are"),
    ("fedavg,independent", "algorithm.mu=0.1", "'algorithm.mu' is a setting of fedprox, and the methods are fedavg, "),
]
COMMANDS = [
    *((("run", *(x for s in settings for x in ("--set", s))), sentence) for settings, sentence in RUNS),
    *((("compare", "--methods", m, *(("--set", s) if s else ())), sentence) for m, s, sentence in COMPARISONS),
]


@pytest.mark.parametrize(("words", "sentence"), COMMANDS)
def test_one_sentence_and_nothing_written(small, cli, words, sentence):
    (small.parent / "ice.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).requires_grad_(False)\n"
    )
    command, *options = words
    code, out, err = cli(command, small, *options)
    assert code == 2
    assert err.startswith(("error: ", "note: "))
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert sentence in err
    assert "Traceback" not in err
    assert not out or out.startswith("left out: fml")
    assert not (small.parent / "runs").exists(), "something was written"


@pytest.mark.parametrize("name", ["missing.toml", "folder"])
def test_a_file_that_cannot_be_read(small, cli, name):
    (small.parent / "folder").mkdir()
    assert name in cli.fail("run", name)


def test_a_file_with_a_byte_order_mark_is_read(small, cli):
    """As Windows' own editor writes it."""
    small.write_bytes(b"\xef\xbb\xbf" + small.read_bytes())
    cli.run("data", "check", small)


def test_a_missing_extra_is_an_error_before_the_folder_is_made(small, cli, monkeypatch):
    monkeypatch.setattr("fedmutual.rundir.trackers.find_spec", lambda name: None)
    assert "key 'records.tensorboard' needs the package 'tensorboard'" in cli.fail(
        "run", small, "--set", "records.tensorboard=true"
    )
    assert not (small.parent / "runs").exists()


def test_a_used_folder_of_a_later_method_is_found_before_the_first_is_trained(small, cli):
    (small.parent / "c/fedavg/0").mkdir(parents=True)
    (small.parent / "c/fedavg/0/thesis.txt").write_text("mine")
    for more in ((), ("--resume",)):
        assert "c/fedavg/0: holds other files already; choose another folder" in cli.fail(
            "compare", small, "--methods", "fml,fedavg", "--seeds", 1, "--out", "c", *more
        )
        assert not (small.parent / "c/fml").exists()


def test_a_run_of_another_configuration_is_found_before_the_first_is_trained(small, cli):
    cli("run", small, "--set", "algorithm.name=fedavg", "--set", "seed=0", "--set", "rounds=1", "--out", "c/fedavg/0")
    settings = ("--seeds", 1, "--out", "c", "--resume", "--set", "optimizer.lr=0.2", "--set", "rounds=1")
    assert "was started with another 'optimizer.lr'" in cli.fail("compare", small, "--methods", "fml,fedavg", *settings)
    assert not (small.parent / "c/fml").exists()


def test_a_page_over_another_file(small, cli):
    """A page replaces only another page."""
    cli("run", small, "--set", "rounds=1")
    config = small.parent / "runs/small/config.toml"
    before = config.read_bytes()
    assert "config.toml: is there and no page of HTML; name another file with -o" in cli.fail(
        "report", "runs/small", "-o", config
    )
    assert config.read_bytes() == before
    assert cli("report", "runs/small", "-o", "page.html")[0] == cli("report", "runs/small", "-o", "page.html")[0] == 0


@pytest.mark.parametrize("page", [".", "..", "runs/"])
def test_a_page_that_is_a_folder(small, cli, page):
    cli("run", small, "--set", "rounds=1")
    err = cli.fail("report", "runs/small", "-o", page)
    assert err.count("error: ") == 1
    assert f"{page.rstrip('/')}: is a folder" in err
    assert "-o" in err


@pytest.mark.parametrize(
    ("setting", "remark"),
    [
        ("algorithm.alpha=1", "alpha = 1 turns distillation off"),
        ("algorithm.beta=1", "beta = 1 turns distillation off"),
        ("training.batch_size=500", "trains as one smaller batch"),
    ],
)
def test_what_is_odd_is_remarked_and_runs(small, cli, setting, remark):
    _, err = cli.run("run", small, "--set", setting, "--set", "rounds=1")
    assert "note: " in err
    assert remark in err
    assert remark in (small.parent / "runs/small/log.txt").read_text()


def test_a_used_folder_and_a_file_in_its_place(small, cli):
    cli("run", small, "--set", "rounds=1")
    said = cli.fail("run", small, "--set", "rounds=1")
    assert "runs/small: holds a run already; add --resume (in Python: resume=True), or choose another folder" in said
    (small.parent / "other").mkdir()
    (small.parent / "other/thesis.txt").write_text("mine")
    assert "other: holds other files already; choose another folder with --out" in cli.fail("run", small, "--out", "other")
    assert "is a file" in cli.fail("run", small, "--out", "small.toml")
    err = cli.fail("run", small, "--out", "small.toml/inside")
    assert "small.toml/inside" in err
    assert "Traceback" not in err


def test_a_diverging_client_stops_the_run_and_the_last_good_state_is_kept(small, cli):
    small.write_text(
        small.read_text() + "\n[clients.2]\noptimizer = { lr = { start = 0.01, end = 1e30, shape = 'step' } }\n"
    )
    code, _, err = cli("run", small, "--set", "rounds=4")
    folder = small.parent / "runs/small"
    assert code == 3
    assert "client '2' diverged in round 3 at batch" in err
    assert json.loads((folder / "checkpoint.json").read_text())["round"] == 2
    assert (folder / "clients/2/round-2.safetensors").exists()
    assert not (folder / "summary.json").exists()
    assert "stopped in round 3: Diverged" in (folder / "log.txt").read_text()


def make_bomb(folder, other):
    class Bomb:
        def __reduce__(self):
            return (open, (str(folder / "exploded"), "w"))

    (folder / "server/round-2.safetensors").write_bytes(pickle.dumps(Bomb()))


def lose_a_tensor(folder, other):
    """Otherwise a run would continue without the shared facts and end in meaningless numbers."""
    tensors, about = read_tensors(path := folder / "server/round-2.safetensors")
    write_tensors(path, {k: v for k, v in tensors.items() if k != min(tensors)}, about)


def save_another_network(folder, other):
    run = json.loads((folder / "checkpoint.json").read_text())["run"]
    about = {"format": "1", "run": run, "round": "2"}
    write_tensors(folder / "clients/1/round-2.safetensors", {"personal.weight": torch.zeros(3)}, about)


def change_data(folder, other):
    partition = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(partition | {"fingerprint": "0"}))


def write(name, text):
    return lambda folder, other: (folder / name).write_text(text)


def of_client(change):
    """Return a function that writes the state of client 1, changed or taken from another run."""
    file = "clients/1/round-2.safetensors"
    return lambda folder, other: (folder / file).write_bytes(change((folder / file).read_bytes(), other / file))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (of_client(lambda state, _: state[:-50]), "clients/1/round-2.safetensors: is truncated or no safetensors file"),
        (of_client(lambda _, file: file.read_bytes()), "belongs to another run, configuration or round"),
        (make_bomb, "is a pickle, which could run code when opened"),
        (lose_a_tensor, "was written by another version of fedmutual: it lacks '"),
        (save_another_network, "holds another network than client '1' has"),
        (change_data, "are not those that this run was started with"),
        (write("checkpoint.json", "{"), "checkpoint.json: is damaged"),
        (write("checkpoint.json", '{"format": 9}'), "checkpoint.json: is of format 9"),
        (write("environment.json", "[]"), "environment.json: is damaged"),
        (write("metrics.jsonl", "{nonsense}\n"), "metrics.jsonl: line 1 is not what fedmutual writes"),
    ],
)
def test_a_run_with_damaged_or_foreign_files_is_not_resumed(small, cli, change, sentence):
    """The run of three rounds was stopped after two."""
    cli("run", small, "--set", "rounds=2", "--out", "r")
    if "another run" in sentence:
        cli("run", small, "--set", "rounds=2", "--set", "seed=5", "--out", "other")
    change(small.parent / "r", small.parent / "other")
    assert sentence in cli.fail("run", small, "--resume", "--out", "r")
    assert not (small.parent / "r" / "exploded").exists()


def test_a_stop_keeps_what_is_saved_and_says_how_to_go_on(small, cli, monkeypatch):
    from fedmutual.engines import base

    real, calls = base.participate, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(base, "participate", interrupted)
        code, _, err = cli("run", small)
    assert code == 130
    assert err.splitlines()[-1].startswith("error: stopped by hand; saved rounds are kept; resume with: ")
    command = shlex.split(err.split("resume with: ")[1])
    assert command == ["fedmutual", "run", str(small), "--resume"]
    assert json.loads((small.parent / "runs/small/checkpoint.json").read_text())["round"] == 1
    cli.run("run", small, "--resume")
    assert "resumed, going on with round 2 of 3" in (small.parent / "runs/small/log.txt").read_text()


@pytest.mark.parametrize(("name", "code"), [("small.toml", 0), ("missing.toml", 2)])
def test_a_command_keeps_its_exit_code_when_nobody_reads_its_messages(small, name, code):
    """As after `2>&1 | tee log`, where tee ended."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-m", "fedmutual", "run", name], stderr=writer, timeout=120, check=False)
    finally:
        os.close(writer)
    assert ended.returncode == code
    assert (small.parent / "runs/small/metrics.jsonl").is_file() == (code == 0)


def test_the_command_that_goes_on_is_what_a_shell_takes(small, cli, monkeypatch):
    def interrupted(*args, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedmutual.studies.compare.compare", interrupted)
    given = ("--methods", "fml, fedavg", "--seeds", "2", "--set", "name=it's", "--set", 'data.root="a b"', "--out", "$c d")
    code, _, err = cli("compare", small, *given)
    assert code == 130
    command = shlex.split(err.split("resume with: ")[1])
    assert command == ["fedmutual", "compare", str(small), *given, "--resume"]


@pytest.mark.parametrize("domain", ["..", "a/b", "c:d", ""])
def test_a_domain_that_cannot_name_a_folder(small, cli, domain):
    rows = "".join(f"{i % 2},{d},{i},{-i}\n" for i in range(40) for d in ("north", domain))
    (small.parent / "t.csv").write_text("label,domain,a,b\n" + rows)
    small.write_text('rounds = 1\ndata = { name = "csv", root = "t.csv" }\npartition = { kind = "domains" }\n')
    err = cli.fail("run", small)
    assert "Traceback" not in err
    assert domain in err
    assert not (small.parent / "runs").exists()
