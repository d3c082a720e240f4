"""What is a run folder, what is not, and what is said of it."""

import pytest

from fedmutual.errors import RunError
from fedmutual.report.html import write_report
from fedmutual.results.frame import find_runs, read_runs
from run_folders import Made, write, write_all


def half(seed, round, client):
    return 0.5


def test_a_run_folder_is_found_as_itself(tmp_path):
    folder = write(tmp_path / "run", Made("fml", half))
    assert find_runs(folder) == [folder]


def test_a_comparison_is_found_run_by_run_in_the_order_of_numbers(tmp_path):
    write_all(tmp_path / "out", [Made("independent", half), Made("fml", half)], [0, 2, 10])
    folders = [p.relative_to(tmp_path / "out").as_posix() for p in find_runs(tmp_path / "out")]
    assert folders == ["fml/0", "fml/2", "fml/10", "independent/0", "independent/2", "independent/10"]


def test_two_comparisons_in_a_folder_are_found(tmp_path):
    write_all(tmp_path / "demo" / "a", [Made("fml", half)], [0])
    write_all(tmp_path / "demo" / "b", [Made("fml", half)], [0])
    assert len(find_runs(tmp_path / "demo")) == 2


def test_no_runs_are_an_error(tmp_path):
    with pytest.raises(RunError, match="holds no run; name a run's folder"):
        find_runs(tmp_path)
    with pytest.raises(RunError, match="nowhere: is no folder"):
        find_runs(tmp_path / "nowhere")
    with pytest.raises(RunError, match="no run to report"):
        read_runs([])


@pytest.mark.parametrize("command", [read_runs, lambda runs: write_report(runs, runs[0] / "report.html")])
def test_a_folder_without_a_run_is_an_error_everywhere(tmp_path, command):
    with pytest.raises(RunError, match=r"is no run folder, it has no config\.toml"):
        command([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_given_twice_is_read_once(tmp_path):
    folder = write(tmp_path / "run", Made("fml", half))
    assert len(read_runs([folder, tmp_path / "run" / ".." / "run"])) == 1


LINES = [
    ("metrics", '{"round": 1, "scores": [{"model": "glo', "line 3 is cut off"),
    ("metrics", "hello\n", "line 3 .*not valid JSON"),
    ("metrics", '{"step": 3, "loss": 0.1}\n', "line 3 .*round: field required"),
    (
        "metrics",
        '{"round": 3, "scores": [{"model": "a", "client": null, "data": "b", "accuracy": 91.2}]}\n',
        "line 3.*accuracy",
    ),
    (
        "metrics",
        '{"round": 3, "scores": [{"model": "a", "client": null, "data": "b", "accuracy": NaN}]}\n',
        "line 3.*accuracy",
    ),
    ("metrics", '{"round": 2, "scores": []}\n', "line 3.*round 2 follows round 2"),
    ("metrics", '{"round": 3, "scores": []}', "line 3.*the line has no end"),
    ("ledger", '{"round": 1, "phase": "fml", "client": "0", "down": 1.5, "up": 0}\n', r"line 7 .*\(down"),
    ("ledger", '{"round": 1, "phase": "p", "client": "0", "down": -1, "up": 0}\n', r"line 7 .*\(down"),
    ("ledger", '{"round": 1e99}\n', r"line 7 .*\(round"),
]


@pytest.mark.parametrize(("name", "text", "message"), LINES)
def test_a_damaged_line_is_named(tmp_path, name, text, message):
    folder = write(tmp_path / "run", Made("fml", half))
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(text)
    with pytest.raises(RunError, match=rf"{name}\.jsonl: {message}") as problem:
        read_runs([folder])
    assert "\n" not in str(problem.value)


OTHER_FORMAT = "is of format 2, and this version of fedmutual reads format 1"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.toml", "seed = = 1", "cannot be read"),
        ("config.toml", 'seed = 1\nrounds = 2\nname = "x"\n', "is damaged: .*algorithm"),
        ("partition.json", '{"format": 1}', "is damaged: .*source"),
        ("partition.json", '{"format": 2}', OTHER_FORMAT),
        ("partition.json", None, "there is no such file"),
        ("environment.json", '{"format": 1, "models": 3}', "is damaged: models: "),
        ("environment.json", '{"format": 1, "scaling": {"mean": ["x"]}}', "is damaged: scaling.mean.0: "),
        ("environment.json", '{"format": 2}', OTHER_FORMAT),
        ("environment.json", None, "there is no such file"),
        ("summary.json", "[", "is damaged or is not JSON"),
        ("summary.json", "[]", "is damaged"),
        ("summary.json", '{"format": 2}', OTHER_FORMAT),
    ],
)
def test_a_foreign_or_missing_file_is_named(tmp_path, name, text, message):
    folder = write(tmp_path / "run", Made("fml", half))
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(RunError, match=f"{name}: {message}"):
        read_runs([folder])


def test_resume_is_named_only_where_it_mends(tmp_path):
    """A finished run is not gone on with."""
    folder = write(tmp_path / "run", Made("fml", half))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3')
    with pytest.raises(RunError, match=r"is cut off .*; restore it, or "):
        read_runs([folder])
    (folder / "summary.json").unlink()
    with pytest.raises(RunError, match=r"is cut off .*; a resume removes an incomplete last line, or "):
        read_runs([folder])


def test_an_unfinished_run_is_one(tmp_path):
    [run] = read_runs([write(tmp_path / "run", Made("fml", half, rounds=9, reached=4))])
    assert (run.finished, run.reached) == (False, 4)


def test_a_run_that_was_given_more_rounds_is_unfinished(tmp_path):
    folder = write(tmp_path / "run", Made("fml", half, rounds=2))
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace("rounds = 2", "rounds = 5"))
    assert not read_runs([folder])[0].finished


def test_a_run_before_its_first_evaluation_is_one(tmp_path):
    folder = write(tmp_path / "run", Made("fml", half, reached=0))
    (folder / "metrics.jsonl").unlink()
    (folder / "ledger.jsonl").unlink()
    write_report([folder], tmp_path / "report.html")
    assert "nothing was evaluated yet" in (tmp_path / "report.html").read_text()
