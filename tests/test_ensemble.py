"""The ensemble of a client's own model and the shared one: by hand, in a run, and as who predicts with it sees it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import fedmutual
from fedmutual.errors import ConfigError, RunError
from fedmutual.federation.evaluation import Ensemble, choose_weight

ON = {"split.holdout": 0.2, "records.ensemble": True, "rounds": 2}


def logits(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_probabilities_are_averaged_by_the_weight():
    first, second = torch.nn.Identity(), torch.nn.Softplus()
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = 0.3 * x.softmax(1) + 0.7 * second(x).softmax(1)
    assert torch.allclose(Ensemble(first, second, 0.3)(x).softmax(1), expected)
    assert torch.allclose(Ensemble(first, second, 0.0)(x).softmax(1), second(x).softmax(1))
    assert torch.allclose(Ensemble(first, second, 1.0)(x).softmax(1), x.softmax(1))


def test_the_weight_of_the_least_loss_is_chosen():
    # both rows are of class 0; the loss is -log(0.5 + 0.4 w) - log(0.5 - 0.4 w), the least at w = 0
    target = torch.tensor([0, 0])
    assert choose_weight(logits([0.9, 0.1], [0.1, 0.9]), logits([0.5, 0.5], [0.5, 0.5]), target) == 0.0
    # -log(0.8 w + 0.1) - log(0.9 - 0.8 w) is the least where both are 0.5: at w = 1/2
    assert choose_weight(logits([0.9, 0.1], [0.1, 0.9]), logits([0.1, 0.9], [0.9, 0.1]), target) == 0.5
    assert choose_weight(logits([0.9, 0.1], [0.8, 0.2]), logits([0.5, 0.5], [0.5, 0.5]), target) == 1.0
    same = logits([0.6, 0.4], [0.3, 0.7])
    assert choose_weight(same, same, target) == 0.5


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_training_is_the_same_to_the_bit_and_nothing_more_is_sent(small):
    for folder, on in (("with", True), ("without", False)):
        fedmutual.run(fedmutual.load_config(small, **ON | {"records.ensemble": on}), folder)
    assert Path("with/ledger.jsonl").read_bytes() == Path("without/ledger.jsonl").read_bytes()
    ours, theirs = (load_file(f"{folder}/server/round-2.safetensors") for folder in ("with", "without"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
    rest = [[s for s in line["scores"] if s["model"] != "ensemble"] for line in lines("with")]
    assert rest == [line["scores"] for line in lines("without")]
    scored = {(s["client"], s["data"]) for s in lines("with")[-1]["scores"] if s["model"] == "ensemble"}
    assert scored == {(client, data) for client in "012" for data in ("validation", "test")}


@pytest.mark.parametrize("engine", ["inprocess", "stacked", "processes"])
def test_the_saved_ensemble_has_the_recorded_scores_also_after_a_resume(small, engine):
    fedmutual.run(fedmutual.load_config(small, **ON | {"rounds": 1, "engine.name": engine}), "out")
    config = fedmutual.load_config(small, **ON | {"engine.name": engine})
    fedmutual.run(config, "out", resume=True)
    run = fedmutual.Run("out")
    images, labels = test_rows(run)
    for client in "012":
        score = next(
            s for s in lines("out")[-1]["scores"] if (s["model"], s["client"], s["data"]) == ("ensemble", client, "test")
        )
        with torch.no_grad():
            answers = run.ensemble(client)(images)
        assert math.isclose((answers.argmax(1) == labels).double().mean().item(), score["accuracy"], abs_tol=1e-9)
        mixed = run.ensemble(client).weight * run.personal_model(client)(images).softmax(1)
        mixed = mixed + (1 - run.ensemble(client).weight) * run.global_model()(images).softmax(1)
        assert torch.allclose(answers.exp(), mixed, atol=1e-6)


def test_rows(run):
    """The test set of a run, as its networks take it."""
    from fedmutual.data import load

    (x, y, *_) = next(iter(load(run.config).test.rows([torch.arange(len(load(run.config).test))])))
    return x, y


test_rows.__test__ = False


def test_predict_answers_with_the_ensemble(small, cli):
    fedmutual.run(fedmutual.load_config(small, **ON), "out")
    np.savez("four.npz", x=load_digits().images[4:5, None].astype(np.uint8))
    code, out, err = cli("predict", "out", "four.npz", "--client", "1", "--ensemble")
    assert (code, "answered by: ensemble of client '1'" in out) == (0, True), err
    (prediction,) = fedmutual.predict("out", ["four.npz"], "1", ensemble=True)
    assert sum(p for _, p in prediction.ranked) == pytest.approx(1)
    assert cli("predict", "out", "four.npz", "--ensemble")[0] == 2
    fedmutual.run(fedmutual.load_config(small, rounds=1), "without")
    with pytest.raises(RunError, match=r"records\.ensemble = true"):
        fedmutual.predict("without", ["four.npz"], "1", ensemble=True)


def test_the_report_has_a_line_for_the_ensemble(small, cli):
    sets = ("--set", "split.holdout=0.2", "--set", "records.ensemble=true", "--set", "rounds=1")
    out, err = cli.run("compare", small, "--methods", "fml,independent", "--seeds", 2, "--out", "c", *sets)
    assert [row.split("  ")[0] for row in out.splitlines() if row.startswith("FML, ")] == [
        "FML, personal",
        "FML, ensemble",
        "FML, shared",
    ]
    assert "'records.ensemble'" in err, "independent training has no ensemble, and a note says so"
    assert "FML, ensemble" in Path("c/report.html").read_text()


def test_what_has_no_hold_out_rows_or_no_classes_is_refused(small):
    with pytest.raises(ConfigError, match=r"'records.ensemble'.*split\.holdout"):
        fedmutual.run(fedmutual.load_config(small, **{"records.ensemble": True}), "out")
    assert not Path("out").exists()
