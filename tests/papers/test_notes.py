"""What the pages must say beside their numbers: other readings, the authors' code, thin sweeps, best rounds."""

import tomllib

import pytest

from committed import read_committed_experiments
from fedmutual_papers.claims import NOT_RUN
from fedmutual_papers.experiment_files import NOTES, RESULTS, find_home
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import make_tables

pytestmark = pytest.mark.long

# the page of proxyfl names the differences from ProxyFL's public code in its own list
REAL = {id: e for id, e in read_committed_experiments().items() if e.index.paper and id != "proxyfl"}
FML = [e for e in REAL.values() if e.index.code == "fml"]


def test_every_page_holds_the_authors_code_against_ours():
    assert {e.index.code for e in REAL.values()} == {"fml", "fedh2l"}
    assert all(e.code for e in REAL.values())


@pytest.mark.parametrize("experiment", FML, ids=lambda e: e.id)
def test_a_page_of_fml_says_how_its_learning_rate_was_chosen(experiment):
    """By thin sweeps, in words; or by a sweep of each method, in a table."""
    swept = all(cell.tunings.keys() == cell.arms.keys() for cell in experiment.cells)
    assert swept or {"learning-rate", "learning-rate-v1"} & set(experiment.index.notes)


@pytest.mark.parametrize("experiment", FML, ids=lambda e: e.id)
def test_the_notes_state_the_start_of_personal_networks(experiment):
    """In the papers personal networks begin with the server's model; a claim of Table 1 compares both starts."""
    if experiment.id != "newcomer":  # which says it of its own arms
        assert "personal-start" in experiment.index.notes
    (claim,) = (c for c in REAL["table1"].index.claims if c.sign == "same")
    (cell,) = (c for c in REAL["table1"].cells if c.name == claim.cells)
    starts = {arm: cell.make_config(arm).model.start for arm in (claim.arm, claim.than)}
    assert starts == {"fml-from-server": "server", "fml": "own"}


def test_table_1_lists_our_last_and_best_rounds_beside_the_paper():
    """Because the printed numbers may be the best on the test set."""
    table1 = REAL["table1"]
    assert "best-on-test" in table1.index.notes
    made = list(make_tables(table1, read_measured_cells(table1, ResultStore(find_home() / RESULTS))))
    captions = [t.caption for t in made]
    assert ["after the last round" in c for c in captions] == [True, False]
    assert ["best on test" in c for c in captions] == [False, True]
    last, best = ([(cell.text, cell.sub) for row in t.rows for cell in row if cell.sub] for t in made)
    assert len(last) == 24 * 3
    ran = [printed for text, printed in last if text != NOT_RUN]
    assert ran
    assert [printed for text, printed in best if text != NOT_RUN] == ran


def test_shared_sentences_are_stored_outside_the_pages():
    shared = set(tomllib.loads((find_home() / NOTES).read_text(encoding="utf-8"))["differences"].values())
    for experiment in REAL.values():
        assert not set(experiment.index.differences) & shared
