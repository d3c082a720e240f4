"""A method that a user wrote by docs/own-algorithm.md, outside the package, is treated as our methods are."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fedmutual
from fedmutual.config import parse_config
from fedmutual.files import read_json
from fedmutual.report.curves import make_pictures
from fedmutual.report.html import write_report
from fedmutual.report.tables import (
    make_client_headline,
    make_client_table,
    make_decision_table,
    make_other_score_table,
    make_part_tables,
)
from fedmutual.report.verdicts import judge
from fedmutual.results.comparison import make_comparisons
from fedmutual.results.frame import read_runs
from fedmutual.sites import contract as contracts
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from wards import COMMON, SITES, TELLING, InMemoryTransport, contract, same, site, together

pytestmark = pytest.mark.run

PAGE = Path(__file__).parents[2] / "docs" / "own-algorithm.md"
METHOD = "my_algorithms:FedAvgM"
TWIN = """

@dataclass(frozen=True, kw_only=True)
class Twin(FedAvg):
    "FedAvg under another name."
"""

ROLE = """

from fedmutual.core import Role

@dataclass(frozen=True, kw_only=True)
class Placed(FedAvgM):
    "FedAvgM before all other methods."
    role: ClassVar[Role] = Role(position=0, colour=2, reference=True)
"""

MUTUAL = """

from fedmutual.algorithms import FML, Independent

@dataclass(frozen=True, kw_only=True)
class Duo(FML):
    "FML, compared with FedProx when a newcomer adapts."
    adapt_rival: ClassVar[str | None] = "fedprox"
"""

NEWCOMER = """
name = "north"
rounds = 1
data = { name = "digits" }
training = { local_epochs = 1, batch_size = 16 }
engine = { name = "inprocess", device = "cpu" }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the files of the documentation's page, and a class that computes what FedAvg computes."""
    for title, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.M | re.S):
        (tmp_path / title).write_text(text)
    with (tmp_path / "my_algorithms.py").open("a") as file:
        file.write(TWIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_algorithms", None)


def test_list_shows_the_settings(folder, cli):
    out, _ = cli.run("list", METHOD)
    assert out.startswith(
        f"{METHOD}: FedAvgM. FedAvg whose server adds momentum to its step. Settings: weighting, momentum."
    )
    (line,) = [line for line in out.splitlines() if "`algorithm.momentum`" in line]
    assert "(number; 0.5)" in line
    assert line.endswith("`compare --tune` tries 0.3, 0.6, 0.9")


def test_list_shows_fields_of_any_type_and_a_class_without_docstring(folder, cli):
    (folder / "my_fields.py").write_text(
        "from dataclasses import dataclass, field\nfrom fedmutual.algorithms import FedAvg\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass A(FedAvg):\n"
        "    needed: int\n    blob: bytes = b'x'\n    counts: dict[str, int] = field(default_factory=dict)\n"
    )
    out, _ = cli.run("list", "my_fields:A")
    first, *lines = out.splitlines()
    assert first == "my_fields:A: A. Settings: weighting, needed, blob, counts."  # no emoji for :A:, no signature
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "- `algorithm.needed` (whole number; needed)",
        "- `algorithm.blob` (bytes; \"b'x'\")",
        "- `algorithm.counts` (table of whole number; {})",
    ]


def test_list_shows_one_of_ours_too(cli):
    assert cli("list", "fedper")[1].startswith("fedper: FedPer. FedAvg of the features")
    assert cli("list", "fedh2l")[1].startswith("fedh2l: FedH2L. Peers teach each other")  # a class of several phases


@pytest.mark.parametrize(
    ("name", "words"),
    [("my_algorithms:Other", "has no 'Other'"), ("nowhere:A", "put nowhere.py into"), ("my_algorithms:VELOCITY", "Phase")],
)
def test_list_of_a_class_that_is_none(folder, cli, name, words):
    err = cli.fail("list", name)
    assert err.count("\n") == 1
    assert words in err


def test_a_class_with_the_hooks_of_fedavg_has_the_page_of_fedavg(folder, cli):
    """Columns, curves, gains, places and sentences are equal: nothing depends on the name of the class."""
    pages = []
    for name in ("fedavg", "my_algorithms:Twin"):
        methods = f"fml,{name},independent"
        out = f"{len(pages)}"
        more = ("--set", "algorithm.name=fml", "--set", "rounds=2", "--set", "engine.name=inprocess", "--out", out)
        momentum = (folder / "momentum.toml").read_text().replace(", momentum = 0.6", "")
        (folder / "small.toml").write_text(momentum)
        cli.run("compare", "small.toml", "--methods", methods, "--seeds", 2, "--jobs", 1, *more)
        (comparison,) = make_comparisons(read_runs(sorted(path.parent for path in Path(out).rglob("summary.json"))))
        pages.append(describe_page(comparison))
    ours, theirs = pages
    assert [label for label, _ in ours["gain"]] == ["FML, personal", "FML, shared", "FedAvg"]
    assert len(ours["curves"]) >= 2
    assert repr(theirs).replace("Twin", "FedAvg") == repr(ours)


def describe_page(comparison):
    """All that a page shows of the results of a comparison, without the seconds and the colours, which differ by method."""
    for picture in make_pictures(comparison):
        assert len({curve.slot for curve in picture.curves if not curve.style}) == len({c.method for c in picture.curves})
    decision = make_decision_table(comparison)
    seconds = [column.name for column in decision.columns].index("Seconds")
    return {
        "methods": [m.method for m in comparison.methods],
        "verdict": judge(comparison),
        "gain": [(line.label, line.model_name) for line in comparison.lines if line.federated],
        "tables": [
            t(comparison) for t in (make_client_headline, make_client_table, make_other_score_table, make_part_tables)
        ],
        "decision": [row[:seconds] + row[seconds + 1 :] for row in decision.rows],
        "curves": [
            (picture.title, [replace(curve, slot=0) for curve in picture.curves]) for picture in make_pictures(comparison)
        ],
    }


def test_compare_makes_a_page_that_shows_it(folder, cli):
    out, _ = cli.run("compare", "momentum.toml", "--methods", f"{METHOD},independent", "--seeds", 1, "--out", "c")
    assert "FedAvgM" in out
    assert METHOD not in out.partition("momentum")[2]
    page = (folder / "c" / "report.html").read_text()
    assert page.count("FedAvgM") > 10
    environment = next(Path("c").glob("my_algorithms-FedAvgM-*/0/environment.json"))
    role = {"position": None, "colour": None, "reference": False, "federates": True}  # FedAvg's own role is not inherited
    assert read_json(environment)["algorithm"] == {"title": "FedAvgM", "preset": [], "shares": True, "role": role}


def test_a_class_declares_its_own_role(folder, cli):
    """The run folder records the role; the report puts the method first and compares the method with every other one."""
    with (folder / "my_algorithms.py").open("a") as file:
        file.write(ROLE)
    (folder / "small.toml").write_text((folder / "momentum.toml").read_text().replace(METHOD, "my_algorithms:Placed"))
    (folder / "plain.toml").write_text((folder / "momentum.toml").read_text())
    for name in ("small", "plain"):
        cli.run("run", f"{name}.toml", "--set", "rounds=1", "--out", name)
    role = read_json(folder / "small" / "environment.json")["algorithm"]["role"]
    assert role == {"position": 0, "colour": 2, "reference": True, "federates": True}
    (comparison,) = make_comparisons(read_runs([folder / "plain", folder / "small"]))
    assert [m.method for m in comparison.methods] == ["Placed", "FedAvgM"]
    assert [m.method for m in comparison.references] == ["Placed"]


def test_sweep_sets_its_settings(folder, cli):
    cli.run("sweep", "momentum.toml", "--set", "algorithm.momentum=0.1,0.6", "--out", "s")
    trials = read_json(folder / "s" / "sweep.json")["settings"]
    assert [trial["set"] for trial in trials] == [{"algorithm.momentum": "0.1"}, {"algorithm.momentum": "0.6"}]
    assert [len(trial["runs"]) for trial in trials] == [1, 1]


@pytest.mark.sites
def test_at_real_sites_it_gives_the_bits_of_one_process(folder, monkeypatch):
    """The module is installed, and each site lists it."""
    monkeypatch.syspath_prepend(folder)
    common = COMMON | TELLING | {"rounds": 2, "algorithm": {"name": METHOD, "momentum": 0.6}}
    sites = {i: {k: v for k, v in tables.items() if k not in ("algorithm", "model")} for i, tables in SITES.items()}
    agreed = contracts.read_submitted_contract(contract(folder, common, sites))
    files = {i: site(folder, i, tables, trust={"modules": ["my_algorithms"]}) for i, tables in sites.items()}
    runtimes = {i: SiteRuntime(agreed, read_site_file(path)) for i, path in files.items()}
    Coordinator(agreed, folder / "server").run(InMemoryTransport(runtimes))
    run, at_server = fedmutual.run(parse_config(together(common, sites)), folder / "one"), fedmutual.Run(folder / "server")
    assert same(at_server.global_model().state_dict(), run.global_model().state_dict())
    assert at_server.summary["bytes"] == run.summary["bytes"]
    write_report([folder / "server"], folder / "sites.html")
    assert "FedAvgM" in (folder / "sites.html").read_text()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("scores = ('shared',)", ("'my_wrong:Wrong'", "'shared'", "'global', 'personal' and 'proxy'")),
        ("needed: int", ("'algorithm.needed'", "no default")),
        ("batch_size: int = 64", ("'batch_size'", "from_training")),
        ("clip: float = from_training(1.0)", ("'clip'", "no key 'training.clip'")),
        ("role = 'reference'", ("'my_wrong:Wrong'", "fedmutual.core.Role")),
        ("role = Role(position='first')", ("'my_wrong'", "position", "'first'")),
        ("role = Role(reference=True, federates=False)", ("'my_wrong'", "reference", "federates")),
    ],
)
def test_a_class_that_cannot_work_is_refused_before_anything_is_written(folder, cli, body, words):
    (folder / "my_wrong.py").write_text(
        "from dataclasses import dataclass\nfrom fedmutual.algorithms import FedAvg\n"
        "from fedmutual.core import Role, from_training\n\n\n"
        f"@dataclass(frozen=True, kw_only=True)\nclass Wrong(FedAvg):\n    {body}\n"
    )
    text = (folder / "momentum.toml").read_text().replace(f'{METHOD}", momentum = 0.6', 'my_wrong:Wrong"')
    (folder / "wrong.toml").write_text(text)
    code, _, err = cli("run", "wrong.toml", "--out", "w")
    sys.modules.pop("my_wrong", None)
    assert (code, err.count("error:")) == (2, 1)
    assert all(word in err for word in words), err
    assert not (folder / "w").exists()


def test_a_newcomer_adapts_its_shared_model(folder, cli):
    (folder / "newcomer.toml").write_text(NEWCOMER)
    cli.run("run", "momentum.toml", "--set", "rounds=1", "--out", "r")
    cli.run("adapt", "r", "--data", "newcomer.toml", "--examples", "20", "--seeds", 1, "--out", "a")
    assert (folder / "a" / "report.html").exists()
    assert read_json(folder / "a" / "adapt.json")["examples"].keys() == {"20"}


def test_a_newcomer_adapts_by_a_mutual_method_that_declares_it(folder, cli):
    with (folder / "my_algorithms.py").open("a") as file:
        file.write(MUTUAL)
    (folder / "newcomer.toml").write_text(NEWCOMER + 'algorithm = { name = "my_algorithms:Duo", alpha = 0.4 }\n')
    for method in ("fml", "fedprox"):
        cli.run("run", "momentum.toml", "--set", "rounds=1", f"--set=algorithm={{name='{method}'}}", "--out", method)
    options = ("--data", "newcomer.toml", "--examples", "20", "--seeds", 1, "--out", "a")
    out, _ = cli.run("adapt", "fml", "--fedavg", "fedprox", *options)
    assert "Duo (mlp)" in out
    assert "against fine-tuning FedProx's shared model it " in " ".join(out.split())
    (way, *others), folders = read_json(folder / "a" / "adapt.json")["networks"], {p.name for p in (folder / "a").iterdir()}
    assert others == ["scratch", "fine-tune"]
    assert {way, *others} <= folders
    assert fedmutual.Run(folder / "a" / way / "20" / "0").config.algorithm == {"name": "my_algorithms:Duo", "alpha": 0.4}
    assert "--fedavg must name a run of 'fedprox'" in cli.fail("adapt", "fml", "--fedavg", "fml", *options)


def test_a_newcomer_cannot_adapt_by_a_method_without_a_shared_model(folder, cli):
    with (folder / "my_algorithms.py").open("a") as file:
        file.write(MUTUAL.replace("class Duo(FML)", "class Duo(Independent)"))
    (folder / "newcomer.toml").write_text(NEWCOMER + 'algorithm = { name = "my_algorithms:Duo" }\n')
    cli.run("run", "momentum.toml", "--set", "rounds=1", "--set=algorithm={name='fml'}", "--out", "r")
    assert "because its `scores` lack 'global'" in cli.fail("adapt", "r", "--data", "newcomer.toml", "--out", "a")
