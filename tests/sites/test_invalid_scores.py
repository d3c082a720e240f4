"""A site that tells scores which are none: the others' scores, and whoever reads the federation's folder, do not suffer."""

import pytest

from fedmutual.report.html import write_report
from fedmutual.rundir.file_names import METRICS
from fedmutual.sites.protocol import EVALUATE, ReleasedScore, SiteAnswer, pack_message, read_order
from log_lines import read_lines
from puppets import SITES, Federation, Puppet

pytestmark = pytest.mark.sites

HONEST = (ReleasedScore("personal", None, "validation", {"accuracy": 0.9, "examples": 100}),)
LIES = {
    "an accuracy above 1": [({"accuracy": 7.0}, "personal", "validation")],
    "an accuracy below 0": [({"accuracy": -5}, "personal", "validation")],
    "the largest number": [({"accuracy": 1e308}, "personal", "validation")],
    "half an example": [({"accuracy": 0.9, "examples": 0.5}, "personal", "validation")],
    "a loss for each class": [({"accuracy": 0.9, "loss": [1.0]}, "personal", "validation")],
    "a value for whose score it is": [({"accuracy": 0.9, "client": 1}, "personal", "validation")],
    "a value for which model's": [({"accuracy": 0.9, "model": 1}, "personal", "validation")],
    "one score thirty times": [({"accuracy": 1.0}, "personal", "validation")] * 30,
    "rows of its own making": [({"accuracy": 1.0}, "personal", "=cmd()")],
    "a model of its own making": [({"accuracy": 1.0}, "<script>", "validation")],
}


class Teller(Puppet):
    """Tells the same scores after every round."""

    def __init__(self, scores=HONEST):
        super().__init__()
        self._scores = tuple(scores)

    def carry_out(self, content):
        asked, _ = read_order(content)
        return (
            pack_message(SiteAnswer(asked, scores=self._scores), {})
            if asked.kind == EVALUATE
            else super().carry_out(content)
        )


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_scores_that_are_none_are_left_out_and_the_report_can_be_read(tmp_path, lies):
    federation = Federation(tmp_path)
    for site in SITES:
        federation.transport.halves[site] = Teller()
    federation.transport.halves["north"] = Teller(ReleasedScore(model, None, data, values) for values, model, data in lies)
    federation.run()
    lines = read_lines(federation.server / METRICS)
    assert [sorted({s["client"] for s in line["scores"]}) for line in lines] == [["south", "west"]] * 3
    assert any("'north'" in note for note in federation.notes)
    write_report([federation.server], tmp_path / "report.html")


def test_a_site_that_says_that_it_is_a_domain_does_not_spoil_the_report(tmp_path):
    """The site may be a domain by its own split."""
    federation = Federation(tmp_path)
    for site in SITES:
        federation.transport.halves[site] = Teller()
    federation.transport.halves["north"] = Teller([ReleasedScore("personal", None, "test.own", {"accuracy": 1.0})])
    write_report([federation.run().server], tmp_path / "report.html")
