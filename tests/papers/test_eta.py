"""The time that is left, by hand."""

import pytest

from committed import read_committed_experiments
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.run import TimeEstimate

pytestmark = pytest.mark.long


def test_a_round_of_many_steps_is_not_compared_with_a_round_of_one_step():
    cells = {c.name: c for c in read_committed_experiments()["rotated-mnist"].cells}
    left = [j for j in list_jobs(cells["shared/public-10"], [0], Scale()) if not j.arm.endswith("-equal-steps")]
    eta = TimeEstimate(left)
    (matched,) = [j for j in left if j.arm == "fedavg-matched"]  # 57 rounds of 175 steps: 9,975 steps of 0.04 s
    assert eta.report_finished([matched], 399) == "1 of 6 runs done, about 33 min 20 s left"  # 5 runs of 10,000 steps
    (job,) = [j for j in left if j.arm == "fedh2l"]
    assert eta.report_finished([job], 800) == "2 of 6 runs done, about 40 min 0 s left"  # of 0.06 s in the mean
