"""What a user gets wrong is one sentence with the file, the key or the client, and the fix; nothing is written half."""

import json
import os
import pickle
import shlex
import signal as signals
import subprocess
import sys

import pytest

from fedmutual.tensor_files import read_tensors, write_tensors

pytestmark = pytest.mark.run


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["optimiser.lr=1"], "unknown key 'optimiser'; did you mean 'optimizer'?"),
        (["algorithm.alpah=0.5"], "unknown key 'algorithm.alpah'; did you mean 'algorithm.alpha'?"),
        (["algorithm.alpha=1.5"], "key 'algorithm.alpha' must be between 0 and 1, not 1.5"),
        (["rounds=many"], "key 'rounds' must be a whole number, not \"many\""),
        (["algorithm.name=fmll"], "there is no algorithm 'fmll'; did you mean 'fml'?"),
        (["model.shared=lenet6"], "did you mean 'lenet5'?"),
        (["data.name=mnits"], "did you mean 'mnist'?"),
        (["model.shared=nowhere:net"], "key 'model.shared'"),
        (["model.personal=nowhere:net"], "key 'model.personal'"),
        (["clients.9.algorithm.alpha=0.3"], "key 'clients.9': there is no such client; there are 0, 1, 2"),
        (
            ["partition.classes_per_client=11"],
            "the 10 classes that have training examples; lower partition.classes_per_client",
        ),
        (["engine.device=cuda:99"], "key 'engine.device'"),
        (["model.start=server", "model.personal=cnn1"], "client '0' has the personal network 'cnn1', which cannot start"),
        (["data.name=mnist", "data.root=nowhere"], "nowhere"),
    ],
)
def test_one_sentence_and_nothing_written(small, cli, settings, sentence):
    code, out, err = cli("run", small, *(x for s in settings for x in ("--set", s)))
    assert code == 2
    assert err.startswith(("error: ", "note: "))
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert sentence in err
    assert "Traceback" not in err
    assert not out
    assert not (small.parent / "runs").exists(), "something was written"


@pytest.mark.parametrize("name", ["missing.toml", "folder"])
def test_a_file_that_cannot_be_read(small, cli, name):
    (small.parent / "folder").mkdir()
    code, _, err = cli("run", name)
    assert code == 2
    assert name in err


def test_a_file_with_a_byte_order_mark_is_read(small, cli):
    """As Windows' own editor writes it."""
    small.write_bytes(b"\xef\xbb\xbf" + small.read_bytes())
    assert cli("data", "check", small)[0] == 0


def test_a_missing_extra_is_an_error_before_the_folder_is_made(small, cli, monkeypatch):
    monkeypatch.setattr("fedmutual.rundir.trackers.find_spec", lambda name: None)
    code, _, err = cli("run", small, "--set", "records.tensorboard=true")
    assert (code, "key 'records.tensorboard' needs the package 'tensorboard'" in err) == (2, True), err
    assert not (small.parent / "runs").exists()


def test_set_without_a_value(small, cli):
    code, _, err = cli("run", small, "--set", "rounds")
    assert (code, "write key=value" in err) == (2, True)


def test_a_compare_of_an_unknown_method(small, cli):
    code, _, err = cli("compare", small, "--methods", "fml,fedagv")
    assert code == 2
    assert "there is no algorithm 'fedagv'; did you mean 'fedavg'?" in err
    assert not (small.parent / "runs").exists()


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ("fml, fml", "--methods names 'fml' twice"),
        (",", "--methods names no algorithm"),
        ("", "--methods names no algorithm"),
    ],
)
def test_methods_that_are_none_or_come_twice(small, cli, methods, sentence):
    code, _, err = cli("compare", small, "--methods", methods)
    assert (code, sentence in err) == (2, True), err
    assert not (small.parent / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("algorithm.muu=0.1", "unknown key 'algorithm.muu'; did you mean 'algorithm.mu'? (of algorithms fml, fedprox)"),
        (
            "algorithm.alpah=0.1",
            "unknown key 'algorithm.alpah'; did you mean 'algorithm.alpha'? (of algorithms fml, fedprox)",
        ),
        ("algorithm.mu=-1", "key 'algorithm.mu' must be at least 0, not -1"),
        ("algorithm.mu=much", "key 'algorithm.mu' must be a number, not \"much\""),
        ("algorithm.lr=0.1", "unknown key 'algorithm.lr'; did you mean 'optimizer.lr'? (of algorithms fml, fedprox)"),
        ("fedprox.mu=0.1", "unknown key 'fedprox'"),
    ],
)
def test_a_compare_with_a_key_that_no_method_has_or_that_is_out_of_range(small, cli, setting, sentence):
    code, _, err = cli("compare", small, "--methods", "fml,fedprox", "--set", setting)
    assert (code, err.count("error: "), sentence in err) == (2, 1, True), err
    assert not (small.parent / "runs").exists()


@pytest.mark.parametrize("key", ["alpha", "mu"])
def test_a_compare_with_a_key_of_a_method_that_is_not_compared(small, cli, key):
    """A key without effect is refused, also alpha of the file's own algorithm, fml."""
    code, _, err = cli("compare", small, "--methods", "fedavg,independent", "--set", f"algorithm.{key}=0.1")
    owner = {"alpha": "fml and proxyfl", "mu": "fedprox"}[key]
    sentence = f"key 'algorithm.{key}' is a setting of {owner}, and the methods are fedavg, independent; remove it"
    assert (code, sentence in err) == (2, True), err


def test_a_used_folder_of_a_later_method_is_found_before_the_first_is_trained(small, cli):
    (small.parent / "c/fedavg/0").mkdir(parents=True)
    (small.parent / "c/fedavg/0/thesis.txt").write_text("mine")
    for more in ((), ("--resume",)):
        code, _, err = cli("compare", small, "--methods", "fml,fedavg", "--seeds", 1, "--out", "c", *more)
        assert (code, "c/fedavg/0: holds other files already; choose another folder" in err) == (2, True), err
        assert not (small.parent / "c/fml").exists()


def test_a_run_of_another_configuration_is_found_before_the_first_is_trained(small, cli):
    cli("run", small, "--set", "algorithm.name=fedavg", "--set", "seed=0", "--set", "rounds=1", "--out", "c/fedavg/0")
    settings = ("--seeds", 1, "--out", "c", "--resume", "--set", "optimizer.lr=0.2", "--set", "rounds=1")
    code, _, err = cli("compare", small, "--methods", "fml,fedavg", *settings)
    assert (code, "was started with another 'optimizer.lr'" in err) == (2, True), err
    assert not (small.parent / "c/fml").exists()


def test_a_page_over_another_file(small, cli):
    """A page replaces only another page."""
    cli("run", small, "--set", "rounds=1")
    config = small.parent / "runs/small/config.toml"
    before = config.read_bytes()
    code, _, err = cli("report", "runs/small", "-o", config)
    assert (code, "config.toml: is there and no page of HTML; name another file with -o" in err) == (2, True), err
    assert config.read_bytes() == before
    assert cli("report", "runs/small", "-o", "page.html")[0] == cli("report", "runs/small", "-o", "page.html")[0] == 0


@pytest.mark.parametrize("page", [".", "..", "runs/"])
def test_a_page_that_is_a_folder(small, cli, page):
    cli("run", small, "--set", "rounds=1")
    code, _, err = cli("report", "runs/small", "-o", page)
    assert (code, err.count("error: "), f"{page.rstrip('/')}: is a folder" in err, "-o" in err) == (2, 1, True, True), err


@pytest.mark.parametrize("which", ["alpha", "beta"])
def test_a_distillation_that_is_off_is_remarked_and_runs(small, cli, which):
    code, _, err = cli("run", small, "--set", f"algorithm.{which}=1", "--set", "rounds=1")
    assert code == 0
    assert f"note: {which} = 1 turns distillation off" in err
    assert "turns distillation off" in (small.parent / "runs/small/log.txt").read_text()


def test_a_used_folder_and_a_file_in_its_place(small, cli):
    cli("run", small, "--set", "rounds=1")
    code, _, err = cli("run", small, "--set", "rounds=1")
    assert (code, "runs/small: holds a run already; add --resume to resume it" in err) == (2, True)
    (small.parent / "other").mkdir()
    (small.parent / "other/thesis.txt").write_text("mine")
    code, _, err = cli("run", small, "--out", "other")
    assert (code, "other: holds other files already; choose another folder with --out" in err) == (2, True)
    code, _, err = cli("run", small, "--out", "small.toml")
    assert (code, "is a file" in err) == (2, True)
    code, _, err = cli("run", small, "--out", "small.toml/inside")
    assert code == 2
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


def test_a_comparison_names_its_diverged_runs(small, cli):
    rate = 'optimizer.lr={ start = 0.01, end = 1e30, shape = "step" }'
    code, _, err = cli("compare", small, "--methods", "fedavg,fml", "--seeds", 1, "--set", "rounds=2", "--set", rate)
    assert code == 3
    assert "error: fedavg, seed 0: client '" in err
    assert "diverged in round 2 at batch" in err


def stopped(small, cli):
    """A run of three rounds that was stopped after two: its folder."""
    cli("run", small, "--set", "rounds=2")
    return small.parent / "runs/small"


def test_a_truncated_checkpoint(small, cli):
    path = stopped(small, cli) / "clients/1/round-2.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    code, _, err = cli("run", small, "--resume")
    assert (code, "clients/1/round-2.safetensors: is truncated or no safetensors file" in err) == (2, True)


def test_a_pickle_in_a_checkpoints_place_is_never_loaded(small, cli):
    path = stopped(small, cli) / "server/round-2.safetensors"

    class Bomb:
        def __reduce__(self):
            return (open, (str(small.parent / "exploded"), "w"))

    path.write_bytes(pickle.dumps(Bomb()))
    code, _, err = cli("run", small, "--resume")
    assert (code, "is a pickle, which could run code when opened" in err) == (2, True)
    assert not (small.parent / "exploded").exists()


def test_a_foreign_checkpoint(small, cli):
    path = stopped(small, cli) / "clients/1/round-2.safetensors"
    cli("run", small, "--set", "rounds=2", "--set", "seed=5", "--out", "other")
    path.write_bytes((small.parent / "other/clients/1/round-2.safetensors").read_bytes())
    code, _, err = cli("run", small, "--resume")
    assert (code, "belongs to another run, configuration or round" in err) == (2, True)


def test_a_server_state_that_another_version_kept(small, cli):
    """Otherwise a run would continue without the shared facts and end in meaningless numbers."""
    path = stopped(small, cli) / "server/round-2.safetensors"
    tensors, about = read_tensors(path)
    lost = sorted(tensors)[0]
    write_tensors(path, {k: v for k, v in tensors.items() if k != lost}, about)
    code, _, err = cli("run", small, "--resume")
    assert (code, f"was written by another version of fedmutual: it lacks '{lost}'" in err) == (2, True)


def test_a_checkpoint_of_another_network(small, cli):
    folder = stopped(small, cli)
    path = folder / "clients/1/round-2.safetensors"
    run = json.loads((folder / "checkpoint.json").read_text())["run"]
    import torch

    write_tensors(path, {"personal.weight": torch.zeros(3)}, {"format": "1", "run": run, "round": "2"})
    code, _, err = cli("run", small, "--resume")
    assert (code, "holds another network than client '1' has" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("checkpoint.json", "{", "checkpoint.json: is damaged"),
        ("checkpoint.json", '{"format": 9}', "checkpoint.json: is of format 9"),
        ("environment.json", "[]", "environment.json: is damaged"),
        ("metrics.jsonl", "{nonsense}\n", "metrics.jsonl: line 1 is damaged"),
    ],
)
def test_damaged_files_of_a_run(small, cli, name, text, sentence):
    (stopped(small, cli) / name).write_text(text)
    code, _, err = cli("run", small, "--resume")
    assert (code, sentence in err) == (2, True), err


def test_other_data_than_the_run_was_started_with(small, cli):
    folder = stopped(small, cli)
    partition = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(partition | {"fingerprint": "0"}))
    code, _, err = cli("run", small, "--resume")
    assert (code, "are not those that this run was started with" in err) == (2, True)


@pytest.mark.parametrize(
    ("signal", "expected", "reason"), [("SIGINT", 130, "stopped by hand"), ("SIGTERM", 143, "stopped by SIGTERM")]
)
def test_a_stop_keeps_what_is_saved_and_says_how_to_go_on(small, cli, monkeypatch, signal, expected, reason):
    from fedmutual.engines import base

    real, calls = base.participate, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) > 4:
            signals.raise_signal(getattr(signals, signal))
        return real(*args)

    monkeypatch.setattr(base, "participate", interrupted)
    before = signals.getsignal(signals.SIGTERM)
    ours = signals.signal(signals.SIGINT, signals.default_int_handler)  # tests that a script starts with & ignore it
    try:
        code, _, err = cli("run", small)
    finally:
        signals.signal(signals.SIGINT, ours)
    assert signals.getsignal(signals.SIGTERM) == before
    assert code == expected
    assert err.splitlines()[-1].startswith(f"error: {reason}; saved rounds are kept; resume with: ")
    command = shlex.split(err.split("resume with: ")[1])
    assert command == ["fedmutual", "run", str(small), "--out", "runs/small", "--resume"]
    assert json.loads((small.parent / "runs/small/checkpoint.json").read_text())["round"] == 1
    monkeypatch.undo()
    monkeypatch.chdir(small.parent)
    code, _, err = cli("run", small, "--resume")
    assert code == 0, err
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
    code, _, err = cli("run", small)
    assert code == 2, err
    assert "Traceback" not in err
    assert domain in err
    assert not (small.parent / "runs").exists()


def test_a_network_with_nothing_to_train(small, cli):
    (small.parent / "ice.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).requires_grad_(False)\n"
    )
    code, _, err = cli("run", small, "--set", "model.personal=ice:net")
    assert (code, "the personal network of client '0' has no trainable parameter" in err) == (2, True), err


def test_one_client_runs_with_a_remark(small, cli):
    one = ("partition.kind=iid", "rounds=1")
    text = small.read_text().replace("classes_per_client = 4, ", "").replace("clients = 3", "clients = 1")
    small.write_text(text)
    code, _, err = cli("run", small, *(x for s in one for x in ("--set", s)))
    assert code == 0, err
    assert "note: " in err
    assert "one client" in err or "only client" in err or "1 client" in err


def test_a_batch_larger_than_a_clients_data_is_remarked(small, cli):
    code, _, err = cli("run", small, "--set", "training.batch_size=500", "--set", "rounds=1")
    assert code == 0
    assert "trains as one smaller batch" in err
