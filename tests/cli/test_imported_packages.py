"""Which large packages a command and `fedmutual` import. Less is always right; each takes a second or more of a core."""

import json
import subprocess
import sys

import pytest

from run_folders import Made, write

pytestmark = pytest.mark.process

COMMAND = """
import json, sys

from fedmutual.cli import main

sys.argv[0] = "fedmutual"
try:
    main()
finally:
    with open("imported.json", "w") as file:
        json.dump([name for name in {large} if name in sys.modules], file)
"""
LARGE = (
    "torch",
    "torch._dynamo",
    "scipy.stats",
    "sklearn",
    "torchvision",
    "matplotlib",
    "pandas",
    "ray",
    "nvflare",
    "fedmutual_papers",
)
INTERFACE = """
import json, sys

imported = {}

def note(step):
    imported[step] = [name for name in {large} if name in sys.modules]

import fedmutual
note("import fedmutual")
from fedmutual.cli import main
note("the command line")
fedmutual.load_config, fedmutual.Run, fedmutual.run
note("load_config, Run, run")
[getattr(fedmutual, name) for name in fedmutual.__all__]
note("all names")
print(json.dumps(imported))
"""
DIGITS = """
name = "digits"
rounds = 1
data = { name = "digits" }
partition = { kind = "iid", clients = 2 }
split = { test = 0.1 }
training = { local_steps = 1 }
engine = { name = "inprocess" }
"""
TABLE = """
name = "table"
rounds = 1
data = { name = "csv", root = "table.csv", label = "ill", classes = ["no", "yes"], mean = [0], std = [1] }
partition = { kind = "domains" }
split = { validation = 0.25, test = 0.25 }
"""


@pytest.fixture
def imported(tmp_path, in_tmp_path):
    """Run a command in a process of its own, in an empty folder -> the large packages that it imported."""

    def run(*arguments):
        command = [sys.executable, "-c", COMMAND.replace("{large}", repr(LARGE)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return set(json.loads((tmp_path / "imported.json").read_text()))

    return run


def test_large_packages_are_imported_when_they_are_needed():
    """One process takes the steps one after the other, so that each has what the last one had."""
    command = [sys.executable, "-c", INTERFACE.replace("{large}", repr(LARGE))]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    imported = {step: set(names) for step, names in json.loads(output).items()}
    assert imported["import fedmutual"] == set()
    assert imported["the command line"] == set()
    assert imported["load_config, Run, run"] <= {"torch"}
    assert imported["all names"] <= {"torch", "scipy.stats", "pandas"}


@pytest.mark.parametrize("command", ["--help", "--version", "demo --help"])
def test_help_imports_no_large_package(imported, command):
    assert imported(*command.split()) == set()


def test_algorithms_are_listed_with_torch_alone(imported):
    assert imported("list", "algorithms") <= {"torch"}


def test_a_run_imports_no_compiler_and_no_scikit_learn(imported, tmp_path):
    """torch._dynamo and sklearn take longer than torch itself; a worker process has the imports of `torch` alone."""
    (tmp_path / "digits.toml").write_text(DIGITS)
    assert imported("run", "digits.toml") <= {"torch", "pandas"}


def test_data_are_checked_with_their_networks_and_no_optimiser(imported, tmp_path):
    rows = [f"{'north' if row % 2 else 'south'},{row / 7},{'yes' if row % 3 else 'no'}" for row in range(80)]
    (tmp_path / "table.csv").write_text("\n".join(["domain,pulse,ill", *rows]))
    (tmp_path / "table.toml").write_text(TABLE)
    assert imported("data", "check", "table.toml") <= {"torch", "pandas"}


def test_a_page_is_made_without_torch(imported, tmp_path):
    write(tmp_path / "run", Made("fml", lambda *_: 0.5))
    assert imported("report", "run") <= {"matplotlib", "pandas"}


def test_a_second_demo_names_the_page_and_a_free_folder(imported, tmp_path):
    """Nothing is imported, trained or changed."""
    for folder in ("demo", "demo-2"):
        (tmp_path / folder).mkdir()
    page = tmp_path / "demo" / "report.html"
    page.write_text("page")
    assert imported("demo", "--seeds", "2", "--out", "demo") == set()
    assert page.read_text() == "page"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo-2", "imported.json"]


def test_the_demo_says_what_it_trains_before_torch_is_imported(tmp_path):
    """Torch cannot be imported in this process, so that the plan is all that is printed."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['fedmutual', 'demo']; from fedmutual.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "35 runs" in done.stdout
    assert "ModuleNotFoundError" in done.stderr
