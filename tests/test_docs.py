"""Every example of the README and the docs runs: files are written, Python and commands are run, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
PLAIN = re.compile(r"""([\w\s./:=,@%+-]|'[^']*'|"[^"$`\\!]*")*""")  # a command in which a shell finds nothing to do
NEEDS_SETUP = ("pip install", "git clone")  # what is shown with a fresh machine, in the closing notes of a release


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_examples_of_a_page_run(page, tmp_path):
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text)
        if language == "toml":
            tomllib.loads(text)
        elif language == "python" and not title:
            (tmp_path / "example.py").write_text(text)
            execute("python example.py", tmp_path, env)
        elif language == "sh":
            for line in text.splitlines():
                if line and not line.startswith("#") and not any(word in line for word in NEEDS_SETUP):
                    execute(line, tmp_path, env)


def execute(line, folder, env):
    """What needs no shell is a fork of what has torch imported, for that takes longer than most commands."""
    words = shlex.split(line)
    if words[0] in ("fedmutual", "python") and PLAIN.fullmatch(line):
        done = forked.run(words, folder, env)
    else:
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_links_to_lines_lead_to_the_code_that_they_name():
    """[text](file#L12 "code"): line 12 holds that code."""
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    links = re.findall(r"""\]\(([^)#\s]+)#L(\d+) (["'])(.+?)\3\)""", text)
    assert len(links) == text.count("#L") >= 10
    for target, line, _, code in links:
        assert code in (ROOT / "docs" / target).read_text(encoding="utf-8").splitlines()[int(line) - 1], (target, line)
