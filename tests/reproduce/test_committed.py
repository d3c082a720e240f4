"""The committed results: each is found again, whatever version of the package asks for it."""

import pytest

from fedmutual.reproduce import ResultStore, Scale, read_experiments
from fedmutual.reproduce.cells import RESULTS, find_home
from fedmutual.reproduce.plan import list_jobs

STORE = ResultStore(find_home() / RESULTS)
FILES = sorted(
    p.relative_to(find_home() / RESULTS).with_suffix("").as_posix() for p in (find_home() / RESULTS).rglob("*.json")
)


@pytest.mark.parametrize("cell", FILES)
def test_every_committed_result_is_found_by_its_fingerprint(cell):
    """With the rounds and keys that its command asked for; some arms are added by an experiment that borrows the cell."""
    looking = [c for e in read_experiments(find_home()) for c in e.cells if c.id == cell]
    scales = {(r.limit, tuple(r.changed.items())) for r in STORE.list_results(cell)}
    seeds = {r.seed for r in STORE.list_results(cell)}
    planned = {
        job.fingerprint: job
        for c in looking
        for limit, changed in scales
        for job in list_jobs(c, seeds, Scale(limit, changed))
    }
    lost = [(r.arm, r.seed, r.rounds) for r in STORE.list_results(cell) if r.fingerprint not in planned]
    assert not lost
    assert all(STORE.find(planned[r.fingerprint], r.numerics) for r in STORE.list_results(cell))


def test_no_committed_result_names_a_path_of_the_machine_that_measured():
    paths = ("/tmp/", "/work/", "/home/", "/root/", "C:\\")
    assert not [r.made.command for r in STORE.list_all_results() if any(p in r.made.model_dump_json() for p in paths)]
