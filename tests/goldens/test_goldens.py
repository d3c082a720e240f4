"""Run folders are read as before: each table, gain, verdict and sentence of the committed folders is as it was recorded.

`RECORD=1 uv run pytest tests/goldens -n 0` writes the outputs anew; look at `git diff` then. make.py made the folders. The
papers' pages have a golden of their own: tests/outside/test_results.py makes docs/reproduction from the committed results.
"""

import difflib
import os
import re
from pathlib import Path

import pytest

from goldens import readings
from goldens.make import FOLDERS, NAMES

pytestmark = pytest.mark.run

OUTPUTS = Path(__file__).parent / "outputs"
COMMAND = "RECORD=1 uv run pytest tests/goldens -n 0"
REPORTED = ("terminal.txt", "page.txt", "tables.csv", "python.txt", "python.csv")
FILES = {
    **{f"report/{folder}": REPORTED for folder in readings.READINGS},
    **{f"audit/{folder}": ("terminal.txt", "page.txt") for folder in readings.AUDITS},
    "resume/sweep": ("terminal.txt", "sweep.json"),
    "resume/tuned": ("terminal.txt", "page.txt", "tables.csv"),
}
"""Way of reading and folder -> the outputs."""
EQUAL = {f"resume/tuned/{file}": f"report/tuned/{file}" for file in ("page.txt", "tables.csv")}
"""Output -> the output whose file it has: a command that is given again writes the page that `report` writes."""
CASES = [pytest.param(way, file, id=f"{way}-{file}") for way, files in FILES.items() for file in files]
_made: dict[str, readings.Outputs] = {}  # what this process has read already


def read(way, cli, out, monkeypatch):
    """The outputs of one way of reading a folder; the working folder is the one of all folders."""
    if way not in _made:
        monkeypatch.chdir(FOLDERS)
        kind, _, folder = way.partition("/")
        if kind == "report":
            _made[way] = readings.report(cli, folder, out)
        else:
            function = {"audit": readings.show_audit, "resume": readings.resume}[kind]
            _made[way] = function(cli, folder, out, monkeypatch)
    return _made[way]


@pytest.mark.parametrize(("way", "file"), CASES)
def test_a_folder_is_read_as_before(way, file, cli, tmp_path, monkeypatch):
    name = f"{way}/{file}"
    now, path = read(way, cli, tmp_path, monkeypatch)[file], OUTPUTS / EQUAL.get(name, name)
    if os.environ.get("RECORD"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, encoding="utf-8")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before != now:
        lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "committed", "now", n=1, lineterm="")
        pytest.fail("\n".join((f"{path}: no longer true. Where the change is meant: {COMMAND}", *lines)), pytrace=False)


def test_a_sweep_has_no_report(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDERS)
    assert "sweep" in cli.fail("report", "sweep", "-o", tmp_path / "page.html")


def test_each_folder_has_each_output():
    committed = {path.relative_to(OUTPUTS).as_posix() for path in OUTPUTS.rglob("*") if path.is_file()}
    assert committed == {f"{way}/{file}" for way, files in FILES.items() for file in files} - EQUAL.keys()
    assert {path.name for path in FOLDERS.iterdir()} == set(NAMES)
    assert {way.split("/")[1] for way in FILES} == set(NAMES)


def test_the_goldens_are_small_and_of_no_machine():
    files = [path for folder in (FOLDERS, OUTPUTS) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w@:.])/(home|root|tmp|dev|work|Users)/", text), path
