"""When there is a verdict: enough rounds of every arm, more than one example, a cell behind a mean; p-values and Holm."""

from dataclasses import replace

import pytest
from scipy.stats import ttest_1samp

from fedmutual_papers.claims import judge, judge_readings
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.measures import MEASURES, find_step
from fedmutual_papers.pages import Page, adjust
from fedmutual_papers.plan import Scale
from fedmutual_papers.prose import describe_verdict
from fedmutual_papers.result import Ends
from fedmutual_papers.schema import Claim, ReadingTable
from fedmutual_papers.significance import Tails, adjust_by_holm, compute_several_tails, compute_tails
from fedmutual_papers.tables import make_claims_table as claims_table
from made_results import result

pytestmark = pytest.mark.long


def claim(**more):
    return Claim(text="It is better.", **{"measure": "global_test", "arm": "fml", "than": "fedavg", **more})


@pytest.fixture
def cell(papers):
    """A cell of 200 rounds, one of whose arms makes 57 in their place."""
    path = papers / "table9/digits/iid.toml"
    arm = '"algorithm.name" = "fedavg"'
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 200").replace(arm, f"{arm}, rounds = 57"))
    return read_experiment(papers, "table9").cells[0]


@pytest.fixture
def measured(cell):
    """A look at the cell with these accuracies a seed, of 10,000 test images, after so many of its rounds."""

    def make(ours, theirs, rounds=None, name="IID"):
        filler = (0.0981, 0.4137, 0.7222, 0.8515, 0.8819, 0.8991)  # rounds before the last, of whole images of 10,000
        results = {
            arm: {seed: result(arm, seed, curve=(*filler, v)) for seed, v in enumerate(values)}
            for arm, values in (("fml", ours), ("fedavg", theirs))
        }
        about = cell.about.model_copy(update={"row": name})
        return MeasuredCell(replace(cell, about=about), Scale(rounds), results)

    return make


UP, LEVEL = (0.9312, 0.9344, 0.9327), (0.9008, 0.9143, 0.9111)
THEIRS = (0.9101, 0.9127, 0.9096)


@pytest.mark.parametrize(("rounds", "message"), [
    (None, "supported"),
    (199, "supported"),
    (100, "supported"),  # 100 of 200, and 29 of 57
    (99, "too short"),
    (3, "too short"),  # 3 of 200, and 1 of 57
])  # fmt: skip
def test_no_verdict_before_every_arm_ran_half_of_its_rounds(measured, rounds, message):
    judged = judge(claim(), [measured(UP, THEIRS, rounds)])
    assert (judged.verdict, judged.lines[0].verdict) == (message, message)
    assert judged.overall.mean == pytest.approx(0.0219666, abs=1e-6)  # the number is shown
    assert (judged.p is None) == (message == "too short")
    assert "2.2 points" in describe_verdict(judged, 1)


def test_shortening_is_stated_for_each_arm(measured):
    short = measured(UP, THEIRS, 3)
    assert (short.describe_arm("fml"), short.describe_arm("fedavg")) == (
        "shortened: 3 of 200 rounds",
        "shortened: 1 of 57 rounds",
    )
    assert describe_verdict(judge(claim(), [short]), 1).startswith(
        "too short (3 of 200 rounds; shortened: 1 of 57 rounds): +2.2"
    )


def test_one_arm_alone_may_be_too_short(papers, newcomer, dependent_arm):
    """An arm that starts from a federation is as short as that."""
    newcomer.write_text(newcomer.read_text().replace("rounds = 2", "rounds = 20") + dependent_arm)
    (cell,) = read_experiment(papers, "newcomer").cells
    scale = Scale(8)  # of the federation's 20; the newcomer's own round is whole
    assert (scale.count_rounds(cell, "scratch"), scale.count_rounds(cell, "given")) == ((1, 1), (8, 20))
    results = {arm: {s: result(arm, s, curve=(v,)) for s, v in enumerate(UP)} for arm in ("given", "scratch")}
    about = claim(arm="given", than="scratch", measure="own_validation")
    assert judge(about, [MeasuredCell(cell, scale, results)]).verdict == "too short"
    assert judge(about, [MeasuredCell(cell, Scale(10), results)]).verdict == "inconclusive"


def test_a_cell_that_is_too_short_supports_nothing(measured):
    full, short = measured(UP, THEIRS), measured(UP, THEIRS, 20, "short")
    assert judge(claim(of="every"), [full, short]).verdict == "inconclusive"
    assert judge(claim(of="every"), [full, full]).verdict == "supported"
    assert judge(claim(of="most"), [full, short, short]).verdict == "inconclusive"
    assert judge(claim(of="most"), [short, short]).verdict == "too short"


def test_cells_of_different_length_are_not_averaged(measured):
    full, half = measured(UP, THEIRS), measured(THEIRS, UP, 150, "half")
    judged = judge(claim(), [full, half, full])
    assert judged.overall.mean == pytest.approx(0.0219666, abs=1e-6)  # of the two whole ones alone
    assert (judged.pooled, judged.other_lengths) == (2, ("digits MLP, half",))
    assert (
        describe_verdict(judged, 1)
        .split("mean over ")[1]
        .startswith("2 of 3 cells, without digits MLP, half (another number of rounds)")
    )
    assert judged.verdict == "inconclusive"  # but it says the opposite
    changed = replace(half, scale=Scale(None, (("optimizer.lr", 0.3),)))
    assert judge(claim(), [full, changed]).other_lengths == ("digits MLP, half",)


def test_a_mean_decides_nothing_where_no_cell_does(measured):
    """Two cells whose seeds swing against each other: each undecided, their mean certain."""
    one, other = (0.93, 0.91, 0.95), (0.93, 0.95, 0.91)
    level = (0.92, 0.92, 0.9203)
    cells = [measured(one, level), measured(other, level, name="other")]
    judged = judge(claim(), cells)
    assert judged.overall.low > 0
    assert [line.verdict for line in judged.lines] == ["inconclusive", "inconclusive"]
    assert judged.verdict == "inconclusive"
    assert judge(claim(sign="less"), cells).verdict == "inconclusive"


@pytest.mark.parametrize(("images", "message"), [
    ((1, 1, 1), "inconclusive"),  # three seeds ahead by one image in 10,000
    ((-1, -1, -1), "inconclusive"),
    ((2, 2, 2), "supported"),  # all agree on more than one image
    ((1, 2, 1), "inconclusive"),
    ((9, 10, 9), "supported"),
])  # fmt: skip
def test_three_seeds_ahead_by_one_image_are_a_tie(measured, images, message):
    ours = [v + n / 10_000 for v, n in zip(THEIRS, images, strict=True)]
    assert judge(claim(), [measured(ours, THEIRS)]).verdict == message
    assert judge(claim(), [measured(ours, THEIRS), measured(ours, THEIRS, name="other")]).verdict == message


def test_one_image_of_one_node_is_a_tie_whatever_was_rounded(cell):
    """Nodes of 600 test images, kept with 5 decimals: equal differences are told apart by rounding alone."""
    results = {"fml": {}, "fedavg": {}}
    for seed, right in enumerate((411, 433, 500)):
        for arm, more in (("fml", 1), ("fedavg", 0)):
            ends = {str(i): round((right + 7 * i + (more if i == 0 else 0)) / 600, 5) for i in range(4)}
            results[arm][seed] = result(arm, seed, transfer={"acc": Ends(last=ends, best=ends)})
    made = MeasuredCell(cell, Scale(), results)
    judged = judge(claim(measure="acc"), [made])
    assert judged.overall.mean == pytest.approx(1 / 2400, abs=1e-5)
    assert (judged.verdict, judged.p) == ("inconclusive", 1.0)
    assert MEASURES["acc"].grain(list(results["fml"].values()), False) == pytest.approx(1 / 2400)


def test_seeds_that_all_agree_are_the_same_within_more_than_one_image(measured):
    same = claim(sign="same", margin=0.01)
    assert judge(same, [measured(THEIRS, THEIRS)]).verdict == "supported"
    assert judge(claim(sign="same", margin=1e-4), [measured(THEIRS, THEIRS)]).verdict == "inconclusive"  # that is one image


def test_the_step_of_an_accuracy():
    assert find_step([0.5, 0.25]) == 1 / 4
    assert find_step(round(n / 600, 5) for n in (311, 477, 502, 599)) == pytest.approx(1 / 600)
    assert find_step((0.0981, 0.4137, 0.7222, 0.8515, 0.8819, 0.8991)) == pytest.approx(1e-4)
    assert find_step([]) == 0.0


def test_the_p_value_is_students(measured):
    differences = [a - b for a, b in zip(UP, THEIRS, strict=True)]
    expected = ttest_1samp(differences, 0).pvalue
    assert judge(claim(), [measured(UP, THEIRS)]).p == pytest.approx(expected)
    assert judge(claim(sign="less"), [measured(UP, THEIRS)]).p == pytest.approx(expected)
    assert judge(claim(), [measured(UP[:2], THEIRS[:2])]).p is None  # fewer than three seeds have no verdict


def test_the_p_value_of_a_margin_is_the_larger_of_two_tests(measured):
    made = measured((0.9105, 0.9120, 0.9102), THEIRS)  # differences 0.0004, -0.0007, 0.0006
    (judged,) = judge_readings(claim(sign="same", margin=0.002), [made])
    inside = max(
        ttest_1samp([0.0004, -0.0007, 0.0006], bound, alternative=way).pvalue
        for bound, way in ((-0.002, "greater"), (0.002, "less"))
    )
    assert judged.p == pytest.approx(2 * inside)
    assert (judged.verdict == "supported") == (judged.p < 0.05)


def test_of_several_cells_the_p_value_is_that_so_many_agree():
    lines = [Tails(0.001, 0.999), Tails(0.01, 0.99), Tails(0.03, 0.97)]
    assert compute_several_tails(lines, 3, 1).supports == 0.03  # all three: the largest
    assert compute_several_tails(lines, 1, 1).supports == pytest.approx(0.003)  # any one: Bonferroni's
    assert compute_several_tails(lines, 2, 2).supports == pytest.approx(0.02)  # two of three: the second, times two
    assert compute_several_tails([*lines, None], 4, 1).supports == 1.0  # a cell that was not run


def test_holm_by_hand():
    # 5 * 0.01, 4 * 0.02, 3 * 0.03, 2 * 0.04 and 1 * 0.05, none smaller than the one before
    assert adjust_by_holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    # 3 * 0.01, 2 * 0.02 and 1 * 0.6, in the order that they were given
    assert adjust_by_holm([0.6, 0.01, 0.02]) == pytest.approx([0.6, 0.03, 0.04])
    assert adjust_by_holm([0.5, 0.9]) == [1.0, 1.0]
    assert adjust_by_holm([]) == []


def page_of(papers, id, *judged):
    return Page(read_experiment(papers, id), [], tuple((j,) for j in judged), (), ())


def test_verdicts_are_adjusted_over_their_page_and_over_all(papers, measured):
    judged = judge(claim(), [measured(UP, THEIRS)])
    unrun = judge(claim(), [measured((), ())])
    judgements = [replace(judged, p=p) for p in (0.01, 0.02, 0.03)]
    first_page, second_page = adjust(
        [page_of(papers, "table9", judgements[0], unrun), page_of(papers, "looker", *judgements[1:])]
    )
    assert [j.holm for j in first_page.judged] == [(pytest.approx(0.01), pytest.approx(0.03)), (None, None)]
    assert [j.holm for j in second_page.judged] == [
        (pytest.approx(0.04), pytest.approx(0.04)),
        (pytest.approx(0.04), pytest.approx(0.04)),
    ]
    assert [cell.text for cell in claims_table(second_page.claims, 1).rows[0][-3:]] == ["0.020", "0.040", "0.040"]
    (alone,) = adjust([page_of(papers, "table9", *judgements)], over_all=False)
    assert [j.holm[1] for j in alone.judged] == [None] * 3


def test_a_claim_is_judged_under_each_reading(measured):
    made = measured(UP, THEIRS)
    made.results["fedavg-equal"] = {s: result("fedavg", s, curve=(v,)) for s, v in enumerate(UP)}
    made = replace(made, cell=replace(made.cell, arms={**made.cell.arms, "fedavg-equal": made.cell.arms["fedavg"]}))
    read = claim(readings=(ReadingTable(name="at equal steps", than="fedavg-equal"),), first_reading="by rounds")
    first, second = judge_readings(read, [made])
    assert [(j.reading, j.verdict) for j in (first, second)] == [
        ("by rounds", "supported"),
        ("at equal steps", "inconclusive"),
    ]
    assert second.claim.than == "fedavg-equal"
    table = claims_table([(first, second)], 1)
    assert [row[2].text for row in table.rows] == ["by rounds", "at equal steps"]
    assert [row[0].text for row in table.rows] == ["1", ""]


def test_two_seeds_have_no_tails(measured):
    judged = judge(claim(), [measured(UP[:2], THEIRS[:2])])
    assert compute_tails(claim(), judged.overall) is None
