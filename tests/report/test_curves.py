"""The points and losses of curves, by hand."""

import pandas as pd
import pytest

from fedmutual.report.curves import make_pictures, make_points
from fedmutual.results.comparison import make_comparisons
from fedmutual.rundir.recorded_run import read_runs
from run_folders import Made, write_all


def test_a_point_is_the_mean_the_lowest_and_the_highest_seed_of_a_round_that_all_runs_have():
    points = make_points(pd.DataFrame({0: {4: 0.5, 2: 0.2, 3: 0.9}, 1: {2: 0.4, 4: 0.25}}))
    assert [tuple(p) for p in points] == [(2, pytest.approx(0.3), 0.2, 0.4), (4, 0.375, 0.25, 0.5)]
    assert make_points(pd.DataFrame({0: {1: 0.5}, 1: {}})) == ()
    assert make_points(pd.DataFrame()) == ()


def test_each_loss_term_has_a_curve_of_the_mean_over_clients(tmp_path):
    """The made losses are 2 / (0.5 + round) of the first term and 1.7 / (0.5 + round) of the second, at every client."""
    runs = write_all(tmp_path, [Made("fml", lambda s, r, c: 0.5), Made("independent", lambda s, r, c: 0.5)], [0, 1])
    (comparison,) = make_comparisons(read_runs(runs))
    (losses,) = [p for p in make_pictures(comparison) if p.id == "loss"]
    assert [(c.label, c.style, c.seeds) for c in losses.curves] == [
        ("FML, personal", 0, 2),
        ("FML, shared", 1, 2),
        ("Local-only", 0, 2),
    ]
    assert [[p.mean for p in c.points] for c in losses.curves[:2]] == [
        pytest.approx([2 / 1.5, 2 / 2.5]),
        pytest.approx([1.7 / 1.5, 1.7 / 2.5]),
    ]


def test_without_losses_there_is_no_picture_of_losses(tmp_path):
    runs = write_all(tmp_path, [Made("fml", lambda s, r, c: 0.5, shared=lambda s, r: 0.5, tells=False)], [0])
    (comparison,) = make_comparisons(read_runs(runs))
    assert [p.id for p in make_pictures(comparison)] == ["global"]
