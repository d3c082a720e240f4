"""Every example of the README and the docs runs, with two seeds and two rounds at most: files are written, Python and
commands are run, links lead somewhere."""

import importlib
import inspect
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

import forked
from fedmutual.core import Phase
from fedmutual.engines.base import HOOKS
from fedmutual.models import libraries
from loopback import IMPORTED, JOBS, free_port
from test_imports import RANKS

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = ("CONTRIBUTING", "CODE_OF_CONDUCT", "CHANGELOG")  # without examples
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
PLAIN = re.compile(r"""([\w\s./:=,@%+-]|'[^']*'|"[^"$`\\!]*")*""")  # a command in which a shell finds nothing to do
FEWER = {  # replacements: a test trains two runs, rounds and trials where a page trains more of one kind
    "sh": ((r"--seeds [3-9]\b", "--seeds 2"), (r"--shadows \d+", "--shadows 2"), (r"--tune \d+", "--tune 2")),
    "toml": ((r"^rounds = \d+$", "rounds = 2"), (r"\blocal_epochs = \d+", "local_epochs = 1")),
}
NEEDS_SETUP = ("pip install", "git clone")  # what is shown with a fresh machine, in the closing notes of a release


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_examples_of_a_page_run(page, tmp_path, background):
    port = free_port()  # not the one that other tests have
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        for pattern, fewer in FEWER.get(language, ()):
            text = re.sub(pattern, fewer, text, flags=re.M)
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text.replace("port = 8002", f"port = {port}"))
        if language == "toml":
            tomllib.loads(text)
        elif language == "python" and not title:
            (tmp_path / "example.py").write_text(text)
            execute("python example.py", tmp_path, env)
        elif language == "sh":
            for line in text.splitlines():
                if line.endswith("&"):
                    background(line.removesuffix("&"), tmp_path, env, port)
                elif line and not line.startswith("#") and not any(word in line for word in NEEDS_SETUP):
                    execute(line, tmp_path, env)


@pytest.fixture
def background():
    """Start what runs beside the other commands of a page; it, and all that it started, is gone in the end."""
    started = []

    def start(line, folder, env, port):
        log = folder / "background.log"
        process = forked.start(shlex.split(line), folder, log, log, env, append=True, modules=IMPORTED, jobs=JOBS)
        started.append(psutil.Process(process.pid))
        until = time.monotonic() + 120
        while line.startswith("fedmutual server") and not listening(port):  # a person waits for it, too
            assert time.monotonic() < until, (folder / "background.log").read_text()
            time.sleep(0.2)

    yield start
    processes = [one for process in started if process.is_running() for one in (*process.children(recursive=True), process)]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, 10)


def listening(port):
    with socket.socket() as connection:
        return connection.connect_ex(("localhost", port)) == 0


def execute(line, folder, env):
    """What needs no shell is a fork of what has torch imported, for that takes longer than most commands."""
    words = shlex.split(line)
    if words[0] in ("fedmutual", "python") and PLAIN.fullmatch(line):
        sites = (folder / "federation.toml").exists()
        result = forked.run(words, folder, env, modules=IMPORTED if sites else forked.COSTLY)
    else:
        result = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
    assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize(
    "page", [*PAGES, *map(ROOT.joinpath, ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md"))], ids=lambda p: p.name
)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_tests_that_the_page_on_security_names_exist():
    named = set(re.findall(r"test_\w+\.py", (ROOT / "docs" / "security.md").read_text(encoding="utf-8")))
    assert len(named) > 15
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize(("page", "least"), [("method.md", 10), ("fedh2l.md", 8)])
def test_links_to_code_lead_to_the_code_that_they_name(page, least):
    """[text](file "code"): the file holds that code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    links = re.findall(r"""\]\(([^)\s]+\.py) (["'])(.+?)\2\)""", text)
    assert len(links) >= least
    for target, _, code in links:
        assert code in (ROOT / "docs" / target).read_text(encoding="utf-8"), (target, code)


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CODE = {
    path: path.read_text(encoding="utf-8")
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / ".ci").glob("run")]
}


def test_the_files_that_the_pages_on_the_code_name_exist():
    """A path in backticks, in a command too, counts from the top of the repository or from src/fedmutual."""
    words = {word for text in re.findall(r"`([^`]+)`", CONTRIBUTING + ARCHITECTURE) for word in text.split()}
    paths = {word for word in words if re.fullmatch(r"[\w.]+(/[\w.]*)+|\w+\.py", word)}
    assert len(paths) > 40
    places = (ROOT, ROOT / "src" / "fedmutual")
    assert [path for path in sorted(paths) if not any((place / path).exists() for place in places)] == []


def test_the_names_that_the_pages_on_the_code_give_are_in_the_code():
    """Classes, functions, constants, arguments and keys in backticks that are no paths; `X` in `a/b.py` is in that file."""
    text = CONTRIBUTING + ARCHITECTURE
    folders = {path.name for place in (ROOT, ROOT / "tests") for path in place.iterdir()}
    named = set(re.findall(r"`([A-Za-z_]\w*)`", text)) - folders
    assert {"METHODS", "COSTS", "open_engine", "average_scores"} <= named
    assert [name for name in sorted(named) if not any(re.search(rf"\b{name}\b", code) for code in CODE.values())] == []
    pairs = re.findall(r"`(\w+)` in\s+`((?:src|tests)/[\w/]+\.py)`", text)
    assert len(pairs) >= 7
    defined = r"^(?:def|class) {0}\b|^{0}\b[^=\n]*="
    assert [pair for pair in pairs if not re.search(defined.format(pair[0]), CODE[ROOT / pair[1]], re.M)] == []


def test_the_table_of_folders_has_each_from_the_lowest_to_the_highest():
    rooms = [room for room in re.findall(r"^\| `(\w+)` \|.*\| \d+ \| [\d,]+ \|$", ARCHITECTURE, re.M) if room != "papers"]
    packages = {path.parent.name for path in (ROOT / "src" / "fedmutual").glob("*/__init__.py")}
    assert sorted(rooms) == sorted(packages)
    assert [RANKS[room] for room in rooms] == sorted(RANKS[room] for room in rooms)


def test_hand_written_documentation_has_fewer_than_40_000_words():
    """docs/count.py says what counts. A page that grows makes another page shorter."""
    counts = runpy.run_path(str(ROOT / "docs" / "count.py"))["count_pages"]()
    assert sum(counts.values()) < 40_000, counts
    assert len(CONTRIBUTING.split()) < 700


def test_each_page_is_in_one_of_four_groups():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    groups = dict(re.findall(r"^:caption: ([\w-]+)\n(?::\w+:\n)*\n([^`]+)```$", index, re.M))
    assert [*groups] == ["Start", "How-to", "Reference", "Background"]
    listed = [name for pages in groups.values() for name in pages.split() if "*" not in name]
    docs = ROOT / "docs"
    pages = [path.stem for path in docs.glob("*.md")] + [f"notebooks/{path.stem}" for path in docs.glob("notebooks/*.ipynb")]
    assert sorted(listed) == sorted([*(page for page in pages if page != "index"), "reproduction/README"])
    assert "reproduction/*" in groups["Background"]


def test_the_tiers_of_contributing_are_those_of_the_tests():
    tiers = re.findall(r"^\| `(\w+)` \| .* \| `uv run pytest -m (\w+)` \|$", CONTRIBUTING, re.M)
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"][
        "markers"
    ]
    assert [*map(tuple, tiers)] == [(name, name) for name in (marker.partition(":")[0] for marker in markers)]


OWN_ALGORITHM = (ROOT / "docs" / "own-algorithm.md").read_text(encoding="utf-8")


def test_the_page_on_an_own_algorithm_has_every_hook_with_its_arguments():
    """In the order of the calls, without `self`."""
    rows = dict(re.findall(r"^\| `(\w+)` \| at the [^|]* \| ([^|]*) \|", OWN_ALGORITHM, re.M))
    documented = {name: re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", arguments)) for name, arguments in rows.items()}
    assert tuple(documented) == HOOKS
    assert documented == {name: [*inspect.signature(getattr(Phase, name)).parameters][1:] for name in HOOKS}


def test_the_imports_that_the_page_on_an_own_algorithm_names_exist():
    rows = re.findall(r"([^;]*)\sfrom\s+`(fedmutual\.[\w.]+)`", OWN_ALGORITHM[OWN_ALGORITHM.index("Import `") :])
    named = [(module, name) for names, module in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(named) >= 8
    assert [(module, name) for module, name in named if not hasattr(importlib.import_module(module), name)] == []


def test_no_page_links_to_lines():
    """A line moves with every change above it."""
    assert not [p.name for p in PAGES if re.search(r"#L\d", p.read_text("utf-8"))]


def test_every_extra_that_a_text_names_exists():
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.*"), *PAGES]
    texts = "".join(path.read_text(encoding="utf-8") for path in places if path.is_file())
    named = {extra for names in re.findall(r"(?:fedmutual|CLONE|/src)\[([a-z,]+)\]", texts) for extra in names.split(",")}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"medical", "sites"} <= named <= extras.keys()
    assert {extra for _, extra in libraries._PACKAGES.values()} <= extras.keys()
