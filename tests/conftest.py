"""Fixtures for many tests: the command line called in this process, and a small experiment."""

import gc
import os
import shutil
import signal
import sys

import psutil
import pytest
import torch
from hypothesis import settings

# Tests run side by side, a core each (pytest-xdist), and so does what they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# The tests write 2 GB in small files: to memory, if /dev/shm and the memory have room.
MEMORY = "/dev/shm"
if os.access(MEMORY, os.W_OK) and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > 8 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# fsync protects against a power failure, which no test simulates; a killed process loses nothing that it has written.
os.fsync = lambda file: None

# Where a shell starts the tests in the background, they and the commands that they start ignore the signal of Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time: a change is judged by what it changed. `--hypothesis-profile default` looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


LATER = ("long", "process", "sites", "docs")  # tiers that `uv run pytest` leaves out; .ci/run runs all


def pytest_configure(config):
    """Without paths and without -m, leave out the tiers that take many minutes."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = " and ".join(f"not {tier}" for tier in LATER)


TIERS = ("unit", "run", *LATER)


def mark_tier(item):
    """Mark a test without a tier as `unit`, and a test of an engine with worker processes as `process`."""
    engine = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
    if str(engine).startswith(("processes", "cluster")):
        item.add_marker("process")
    elif not any(marker.name in TIERS for marker in item.iter_markers()):
        item.add_marker("unit")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark each test with its tier; when pytest has chosen the tests, sort them.

    pytest-xdist gives each worker a part of the list, and a worker without tests takes some from the end of another's part.
    The tests that need a Ray cluster begin the first part, those that kill the cluster last: its start takes 15 s.
    Federations of FLARE's processes begin the second part. So at most one test of each kind runs at a time. The examples of
    the documentation begin the third part, or follow those federations where there are fewer workers: a page may take half a
    minute, and short tests at the end keep all workers busy.
    """
    for item in items:
        mark_tier(item)
    result = yield
    items.sort(key=lambda item: ("cluster" not in item.nodeid, "test_cluster" in item.nodeid))
    flare = [item for item in items if starts_flare(item.nodeid)]
    pages = [item for item in items if "a_page_run[" in item.nodeid and item not in flare]
    others = [item for item in items if item not in flare and item not in pages]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    part = len(items) // workers
    cut = max(part, 2 * part - len(flare)) if workers > 2 else part
    items[:] = [*others[:part], *flare, *others[part:cut], *pages, *others[cut:]]
    return result


def starts_flare(nodeid):
    """Return whether a test starts a federation of NVIDIA FLARE's processes."""
    files = ("test_loopback.py", "test_ending.py", "test_flare_security.py")
    return nodeid.partition("::")[0].rpartition("/")[2] in files or "a_page_run[sites" in nodeid


def pytest_collection_finish():
    """Exempt the modules and tests from garbage collection: they stay to the end, and each collection would visit them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


CHECKED = set()  # names of imported modules that no test wrote; a look at all of them after each test takes long


@pytest.fixture(autouse=True)
def forget_modules(tmp_path_factory):
    """Forget the modules that a test wrote, because another test may write one of the same name."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - CHECKED:
        if (vars(sys.modules[name]).get("__file__") or "").startswith(folder):
            del sys.modules[name]
        else:
            CHECKED.add(name)


@pytest.fixture(autouse=True)
def train_in_turn(monkeypatch):
    """Train the runs of a command one after the other unless a test asks for jobs: else the machine's speed would decide."""
    monkeypatch.setattr("fedmutual.studies.side_by_side.choose_jobs", lambda *work: 1)


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
    """Yield a browser without a window; skip the test if there is no browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the python package playwright is not installed")
    executable = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as p:
        instance = p.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield instance
        instance.close()


@pytest.fixture
def new_page(browser):
    """Return a function that opens an empty page in a context of its own -> (page, what the console says from now on)."""
    contexts = []

    def open_page(**options):
        contexts.append(browser.new_context(**options))
        page, console_messages = contexts[-1].new_page(), []
        page.on("console", lambda message: console_messages.append(message.text))
        page.on("pageerror", lambda problem: console_messages.append(str(problem)))
        return page, console_messages

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Return the path of a small experiment's file, in an empty folder that is the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def held_out_config(small):
    """Return the path of the small experiment's file, with hold-out rows."""
    small.write_text(small.read_text().replace("split = { test = 0.5 }", "split = { test = 0.1, holdout = 0.2 }"))
    return small


@pytest.fixture
def in_float64():
    """Compute in float64, so that a result by hand is equal to 1e-12."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """Work in the test's temporary folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(capsys, monkeypatch):
    """Return a function that calls the command line and returns (exit code, standard output, standard error).

    `cli.run(...)` returns (standard output, standard error) of a command that succeeds, `cli.fail(...)` the standard error
    of one that refuses its input.
    """
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
        output = capsys.readouterr()
        return code, output.out, output.err

    def run(*arguments):
        code, out, err = call(*arguments)
        assert code == 0, err
        return out, err

    def fail(*arguments):
        code, _, err = call(*arguments)
        assert code == 2, err
        return err

    call.run, call.fail = run, fail
    return call
