"""Nodes that are domains: ACC, BWT and FWT, what joining costs, and accuracy against bytes; all by hand from made runs."""

import json
import re
from dataclasses import replace

import pytest

from fedmutual.report import tables
from fedmutual.report.curves import assign_slots, make_data_table, make_pictures
from fedmutual.report.plots import draw_curves
from fedmutual.report.terminal import make_headline_tables
from fedmutual.results.frame import read_runs
from fedmutual.results.gains import find_last_common
from fedmutual.results.scale import PERCENT
from run_folders import (
    Made,
    compare_folders,
    get_cell,
    get_texts,
    list_findings,
    make_comparison,
    print_table,
    read_table,
    write,
    write_all,
)

NODES = ("0", "40")
LAST, FIRST = {"0": 0.8, "40": 0.6}, {"0": 0.9, "40": 0.5}  # ACC after round 2 and after round 1


def own_accuracy(seed, round, node):
    """Validation accuracy: node 0 is best after round 1, node 40 after round 2."""
    return 0.9 if round == {"0": 1, "40": 2}[node] else 0.5


def reach(seed, round, node):
    """ACC; BWT 5 points above, FWT 10 points below it; the second seed 2 points better."""
    acc = (LAST if round == 2 else FIRST)[node] + 0.02 * seed
    return acc, acc + 0.05, acc - 0.1


def steps(n):
    return {"training": {"local_steps": n, "batch_size": 32}}


def make_method(algorithm, reach=reach, n=1, **more):
    return Made(algorithm, own_accuracy, reach=reach, clients=NODES, **{"config": steps(n), **more})


FEDH2L = make_method("fedh2l", projected=0.25)
ALONE = make_method("independent", lambda s, r, c: (0.5, 0.9, 0.3))
AGG = make_method("aggregate", lambda s, r, c: tuple(v - 0.1 for v in reach(s, r, c)))
FEDAVG = make_method("fedavg", lambda s, r, c: (0.7, 0.7, 0.7))


@pytest.fixture
def folders(tmp_path):
    return write_all(tmp_path, [FEDH2L, AGG, FEDAVG, ALONE], [0, 1])


def texts(table):
    return [[(c.text, c.spread) for c in row] for row in table.rows]


def test_the_averages_of_every_method(folders):
    """FedH2L's nodes' ACC, last: 0.7 and 0.72, so 0.71 and half = 12.7062 * 0.01 = 0.127; best: (0.9 + 0.6) / 2 + 0.01."""
    table = tables.make_node_headline(make_comparison(folders))
    assert [row[0].text for row in table.rows] == ["FedH2L", "AGG", "FedAvg", "Local-only"]
    assert get_texts(table, 0) == {
        "Method": "FedH2L",
        "ACC: all domains: last": "71.0 ± 12.7",
        "ACC: all domains: best": "76.0 ± 12.7",
        "BWT: its own domain: last": "76.0 ± 12.7",
        "BWT: its own domain: best": "81.0 ± 12.7",
        "FWT: the other domains: last": "61.0 ± 12.7",
        "FWT: the other domains: best": "66.0 ± 12.7",
        "Worst node's ACC: last": "61.0 ± 12.7",
        "Mutual steps: projected": "25.0",
    }
    projected = [get_cell(table, k, "Mutual steps: projected").note for k in (1, 2, 3)]
    assert projected == ["n/a: it projects no gradient"] * 3
    assert float(read_table(table)[0]["acc_best"]) == pytest.approx(0.76)
    assert table.caption.endswith("interval over 2 seeds)")


def test_node_by_node_methods_side_by_side(folders):
    """Node 0, ACC: last 0.8 and 0.82, best (after round 1) 0.9 and 0.92; node 40's best is its last."""
    table = tables.make_node_table(make_comparison(folders), "acc")
    assert [c.name for c in table.columns] == ["Node", "FedH2L", "AGG", "FedAvg", "Local-only"]
    assert [(row[0].text, row[1].text, row[1].spread, row[1].sub) for row in table.rows] == [
        ("0", "81.0", "± 12.7", "best 91.0 ± 12.7"),
        ("40", "61.0", "± 12.7", "best 61.0 ± 12.7"),
        ("mean", "71.0", "± 12.7", "best 76.0 ± 12.7"),
    ]
    assert float(read_table(table)[0]["AGG best"]) == pytest.approx(0.81)
    bwt = tables.make_node_table(make_comparison(folders), "bwt")
    assert [row[4].text for row in bwt.rows] == ["90.0", "90.0", "90.0"]


def test_a_recorded_share_of_projected_steps_has_a_table(folders, tmp_path):
    drawn = tables.make_node_tables(make_comparison(folders))
    assert [t.id for t in drawn] == ["acc", "bwt", "fwt", "projected"]
    assert texts(drawn[-1]) == [[(name, ""), ("25.0", "")] for name in (*NODES, "mean")]
    assert [t.id for t in tables.make_node_tables(make_comparison([write(tmp_path / "x", AGG)]))] == ["acc", "bwt", "fwt"]


@pytest.mark.parametrize(
    ("pooled", "message"),
    [
        (True, "the validation data of all nodes pooled, which real sites cannot do: they have their own only."),
        (False, "its own validation data, as a real site can."),
    ],
)
def test_the_rows_that_chose_the_best_rounds_are_named(tmp_path, pooled, message):
    compared = make_comparison([write(tmp_path / "x", replace(FEDH2L, pooled=pooled))])
    assert (
        tables.describe_choice(compared) == f"Best is after each node's own best round, chosen by its accuracy on {message}"
    )


def test_a_best_that_test_rows_chose_is_marked(tmp_path):
    """Without split.validation a node's validation rows are its test rows."""
    seen = make_comparison([write(tmp_path / "x", replace(FEDH2L, pooled=False, validation_of="test"))])
    assert tables.describe_choice(seen).endswith("on its own validation data, which are test examples that it is scored on.")
    marked = [c.name for c in tables.make_node_headline(seen).columns if "so the score is too high" in c.note]
    assert marked == ["best"] * 3
    assert "so the score is too high" in tables.make_node_table(seen, "acc").columns[1].note
    fair = make_comparison([write(tmp_path / "y", replace(FEDH2L, pooled=False))])
    shown = [tables.make_node_headline(fair), *tables.make_node_tables(fair)]
    assert not any(c.note for t in shown for c in t.columns)


def test_the_ceiling_says_why_no_node_has_its_score(tmp_path):
    folders = write_all(tmp_path, [FEDH2L, make_method("centralised"), ALONE], [0])
    metrics = folders[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line | {"scores": [s for s in line["scores"] if not s["data"].startswith("test")]} for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((folders[1] / "summary.json").read_text()) | {"transfer": None}
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    seen = make_comparison(folders)
    row = next(row for row in tables.make_node_headline(seen).rows if row[0].text == "Centralised")
    assert {cell.note.partition(",")[0] for cell in row[1:8]} == {"n/a: one model is trained on all data"}


def test_of_an_unfinished_run_the_last_round_counts_and_no_best(tmp_path):
    table = tables.make_node_headline(make_comparison([write(tmp_path / "x", replace(FEDH2L, rounds=9, reached=2))]))
    last, best = (get_cell(table, 0, f"ACC: all domains: {end}") for end in ("last", "best"))
    assert (table.rows[0][0].sub, last.text) == ("unfinished: round 2 of 9", "70.0")
    assert best.note == "n/a: best rounds are chosen when the run is finished"
    assert table.caption == "Accuracy over nodes, % (one seed, so without intervals)"


def test_nodes_without_shared_scores_are_not_domains_in_a_report(tmp_path):
    compared = make_comparison([write(tmp_path / "x", replace(FEDH2L, tells=False))])
    assert not compared.domains
    headline = tables.make_client_headline(compared)
    assert get_cell(headline, 0, "Client's model, own data: mean, last round").text == "n/a"


def test_joining_pays_over_all_domains_and_costs_the_own_one(tmp_path):
    """ACC: 0.3 and 0.1 above alone, in seeds 1 and 2 0.02 and 0.04 more: 0.22, half 4.302653 * 0.02 / sqrt 3 = 0.0497.

    BWT: 0.05 and 0.25 below, then 0.02 and 0.04 less.
    """
    sentences = list_findings(write_all(tmp_path, [FEDH2L, AGG, FEDAVG, ALONE], [0, 1, 2]))
    assert sentences[0] == ("Joining pays with FedH2L, AGG and FedAvg: nodes do better over all domains than alone.")
    assert sentences[1] == (
        "FedH2L: over all domains (ACC) nodes score 72.0 %, 22.0 points above local-only "
        "(95 % interval 17.0 to 27.0, 3 seeds). Of 2 nodes, all gain."
    )
    assert sentences[2] == (
        "FedH2L, on a node's own domain (BWT): joining costs accuracy there; 77.0 %, 13.0 points below local-only "
        "(95 % interval 8.0 to 18.0, 3 seeds). Of 2 nodes, all are harmed: node 40 by 23.0 points and "
        "node 0 by 3.0 (may be chance)."
    )
    # AGG is 0.1 below FedH2L everywhere
    [against] = [s for s in sentences if s.startswith("Against AGG")]
    assert against == (
        "Against AGG: on all domains (ACC) FedH2L wins by 10.0 points (equal in all 3 seeds); on its own "
        "domain (BWT) FedH2L wins by 10.0 points (equal in all 3 seeds); on the other domains (FWT) "
        "FedH2L wins by 10.0 points (equal in all 3 seeds)."
    )


@pytest.mark.parametrize(
    ("gain", "cost", "ending"),
    [
        ({"0": 0.02, "40": 0.03}, "joining costs nothing: nodes gain there too", "Of 2 nodes, all gain."),
        (
            {"0": 0.0, "40": 0.03},
            "a cost of joining is not certain",
            "Of 2 nodes, 1 gains, 1 stays equal and none is harmed.",
        ),
        (
            {"0": -0.04, "40": 0.01},
            "a cost of joining is not certain",
            "Of 2 nodes, 1 gains and 1 is harmed: node 0 by 4.0 points.",
        ),
    ],
)
def test_what_joining_costs_a_node_s_own_domain(tmp_path, gain, cost, ending):
    """In one seed the interval is over nodes: 0.02 and 0.03 are 0.025 with half 12.7 * 0.005 = 0.064, no certain gain."""
    ours = make_method("fedh2l", lambda s, r, c: (0.6, 0.9 + gain[c] + 0.0001 * s, 0.5))
    seeds = [0, 1, 2] if gain["0"] > 0 else [0]
    sentences = list_findings(write_all(tmp_path, [ours, ALONE], seeds))
    assert sentences[2].startswith(f"FedH2L, on a node's own domain (BWT): {cost}; ")
    assert sentences[2].endswith(ending)


def test_many_harmed_nodes_are_not_all_named(tmp_path):
    nodes = tuple("abcdefgh")
    ours = make_method("fedh2l", lambda s, r, c: (0.4 - 0.01 * nodes.index(c), 0.9, 0.5))
    sentences = list_findings(
        write_all(tmp_path, [replace(m, own_score=lambda s, r, c: 0.5, clients=nodes) for m in (ours, ALONE)], [0])
    )
    assert sentences[0] == "In this one seed, joining does not pay: with FedH2L nodes do worse over all domains than alone."
    assert sentences[1].endswith(
        "Of 8 nodes, all are harmed: node h by 17.0 points, node g by 16.0, node f by 15.0, node e by 14.0, node d by 13.0 "
        "and 3 others, each by no more."
    )


def test_methods_with_different_exchange_rates_are_compared_after_equal_local_steps(tmp_path):
    """FedAvg: 4 rounds of 5 steps, evaluated after 5, 10, 15, 20 steps. Alone: 22 rounds of 1, after 2, 4, ..., 20, 22."""
    alone = make_method("independent", lambda s, r, c: (r / 100,) * 3, rounds=22, every=2)
    ours = make_method("fedavg", lambda s, r, c: (r / 10,) * 3, n=5, rounds=4)
    plain = [replace(m, own_score=lambda s, r, c: 0.5) for m in (ours, alone)]
    a, b = read_runs(write_all(tmp_path, plain, [0]))
    assert find_last_common(a, b) == (4, 20)
    sentences = list_findings([a, b])
    assert "nodes score 40.0 %, 20.0 points above local-only" in sentences[1]  # 0.4 and 0.2
    [short] = read_runs([write(tmp_path / "short", replace(plain[0], rounds=3))])
    assert find_last_common(short, b) == (2, 10)
    assert any("FedAvg is compared with local-only after round 2," in s for s in list_findings([short, b]))


def test_rounds_that_only_one_of_two_tells_in_steps_are_compared_at_both_ends(tmp_path):
    epochs = replace(make_method("fedavg", rounds=2), config={"training": {"local_epochs": 1}})
    alone = replace(ALONE, own_score=lambda s, r, c: 0.5, rounds=7)
    a, b = read_runs([write(tmp_path / "a", epochs), write(tmp_path / "b", alone)])
    assert find_last_common(a, b) == (2, 7)
    [c] = read_runs([write(tmp_path / "c", replace(alone, rounds=9, reached=7))])
    assert find_last_common(a, c) == (0, 0)


def test_curves_of_domains(folders):
    drawn = {p.id: p for p in make_pictures(make_comparison(folders))}
    assert list(drawn) == ["acc", "bwt", "fwt", "worst", "loss", "mutual", "shares", "costs"]
    first = drawn["acc"].curves[0]
    assert first.points[0] == (1, pytest.approx(0.71), pytest.approx(0.7), pytest.approx(0.72))
    assert [p.mean for p in drawn["worst"].curves[0].points] == pytest.approx([0.51, 0.61])
    # the losses of FedH2L's local step are beside the others', what peers teach is apart, and a share is no loss
    assert [c.label for c in drawn["loss"].curves] == ["FedH2L", "AGG", "FedAvg", "Local-only"]
    assert [(c.label, c.style) for c in drawn["mutual"].curves] == [("FedH2L, KL", 0), ("FedH2L, CE", 1)]
    assert [p.mean for p in drawn["mutual"].curves[0].points] == pytest.approx([1.7 / 1.5, 1.7 / 2.5])
    assert [(c.label, c.points[1].mean) for c in drawn["shares"].curves] == [("FedH2L", pytest.approx(0.25))]


def test_losses_that_fall_far_are_drawn_on_a_log_scale(tmp_path):
    def losses(rounds):
        method = replace(ALONE, own_score=lambda s, r, c: 0.5, rounds=rounds)
        return {p.id: p for p in make_pictures(make_comparison([write(tmp_path / str(rounds), method)]))}["loss"]

    assert not losses(100).log  # 2 / 1.5 to 2 / 100.5: a factor of 67
    assert losses(200).log  # of 134


def test_where_methods_take_different_numbers_of_local_steps_curves_go_over_these(tmp_path):
    compared = make_comparison([write(tmp_path / "a", FEDH2L), write(tmp_path / "b", replace(FEDAVG, config=steps(7)))])
    drawn = {p.id: p for p in make_pictures(compared)}
    assert (drawn["acc"].unit, drawn["acc"].rounds) == ("local step", [1, 2, 7, 14])
    assert [c.name for c in make_data_table(drawn["acc"], PERCENT).columns] == ["Local step", "FedH2L", "FedAvg"]
    assert [r["local_step"] for r in read_table(make_data_table(drawn["acc"], PERCENT))] == ["1", "2", "7", "14"]
    epochs = write(tmp_path / "c", replace(ALONE, config={"training": {"local_epochs": 1}}))
    drawn = {p.id: p for p in make_pictures(make_comparison([tmp_path / "a", tmp_path / "b", epochs]))}
    assert {picture.unit for picture in drawn.values()} == {"round", "bytes sent"}, "of methods that count epochs"


def test_labels_tell_variants_apart_by_what_most_have_not(tmp_path):
    def variant(name, **keys):
        config = {"algorithm": {"name": "fedh2l", "kl": True, "projection": "qp", **keys}, **steps(1)}
        return write(tmp_path / name, replace(FEDH2L, config=config))

    slow = write(tmp_path / "slow", replace(FEDAVG, config=steps(2)))
    runs = [variant("b", kl=False), variant("c", projection="none"), variant("a"), slow, write(tmp_path / "alone", ALONE)]
    compared = make_comparison(runs)
    labels = [m.label for m in compared.methods]
    assert labels == ["FedH2L", "FedH2L (kl = false)", "FedH2L (projection = none)", "FedAvg", "Local-only"]
    assert assign_slots(compared.methods) == {"FedH2L": 6, labels[1]: 8, labels[2]: 7, "FedAvg": 2, "Local-only": 4}
    against = [s.partition(":")[0] for s in list_findings(runs) if s.startswith("Against")]
    assert against == ["Against FedH2L (kl = false)", "Against FedH2L (projection = none)", "Against FedAvg"]
    two = make_comparison([tmp_path / "a", tmp_path / "b"])  # of two, neither is what most have
    assert [m.label for m in two.methods] == ["FedH2L (kl = true)", "FedH2L (kl = false)"]


def sent(round, node):
    return (
        [("agree", 6, 6), ("seed", 0, 100 if node == "0" else 300)] if round == 0 else [("local", 0, 50), ("mutual", 50, 0)]
    )


@pytest.fixture
def costly(tmp_path):
    methods = [replace(FEDH2L, sent=sent), replace(AGG, sent=lambda r, c: [] if r else sent(0, c)[1:]), FEDAVG, ALONE]
    return make_comparison(write_all(tmp_path, methods, [0, 1]))


def test_accuracy_against_bytes(costly):
    """A node's mean: 200 of public data, 6 before round 1 and 50 in each; FedAvg 72; AGG public data alone."""
    picture = make_pictures(costly)[-1]
    assert (picture.id, picture.unit) == ("costs", "bytes sent")
    drawn = {curve.label: curve.points for curve in picture.curves}
    assert {label: [point.round for point in points] for label, points in drawn.items()} == {
        "FedH2L": [256, 306],
        "AGG": [200],
        "FedAvg": [72, 144],
    }
    assert drawn["FedH2L"][0][1:] == (pytest.approx(0.71), pytest.approx(0.7), pytest.approx(0.72))
    table = make_data_table(picture, PERCENT)
    assert [[c.text for c in row] for row in table.rows][-1] == ["306", "71.0", "", ""]
    svg = draw_curves(picture, "x", {})
    assert all(f">{label}</text>" in svg for label in drawn)
    assert re.findall(r">(\d+ B)<", svg)


def test_methods_that_send_nothing_have_no_picture_of_bytes(tmp_path):
    pictures = make_pictures(make_comparison([write(tmp_path / "x", ALONE)]))
    assert "costs" not in [picture.id for picture in pictures]


def test_the_headline_in_the_terminal(folders, tmp_path):
    text = print_table(make_headline_tables(compare_folders(folders)), width=80)
    [line] = [x for x in text.splitlines() if x.startswith("FedH2L")]
    assert re.split(r"  +", line.strip()) == [
        "FedH2L",
        "71.0 ± 12.7",
        "76.0 ± 12.7",
        "61.0 ± 12.7",
        "61.0 ± 12.7",
        "+21.0 ± 12.7",
    ]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    clients = write(tmp_path / "other", Made("fml", lambda s, r, c: 0.5, name="clients"))
    text = print_table(make_headline_tables(compare_folders([*folders, clients])), width=80)
    assert text.index("ACC, %") < text.index("clients") < text.index("own data, %")


def test_equal_rows_are_listed_once(tmp_path):
    """The test set is the data of all domains, and validation rows may be those of the own domain."""
    both = make_method("fml", shared=lambda s, r: 0.7, shared_own=own_accuracy, validation_of="test", pooled=False)
    compared = make_comparison(
        [write(tmp_path / "x", both), write(tmp_path / "y", replace(FEDAVG, shared=lambda s, r: 0.7))]
    )
    assert [row[0].sub for row in tables.make_other_score_table(compared).rows if row[0].text == "FML"] == [
        "shared model, test set",
        "personal model, test data of all domains",
        "personal model, of its own domain (its validation data)",
    ]
    assert [(c.group, c.name) for c in tables.make_part_tables(compared)[0].columns[1:]] == [
        ("FML", "shared model"),
        ("FML", "personal model"),
        ("FedAvg", "shared model"),
    ]
