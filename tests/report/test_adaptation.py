"""What the report says of a newcomer, from folders with made numbers."""

import json
import shutil
from dataclasses import replace

import pytest

from fedmutual.errors import RunError
from fedmutual.report.adaptation import summarise_adaptation, write_adaptation
from fedmutual.report.rendering import render_facts
from fedmutual.results.estimate import Missing, estimate
from fedmutual.results.scale import PERCENT
from run_folders import Made, write

ACCURACY = {"fml": (0.8, 0.84, 0.88), "scratch": (0.7, 0.72, 0.74), "fine-tune": (0.8, 0.85, 0.87)}


@pytest.fixture
def adaptation_folder(tmp_path):
    """FML is 10, 12 and 14 points ahead of scratch; 0, -1 and +1 of fine-tuning; 6, 2 and -2 behind what came."""
    for way, scores in ACCURACY.items():
        for seed, score in enumerate(scores):
            algorithm = "fml" if way == "fml" else "independent"
            made = Made(algorithm, own_score=lambda seed, round, client, score=score: score, clients=("0",))
            write(tmp_path / way / "50" / str(seed), replace(made, seed=seed))
    about = {
        "format": 1,
        "name": "north",
        "from": {"run": "r", "algorithm": "fml", "model": "mlp", "round": 5},
        "fine-tuned": {"run": "a", "algorithm": "fedavg", "model": "mlp", "round": 5},
        "rounds": 2,
        "networks": dict.fromkeys(ACCURACY, "mlp"),
        "accuracy": {way: {"50": {str(k): v for k, v in enumerate(scores)}} for way, scores in ACCURACY.items()},
        "examples": {"50": {"training": 50, "validation": 300}},
        "as it is": {"50": dict.fromkeys("012", 0.86)},
    }
    (tmp_path / "adapt.json").write_text(json.dumps(about))
    return tmp_path


def test_the_sentence_holds_the_gains_with_their_intervals(adaptation_folder):
    """Gains 10, 12, 14: mean 12, s = 2, t(2; 0.975) = 4.303, half = 4.303 * 2 / sqrt 3 = 4.97. 0, -1, 1: half 2.48.
    -6, -2, 2: half 9.94."""
    _, (sentences,) = summarise_adaptation(adaptation_folder)
    assert sentences == (
        "Adapting by mutual learning with 50 examples: against training from scratch it pays: 12.0 points ahead (95 % "
        "interval 7.0 to 17.0, 3 seeds); against fine-tuning FedAvg's shared model it is level "
        "(95 % interval 2.5 behind to 2.5 ahead, 3 seeds); against the unchanged shared model it is "
        "2.0 points behind (95 % interval 11.9 behind to 7.9 ahead, 3 seeds), which may be chance."
    )


def test_a_fork_better_than_the_personal_model_is_reported(adaptation_folder):
    """The fork gains 10, 10, 10 points over fine-tuning; a worse fork is only listed in the table."""
    better = (
        "These numbers are of its personal model. Its fork of the shared model, which it may use too, scores 94.0 %: against"
    )
    for fork, is_said in ((0.1, True), (-0.2, False)):
        for seed, tuned in enumerate(ACCURACY["fine-tune"]):
            own_score, forked = (lambda s, r, c, score=score: score for score in (ACCURACY["fml"][seed], tuned + fork))
            made = Made("fml", own_score=own_score, shared_own=forked, clients=("0",))
            shutil.rmtree(adaptation_folder / "fml/50" / str(seed))
            write(adaptation_folder / "fml/50" / str(seed), replace(made, seed=seed))
        table, (sentence,) = summarise_adaptation(adaptation_folder)
        assert table.rows[-1][0].text == "FML's fork of the shared model (mlp)"
        assert (better in sentence) == ("its personal model" in sentence) == is_said
        assert ("10.0 points ahead (equal in all 3 seeds)." in sentence) == is_said
    assert table.rows[-1][1].text == "64.0"


def test_more_seeds_are_those_of_adapt(adaptation_folder, tmp_path):
    """FML's gain over fine-tuning is not certain with three."""
    made = Made("fml", own_score=lambda seed, round, client: (0.8, 0.6, 0.88)[seed], clients=("0",))
    for seed in range(3):
        shutil.rmtree(adaptation_folder / "fml/50" / str(seed))
        write(adaptation_folder / "fml/50" / str(seed), replace(made, seed=seed))
    write_adaptation(adaptation_folder, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "fedmutual adapt RUN --seeds 5" in page
    assert "fedmutual compare" not in page


def test_a_damaged_file_is_named(adaptation_folder):
    about = json.loads((adaptation_folder / "adapt.json").read_text())
    (adaptation_folder / "adapt.json").write_text(json.dumps(about | {"rounds": "two"}))
    with pytest.raises(RunError, match=r"adapt\.json: is damaged: rounds: "):
        summarise_adaptation(adaptation_folder)


def test_a_folder_given_twice_is_the_same_page(adaptation_folder, cli, tmp_path):
    once, _ = cli.run("report", adaptation_folder, "-o", tmp_path / "page.html")
    assert cli(
        "report", adaptation_folder, adaptation_folder / ".." / adaptation_folder.name, "-o", tmp_path / "page.html"
    ) == (0, once, "")


def test_a_run_given_twice_counts_once(cli, tmp_path):
    runs = [write(tmp_path / str(s), Made("fml", lambda s, r, c: 0.5 + s / 10, seed=s)) for s in (0, 1)]
    code, once, _ = cli("report", *runs, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_bytes()
    assert code == 0
    assert cli("report", *runs, tmp_path / "0" / ".." / "0", *runs, "-o", tmp_path / "page.html") == (0, once, "")
    assert (tmp_path / "page.html").read_bytes() == page


@pytest.mark.parametrize(
    ("rival", "gain", "words"),
    [
        ("scratch", Missing("no score"), "against training from scratch it cannot be compared: no score."),
        (
            "fine-tune",
            estimate([0.1, 0.11, 0.12], "seeds"),
            "against fine-tuning T's shared model it pays: 11.0 points ahead",
        ),
        (
            "unchanged",
            estimate([-0.1, -0.11, -0.12], "seeds"),
            "the unchanged shared model it does not pay: 11.0 points behind",
        ),
        ("scratch", estimate([0.0] * 3, "seeds"), "it is level (equal in all 3 seeds)."),
        ("scratch", estimate([0.1] * 2, "seeds"), "ahead (equal in both seeds), and two seeds cannot exclude chance."),
    ],
)
def test_the_sentence_of_an_answer(rival, gain, words):
    facts = {"examples": "50 examples", "contests": [(rival, gain)], "tuned": "T", "fork": None}
    assert words in render_facts("adaptation.j2", PERCENT, "answer", **facts)
