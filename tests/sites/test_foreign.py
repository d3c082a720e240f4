"""A federation on networks of others: what they cannot give is refused, and the rest has the bits of one process."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedmutual.errors import ConfigError, UserError
from fedmutual.files import write_bytes
from fedmutual.rundir.checkpoint import write_checkpoint
from fedmutual.rundir.schema import Saved
from fedmutual.sites.contract import read_contract
from fedmutual.sites.foreign import FOLDER, open_site, read_foreign_contracts, run_server
from fedmutual.user_code import plugins
from foreign import TABLES, TWO, check_equal, prepare
from wards import contract

pytestmark = pytest.mark.sites


@pytest.mark.parametrize(
    ("tables", "given", "words"),
    [
        ({"server": {"sum": "masked"}}, {"names": ["north", "south", "west"]}, "the keys of fedmutual's kits"),
        ({"algorithm": {"name": "fedh2l"}}, {"public": "public"}, "messages between sites"),
        ({"model": {"shared": "mine:Tiny"}}, {}, "module 'mine', which this process does not trust"),
    ],
)
def test_what_such_a_network_cannot_give_is_refused(tmp_path, monkeypatch, tables, given, words):
    monkeypatch.setattr("fedmutual.sites.foreign.read_submitted_contract", read_contract)
    path = contract(tmp_path, {**TABLES, **tables}, TWO, **given)
    with pytest.raises(ConfigError, match=words) as caught:
        read_foreign_contracts(path)
    assert "fedmutual server" in str(caught.value)


def test_each_host_has_agreed_to_the_contract(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "process_rule", None)  # the calls set it for the whole process
    path = prepare(tmp_path)
    text = json.dumps(read_contract(path).record())
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(ConfigError, match=FOLDER):
        open_site("north", text)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert open_site("north", text)[1].name == "wards"
    with pytest.raises(UserError, match=r"west\.toml: there is no such file"):
        open_site("west", text)
    (tmp_path / "west.toml").write_text((tmp_path / "north.toml").read_text())
    with pytest.raises(ConfigError, match="it is the file of 'north', and this site is 'west'"):
        open_site("west", text)
    other = text.replace('"beta": 0.6', '"beta": 0.5')
    for party, call in (("site", lambda: open_site("north", other)), ("server", lambda: run_server(other, None, print))):
        with pytest.raises(ConfigError, match=rf"its 'algorithm.beta' is 0.5, and this {party} agreed to 0.6"):
            call()


def test_a_site_that_joins_later_is_not_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "process_rule", None)
    monkeypatch.setattr("fedmutual.sites.foreign.Coordinator", lambda *_: SimpleNamespace(run=lambda *_: None))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    text, said = json.dumps(read_contract(contract(tmp_path, TABLES, joins={"west": 2}, wait=0.1)).record()), []
    run_server(text, SimpleNamespace(list_connected=lambda: ("north", "south")), said.append)
    assert said == []
    run_server(text, SimpleNamespace(list_connected=lambda: ("north",)), said.append)
    assert said == ["begins without south, which may join later"]


@pytest.mark.parametrize("rounds", [{}, {"rounds": 7}])
def test_the_results_of_a_job_are_copied_whatever_the_contract_leaves_open(tmp_path, monkeypatch, rounds):
    stock = pytest.importorskip("fedmutual.sites.flare.stock", reason="NVIDIA FLARE is not installed")
    run, job = tmp_path / "server" / "wards", tmp_path / "job"
    for name in ("summary.json", "server/round-5.safetensors", "server/round-7.safetensors"):
        write_bytes(run / name, name.encode())
    write_checkpoint(run, Saved(run="0" * 32, round=5, seconds=0.0))
    monkeypatch.setattr(stock, "StockTransport", lambda *_: SimpleNamespace(check=None))
    monkeypatch.setattr(stock, "run_server", lambda *_: run)
    rounds_of_job = object.__new__(stock.StockRounds)
    rounds_of_job._contract = json.dumps({"tables": rounds})
    workspace = SimpleNamespace(get_run_dir=lambda _: str(job))
    context = SimpleNamespace(get_prop=lambda _: workspace, get_job_id=lambda: "J1")
    rounds_of_job.control_flow(None, context)
    copied = {path.relative_to(job / "wards").as_posix() for path in job.rglob("*") if path.is_file()}
    assert {"summary.json", "server/round-5.safetensors"} <= copied
    assert "server/round-7.safetensors" not in copied


def test_flares_own_simulator_has_the_bits_of_one_process(tmp_path, cli):
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")
    code, output, _ = cli("export-job", prepare(tmp_path), "--out", tmp_path / "jobs")
    assert code == 0
    classes = [line.split()[-1] for line in output.splitlines() if "flare.stock." in line]
    job, work = tmp_path / "jobs" / "wards", tmp_path / "work"
    assert sorted(path.name for path in job.rglob("*.*")) == [
        "config_fed_client.json",
        "config_fed_server.json",
        "meta.json",
    ]  # and no code
    (work / "local").mkdir(parents=True)
    (work / "local" / "resources.json").write_text(json.dumps({"format_version": 2, "class_allow_list": classes}))
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", job, "-w", work, "-t", "2"]
    done = subprocess.run(
        command, env={**os.environ, FOLDER: str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal(tmp_path, tmp_path / "one")
    fetched = work / "server" / "simulate_job" / "wards"  # what FLARE's `download_job` has
    assert (fetched / "summary.json").read_bytes() == (tmp_path / "server" / "wards" / "summary.json").read_bytes()
