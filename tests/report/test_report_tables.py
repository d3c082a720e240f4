"""The numbers of the page's tables, and what stands where one is missing."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from fedmutual.report import columns, measures, provenance, tables
from fedmutual.report.curves import make_data_table, make_pictures, make_points, thin_out
from fedmutual.results.estimate import Missing
from fedmutual.results.scale import PERCENT
from run_folders import Made, get_cell, get_texts, make_comparison, read_table, write, write_all

SHARED, OWN, GAIN = columns.SHARED, columns.OWN, columns.GAIN
ALONE = {"0": 0.5, "1": 0.4, "2": 0.3}


def base(seed, round, client):
    """Local-only: the same in both rounds."""
    return ALONE[client]


def better(seed, round, client):
    """After round 1 as local-only; after round 2 by 0.1 (seed 0) or 0.2 (seed 1) better, client 2 not at all."""
    return ALONE[client] + (0.1 * (1 + seed) if round == 2 and client != "2" else 0)


def shared(seed, round):
    return 0.6 + 0.1 * seed + 0.05 * (round == 2)


METHODS = [Made("fml", better, shared), Made("fedavg", base, shared), Made("independent", base)]


@pytest.fixture
def two_seeds(tmp_path):
    return make_comparison(write_all(tmp_path, METHODS, [0, 1]))


def test_the_headline(two_seeds):
    table = tables.make_client_headline(two_seeds)
    # t(0.975, 1) = 12.7062, and two numbers d apart have s / sqrt(2) = d / 2
    # shared, last: 0.65, 0.75; at round 1: 0.6, 0.7; half = 12.7062 * 0.05 = 0.635
    # own, last: (0.6 + 0.5 + 0.3) / 3 = 0.4667 and (0.7 + 0.6 + 0.3) / 3 = 0.5333: mean 0.5, half = 12.7062 / 30 = 0.4235
    # at round 1: 0.4 twice; worst: 0.3 always; gain: 0.0667 and 0.1333: mean 0.1, half = 12.7062 / 30
    assert get_texts(table, 0) == {
        "Method": "FML",
        "Shared model, test set: last round": "70.0 ± 63.5",
        "Shared model, test set: best on hold-out": "65.0 ± 63.5",
        "Client's model, own data: mean, last round": "50.0 ± 42.4",
        "Client's model, own data: mean, best on hold-out": "40.0",
        "Client's model, own data: worst, last round": "30.0",
        "Client's model, own data: worst, best on hold-out": "30.0",
        "Gain over local-only: mean, points": "+10.0 ± 42.4",
        "Gain over local-only: gain/harmed": "4/0",
    }
    assert [*get_texts(table, 2).values()] == ["Local-only", "n/a", "n/a", "40.0", "40.0", "30.0", "30.0", "n/a", "n/a"]
    assert get_cell(table, 0, f"{SHARED}: best on hold-out").sub == "round 1"
    assert get_cell(table, 0, f"{GAIN}: mean, points").sub == "over 2 seeds"
    assert get_cell(table, 0, f"{GAIN}: gain/harmed").sub == "of 6, 2 equal"
    assert "over 2 seeds" in table.caption
    assert table.footnotes == ("n/a: there is no shared model: nothing is shared", "n/a: this is local-only training itself")
    line = read_table(table)[0]
    assert (line["gain_n"], line["gain_unit"], line["gained"], line["harmed"], line["equal"]) == (
        "2",
        "seeds",
        "4",
        "0",
        "2",
    )
    assert float(line["personal_last"]) == pytest.approx(0.5)
    assert float(line["personal_last_half_width"]) == pytest.approx(0.423540, abs=1e-6)


def test_a_method_with_two_models_has_a_line_for_each(tmp_path):
    """After round 2 the shared model is 0.1 above local-only with client 0, 0.1 below with client 1, equal with client 2."""
    both = Made("fml", better, shared, shared_own=lambda s, r, c: ALONE[c] + {"0": 0.1, "1": -0.1, "2": 0}[c] * (r == 2))
    table = tables.make_client_headline(make_comparison(write_all(tmp_path, [both, *METHODS[1:]], [0, 1])))
    assert [(row[0].text, row[0].sub) for row in table.rows] == [
        ("FML", "personal models"),
        ("FML", "shared model"),
        ("FedAvg", "shared model"),
        ("Local-only", "personal models"),
    ]
    # the personal models as in test_the_headline; the shared one: 0.6, 0.3, 0.3 in both seeds, so mean 0.4 and gain 0
    personal, common = ([*get_texts(table, line).values()] for line in (0, 1))
    assert personal == ["FML", "n/a", "n/a", "50.0 ± 42.4", "40.0", "30.0", "30.0", "+10.0 ± 42.4", "4/0"]
    assert common == ["FML", "70.0 ± 63.5", "65.0 ± 63.5", "40.0", "n/a", "30.0", "n/a", "0.0", "2/2"]
    assert get_cell(table, 1, f"{GAIN}: gain/harmed").sub == "of 6, 2 equal"
    assert table.footnotes[:2] == (
        "n/a: the shared model has a line of its own",
        "n/a: on own data a run chooses its best round for the personal models",
    )
    assert [(r["method"], r["model"], r["global_last"], r["personal_last"]) for r in read_table(table)[:3]] == [
        ("FML", "personal models", "", "0.5"),
        ("FML", "shared model", "0.7", "0.4"),
        ("FedAvg", "shared model", "0.7", "0.4"),
    ]


def test_both_models_have_distinct_labels_everywhere(tmp_path):
    both = Made("fml", better, shared, shared_own=lambda s, r, c: 0.45)
    compared = make_comparison(write_all(tmp_path, [both, METHODS[2]], [0, 1]))
    assert [row[0].sub for row in tables.make_other_score_table(compared).rows[:4]] == [
        "shared model, test set",
        "personal model, own validation data",
        "personal model, all classes (test set)",
        "shared model, own validation data",
    ]
    # seed 1, client 1: 0.6 by its personal model, 0.45 by the shared one, 0.4 alone
    table = tables.make_client_table(compared)
    assert [c.name for c in table.columns[5:]] == ["FML, personal", "FML, shared", "Local-only"]
    assert [(c.text, c.spread) for c in table.rows[4][5:]] == [("60.0", "+20.0"), ("45.0", "+5.0"), ("40.0", "")]
    drawn = {p.id: p.curves for p in make_pictures(compared)}
    for id in ("personal", "worst"):
        assert [(c.label, c.slot, c.style) for c in drawn[id][:2]] == [("FML, personal", 1, 0), ("FML, shared", 1, 1)]
    assert [p.mean for p in drawn["personal"][1].points] == pytest.approx([0.45, 0.45])
    assert [c.label for c in drawn["global"]] == ["FML"]


def test_forks_that_no_complete_model_unites_are_called_so(tmp_path):
    parted = Made("fml", better, shared_own=lambda s, r, c: 0.45)
    table = tables.make_client_headline(make_comparison([write(tmp_path / "a", parted)]))
    assert [row[0].sub for row in table.rows] == ["personal models", "clients' forks"]
    assert [get_cell(table, line, f"{OWN}: mean, last round").text for line in (0, 1)] == ["46.7", "45.0"]
    assert "n/a: no complete shared model exists: a part of it stays with the clients" in table.footnotes


@pytest.mark.parametrize(
    ("by", "validation_of", "message"),
    [
        ("holdout", "train", "best on hold-out"),
        ("holdout", "test", "best on hold-out"),
        ("validation", "train", "best on validation"),
        ("validation", "test", "best on validation (test examples)"),
        ("test", "train", "best on test"),
    ],
)
def test_the_rows_that_chose_the_best_round_are_named(tmp_path, by, validation_of, message):
    made = Made("fml", better, shared, best_by=(by, by), validation_of=validation_of)
    table = tables.make_client_headline(make_comparison([write(tmp_path / "a", made)]))
    assert [c.name for c in table.columns if "best" in c.name] == [message, f"mean, {message}", f"worst, {message}"]
    notes = [[c.note for c in table.columns if c.group == group and "best" in c.name] for group in (SHARED, OWN)]
    seen = "the same test examples chose the best round and score the model, so the score is too high"
    assert notes == [
        [seen if "test" in message else ""],
        [seen if "test" in message and validation_of == "test" else ""] * 2,
    ]


def test_bests_chosen_in_several_ways_each_say_how(tmp_path):
    folders = [
        write(tmp_path / "a", Made("fml", better, shared)),
        write(tmp_path / "b", Made("fedavg", base, shared, best_by=("test", "validation"), best_round=2)),
    ]
    table = tables.make_client_headline(make_comparison(folders))
    assert [get_cell(table, k, f"{SHARED}: best").sub for k in (0, 1)] == ["on hold-out, round 1", "on test, round 2"]


def test_what_is_missing_says_why(tmp_path):
    silent = Made("fml", better, tells=False)
    compared = make_comparison([write(tmp_path / "a", silent)])
    table = tables.make_client_headline(compared)
    assert table.footnotes == (
        "n/a: no complete shared model exists: a part of it stays with the clients",
        "n/a: no client shares its accuracy: share.metrics forbids it, or it was computed on fewer than 50 rows",
        f"n/a: {measures.explain_no_local(compared)}",
    )
    table = tables.make_client_headline(make_comparison([write(tmp_path / "b", Made("fml", better, shared, reached=1))]))
    assert table.rows[0][0].sub == "personal models, unfinished: round 1 of 2"
    assert get_cell(table, 0, f"{SHARED}: last round").text == "60.0"
    assert get_cell(table, 0, f"{SHARED}: best").note == "n/a: a best round is chosen when the run is finished"


def test_two_decimals_for_a_large_test_set(tmp_path):
    made = Made("fml", better, lambda s, r: 0.98765, test_examples=10_000)
    table = tables.make_client_headline(make_comparison([write(tmp_path / "a", made)]))
    assert get_cell(table, 0, f"{SHARED}: last round").text == "98.77"


def test_an_undefined_auroc(tmp_path):
    made = Made("independent", base, auroc=lambda client: None if client == "0" else 0.8)
    cell = get_cell(tables.make_other_score_table(make_comparison([write(tmp_path / "a", made)])), 0, "Macro AUROC")
    assert (cell.text, cell.note) == ("0.800", "over the 2 of 3 for which it is defined")
    never = replace(made, auroc=lambda client: None)
    cell = get_cell(tables.make_other_score_table(make_comparison([write(tmp_path / "b", never)])), 0, "Macro AUROC")
    assert (cell.text, cell.note) == ("n/a", "n/a: not shared, or undefined, because the scored data have one class only")


def test_more_clients_than_classes_run_down_the_page(tmp_path):
    made = Made("independent", lambda s, r, c: 0.5, clients=tuple("abcde"))
    [table] = tables.make_holdings_tables(make_comparison([write(tmp_path / "a", made)]))
    assert [c.name for c in table.columns] == ["Client", "0", "1", "2", "all"]
    assert [row[0].text for row in table.rows] == list("abcde")


def test_curves(two_seeds):
    drawn = {p.id: p for p in make_pictures(two_seeds)}
    assert list(drawn) == ["global", "personal", "worst", "loss"]
    [fml, fedavg] = drawn["global"].curves
    assert (fml.label, fml.slot, fedavg.slot) == ("FML", 1, 2)
    assert fml.points[1] == (2, pytest.approx(0.7), pytest.approx(0.65), pytest.approx(0.75))
    assert [c.label for c in drawn["loss"].curves] == ["FML, personal", "FML, shared", "FedAvg", "Local-only"]
    # the made losses: (2 - 0.3 for each further term) / (0.5 + round)
    assert [p.mean for p in drawn["loss"].curves[1].points] == pytest.approx([1.7 / 1.5, 1.7 / 2.5])
    table = make_data_table(drawn["personal"], PERCENT)
    assert [[c.text for c in row] for row in table.rows] == [["1", "40.0", "40.0", "40.0"], ["2", "50.0", "40.0", "40.0"]]
    assert read_table(table)[1] == {
        "round": "2",
        "FML, seed 0": "0.4667",
        "FML, seed 1": "0.5333",
        "FedAvg, seed 0": "0.4000",
        "FedAvg, seed 1": "0.4000",
        "Local-only, seed 0": "0.4000",
        "Local-only, seed 1": "0.4000",
    }


def test_a_point_is_the_mean_the_lowest_and_the_highest_seed_of_a_round_that_all_runs_have():
    points = make_points(pd.DataFrame({0: {4: 0.5, 2: 0.2, 3: 0.9}, 1: {2: 0.4, 4: 0.25}}))
    assert [tuple(p) for p in points] == [(2, pytest.approx(0.3), 0.2, 0.4), (4, 0.375, 0.25, 0.5)]
    assert make_points(pd.DataFrame({0: {1: 0.5}, 1: {}})) == ()
    assert make_points(pd.DataFrame()) == ()


def test_without_losses_there_is_no_picture_of_losses(tmp_path):
    runs = write_all(tmp_path, [Made("fml", lambda s, r, c: 0.5, shared=lambda s, r: 0.5, tells=False)], [0])
    assert [p.id for p in make_pictures(make_comparison(runs))] == ["global"]


def test_long_curves_are_thinned_evenly_with_both_ends():
    assert thin_out(list(range(5)), 10) == [0, 1, 2, 3, 4]
    assert thin_out(list(range(101)), 11) == list(range(0, 101, 10))


def test_how_it_was_made(two_seeds):
    assert provenance.make_subtitle(two_seeds) == (
        "digits, 3 classes · 2 of 3 classes a client (shards) · 3 clients · 2 rounds · 2 seeds"
    )
    assert dict(provenance.list_facts(two_seeds)) == {
        "Methods": "FML, FedAvg and Local-only",
        "Networks": "shared mlp (16 parameters); personal mlp, cnn1 and lenet5 (1,000 to 1,002 parameters)",
        "First weights": "not recorded",
        "Inputs": "minus mean (0.5), over standard deviation (0.25); augmentation: none",
    }
    config = provenance.make_configuration_tables(two_seeds)
    common, differing = config
    assert "seed" not in common
    assert "[partition]" in common
    assert [[c.text for c in row] for row in differing.rows] == [["algorithm.name", "fml", "fedavg", "independent"]]
    environment, _ = provenance.make_environment_tables(two_seeds)
    assert "threads = 1" in environment
    assert "scaling.mean = [0.5]" in environment
    first, third = (get_cell(provenance.list_runs(two_seeds), k, "Partition's fingerprint").text for k in (0, 2))
    assert first == third == two_seeds.first.partition.fingerprint[:12]


def test_gains_need_a_pair(two_seeds, tmp_path):
    lonely = make_comparison([write(tmp_path / "x", Made("fml", better))])
    assert measures.measure_gains(lonely, lonely.lines[0]) == Missing(measures.explain_no_local(lonely))


def test_many_scaling_numbers_are_counted_and_listed_once(tmp_path):
    folder = write(tmp_path / "a", METHODS[0])
    about = json.loads((folder / "environment.json").read_text())
    scaling = {"divisor": 1.0, "mean": [0.5] * 30, "std": [0.25] * 30, "augment": "none"}
    other = scaling | {"mean": [0.125] * 30}
    space = {"input": [30], "outputs": 2, "classes": ["a", "b"], "task": "t"}
    clients = {"0": space | {"scaling": scaling}, "1": space | {"scaling": other}}
    (folder / "environment.json").write_text(json.dumps(about | {"scaling": scaling, "clients": clients}))
    compared = make_comparison([folder])
    assert provenance.describe_scaling(compared.first).startswith("scaled by each client in its own way")
    alike = replace(compared.first, environment=compared.first.environment.model_copy(update={"clients": {}}))
    assert provenance.describe_scaling(alike) == (
        "scaled by 30 means and standard deviations, which the environment below lists; augmentation: none"
    )
    common, _ = provenance.make_environment_tables(compared)
    assert common.count("0.5, 0.5") == 15
    assert "clients.1.scaling.mean" in common
    assert "clients.0.task = t" in common


def test_notes_of_runs_are_listed_once_with_their_methods(tmp_path):
    folders = write_all(tmp_path, METHODS, [0, 1])
    for folder in folders:
        method_note = "T  note: only fml\n" if folder.parent.name == "fml" else ""
        (folder / "log.txt").write_text(f"T  started, 2 rounds\nT  note: mind this\n{method_note}T  note: mind this\n")
    assert provenance.list_run_notes(make_comparison(folders)) == ["mind this", "FML: only fml"]


def test_a_note_of_many_rounds_is_listed_once_with_the_number_of_rounds(tmp_path):
    folders = write_all(tmp_path, METHODS, [0, 1])
    logs = {"fml": "at the start: gone|in round 7: gone|in round 7: gone", "fedavg": "in round 1: odd|at the start: new"}
    for folder in folders:
        note_texts = logs.get(folder.parent.name, "in round 1: even|in round 2: even|in round 3: even").split("|")
        if (folder.parent.name, folder.name) == ("independent", folders[-1].name):
            note_texts = []
        (folder / "log.txt").write_text("".join(f"T  note {words}\n" for words in note_texts))
    assert provenance.list_run_notes(make_comparison(folders)) == [
        "FML: gone (in 4 rounds of 2 runs, from the start to round 7)",  # a round that was begun again counts once
        "FedAvg: odd (in round 1)",
        "FedAvg: new (at the start)",
        "Local-only: even (in 3 rounds, from round 1 to round 3)",
    ]
