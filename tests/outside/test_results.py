"""The committed results: each is found again by its fingerprint, and the pages are what they make."""

import json
import shutil
from collections import defaultdict
from functools import cache

import pytest

from outside.internals import experiments_folder, planned_fingerprints
from outside.snapshots import FOLDER

DOCS = FOLDER.parents[1] / "docs" / "reproduction"
ALONE = ("catfish", "fairness", "h2l-ablation", "mh", "newcomer", "oh", "pacs")
"""Experiments whose pages take results of no other experiment."""

RUN = ("arm", "seed", "fingerprint")


@cache
def read_results():
    """Cell -> its committed results, as experiments/results has them."""
    folder = experiments_folder() / "results"
    files = sorted(folder.rglob("*.json"))
    return {path.relative_to(folder).with_suffix("").as_posix(): json.loads(path.read_text())["runs"] for path in files}


@pytest.mark.parametrize("cell", read_results())
def test_each_result_is_found_again_by_its_fingerprint(cell):
    """A run of the same cell, arm, seed, `--rounds` and `--set` is planned with the fingerprint that the result has."""
    ways, planned = defaultdict(set), set()
    for result in read_results()[cell]:
        ways[result.get("limit"), json.dumps(result.get("changed", {}))].add(result["seed"])
    for (limit, changed), seeds in ways.items():
        for run in planned_fingerprints(cell, sorted(seeds), limit, json.loads(changed)):
            planned.add((limit, changed, *run))
    lost = [
        way
        for result in read_results()[cell]
        if (way := (result.get("limit"), json.dumps(result.get("changed", {})), *map(result.get, RUN))) not in planned
    ]
    assert lost == []


def test_there_are_results():
    assert len(read_results()) >= 33
    assert sum(map(len, read_results().values())) >= 361


@pytest.mark.parametrize("experiment", ALONE)
def test_a_page_is_made_of_the_results_again(experiment, cli, tmp_path, monkeypatch):
    """By the command, which finds each result by its fingerprint: one that is not found leaves a gap in the page."""
    monkeypatch.chdir(tmp_path)
    for part in (experiment, f"results/{experiment}"):
        shutil.copytree(experiments_folder() / part, tmp_path / "experiments" / part)
    words = ("--pages", "pages", "--experiments", "experiments", "--results", "experiments/results")
    code, _, err = cli("reproduce", experiment, *words)
    assert code == 0, err
    made, committed = (folder / f"{experiment}.md" for folder in (tmp_path / "pages", DOCS))
    assert made.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_a_known_result_is_not_trained_again(cli, tmp_path, monkeypatch):
    """The command with the committed results alone, for a cell of which every run is known."""
    monkeypatch.chdir(tmp_path)
    cell, results = next((cell, runs) for cell, runs in read_results().items() if cell.startswith("fairness/"))
    seeds, rounds = len({result["seed"] for result in results}), results[0]["limit"]
    words = ("--seeds", seeds, "--rounds", rounds, "--only", cell.partition("/")[2])
    code, out, err = cli("reproduce", "fairness", *words, "--out", "out")
    assert code == 0, err
    assert "0 runs to train" in out
    assert not (tmp_path / "out/runs").exists()
