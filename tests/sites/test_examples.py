"""The examples of real sites as services: files that read, and are those of the tutorial."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from fedmutual.sites.contract import read_contract
from fedmutual.sites.site_settings import read_site_file

pytestmark = pytest.mark.sites

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "sites"
TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.M | re.S)


def test_the_files_are_those_of_the_tutorial():
    for title, text in TITLED.findall((ROOT / "docs" / "sites.md").read_text(encoding="utf-8")):
        mine = (EXAMPLES / title).read_text(encoding="utf-8")
        if title.endswith(".toml"):
            example, tutorial = tomllib.loads(mine), tomllib.loads(text)
            for tables in (example, tutorial):  # in containers these have other names
                tables.pop("state", None)
                tables.get("server", {}).pop("hosts", None)
            assert example == tutorial, title
        else:
            assert mine == text, title
    sites = read_contract(EXAMPLES / "federation.toml").sites.names
    assert [read_site_file(EXAMPLES / name / "site.toml").file.site for name in sites] == list(sites)


def test_the_compose_file_has_a_service_and_a_volume_for_each():
    yaml = pytest.importorskip("yaml")
    recorded = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))
    contract = read_contract(EXAMPLES / "federation.toml")
    names = ["server", *contract.sites.names]
    assert list(recorded["services"]) == list(recorded["volumes"]) == names
    for name, service in recorded["services"].items():
        assert service["command"].split()[0] == ("server" if name == "server" else "site")
        assert f"./kits/{name}:/kit:ro" in service["volumes"]
        assert service["ports"] == ([f"{contract.server.port}:{contract.server.port}"] if name == "server" else [])
    assert contract.server.hosts[0] == recorded["services"]["server"]["hostname"]


@pytest.mark.parametrize("name", ["server", "site"])
def test_the_units_are_what_systemd_takes(tmp_path, name):
    text = (EXAMPLES / f"fedmutual-{name}.service").read_text(encoding="utf-8")
    assert f"ExecStart=/opt/fedmutual/bin/fedmutual {name} --kit" in text
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the PATH")
    unit = tmp_path / f"fedmutual-{name}.service"
    unit.write_text(text.replace("/opt/fedmutual/bin/fedmutual", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, []), done.stderr
