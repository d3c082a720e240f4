"""Verdicts and p-values on made-up results, by hand."""

from dataclasses import replace

import pytest
from scipy.stats import sem, ttest_1samp

from fedmutual_papers.claims import adjust_by_holm, combine_tails, judge, judge_readings, pool
from fedmutual_papers.experiment_files import Claim, read_experiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.measures import MEASURES, find_step
from fedmutual_papers.pages import Page, adjust
from fedmutual_papers.plan import Scale
from fedmutual_papers.prose import describe_verdict as describe_adjusted
from fedmutual_papers.prose import say
from fedmutual_papers.tables import make_claims_table, make_verdicts_table
from made_results import result

pytestmark = pytest.mark.long

FILLER = (0.0981, 0.4137, 0.7222, 0.8515, 0.8819, 0.8991)  # rounds before the last, of whole images of 10,000
THEIRS = (0.9101, 0.9127, 0.9096)
UP, DOWN, LEVEL, NONE = (0.9312, 0.9344, 0.9327), (0.8801, 0.8827, 0.8796), (0.9008, 0.9143, 0.9111), ()  # against THEIRS
SIX = (0.8, 0.82, 0.81, 0.8, 0.8, 0.8), (0.7, 0.72, 0.71, 0.7, 0.7, 0.7)  # ten points in each of six seeds


def describe_verdict(judged, decimals):
    """Return the verdict of a family of one claim."""
    return describe_adjusted(replace(judged, adjusted=judged.p), decimals)


def fill_look(values):
    """Return three numbers as those of five seeds, the fewest that decide."""
    return (*values, *values[:2]) if len(values) == 3 else values


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
    """Make a look at the cell with these accuracies a seed, of 10,000 test images, after so many of its rounds."""

    def make(ours, theirs=THEIRS, rounds=None, row="IID", name="digits/iid", before=FILLER, fell=(), **more):
        arms = {"fml": ours, "fedavg": theirs if ours else ()}
        results = {
            arm: {seed: result(arm, seed, curve=(*before, v), **more) for seed, v in enumerate(fill_look(values))}
            for arm, values in arms.items()
        }
        for arm, seed in fell:
            results[arm][seed] = result(arm, seed, failed="client '0' diverged", curves={}, clients={})
        about = cell.about.model_copy(update={"row": row})
        return MeasuredCell(replace(cell, about=about, name=name), Scale(rounds), results)

    return make


@pytest.fixture
def clients(measured):
    """Make a cell in which client i gains gains[i] by FML over FedAvg, in each of five seeds."""

    def make(*gains):
        cell = measured(NONE)
        for seed in range(5):
            ours = {str(i): (10, 0.5003 + gain) for i, gain in enumerate(gains)}  # of test sets of 10,000
            cell.results["fml"][seed] = result("fml", seed, clients=ours)
            cell.results["fedavg"][seed] = result("fedavg", seed, clients=dict.fromkeys(ours, (10, 0.5003)))
        return cell

    return make


EACH = {"measure": "own_validation", "per": "client"}


@pytest.mark.parametrize(("more", "ours", "theirs", "message"), [
    ({}, (0.80, 0.82, 0.81), (0.70, 0.72, 0.71), "supported"),
    ({"sign": "less"}, (0.80, 0.82, 0.81), (0.70, 0.72, 0.71), "contradicted"),
    ({}, (0.8, 0.7, 0.7), (0.7, 0.8, 0.7), "inconclusive"),  # differences 0.1, -0.1 and 0.0
    ({}, (0.8, 0.82), (0.7, 0.72), "inconclusive"),  # two seeds may agree by chance
    ({"sign": "same", "margin": 0.01}, (0.800, 0.801, 0.802), (0.801, 0.802, 0.801), "supported"),
    ({"sign": "same", "margin": 0.01}, (0.90, 0.91, 0.92), (0.5, 0.51, 0.52), "contradicted"),
    ({"sign": "same", "margin": 0.01}, (0.7, 0.9), (0.8, 0.8), "inconclusive"),
    ({"sign": "same", "margin": 0.01}, (0.8, 0.8), (0.8, 0.8), "inconclusive"),
    ({"sign": "same", "margin": 0.01}, THEIRS, THEIRS, "supported"),
    ({"sign": "same", "margin": 1e-4}, THEIRS, THEIRS, "inconclusive"),  # that is one image
    ({}, NONE, NONE, "not run"),
])  # fmt: skip
def test_an_interval_decides(measured, more, ours, theirs, message):
    judged = judge(claim(**more), [measured(ours, theirs)])
    assert judged.verdict == message
    assert (describe_verdict(judged, 1) == "not run") == (message == "not run")


def test_the_interval_by_hand(measured):
    # differences 0.1 and 0.3: mean 0.2, s = 0.1414, t(0.975, 1) = 12.706, half = 12.706 * 0.1414 / sqrt(2) = 1.2706
    judged = judge(claim(), [measured((0.6, 0.8, 0.1), (0.5, 0.5))])  # the third seed has no pair
    assert (judged.overall.n, judged.overall.half) == (2, pytest.approx(1.2706, abs=1e-4))
    assert describe_verdict(judged, 1) == "inconclusive: +20.0 points (95 % interval −107.1 to +147.1, 2 seeds)"
    one = judge(claim(), [measured((0.9,), (0.1,))])
    assert describe_verdict(one, 1) == "inconclusive: +80.0 points (one seed, so no interval)"


def test_over_cells_the_mean_of_each_seed_counts(measured):
    cells = [measured((0.8, 0.9), (0.7, 0.7)), measured((0.5, 0.5), (0.5, 0.4)), measured(NONE)]  # seeds 0.05 and 0.15
    judged = judge(claim(), cells)
    assert judged.overall.mean == pytest.approx(0.1)
    assert [line.verdict for line in judged.lines] == ["inconclusive", "inconclusive", "not run"]
    assert describe_verdict(judged, 1).endswith("mean over 2 of 3 cells: 2 inconclusive")


def test_a_cell_of_one_seed_takes_no_interval_away(measured):
    better = measured((0.8, 0.82, 0.813), (0.7, 0.72, 0.713))
    judged = judge(claim(), [better, measured((0.5,), (0.5,), row="Non-IID"), measured(NONE)])
    assert (judged.verdict, judged.overall.n, judged.unpaired) == ("supported", 5, ("digits MLP, Non-IID",))
    assert describe_verdict(judged, 1) == (
        "supported: +10.0 points (equal in all 5 seeds), mean over 1 of 3 cells, without digits MLP, "
        "Non-IID (too few seeds in common): 1 supported and 1 inconclusive without adjustment"
    )


@pytest.mark.parametrize(("cells", "chosen", "seeds"), [
    ([], (), ()),
    ([{0}], (0,), (0,)),
    ([{0}, {0}, {0}], (0, 1, 2), (0,)),  # nowhere are there two
    ([{0, 1, 2}, {0}], (0,), (0, 1, 2)),
    ([{0}, {0}, {0}, {0, 1}], (3,), (0, 1)),  # one pair has an interval, four single ones have none
    ([{0, 1, 2}, {0, 1}], (0, 1), (0, 1)),  # four pairs, and three
    ([{0, 1, 2, 3, 4}, {0, 1}], (0,), (0, 1, 2, 3, 4)),
    ([{0, 1}, {1, 2}, {1, 2, 3}], (1, 2), (1, 2)),
    ([{0, 1}, {2, 3}], (0,), (0, 1)),  # as good: the first
    ([{0, 1, 2}] * 4 + [{0, 1, 2, 3, 4}], (0, 1, 2, 3, 4), (0, 1, 2)),  # many are not left out for one of more
])  # fmt: skip
def test_which_cells_are_pooled(cells, chosen, seeds):
    assert pool(cells) == (chosen, seeds)


@pytest.mark.parametrize(("gains", "message"), [
    ((0.1, 0.05), ("supported: +7.5 points", "mean over 2 of 2 clients: 2 supported without adjustment")),
    ((0.1, -0.05, 0.1), ("contradicted: +5.0 points", "3 clients: 2 supported and 1 contradicted without adjustment")),
    ((0.1, 0.0), ("inconclusive: +5.0 points", "2 of 2 clients: 1 supported and 1 inconclusive without adjustment")),
])  # fmt: skip
def test_a_claim_about_each_client_differs_from_a_claim_about_their_mean(clients, measured, gains, message):
    judged = judge(claim(**EACH), [clients(*gains)])
    judgement = describe_verdict(judged, 1)
    assert (judgement.startswith(message[0]), judgement.endswith(message[1])) == (True, True), judgement
    assert say("condition", judged) == "fml minus fedavg; supported if each client's difference is significantly above 0"
    assert judged.lines[1].title == "digits MLP, IID, client 1 (mlp)"
    # of a cell that was not run no client is known
    assert judge(claim(**EACH), [clients(0.1), measured(NONE)]).verdict == "inconclusive"


@pytest.mark.parametrize(("of", "cells", "message"), [
    ("mean", (UP, LEVEL, NONE), "supported"),
    ("mean", (DOWN, (0.85, 0.97, 0.91)), "inconclusive"),
    ("mean", (DOWN, DOWN, NONE), "contradicted"),
    ("mean", (UP, UP, DOWN), "inconclusive"),  # the mean is up, and one is down
    ("every", (UP, DOWN, DOWN), "contradicted"),
    ("every", (UP, UP, UP), "supported"),
    ("every", (UP, UP, LEVEL), "inconclusive"),
    ("every", (UP, UP, NONE), "inconclusive"),  # not all were run
    ("every", (UP, DOWN, NONE), "contradicted"),  # one is enough
    ("every", (NONE, NONE), "not run"),
    ("most", (UP, DOWN, DOWN), "contradicted"),
    ("most", (UP, UP, DOWN), "supported"),
    ("most", (UP, UP, NONE), "supported"),
    ("most", (UP, UP, NONE, NONE), "inconclusive"),  # half is not most
    ("most", (DOWN, DOWN, UP, UP), "inconclusive"),
    ("most", (DOWN, DOWN, LEVEL), "contradicted"),
])  # fmt: skip
def test_a_claim_about_every_or_most_cells_differs_from_a_claim_about_their_mean(measured, of, cells, message):
    judged = judge(claim(of=of), [measured(values) for values in cells])
    assert judged.verdict == message
    assert (judged.overall is None) == (message == "not run")  # every other message states the mean too


@pytest.mark.parametrize(("more", "end"), [
    ({"of": "every"}, "fml minus fedavg; supported if in every cell the difference is significantly above 0"),
    ({"of": "most"}, "supported if in more than half of all cells the difference is significantly above 0"),
    ({}, "difference is significantly above 0 for the mean and for at least one cell, and no cell contradicts the claim"),
    ({"sign": "same", "margin": 0.02},
     "significantly within ± 2.0 points for the mean and for at least one cell, and no cell contradicts the claim"),
])  # fmt: skip
def test_the_condition_is_described(measured, more, end):
    assert say("condition", judge(claim(**more), [measured(UP), measured(DOWN)])).endswith(end)


def test_what_lines_say_against_a_mean_counts(measured):
    """Of a claim that two are the same, and of a mean that denies."""
    same, mirrored = claim(sign="same", margin=0.015), tuple(2 * t - u for u, t in zip(UP, THEIRS, strict=True))
    assert judge(same, [measured(UP), measured(mirrored)]).verdict == "contradicted"
    judged = judge(same, [measured(UP), measured(THEIRS)])
    assert (judged.verdict, [line.verdict for line in judged.lines]) == ("inconclusive", ["contradicted", "supported"])
    assert describe_verdict(judged, 1).endswith("1 supported without adjustment, which contradict each other")
    fallen = tuple(v - 0.5 for v in THEIRS)  # the mean is certainly below 0, and one is up
    assert judge(claim(), [measured(UP), measured(fallen)]).verdict == "inconclusive"


def test_a_mean_decides_nothing_where_no_cell_does(measured):
    """Two cells whose seeds swing against each other: each undecided, their mean certain."""
    level = (0.92, 0.92, 0.9203)
    cells = [measured((0.93, 0.91, 0.95), level), measured((0.93, 0.95, 0.91), level, row="other")]
    judged = judge(claim(), cells)
    assert judged.overall.low > 0
    assert [judged.verdict, *(line.verdict for line in judged.lines)] == ["inconclusive"] * 3
    assert judge(claim(sign="less"), cells).verdict == "inconclusive"


def test_what_was_not_reached_took_one_round_more_at_least(measured):
    rounds = claim(measure="rounds_to:0.625", sign="less")
    reached = measured(
        (0.9, 0.9), (0.2, 0.3), before=(0.1,)
    )  # half is 0.625 of the cell's 0.8; round 2 of 2, against none: 3
    assert judge(rounds, [reached]).overall.mean == -1
    neither = judge(rounds, [measured((0.1, 0.1), (0.2, 0.3), before=(0.1,))])
    assert describe_verdict(neither, 1) == "inconclusive: no seed of the runs has the numbers"


@pytest.mark.parametrize(("fell", "more", "verdict", "end"), [
    ([("fml", 1), ("fml", 3)], {}, "inconclusive", "4 seeds); fml diverged in 2 of 6 runs"),  # it wins nothing
    ([("fedavg", 1)], {}, "supported", "5 seeds); fedavg diverged in 1 of 6 runs"),
    ([("fedavg", 1)], {"sign": "less"}, "inconclusive", "fedavg diverged in 1 of 6 runs"),  # a rival that diverged, neither
    ([("fedavg", 1)], {"sign": "same", "margin": 0.2}, "inconclusive", "fedavg diverged in 1 of 6 runs"),
    ([("fml", seed) for seed in range(6)], {}, "diverged", "diverged: fml diverged in 6 of 6 runs"),
])  # fmt: skip
def test_an_arm_that_diverged_in_a_seed_is_not_better(measured, fell, more, verdict, end):
    judged = judge(claim(**more), [measured(*SIX, fell=fell)])
    assert (judged.verdict, judged.lines[0].verdict) == (verdict, verdict)
    assert describe_verdict(judged, 1).endswith(end)
    assert make_verdicts_table(judged, 1).footnotes[0].endswith(end[-23:])


def test_all_diverged_is_not_not_run(measured, clients):
    fallen = measured(*SIX, fell=[("fml", seed) for seed in range(6)])
    judged = judge(claim(), [fallen, measured(NONE)])
    assert [line.verdict for line in judged.lines] == ["diverged", "not run"]
    assert [row[2].text for row in make_verdicts_table(judged, 1).rows] == ["diverged", "not run"]
    short = judge(claim(), [replace(fallen, scale=Scale(1))])
    assert describe_verdict(short, 1) == "diverged, shortened: fml diverged in 6 of 6 runs"
    judged = judge(claim(), [measured((0.8, 0.82, 0.81), (0.7, 0.72, 0.71)), fallen])  # it takes part in the verdict
    assert [line.verdict for line in judged.lines] == ["supported", "diverged"]
    assert describe_verdict(judged, 1) == (
        "inconclusive: +10.0 points (equal in all 5 seeds), only in digits MLP, IID, 1 of 2 cells; "
        "fml diverged in 6 of 11 runs"
    )
    made = clients(0.1, 0.05)
    made.results["fml"][2] = result("fml", 2, failed="client '0' diverged", curves={}, clients={})
    ending = "mean over 2 of 2 clients: 2 inconclusive; fml diverged in 1 of 5 runs"
    assert describe_verdict(judge(claim(**EACH), [made]), 1).endswith(ending)


@pytest.mark.parametrize(("more", "mean", "condition"), [
    ({"than": "fedavg@there"}, 0.2, "fml minus fedavg in there"),  # 0.9 - 0.6 and 0.8 - 0.7
    ({"less": "there"}, 0.7 + 0.4, "fml minus fedavg, minus this number in there"),  # 0.8, 0.6 here and -0.4, -0.4 there
    ({"than": "", "less": "there"}, 0.6, "fml, minus this number in there"),  # 0.9 - 0.2 and 0.8 - 0.3
])  # fmt: skip
def test_a_number_of_another_cell_is_taken_off(measured, more, mean, condition):
    here, there = measured((0.9, 0.8), (0.1, 0.2), name="here"), measured((0.2, 0.3), (0.6, 0.7), name="there")
    judged = judge(claim(cells="here", **more), [here, there])
    assert judged.overall.mean == pytest.approx(mean)
    assert say("condition", judged) == f"{condition}; supported if the difference is significantly above 0"
    assert judge(claim(than="fedavg@nowhere", cells="here"), [here, there]).verdict == "not run"
    other_scale = replace(there, scale=Scale(1))
    assert judge(claim(cells="here", **more), [here, other_scale]).verdict == "not run"


@pytest.mark.parametrize(("times", "sign", "message"), [
    (100, "more", "supported"), (1000, "more", "contradicted"), (1000, "less", "supported"),
])  # fmt: skip
def test_so_many_times(measured, times, sign, message):
    cell, clients = measured(NONE), {"a": (9, 0.5)}
    for seed in range(3):  # 200 up and 1, in a round: 200 times, whatever the seed
        for arm, up in (("fml", 400), ("fedavg", 2)):
            cell.results[arm][seed] = result(arm, seed, clients=clients, traffic={"up": up, "down": 0})
    judged = judge(claim(measure="bytes_up", times=times, sign=sign), [cell])
    assert describe_verdict(judged, 1) == f"{message}: 200.0 times (equal in all 3 seeds)"
    side = "above" if sign == "more" else "below"
    assert say("condition", judged) == f"fml divided by fedavg; supported if the ratio is significantly {side} {times:,}"
    cell.results["fedavg"][1] = result("fedavg", 1, clients=clients, traffic={"up": 0, "down": 0})
    assert judge(claim(measure="bytes_up", times=times), [cell]).overall.n == 2  # nothing is so many times nothing


def test_of_domains_the_best_round_that_validation_chose_counts(measured):
    cell, last = measured(NONE), dict.fromkeys("ab", 0.1)
    for seed in range(2):
        for arm, best in (("fml", {"a": 0.9, "b": 0.7}), ("fedavg", {"a": 0.8, "b": 0.4})):
            clients = dict.fromkeys(best, (9, 0.5))
            cell.results[arm][seed] = result(arm, seed, clients=clients, transfer={"acc": {"last": last, "best": best}})
    assert judge(claim(measure="acc"), [cell]).overall.mean == pytest.approx(0.2)
    lines = judge(claim(measure="acc", per="client"), [cell]).lines
    assert [line.difference.mean for line in lines] == pytest.approx([0.1, 0.3])
    assert judge(claim(measure="acc", at="last", than_at="last"), [cell]).overall.mean == 0


LEVEL_CURVE, RISING_CURVE = (0.92,) * 59, (0.85,) * 35 + (0.92,) * 24  # before the last round


@pytest.mark.parametrize(("rounds", "before", "message"), [
    (None, FILLER, "supported"),
    (199, FILLER, "too short"),
    (3, FILLER, "too short"),  # 3 of 200, and 1 of 57
    (60, LEVEL_CURVE, "supported"),  # its last 25 rounds are as good as the 25 before
    (60, RISING_CURVE, "too short"),  # and here 7 points better
])  # fmt: skip
def test_no_verdict_before_every_arm_ran_all_rounds_or_reached_a_plateau(measured, rounds, before, message):
    judged = judge(claim(), [measured(UP, rounds=rounds, before=before)])
    assert (judged.verdict, judged.lines[0].verdict) == (message, message)
    one_round = 0.02174  # the mean of ten rounds has a tenth of this difference, for nine rounds are equal
    assert judged.overall.mean == pytest.approx(one_round if before is FILLER else one_round / 10, abs=1e-6)
    assert (judged.p is None) == (message == "too short")
    if rounds == 3:
        start = "too short (3 of 200 rounds; shortened: 1 of 57 rounds): +2.2"
        assert describe_verdict(judged, 1).startswith(start)
    changed = replace(measured(UP, before=LEVEL_CURVE), scale=Scale(60, (("optimizer.lr", 0.3),)))
    assert judge(claim(), [changed]).verdict == "too short"  # a changed key is no plateau of the paper's setting


def test_the_second_look_is_for_claims_that_the_first_does_not_decide(papers, measured):
    """Of ten seeds the first five decide, or else all ten; six to nine seeds complete no second look."""
    clear = tuple(t + 0.02 + 0.001 * (n % 3) for n, t in enumerate(THEIRS * 4))[:10]
    unclear = (*(t + 0.02 * (-1) ** n for n, t in enumerate((THEIRS * 2)[:5])), *clear[5:])
    made = read_experiment(papers, "table9")
    for ours, seeds, looks in ((clear, 10, 5), (unclear, 10, 10), (clear, 9, 5), (clear, 4, 4)):
        cell = measured(ours[:seeds], (THEIRS * 4)[:seeds])
        judged = judge(claim(), [cell])
        (page,) = adjust([Page(made, [cell], ((judged,),))])
        assert page.judged[0].overall.n == looks
        assert (page.judged[0].standing == "supported") == (ours is clear and seeds >= 5)


def test_one_arm_alone_may_be_too_short(papers, newcomer, dependent_arm):
    """An arm that starts from a federation is as short as that."""
    newcomer.write_text(newcomer.read_text().replace("rounds = 2", "rounds = 20") + dependent_arm)
    (cell,) = read_experiment(papers, "newcomer").cells
    scale = Scale(8)  # of the federation's 20; the newcomer's own round is whole
    assert (scale.count_rounds(cell, "scratch"), scale.count_rounds(cell, "given")) == ((1, 1), (8, 20))
    results = {arm: {s: result(arm, s, curve=(v,)) for s, v in enumerate(UP)} for arm in ("given", "scratch")}
    about = claim(arm="given", than="scratch", measure="own_validation")
    assert judge(about, [MeasuredCell(cell, scale, results)]).verdict == "too short"
    assert judge(about, [MeasuredCell(cell, Scale(), results)]).verdict == "inconclusive"


@pytest.mark.parametrize(("of", "shorts", "message"), [
    ("every", (False, True), "inconclusive"), ("every", (False, False), "supported"),
    ("most", (False, True, True), "inconclusive"), ("most", (True, True), "too short"),
])  # fmt: skip
def test_a_cell_that_is_too_short_supports_nothing(measured, of, shorts, message):
    cells = [measured(UP, rounds=20 if short else None) for short in shorts]
    assert judge(claim(of=of), cells).verdict == message


def test_cells_of_different_length_are_not_averaged(measured):
    full, half = measured(UP), measured(THEIRS, UP, 150, "half")
    judged = judge(claim(), [full, half, full])
    assert judged.overall.mean == pytest.approx(0.02174, abs=1e-6)  # of the two whole ones alone
    assert (judged.verdict, judged.other_lengths) == ("supported", ("digits MLP, half",))  # which is too short
    mean = describe_verdict(judged, 1).split("mean over ")[1]
    assert mean.startswith("2 of 3 cells, without digits MLP, half (another number of rounds)")
    level = measured(THEIRS, UP, 60, "level", before=LEVEL_CURVE)  # its curves no longer rise, so it counts as a whole one
    both = judge(claim(), [full, level, half])
    assert both.other_lengths == ("digits MLP, half",)
    assert both.overall.mean == pytest.approx((0.02174 - 0.02174 / 10) / 2, abs=1e-6)  # 9 of its last 10 rounds are equal
    changed = replace(half, scale=Scale(None, (("optimizer.lr", 0.3),)))
    assert judge(claim(), [full, changed]).other_lengths == ("digits MLP, half",)


@pytest.mark.parametrize(("images", "message"), [
    ((1, 1, 1), "inconclusive"),  # three seeds ahead by one image in 10,000
    ((-1, -1, -1), "inconclusive"),
    ((2, 2, 2), "supported"),  # all agree on more than one image
    ((1, 3, 0), "inconclusive"),
    ((9, 10, 9), "supported"),
])  # fmt: skip
def test_three_seeds_ahead_by_one_image_are_a_tie(measured, images, message):
    ours = tuple(v + n / 10_000 for v, n in zip(THEIRS, images, strict=True))
    assert judge(claim(), [measured(ours)]).verdict == message
    assert judge(claim(), [measured(ours), measured(ours, row="other")]).verdict == message


def test_one_image_of_one_node_is_a_tie_whatever_was_rounded(cell):
    """Nodes of 600 test images, kept with 5 decimals: equal differences are told apart by rounding alone."""
    results = {"fml": {}, "fedavg": {}}
    for seed, right in enumerate((411, 433, 500, 411, 433)):
        for arm, more in (("fml", 1), ("fedavg", 0)):
            ends = {str(i): round((right + 7 * i + (more if i == 0 else 0)) / 600, 5) for i in range(4)}
            results[arm][seed] = result(arm, seed, transfer={"acc": {"last": ends, "best": ends}})
    judged = judge(claim(measure="acc"), [MeasuredCell(cell, Scale(), results)])
    assert judged.overall.mean == pytest.approx(1 / 2400, abs=1e-5)
    assert (judged.verdict, judged.p) == ("inconclusive", 1.0)
    assert MEASURES["acc"].grain(list(results["fml"].values()), False) == pytest.approx(1 / 2400)


def test_the_step_of_an_accuracy():
    assert find_step([0.5, 0.25]) == 1 / 4
    assert find_step(round(n / 600, 5) for n in (311, 477, 502, 599)) == pytest.approx(1 / 600)
    assert find_step(FILLER) == pytest.approx(1e-4)
    assert find_step([]) == 0.0


def test_the_p_value_is_students(measured):
    differences = [a - b for a, b in zip(fill_look(UP), fill_look(THEIRS), strict=True)]
    expected = ttest_1samp(differences, 0).pvalue
    judged = judge(claim(), [measured(UP)])
    assert judged.p == pytest.approx(expected)
    assert judge(claim(sign="less"), [measured(UP)]).p == pytest.approx(expected)
    assert judge(claim(), [measured(fill_look(UP)[:4])]).p is None  # fewer seeds than a look has no verdict
    # by hand: t(0.9855, 4) = 3.3338 and t(0.8, 4) = 0.9410, times the standard error
    assert judged.detectable == pytest.approx((3.3338 + 0.9410) * sem(differences), rel=1e-3)
    judged = judge(claim(sign="same", margin=0.002), [measured((0.9105, 0.9120, 0.9102))])
    near = [a - b for a, b in zip(fill_look((0.9105, 0.9120, 0.9102)), fill_look(THEIRS), strict=True)]
    sides = ((-0.002, "greater"), (0.002, "less"))  # the larger of two tests counts
    inside = max(ttest_1samp(near, bound, alternative=way).pvalue for bound, way in sides)
    assert judged.p == pytest.approx(2 * inside)
    assert (judged.verdict == "supported") == (judged.p < 0.029)


def test_of_several_cells_the_p_value_is_that_so_many_agree():
    lines = [(0.001, 0.999), (0.01, 0.99), (0.03, 0.97)]
    assert combine_tails(lines, 3, 1)[0] == 0.03  # all three: the largest
    assert combine_tails(lines, 1, 1)[0] == pytest.approx(0.003)  # any one: Bonferroni's
    assert combine_tails(lines, 2, 2)[0] == pytest.approx(0.02)  # two of three: the second, times two
    assert combine_tails([*lines, None], 4, 1)[0] == 1.0  # a cell that was not run


@pytest.mark.parametrize(("p_values", "adjusted"), [
    # 5 * 0.01, 4 * 0.02, 3 * 0.03, 2 * 0.04 and 1 * 0.05, none smaller than the one before
    ([0.01, 0.02, 0.03, 0.04, 0.05], [0.05, 0.08, 0.09, 0.09, 0.09]),
    ([0.6, 0.01, 0.02], [0.6, 0.03, 0.04]),  # 3 * 0.01, 2 * 0.02 and 1 * 0.6, in the order that they were given
    ([0.5, 0.9], [1.0, 1.0]),
    ([], []),
])  # fmt: skip
def test_holm_by_hand(p_values, adjusted):
    assert adjust_by_holm(p_values, 0) == pytest.approx(adjusted)
    assert adjust_by_holm([0.01, 0.02], 5) == pytest.approx([0.05, 0.08])  # 5 * 0.01 and 4 * 0.02: three have no p-value


def test_the_size_of_a_family_is_that_of_its_files(papers, measured):
    """Two experiments in one family with three claims, of which one has no p-value; of a table's part p counts twice."""
    judged, unrun = judge(claim(), [measured(UP)]), judge(claim(), [measured(NONE)])
    made = [read_experiment(papers, id) for id in ("table9", "looker")]
    for family, expected in (("", [0.01, 0.02, 0.08]), ("both", [0.03, 0.04, 0.08])):
        first, second = (
            replace(e, index=e.index.model_copy(update={"family": family, "claims": (claim(),) * n}))
            for e, n in zip(made, (1, 2), strict=True)
        )
        parts = tuple(replace(judged, p=p, part=part, parts=2) for p, part in ((0.01, "one"), (0.04, "two")))
        pages = [Page(first, [], ((replace(judged, p=0.01),),)), Page(second, [], ((unrun,), parts))]
        one, two = adjust(pages)
        assert [j.adjusted for j in one.judged] == [pytest.approx(expected[0])]
        assert [j.adjusted for j in two.judged] == [None, pytest.approx(0.04), pytest.approx(0.16)]
        assert [cell.text for cell in make_claims_table(two.claims, 1).rows[1][-2:]] == ["0.010", "0.040"]


def test_a_claim_is_judged_under_each_reading(measured):
    made = measured(UP)
    made.results["fedavg-equal"] = {s: result("fedavg", s, curve=(v,)) for s, v in enumerate(UP)}
    made = replace(made, cell=replace(made.cell, arms={**made.cell.arms, "fedavg-equal": made.cell.arms["fedavg"]}))
    read = claim(readings=({"name": "at equal steps", "than": "fedavg-equal"},), first_reading="by rounds")
    first, second = judge_readings(read, [made])
    assert [j.verdict for j in (first, second)] == ["supported", "inconclusive"]
    assert second.claim.than == "fedavg-equal"
    rows = make_claims_table([(first, second)], 1).rows
    assert [(row[0].text, row[2].text) for row in rows] == [("1", "by rounds"), ("", "at equal steps")]


def test_a_claim_about_a_table_is_judged_for_each_column(papers, measured):
    """A column without all its cells is not run, also if its first look has decided; one column alone is the table."""
    clear = tuple(v + 0.02 + 0.001 * (n % 3) for n, v in enumerate(THEIRS * 4))[:10]

    def put(column, row, ours):
        of_cell = measured(ours, (THEIRS * 4)[: len(ours)], row=row, name=f"{column}/{row}")
        about = of_cell.cell.about.model_copy(update={"column": column})
        return replace(of_cell, cell=replace(of_cell.cell, about=about))

    cells = [put("MLP", "IID", clear), put("LeNet5", "IID", clear), put("LeNet5", "other", NONE), put("CNN1", "IID", NONE)]
    judged = judge_readings(claim(by="column"), cells)
    assert [(j.part, j.parts, j.verdict) for j in judged] == [
        ("MLP", 4, "supported"),
        ("LeNet5", 4, "not run"),
        ("", 4, "not run"),
    ]
    (page,) = adjust([Page(read_experiment(papers, "table9"), cells, (judged,))])
    assert [j.standing for j in page.judged] == ["supported", "not run", "not run"]
    assert page.judged[0].adjusted == pytest.approx(4 * judged[0].first.p)
    (alone,) = judge_readings(claim(by="column"), cells[-1:])
    assert (alone.part, alone.parts, alone.verdict) == ("", 1, "not run")
