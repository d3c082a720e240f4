"""The committed results: each is found again by its fingerprint, and the pages are what they make."""

import json
import shutil
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from outside.internals import experiments_folder, list_lost_results, planned_jobs
from outside.snapshots import FOLDER

pytestmark = pytest.mark.long

DOCS = FOLDER.parents[1] / "docs" / "reproduction"
RUN = ("arm", "seed", "fingerprint")


@cache
def read_results():
    """Cell -> its committed results, as papers/experiments/results has them."""
    folder = experiments_folder() / "results"
    files = sorted(folder.rglob("*.json"))
    return {path.relative_to(folder).with_suffix("").as_posix(): json.loads(path.read_text())["runs"] for path in files}


@pytest.mark.parametrize("cell", read_results())
def test_each_result_is_found_again_by_its_fingerprint(cell):
    """A run of the same cell, arm, seed, `--rounds` and `--set` is planned with the fingerprint that the result has."""
    ways, planned, jobs = defaultdict(set), set(), {}
    for result in read_results()[cell]:
        ways[result.get("limit"), json.dumps(result.get("changed", {}))].add(result["seed"])
    for (limit, changed), seeds in ways.items():
        for job in planned_jobs(cell, sorted(seeds), limit, json.loads(changed)):
            planned.add((limit, changed, job.arm, job.seed, job.fingerprint))
            jobs[job.fingerprint] = job
    lost = [
        way
        for result in read_results()[cell]
        if (way := (result.get("limit"), json.dumps(result.get("changed", {})), *map(result.get, RUN))) not in planned
    ]
    assert lost == []
    assert list_lost_results(cell, jobs) == []


def test_there_are_results():
    assert len(read_results()) >= 33
    assert sum(map(len, read_results().values())) >= 361


def test_the_pages_are_made_of_the_results_again(cli, in_tmp_path):
    """By the command, which finds each result by its fingerprint: one that is not found leaves a gap in a page."""
    shutil.copytree(experiments_folder(), "papers/experiments")
    Path("docs").mkdir()
    Path("docs/reproduction").mkdir()
    for name in ("README.md", "protocol.md"):  # written by hand
        shutil.copy(DOCS / name, "docs/reproduction")
    folders = ("--experiments", "papers/experiments", "--results", "papers/experiments/results")
    cli.run("reproduce", "--pages", "docs/reproduction", *folders)
    committed = {path.relative_to(DOCS.parent): path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    committed |= {Path(name): (DOCS.parent / name).read_text(encoding="utf-8") for name in ("findings.md", "benchmark.md")}
    assert len(committed) > 20
    different = [path for path, text in committed.items() if (Path("docs") / path).read_text(encoding="utf-8") != text]
    assert different == [], "make it anew: docs/architecture.md has the command"
    assert len(committed[Path("findings.md")].splitlines()) < 80, "one screen, and where to use what"
    for pattern in ("*.md", "figures/*.svg"):
        committed_names, made_names = (sorted(p.name for p in f.glob(pattern)) for f in (DOCS, Path("docs/reproduction")))
        assert committed_names == made_names


def test_no_committed_result_names_a_path_of_the_machine_that_measured():
    paths = ("/tmp/", "/work/", "/home/", "/root/", "C:\\\\")
    assert not [cell for cell, runs in read_results().items() if any(p in json.dumps(runs) for p in paths)]
