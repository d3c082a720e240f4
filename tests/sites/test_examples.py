"""The examples of real sites as services: files that read, and are those of the tutorial."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from fedmutual.cli.app import app
from fedmutual.rundir.folder import lock_folder
from fedmutual.sites.contract import read_contract
from fedmutual.sites.flare.kits import KINDS
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


def parse(words):
    """Return the options of a command line of fedmutual, which is not carried out."""
    command = typer.main.get_command(app).commands[words[0]]
    return command.make_context(words[0], [*words[1:]]).params


DOCKERFILE = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
USER = int(re.search(r"^USER (\d+)$", DOCKERFILE, re.M)[1])
CHECK = json.loads(re.search(r"^HEALTHCHECK .* CMD (.*)$", DOCKERFILE, re.M)[1])


def test_the_compose_file_has_a_service_and_a_volume_for_each():
    yaml = pytest.importorskip("yaml")
    recorded = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))
    contract = read_contract(EXAMPLES / "federation.toml")
    names = ["server", *contract.sites.names]
    assert list(recorded["services"]) == [*names, "north-watch"]
    assert list(recorded["volumes"]) == names
    for name, service in recorded["services"].items():
        participant, _, is_watch = name.partition("-")
        words = service["command"].split()
        options = parse(words)
        assert words[0] == (is_watch or ("server" if name == "server" else "site"))
        volumes = dict(reversed(volume.split(":", 1)) for volume in service["volumes"])
        assert volumes[f"{options['kit']}:ro"] == f"./kits/{participant}"
        assert volumes[f"/state{':ro' if is_watch else ''}"] == participant
        port = (
            f"127.0.0.1:{options['port']}:{options['port']}"
            if is_watch
            else f"{contract.server.port}:{contract.server.port}"
        )
        assert service["ports"] == ([port] if is_watch or name == "server" else [])
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert contract.server.hosts[0] == recorded["services"]["server"]["hostname"]


@pytest.mark.parametrize("kind", ["server", "site"])
def test_the_manifests_name_the_files_of_a_kit_and_run_as_nobody_special(kind):
    yaml = pytest.importorskip("yaml")
    text = (EXAMPLES / "kubernetes" / f"{kind}.yaml").read_text(encoding="utf-8")
    manifests = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}
    pod = manifests["StatefulSet"]["spec"]["template"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    items = {item["path"]: item["key"] for item in volumes["kit"]["secret"]["items"]}
    assert items.keys() == {"kit.json", "federation.toml", *(f"startup/{file}" for file in KINDS[kind].files)}
    assert all(path.endswith(key) for path, key in items.items())
    assert (pod["spec"]["securityContext"]["runAsUser"], pod["spec"]["securityContext"]["runAsNonRoot"]) == (USER, True)
    for container in pod["spec"]["containers"]:
        options, mounts = parse(container["args"]), {mount["mountPath"] for mount in container["volumeMounts"]}
        paths = [path for key in ("kit", "state", "config", "token_file") if (path := options.get(key)) is not None]
        assert all(any(path.is_relative_to(mount) for mount in mounts) for path in paths)
        assert mounts <= {f"/{name}" for name in (*volumes, "state")}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    check = pod["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    assert check[:2] == CHECK[:2]
    assert f"alive.py {CHECK[1]}" in DOCKERFILE
    assert check[2] == f"/state/{kind}"
    assert check[2] in text.split("args:")[1 if kind == "server" else 0]  # of the server in its command, else in site.toml
    policy, port = manifests["NetworkPolicy"]["spec"], read_contract(EXAMPLES / "federation.toml").server.port
    assert (
        policy["podSelector"]["matchLabels"] == pod["metadata"]["labels"] == manifests["StatefulSet"]["metadata"]["labels"]
    )
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    opened = [rule["port"] for rules in policy["ingress"] for rule in rules["ports"]]
    assert opened == ([port] if kind == "server" else [])
    assert {rule["port"] for rules in policy["egress"] for rule in rules["ports"]} == (
        {53} if kind == "server" else {53, port}
    )
    assert ("Service" in manifests) == (kind == "server")


def test_the_check_of_a_container_tells_whether_a_process_works_there(tmp_path):
    def check():
        return subprocess.run([sys.executable, EXAMPLES / "alive.py", tmp_path], capture_output=True, timeout=60).returncode

    assert check() == 1
    with lock_folder(tmp_path):
        assert check() == 0
    assert check() == 1


@pytest.mark.parametrize("name", ["server", "site", "watch"])
def test_the_units_are_what_systemd_takes(tmp_path, name):
    text = (EXAMPLES / f"fedmutual-{name}.service").read_text(encoding="utf-8")
    program, *words = re.search(r"^ExecStart=(.*)$", text, re.M)[1].split()
    assert (program, words[0]) == ("/opt/fedmutual/bin/fedmutual", name)
    assert parse(words)["kit"] == Path("/etc/fedmutual/kit")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the PATH")
    unit = tmp_path / f"fedmutual-{name}.service"
    unit.write_text(text.replace("/opt/fedmutual/bin/fedmutual", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, []), done.stderr
