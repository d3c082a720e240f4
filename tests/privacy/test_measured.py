"""The docs print what `benchmarks/run.py` measured: sensitivity to one record, and seconds of steps and of masked rounds."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOPS = {"proxyfl": "ProxyFL as published", "meme": "beta = 1, noise on the meme", "both": "noise on both networks"}


def read(section):
    return json.loads((ROOT / "benchmarks" / "results" / f"{section}.json").read_text())["results"]


def test_the_docs_print_the_measured_sensitivity():
    text = (ROOT / "docs" / "privacy-theory.md").read_text()
    for line in read("sensitivity"):
        numbers = (line[key] for key in ("without_median", "without_largest", "holding_largest"))
        assert f"| {LOOPS[line['loop']]} | {line['record']} | {' | '.join(f'{n:g}' for n in numbers)} |" in text


@pytest.mark.parametrize("loop", ["meme", "both"])
def test_one_record_moves_only_batches_that_hold_it_and_by_its_bound_at_most(loop):
    lines = [line for line in read("sensitivity") if line["loop"] == loop]
    assert {line["record"] for line in lines} == {"ordinary", "mislabelled"}
    assert all(line["without_largest"] == 0 and 0 < line["holding_largest"] <= 1 for line in lines)
    assert all(line["without_largest"] > 0.3 for line in read("sensitivity") if line["loop"] == "proxyfl")


def test_the_docs_print_the_measured_slowdown():
    text = (ROOT / "docs" / "performance.md").read_text()
    for line in read("privacy"):
        cells = (
            f"{line[nets]['median']:.2f} ({' to '.join(f'{q:.2f}' for q in line[nets]['quartiles'])})"
            for nets in ("meme", "both")
        )
        assert f"| {line['network']} | {' | '.join(cells)} | {line['goal']:g} |" in text


def test_the_docs_print_the_measured_seconds_of_real_rounds():
    text = " ".join((ROOT / "docs" / "secure-sum.md").read_text().split())
    for line in read("secure-sum-sites"):
        low, high = line["seconds"]["quartiles"]
        sums = {"float": "without", "masked": "with masks"}
        assert f"{line['seconds']['median']:.2f} s ({low:.2f} to {high:.2f}) {sums[line['sum']]}" in text
        assert f"{line['rounds']} rounds" in text
