"""`flwr run` with the simulation runtime of Flower has the bits of one process.

Flower needs other versions than the development environment, so this test has an environment of its own, by
`uv run --isolated --locked --no-default-groups --extra flower --group flower pytest tests/sites/test_flower.py`.
"""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tomli_w

from fedmutual.sites.foreign import FOLDER, read_foreign_contracts, write_flower_app
from foreign import check_equal, prepare

pytestmark = pytest.mark.sites

pytest.importorskip("flwr", reason="Flower is not installed (the extra fedmutual[flower], in an environment of its own)")

PORT = 28_731


@pytest.fixture
def superlink(tmp_path_factory):
    """A SuperLink that simulates, and the environment of Flower's commands. Ray needs a short path, and no other cluster."""
    home = tmp_path_factory.mktemp("f")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ray = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(home)}
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    env = {**os.environ, "PATH": programs, "FLWR_HOME": str(home), **ray, **quiet}
    here = {"address": f"127.0.0.1:{PORT}", "insecure": True}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "here", "here": here}}))
    words = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(PORT)]
    command = ["flower-superlink", *words, "--disable-runtime-dependency-installation"]
    return command, env


def test_flwr_run_has_the_bits_of_one_process(tmp_path, superlink):
    (contract,) = read_foreign_contracts(prepare(tmp_path))
    app, (command, env) = write_flower_app(contract, tmp_path / "apps"), superlink
    assert [path.name for path in app.rglob("*")] == ["pyproject.toml"]  # and no code
    env = {**env, FOLDER: str(tmp_path)}
    with open(tmp_path / "superlink.log", "w") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as link:
        try:
            wait_for(f"http://127.0.0.1:{PORT}/health")
            nodes = ["--federation-config", "num-supernodes=2 client-resources-num-cpus=1"]
            run = ["flwr", "run", app, "--stream", *nodes]
            done = subprocess.run(run, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        finally:
            link.terminate()
    assert "done: " in done.stdout, done.stdout + done.stderr
    check_equal(tmp_path, tmp_path / "one")


def wait_for(page, seconds=60.0):
    """Wait until a server answers."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(page, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"{page} does not answer in {seconds:g} s")
