"""Verdicts on made-up results, by hand."""

from dataclasses import replace

import pytest

from fedmutual_papers.claims import judge, pool
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.plan import Scale
from fedmutual_papers.prose import describe_condition, describe_verdict
from fedmutual_papers.result import Ends, Traffic
from fedmutual_papers.schema import Claim
from fedmutual_papers.tables import make_verdicts_table
from made_results import result

pytestmark = pytest.mark.long

LESS, MORE = {"sign": "less"}, {"sign": "more"}


def claim(**more):
    return Claim(text="It is better.", **{"measure": "global_test", "arm": "fml", "than": "fedavg", **more})


@pytest.fixture
def measured(papers):
    cell = read_experiment(papers, "table9").cells[0]

    def make(ours, theirs, **more):
        arms = {"fml": ours, "fedavg": theirs}
        results = {
            arm: {seed: result(arm, seed, curve=(0.1, v), **more) for seed, v in enumerate(values)}
            for arm, values in arms.items()
        }
        return MeasuredCell(cell, Scale(), results)

    return make


def test_an_interval_decides(measured):
    better = judge(claim(), [measured((0.80, 0.82, 0.81), (0.70, 0.72, 0.71))])
    assert better.verdict == "supported"
    assert better.overall.mean == pytest.approx(0.1)
    assert judge(claim(sign="less"), [measured((0.80, 0.82, 0.81), (0.70, 0.72, 0.71))]).verdict == "contradicted"
    # differences 0.1, -0.1 and 0.0: mean 0, and the interval holds 0
    assert judge(claim(), [measured((0.8, 0.7, 0.7), (0.7, 0.8, 0.7))]).verdict == "inconclusive"


def test_one_seed_decides_nothing(measured):
    judged = judge(claim(), [measured((0.9,), (0.1,))])
    assert judged.verdict == "inconclusive"
    assert describe_verdict(judged, 1) == "inconclusive: +80.0 points (one seed, so no interval)"


def test_only_seeds_that_both_have_are_paired(measured):
    judged = judge(claim(), [measured((0.9, 0.8, 0.1), (0.5, 0.5))])
    assert judged.overall.n == 2
    assert judged.overall.mean == pytest.approx(0.35)


def test_the_interval_by_hand(measured):
    # differences 0.1 and 0.3: mean 0.2, s = 0.1414, t(0.975, 1) = 12.706, half = 12.706 * 0.1414 / sqrt(2) = 1.2706
    judged = judge(claim(), [measured((0.6, 0.8), (0.5, 0.5))])
    assert judged.overall.half == pytest.approx(1.2706, abs=1e-4)
    assert describe_verdict(judged, 1) == "inconclusive: +20.0 points (95 % interval −107.1 to +147.1, 2 seeds)"


def test_over_cells_the_mean_of_each_seed_counts(measured):
    one, other = (
        measured((0.8, 0.9), (0.7, 0.7)),
        measured((0.5, 0.5), (0.5, 0.4)),
    )  # 0.1, 0.2 and 0.0, 0.1: seeds 0.05, 0.15
    judged = judge(claim(), [one, other, measured((), ())])
    assert judged.overall.mean == pytest.approx(0.1)
    assert [line.verdict for line in judged.lines] == ["inconclusive", "inconclusive", "not run"]
    assert describe_verdict(judged, 1).endswith("mean over 2 of 3 cells: 2 inconclusive")


def other(measured, name, ours, theirs):
    """A cell of another name."""
    made = measured(ours, theirs)
    about = made.cell.about.model_copy(update={"row": name})
    return replace(made, cell=replace(made.cell, about=about))


def test_a_cell_of_one_seed_takes_no_interval_away(measured):
    better = measured((0.8, 0.82, 0.813), (0.7, 0.72, 0.713))
    judged = judge(claim(), [better, other(measured, "Non-IID", (0.5,), (0.5,)), measured((), ())])
    assert (judged.verdict, judged.overall.n, judged.unpaired) == ("supported", 3, ("digits MLP, Non-IID",))
    assert describe_verdict(judged, 1) == (
        "supported: +10.0 points (95 % interval +10.0 to +10.0, 3 seeds), mean over 1 of 3 cells, without digits MLP, "
        "Non-IID (no common seeds): 1 supported and 1 inconclusive"
    )


def test_many_cells_of_fewer_seeds_are_not_left_out_for_one_of_more(measured):
    cells = [measured((0.803,) * 3, (0.703,) * 3) for _ in range(4)] + [measured((0.803,) * 5, (0.703,) * 5)]
    judged = judge(claim(), cells)
    assert (judged.overall.n, judged.unpaired) == (3, ())
    assert "mean over 5 of 5 cells: 5 supported" in describe_verdict(judged, 1)


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
])  # fmt: skip
def test_which_cells_are_pooled(cells, chosen, seeds):
    assert pool(cells) == (chosen, seeds)


def test_the_same_means_within_the_margin(measured):
    near, far = measured((0.800, 0.801, 0.802), (0.801, 0.802, 0.801)), measured((0.90, 0.91, 0.92), (0.5, 0.51, 0.52))
    same = claim(sign="same", margin=0.01)
    assert judge(same, [near]).verdict == "supported"
    assert judge(same, [far]).verdict == "contradicted"
    assert judge(same, [measured((0.7, 0.9), (0.8, 0.8))]).verdict == "inconclusive"
    assert judge(same, [measured((0.8, 0.8), (0.8, 0.8))]).verdict == "inconclusive"  # two seeds may agree by chance


def test_each_client_against_its_own(measured):
    made = measured((0.5, 0.5), (0.5, 0.5), clients={"0": (10, 0.9), "1": (10, 0.7)})
    judged = judge(claim(measure="own_validation", per="client"), [made])
    assert [line.title for line in judged.lines] == ["digits MLP, IID, client 0 (mlp)", "digits MLP, IID, client 1 (mlp)"]


def of_clients(measured, gains):
    """A cell in which client i gains gains[i] by FML over FedAvg, in each of three seeds."""
    cell = measured((), ())
    for seed in range(3):
        ours = {str(i): (10, 0.5003 + gain) for i, gain in enumerate(gains)}  # of test sets of 10,000
        cell.results["fml"][seed] = result("fml", seed, clients=ours)
        cell.results["fedavg"][seed] = result("fedavg", seed, clients=dict.fromkeys(ours, (10, 0.5003)))
    return cell


@pytest.mark.parametrize(("gains", "message"), [
    ((0.1, 0.05), ("supported: +7.5 points", "mean over 2 of 2 clients: 2 supported")),
    ((0.1, -0.05, 0.1), ("contradicted: +5.0 points", "mean over 3 of 3 clients: 2 supported and 1 contradicted")),
    ((0.1, 0.0), ("inconclusive: +5.0 points", "mean over 2 of 2 clients: 1 supported and 1 inconclusive")),
])  # fmt: skip
def test_a_claim_about_each_client_differs_from_a_claim_about_their_mean(measured, gains, message):
    judged = judge(claim(measure="own_validation", per="client"), [of_clients(measured, gains)])
    judgement = describe_verdict(judged, 1)
    assert (judgement.startswith(message[0]), judgement.endswith(message[1])) == (True, True), judgement
    assert describe_condition(judged) == "fml minus fedavg; supported if each client's interval lies above 0"


UP, DOWN, LEVEL, NONE = (0.8, 0.82, 0.81), (0.67, 0.69, 0.68), (0.7, 0.75, 0.7), ()  # against these:


THEIRS = (0.7, 0.72, 0.71)


def cells_of(measured, *ours):
    return [measured(values, THEIRS if values else ()) for values in ours]


@pytest.mark.parametrize(("of", "cells", "message"), [
    ("mean", (UP, LEVEL, NONE), "supported"),
    ("mean", (DOWN, LEVEL), "inconclusive"),
    ("mean", (DOWN, DOWN, NONE), "contradicted"),
    ("mean", (UP, DOWN, DOWN), "inconclusive"),  # ten points up, three down, three down: the mean is up, and most are down
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
    judged = judge(claim(of=of), cells_of(measured, *cells))
    assert judged.verdict == message
    assert (judged.overall is None) == (message == "not run")  # every other message states the mean too


def test_the_conditions_of_every_and_most_are_described(measured):
    cells = cells_of(measured, UP, DOWN, DOWN)
    assert (
        describe_condition(judge(claim(of="every"), cells))
        == "fml minus fedavg; supported if in every cell the interval lies above 0"
    )
    most = judge(claim(of="most"), cells)
    assert (
        describe_condition(most) == "fml minus fedavg; supported if in more than half of all cells the interval lies above 0"
    )
    assert describe_verdict(most, 1).endswith("mean over 3 of 3 cells: 2 contradicted and 1 supported")
    mean = describe_condition(judge(claim(), cells))
    assert mean.endswith("no cell contradicts the claim")


def test_what_lines_say_against_a_mean_counts(measured):
    """Of a claim that two are the same, of one of so many times, of clients, and of a mean that denies."""
    equality_claim = claim(sign="same", margin=0.02)
    assert (
        judge(equality_claim, cells_of(measured, UP, tuple(2 * t - u for u, t in zip(UP, THEIRS, strict=True)))).verdict
        == "contradicted"
    )
    judged = judge(equality_claim, cells_of(measured, UP, THEIRS))
    assert (judged.verdict, [line.verdict for line in judged.lines]) == ("inconclusive", ["contradicted", "supported"])
    assert describe_verdict(judged, 1).endswith("1 contradicted and 1 supported, which contradict each other")
    assert describe_condition(judged).endswith(
        "supported if the interval lies within ± 2.0 points for the mean and for at least one cell, and no cell contradicts "
        "the claim"
    )
    fallen = tuple(v - 0.5 for v in THEIRS)
    assert (
        judge(claim(), cells_of(measured, UP, fallen)).verdict == "inconclusive"
    )  # the mean is certainly below 0, and one is up
    each = judge(claim(measure="own_validation", per="client", of="mean"), [of_clients(measured, (0.1, -0.05))])
    assert each.verdict == "inconclusive"
    assert describe_condition(each).endswith(
        "the interval lies above 0 for the mean and for at least one client, and no client contradicts the claim"
    )


def test_of_a_cell_that_was_not_run_no_client_is_known(measured):
    judged = judge(claim(measure="own_validation", per="client"), [of_clients(measured, (0.1, 0.05)), measured((), ())])
    assert judged.verdict == "inconclusive"


def test_what_was_not_reached_took_one_round_more_at_least(measured):
    rounds = claim(measure="rounds_to:1", sign="less")
    reached = measured((0.9, 0.9), (0.2, 0.3), target=0.5)  # round 2 of 2, against none: 3
    assert judge(rounds, [reached]).overall.mean == -1
    neither = judge(rounds, [measured((0.1, 0.1), (0.2, 0.3), target=0.5)])
    assert describe_verdict(neither, 1) == "inconclusive: no seed of the runs has the numbers"


def test_a_diverged_run_has_no_say(measured):
    made = measured((0.9, 0.8), (0.5, 0.5))
    made.results["fml"][1] = result("fml", 1, failed="client '0' diverged", curves={})
    assert judge(claim(), [made]).overall.n == 1


def fell(measured, arm, *seeds):
    """Return the cell with a diverged run of an arm for some seeds."""
    for seed in seeds:
        measured.results[arm][seed] = result(arm, seed, failed="client '0' diverged", curves={}, clients={})
    return measured


@pytest.fixture
def four_seeds(measured):
    """A cell in which FML gains ten points in each of four seeds."""
    return measured((0.8, 0.82, 0.81, 0.8), (0.7, 0.72, 0.71, 0.7))


def test_an_arm_that_diverged_in_a_seed_wins_nothing(four_seeds):
    judged = judge(claim(), [fell(four_seeds, "fml", 1, 3)])
    assert (judged.verdict, judged.lines[0].verdict) == ("inconclusive", "inconclusive")
    assert describe_verdict(judged, 1) == (
        "inconclusive: +10.0 points (95 % interval +10.0 to +10.0, 2 seeds); fml diverged in 2 of 4 runs"
    )
    assert make_verdicts_table(judged, 1).footnotes == ("fml diverged in 2 of 4 runs",)


def test_a_diverged_rival_is_reported_and_wins_no_comparison(four_seeds):
    fell(four_seeds, "fedavg", 1)
    assert describe_verdict(judge(claim(), [four_seeds]), 1).endswith("3 seeds); fedavg diverged in 1 of 4 runs")
    assert judge(claim(), [four_seeds]).verdict == "supported"
    assert judge(claim(sign="less"), [four_seeds]).verdict == "inconclusive"
    assert (
        judge(claim(sign="same", margin=0.2), [four_seeds]).verdict == "inconclusive"
    )  # one diverged where the other did not


def test_all_diverged_is_not_not_run(measured, four_seeds):
    judged = judge(claim(), [fell(four_seeds, "fml", 0, 1, 2, 3), measured((), ())])
    assert [line.verdict for line in judged.lines] == ["diverged", "not run"]
    assert (judged.verdict, describe_verdict(judged, 1)) == ("diverged", "diverged: fml diverged in 4 of 4 runs")
    assert [row[2].text for row in make_verdicts_table(judged, 1).rows] == ["diverged", "not run"]
    short = MeasuredCell(four_seeds.cell, Scale(1), four_seeds.results)
    assert describe_verdict(judge(claim(), [short]), 1) == "diverged, shortened: fml diverged in 4 of 4 runs"


def test_a_cell_in_which_all_diverged_takes_part_in_the_verdict(measured, four_seeds):
    better = measured((0.8, 0.82, 0.81), (0.7, 0.72, 0.71))
    judged = judge(claim(), [better, fell(four_seeds, "fml", 0, 1, 2, 3)])
    assert [line.verdict for line in judged.lines] == ["supported", "diverged"]
    assert describe_verdict(judged, 1) == (
        "inconclusive: +10.0 points (95 % interval +10.0 to +10.0, 3 seeds), only in digits MLP, IID, 1 of 2 cells; "
        "fml diverged in 4 of 7 runs"
    )


def test_clients_of_a_run_that_diverged_are_not_supported(measured):
    made = fell(of_clients(measured, (0.1, 0.05)), "fml", 2)
    judged = judge(claim(measure="own_validation", per="client"), [made])
    assert describe_verdict(judged, 1).endswith("mean over 2 of 2 clients: 2 inconclusive; fml diverged in 1 of 3 runs")


def named(measured, name):
    """Return the cell with another name."""
    return replace(measured, cell=replace(measured.cell, name=name))


def test_an_arm_may_be_held_against_one_of_another_cell(measured):
    first_cell, second_cell = (
        named(measured((0.9, 0.8), (0.1, 0.1)), "here"),
        named(measured((0.1, 0.1), (0.6, 0.7)), "there"),
    )
    judged = judge(claim(than="fedavg@there", cells="here"), [first_cell, second_cell])  # 0.9 - 0.6 and 0.8 - 0.7
    assert judged.overall.mean == pytest.approx(0.2)
    assert describe_condition(judged) == "fml minus fedavg in there; supported if the interval lies above 0"
    assert judge(claim(than="fedavg@nowhere", cells="here"), [first_cell, second_cell]).verdict == "not run"


def test_a_difference_less_the_same_in_another_cell(measured):
    # leads 0.3, 0.2 here and 0.1, 0.1 there: 0.2 and 0.1 more
    first_cell, second_cell = (
        named(measured((0.9, 0.8), (0.6, 0.6)), "here"),
        named(measured((0.5, 0.5), (0.4, 0.4)), "there"),
    )
    judged = judge(claim(cells="here", less="there"), [first_cell, second_cell])
    assert judged.overall.mean == pytest.approx(0.15)
    assert (
        describe_condition(judged) == "fml minus fedavg, minus this number in there; supported if the interval lies above 0"
    )
    alone = judge(claim(than="", cells="here", less="there"), [first_cell, second_cell])  # 0.9 - 0.5 and 0.8 - 0.5
    assert alone.overall.mean == pytest.approx(0.35)
    assert describe_condition(alone) == "fml, minus this number in there; supported if the interval lies above 0"


def test_cells_of_other_scales_are_not_held_against_each_other(measured):
    first_cell, second_cell = (
        named(measured((0.9, 0.8), (0.6, 0.6)), "here"),
        named(measured((0.5, 0.5), (0.4, 0.4)), "there"),
    )
    short = replace(second_cell, scale=Scale(1))
    assert judge(claim(cells="here", less="there"), [first_cell, short]).verdict == "not run"


@pytest.mark.parametrize(("times", "sign", "message"), [
    (100, "more", "supported"), (1000, "more", "contradicted"), (1000, "less", "supported"),
])  # fmt: skip
def test_so_many_times(measured, times, sign, message):
    cell, clients = measured((), ()), {"a": (9, 0.5)}
    for seed in range(3):  # 200 up and 1, in a round: 200 times, whatever the seed
        for arm, up in (("fml", 400), ("fedavg", 2)):
            cell.results[arm][seed] = result(arm, seed, clients=clients, traffic=Traffic(up=up, down=0))
    judged = judge(claim(measure="bytes_up", times=times, sign=sign), [cell])
    assert describe_verdict(judged, 1) == f"{message}: 200.0 times (95 % interval 200.0 to 200.0, 3 seeds)"
    side = "above" if sign == "more" else "below"
    assert describe_condition(judged) == f"fml divided by fedavg; supported if the ratio's interval lies {side} {times:,}"
    cell.results["fedavg"][1] = result("fedavg", 1, clients=clients, traffic=Traffic(up=0, down=0))
    assert judge(claim(measure="bytes_up", times=times), [cell]).overall.n == 2  # nothing is so many times nothing


def test_of_domains_the_best_round_that_validation_chose_counts(measured):
    cell, last = measured((), ()), dict.fromkeys("ab", 0.1)
    for seed in range(2):
        for arm, best in (("fml", {"a": 0.9, "b": 0.7}), ("fedavg", {"a": 0.8, "b": 0.4})):
            clients = dict.fromkeys(best, (9, 0.5))
            cell.results[arm][seed] = result(arm, seed, clients=clients, transfer={"acc": Ends(last=last, best=best)})
    assert judge(claim(measure="acc"), [cell]).overall.mean == pytest.approx(0.2)
    lines = judge(claim(measure="acc", per="client"), [cell]).lines
    assert [line.difference.mean for line in lines] == pytest.approx([0.1, 0.3])
    assert judge(claim(measure="acc", at="last", than_at="last"), [cell]).overall.mean == 0


def test_nothing_was_run(measured):
    judged = judge(claim(), [measured((), ())])
    assert (judged.verdict, describe_verdict(judged, 1)) == ("not run", "not run")
