"""The docs print the cost of a step with differential privacy that `benchmarks/run.py privacy` measured."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read(section):
    return json.loads((ROOT / "benchmarks" / "results" / f"{section}.json").read_text())["results"]


def test_the_docs_print_the_measured_slowdown():
    text = (ROOT / "docs" / "performance.md").read_text()
    for line in read("privacy"):
        cells = (
            f"{line[nets]['median']:.2f} ({' to '.join(f'{q:.2f}' for q in line[nets]['quartiles'])})"
            for nets in ("meme", "both")
        )
        assert f"| {line['network']} | {' | '.join(cells)} | {line['goal']:g} |" in text
