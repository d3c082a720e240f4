"""Bytes as the report has them: sums by hand, the seed set apart, and a ledger as long as FedH2L's."""

import csv
import io
import json
import tracemalloc

import pytest

from fedmutual.report import provenance
from fedmutual.results.comparison import make_comparisons
from fedmutual.results.frame import read_run, tabulate_work
from fedmutual.rundir.schema import LedgerLine
from run_folders import Made, make_comparison, write

LINES = [
    (0, "agree", "b", 3, 1),
    (0, "seed", "a", 9, 500),
    (0, "seed", "b", 9, 700),
    (0, "seed", "b", 9, 1),
    (1, "local", "a", 0, 10),
    (1, "local", "b", 0, 20),
    (1, "mutual", "a", 30, 0),
    (2, "local", "b", 0, 40),
    (2, "seed", "a", 5, 6),
]


def test_sums_without_the_seed_set(tmp_path):
    """Up 1 + 10 + 20 + 40 + 6, down 3 + 30 + 5; in the rounds 76 and 35, of four visits; the public data are apart."""
    folder = write(tmp_path / "run", Made("fml", lambda s, r, c: 0.5))
    names = ("round", "phase", "client", "down", "up")
    lines = [json.dumps(dict(zip(names, line, strict=True))) for line in LINES]
    (folder / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines))
    comparison = make_comparison([folder])
    assert read_csv(provenance.make_method_bytes_table(comparison)) == [
        ["method", "up_client_round", "down_client_round", "up_client_step", "up_run", "down_run", "seed_set"],
        ["FML", "19", "8.75", "", "77", "38", "1201"],
    ]
    (folder / "ledger.jsonl").unlink()
    comparison = make_comparison([folder])
    assert provenance.make_method_bytes_table(comparison).rows[0][2].note == "n/a: the ledger is empty so far"


def test_sums_beyond_what_a_float_counts():
    up = 2**53 + 1
    work = tabulate_work(LedgerLine(round=r, phase="x", client="a", down=0, up=up) for r in (1, 2, 3))
    assert int(work["up"].sum()) == 3 * up


def read_csv(table):
    return list(csv.reader(io.StringIO(table.csv)))


def test_a_run_of_ten_thousand_rounds_takes_little_memory_and_few_lines(tmp_path):
    folder = write(tmp_path / "run", Made("fml", lambda s, r, c: 0.5, rounds=2))
    with (folder / "ledger.jsonl").open("w") as file:
        for r in range(1, 10_001):
            for phase, up, down in (("local", 1412, 0), ("mutual", 0, 4236)):
                for client in "0123":
                    file.write(json.dumps({"round": r, "phase": phase, "client": client, "down": down, "up": up}) + "\n")
    tracemalloc.start()
    run = read_run(folder)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(run.work) == 80_000
    assert held_bytes < 10_000_000  # a record a line took 80 MB
    [comparison] = make_comparisons([run])
    assert [c.text for c in provenance.make_method_bytes_table(comparison).rows[0][2:]] == [
        "1.4 kB",
        "4.2 kB",
        "56.5 MB",
        "169.4 MB",
    ]


def sent(round, client):
    """A fingerprint and 500 bytes of public data once, then 60 up and 90 down a round."""
    if round == 0:
        return [("agree", 16, 16), ("seed", 0, 500)]
    return [("local", 0, 60), ("mutual", 90, 0)]


@pytest.fixture
def methods(tmp_path):
    steps = {"training": {"local_steps": 5, "batch_size": 32}}
    domains = {"reach": lambda s, r, c: (0.5, 0.6, 0.4), "rounds": 4}
    methods_of_domains = [
        Made("fedh2l", lambda s, r, c: 0.5, sent=sent, **domains),
        Made("aggregate", lambda s, r, c: 0.5, sent=lambda r, c: [] if r else [("seed", 0, 500)], **domains),
        Made("fedavg", lambda s, r, c: 0.5, config=steps, **domains),
        Made("independent", lambda s, r, c: 0.5, **domains),
    ]
    return make_comparison([write(tmp_path / m.algorithm, m) for m in methods_of_domains])


def test_the_seed_set_has_its_own_column_and_local_steps_are_shown(methods):
    table = provenance.make_method_bytes_table(methods)
    assert [c.title for c in table.columns[2:]] == [
        "A client in a round: up",
        "A client in a round: down",
        "In a local step: up",
        "All clients, whole run: up",
        "All clients, whole run: down",
        "Public seed set: once",
    ]
    partition = {row[0].text.partition(",")[0]: [c.text for c in row[1:]] for row in table.rows}
    once = "once, before: its public data"
    # 3 clients, 4 rounds: up 3 (16 + 4 * 60), down 3 (16 + 4 * 90); FedAvg 72 up and 64 down, in 5 local steps
    assert partition["FedH2L"] == [f"3 tensors, 129 numbers; {once}", "60 B", "90 B", "n/a", "768 B", "1.1 kB", "1.5 kB"]
    assert partition["AGG"] == [f"nothing; {once}", "0 B", "0 B", "n/a", "0 B", "0 B", "1.5 kB"]
    assert partition["FedAvg"][1:] == ["72 B", "64 B", "14 B", "864 B", "768 B", "0 B"]
