"""What many tests use: the command line called in this process, and a small experiment."""

import os
import shutil
import sys

import pytest
import torch
from hypothesis import settings

# Tests run side by side, a core each (pytest-xdist), and so does what they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# The same examples each time: a change is judged by what it changed. `--hypothesis-profile default` looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


FARM = ("process", "sites", "docs")  # the tiers that start processes: `uv run pytest` leaves them out, .ci/run runs all


def pytest_configure(config):
    """Without paths and without -m, leave the tiers out that take many processes and minutes."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = " and ".join(f"not {tier}" for tier in FARM)


def find_tier(nodeid):
    """The tier of a test, by the path of its file and by its name."""
    path, _, name = nodeid.partition("::")
    if path.startswith("tests/sites/") or "real_sites" in name:
        return "sites"
    if path == "tests/test_docs.py":
        return "docs"
    starts_processes = ("cluster", "processes", "kill", "workers")
    if any(word in part for word in starts_processes for part in (path.rpartition("/")[2], name)):
        return "process"
    return "run" if path.split("/")[1] in ("cli", "outside", "reproduce") or "browser" in path else "unit"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    """Mark each test with its tier. A Ray cluster takes 15 s to start: what needs one comes first, then what kills it."""
    for item in items:
        item.add_marker(find_tier(item.nodeid))
    items.sort(key=lambda item: ("cluster" not in item.nodeid, "test_cluster" in item.nodeid))


@pytest.fixture(autouse=True)
def forget_modules(tmp_path_factory):
    """Modules that a test wrote are forgotten after the test, for another test may write one of the same name."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (vars(module).get("__file__") or "").startswith(folder):
            del sys.modules[name]


SMALL = """
name = "small"
rounds = 3
data = { name = "digits" }
partition = { kind = "shards", clients = 3, classes_per_client = 4, examples = 40 }
split = { test = 0.5 }
algorithm = { name = "fml", alpha = 0.4, beta = 0.6 }
model = { shared = "mlp" }
training = { local_epochs = 1, batch_size = 16 }
engine = { device = "cpu", threads = 1 }
"""


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """A browser without a window; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the python package playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The path of a small experiment's file, in an empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def cli(capsys, monkeypatch):
    """Call the command line -> (exit code, standard output, standard error)."""
    from fedmutual.cli import main, terminal

    for console in (terminal.out, terminal.err):  # they may have been made where COLUMNS was set
        monkeypatch.setattr(console, "_width", None)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedmutual", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
