"""Runs that were trained twice: their scores of the same rounds, held against each other."""

from pathlib import Path

import pytest

from fedmutual_papers import pages
from fedmutual_papers.experiment_files import RESULTS, find_home
from fedmutual_papers.reproduce import make_marks, write_front
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import make_repeats_frame, make_repeats_table
from made_results import MADE, result

pytestmark = pytest.mark.long

FRONT = Path(__file__).parents[2] / "docs/reproduction/README.md"


CELL = "table9/digits/iid"


def keep(store, curve, fingerprint="abc", **more):
    store.add(CELL, result("fml", 0, curve, fingerprint=f"{fingerprint}-{len(curve)}", **more))


@pytest.mark.parametrize(("second", "further_fields", "row"), [
    ((0.5, 0.7, 0.9), {}, ("the same", 1, 4, 4, 0.0)),  # two curves of two rounds that both have
    ((0.5, 0.75, 0.9), {}, ("the same", 1, 4, 2, 0.05)),
    ((0.25, 0.75, 0.9), {"made": MADE.model_copy(update={"platform": "Other"})}, ("another", 1, 4, 0, 0.25)),
    ((0.7, 0.9, 0.8, 0.6), {"every": 2, "curve_every": 2}, ("the same", 1, 2, 0, 0.1)),
])  # fmt: skip
def test_scores_of_rounds_that_both_evaluated_are_compared(store, second, further_fields, row):
    keep(store, (0.5, 0.7))
    if further_fields.pop("curve_every", None):
        curve = (0.8, 0.6)  # after rounds 2 and 4
        store.add(CELL, result("fml", 0, curve, fingerprint="abc-4", rounds=4, **further_fields))
    else:
        keep(store, second, **further_fields)
    (frame_row,) = make_repeats_frame(store).itertuples(index=False)
    assert (frame_row.machine, frame_row.pairs, frame_row.scores, frame_row.equal) == row[:4]
    assert frame_row.largest == pytest.approx(row[4])


def test_a_run_shared_by_two_cells_is_not_a_pair(store):
    for cell in ("table9/digits/iid", "looker/digits/iid"):
        for rounds in (2, 3):
            store.add(cell, result("fml", 0, (0.5, 0.7, 0.9)[:rounds], fingerprint=f"abc-{rounds}"))
    (row,) = make_repeats_frame(store).itertuples(index=False)
    assert row.pairs == 1


@pytest.mark.parametrize("more", [{"fingerprint": "other"}, {"numerics": 2}, {"failed": "client 0 diverged"}])
def test_other_runs_are_not_compared(store, more):
    keep(store, (0.5, 0.7))
    keep(store, (0.5, 0.7, 0.9), **more)
    assert make_repeats_frame(store).empty
    assert not make_repeats_table(make_repeats_frame(store)).rows


def test_the_front_page_tells_the_repeated_runs_of_the_committed_results():
    """On one machine they are equal to the bit: whoever measures anew and is not has changed the numerics."""
    frame = make_repeats_frame(ResultStore(find_home() / RESULTS))
    begin, end = make_marks("repeated runs")
    table = pages.render_table(make_repeats_table(frame), caption=False)
    assert FRONT.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip() == table
    alike = frame[frame["machine"] == "the same"]
    assert alike["cell"].nunique() >= 1
    assert (alike["equal"] == alike["scores"]).all()
    assert frame["cell"].nunique() >= 2


def test_a_front_page_without_the_marks_of_a_table_is_left_as_it_is(tmp_path):
    begin, end = make_marks("one")
    page = tmp_path / "README.md"
    page.write_text(f"Before.\n{begin}\nold\n{end}\nAfter.\n")
    assert write_front(tmp_path, {"two": "| 2 |"}) == []
    assert page.read_text() == f"Before.\n{begin}\nold\n{end}\nAfter.\n"
    assert write_front(tmp_path, {"two": "| 2 |", "one": "| 1 |"}) == [page]
    assert page.read_text() == f"Before.\n{begin}\n\n| 1 |\n\n{end}\nAfter.\n"
    assert write_front(tmp_path / "none", {"one": "| 1 |"}) == []
