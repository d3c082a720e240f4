"""The headline of comparisons: its lines in the terminal at each width, and its numbers for scripts."""

import json
import re

import pytest

from fedmutual.report.terminal import list_comparisons, make_headline_tables
from run_folders import Made, alone, compare_folders, make_comparison, make_two_models, plus, print_table, write, write_all


def rows(text, start):
    """The cells of the terminal's lines that begin so."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip().startswith(start)]


def test_the_headline_in_the_terminal_has_a_line_for_each_model(tmp_path):
    text = print_table(
        make_headline_tables(
            compare_folders(write_all(tmp_path, [make_two_models((0.1, 0.1, 0.1), (0.2, 0, -0.1)), alone], [0, 1]))
        )
    )
    assert rows(text, "FML") == [
        ["FML, personal", "n/a", "80.0", "70.0", "+10.0", "6/0"],
        ["FML, shared", "70.0", "73.3", "50.0", "+3.3", "2/2"],
    ]


def test_the_headline_fits_a_terminal_of_80_columns_when_intervals_are_as_wide_as_can_be(tmp_path):
    clients = tuple(map(str, range(50)))
    never = Made("independent", lambda s, r, c: 1.0 - s, clients=clients)
    methods = [
        Made("fml", lambda s, r, c: float(s), lambda s, r: float(s), shared_own=lambda s, r, c: float(s), clients=clients),
        Made("fedavg", lambda s, r, c: float(s), lambda s, r: float(s), clients=clients),
        never,
    ]
    text = print_table(make_headline_tables(compare_folders(write_all(tmp_path, methods, [0, 1]))), width=80)
    # 0 and 1 have s / sqrt(2) = 0.5, so half = 12.7062 * 0.5, more than accuracy allows
    assert rows(text, "FedAvg") == [["FedAvg", *["50.0 ± 100.0"] * 3, "0.0 ± 100.0", "50/50"]]
    assert [line[1:] for line in rows(text, "FML")] == [
        ["n/a", *["50.0 ± 100.0"] * 2, "0.0 ± 100.0", "50/50"],
        [*["50.0 ± 100.0"] * 3, "0.0 ± 100.0", "50/50"],
    ]
    assert "harmed" in text
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("width", [40, 60, 66, 70, 74, 80, 120])
def test_names_of_methods_and_numbers_are_whole_at_each_width(tmp_path, width):
    both = make_two_models((0.1, 0.1, 0.1), (0.2, 0, -0.1))
    shared = [Made(name, plus(0, 0, 0), lambda s, r: 0.5) for name in ("fedavg", "fedprox")]
    text = print_table(make_headline_tables(compare_folders(write_all(tmp_path, [both, alone, *shared], [0, 1]))), width)
    for word in ("personal", "Local-only", "FedAvg", "FedProx", "+10.0", "6/0"):
        assert word in text
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_methods_of_one_title_have_the_names_of_their_algorithms(tmp_path):
    folders = [write(tmp_path / name, Made("fedavg", plus(0, 0, 0), lambda s, r: 0.5)) for name in "ab"]
    config = folders[1] / "config.toml"
    config.write_text(config.read_text().replace('"fedavg"', '"mine:FedAvg"'))
    environment = json.loads((folders[1] / "environment.json").read_text())
    about = {"title": "FedAvg", "shares": True, "preset": []}
    (folders[1] / "environment.json").write_text(json.dumps(environment | {"algorithm": about}))
    compared = make_comparison(folders)
    assert {m.method for m in compared.methods} == {"FedAvg (fedavg)", "FedAvg (mine:FedAvg)"}


def test_the_numbers_of_the_headline_for_scripts(tmp_path):
    methods = [Made("fml", plus(0.1, 0.2, 0.0), lambda s, r: 0.75 + 0.1 * s), alone]
    (told,) = list_comparisons(compare_folders(write_all(tmp_path, methods, [0, 1])))
    fml, local = told["methods"]
    assert (told["metric"], fml["method"], fml["seeds"], fml["gained"], fml["harmed"]) == ("accuracy", "FML", 2, 4, 0)
    assert (fml["global_last"], fml["gain"], local["gain"]) == (pytest.approx(0.8), pytest.approx(0.1), None)


def test_names_with_brackets_are_not_read_as_markup(tmp_path):
    other = {"partition": {"kind": "iid", "clients": 3}}
    folders = [
        write(tmp_path / "a", Made("fml", plus(0, 0, 0), name="[bold]a")),
        write(tmp_path / "b", Made("fml", plus(0, 0, 0), name="b[/red]", config=other)),
    ]
    text = print_table(make_headline_tables(compare_folders(folders)))
    assert "[bold]a" in text
    assert "b[/red]" in text


def test_one_run_has_no_columns_of_gains_and_no_legend_of_what_is_not_there(tmp_path):
    one = make_two_models((0, 0, 0), (0.1, 0.1, 0.1))
    text = print_table(make_headline_tables(compare_folders([write(tmp_path / "a", one)])))
    assert "gain" not in text
    assert "±" not in text
    assert "Last round. n/a: `fedmutual report` says why." in text
    assert rows(text, "FML") == [["FML, personal", "n/a", "70.0", "60.0"], ["FML, shared", "70.0", "80.0", "70.0"]]
    assert "n/a" not in print_table(
        make_headline_tables(compare_folders([write(tmp_path / "b", Made("fedavg", plus(0, 0, 0), lambda s, r: 0.5))]))
    )
