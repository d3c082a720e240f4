"""`fedmutual audit`: its statistics, what it sees where a model memorises and where there is nothing to see."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

import fedmutual
import toy
from fedmutual.algorithms import FedAvg
from fedmutual.errors import RunError
from fedmutual.report.audit import Audit, Guarantee, Membership, bound_advantage, make_sentences
from fedmutual.studies.attacks import (
    attack_by_imprint,
    choose_threshold,
    draw_splits,
    measure_auc,
    measure_strength,
    score_against_shadows,
)
from fedmutual.studies.audit import audit
from own_data import config, npz

pytestmark = pytest.mark.long


def test_the_auc_counts_pairs_and_ties_half():
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 9, 40).astype(float), rng.integers(0, 7, 30).astype(float)
    auc, low, high = measure_auc(members, others, 0.95)
    assert auc == pytest.approx(roc_auc_score([1] * 40 + [0] * 30, np.concatenate([members, others])))
    assert low < auc < high


def test_the_auc_of_separated_scores_has_an_interval():
    """Exact: 20 of 20 pairs in one order have the lower bound 0.025 ** (1 / 20)."""
    members, others = np.arange(20.0), np.arange(30.0) - 40
    assert measure_auc(members, others, 0.95) == (1, pytest.approx(0.025 ** (1 / 20)), 1)
    assert measure_auc(others, members, 0.95) == (0, 0, pytest.approx(1 - 0.025 ** (1 / 20)))
    low, high = stats.beta.ppf([0.025, 0.975], [10, 11], [11, 10])  # 10 of 20 pairs, of equal scores
    assert measure_auc(np.ones(20), np.ones(30), 0.95) == (0.5, pytest.approx(low), pytest.approx(high))


def test_the_threshold_separates_best():
    assert choose_threshold(np.array([3.0, 4.0, 9.0]), np.array([1.0, 2.0, 5.0])) == 2.0


@pytest.mark.parametrize(("shift", "detected"), [(0.0, False), (2.0, True)])
def test_the_interval_of_the_advantage(shift, detected):
    rng = np.random.default_rng(1)
    strength = measure_strength(rng.normal(shift, 1, 400), rng.normal(0, 1, 400), 0.95, rng)
    assert (strength["low"] > 0) == detected
    assert strength["low"] < stats.norm.cdf(shift / 2) - stats.norm.cdf(-shift / 2) < strength["high"]


def test_the_interval_covers_no_advantage_as_often_as_it_says():
    rng = np.random.default_rng(2)
    misses = sum(measure_strength(*rng.normal(size=(2, 40)), 0.9, rng)["low"] > 0 for _ in range(200))
    assert misses <= 20


def test_shadow_splits_leave_each_row_out_equally_often():
    rows = type("Rows", (), {"__len__": lambda self: 10})()
    splits = draw_splits({"0": (rows, 7)}, 10, np.random.default_rng(0))
    left_out = [set(range(10)) - set(split["0"].tolist()) for split in splits]
    assert [len(s) for s in left_out] == [3] * 10
    assert [sum(row in s for s in left_out) for row in range(10)] == [3] * 10


def test_the_ratio_against_shadows_is_that_of_two_normal_densities():
    """Trained on: 1 and 3, mean 2, variance 2; not: -1 and 1, mean 0, variance 2. The second row has no other kind."""
    shadows = np.array([[1.0, 1.0], [3.0, 3.0], [-1.0, 5.0], [1.0, 7.0]])
    trained = np.array([[True, True], [True, True], [False, True], [False, True]])
    first, second = score_against_shadows(np.array([2.0, 1.0]), shadows, trained)
    spread = (1 + 1 + 9 + 1 + 1 + 9) / (1 + 3)  # of both rows' trained shadow runs together
    normal = stats.norm(2, math.sqrt(spread)).logpdf(2) - stats.norm(0, math.sqrt(2)).logpdf(2)
    assert first == pytest.approx(normal)
    assert math.isnan(second)


def test_the_bound_of_a_guarantee():
    """Epsilon log 3: (3 - 1) / (3 + 1)."""
    assert bound_advantage(math.log(3), 0.0) == pytest.approx(0.5)
    assert bound_advantage(0.0, 0.1) == pytest.approx(0.1)


ONE_EPOCH = {"training": {"local_epochs": 1, "batch_size": 16}}
NOISED = {"privacy": {"nets": "both", "sigma": 2.0}, **ONE_EPOCH}


@pytest.fixture
def make_run(tmp_path, in_tmp_path):
    """Train on random rows with random labels: there is nothing to learn, and all to memorise."""
    rng = np.random.default_rng(3)
    arrays = {"x": rng.normal(size=(300, 1, 4, 4)).astype(np.float32), "y": rng.integers(0, 2, 300)}
    source = npz(tmp_path / "noise.npz", **arrays)

    def make(rate, rounds=1, **further_tables):
        tables = {
            "name": "noise",
            "rounds": rounds,
            "data": source,
            "split": {"test": 0.1, "validation": 0.5},
            "training": {"local_epochs": 40, "batch_size": 16},
            "optimizer": {"lr": rate},
            "engine": {"device": "cpu"},
        }
        return fedmutual.run(config(**tables | further_tables), tmp_path / "run").folder

    return make


def test_an_audit_sees_memorised_rows(make_run):
    result = audit(make_run(0.1), shadows=4)
    personal = [m for m in result.memberships if m.model == "personal"]
    assert {m.attack for m in personal} == {"loss", "answers", "shadows"}
    assert {m.client for m in personal} == {"0", "1"}
    assert all(m.is_detected and m.advantage > 0.3 for m in personal if m.attack == "loss")
    assert any(m.is_detected for m in personal if m.attack == "shadows")
    assert result.privacy is None


def test_an_audit_sees_nothing_where_nothing_was_learned(make_run):
    result = audit(make_run(1e-9, **ONE_EPOCH), shadows=4)
    assert len(result.memberships) == 15
    assert not any(m.is_detected for m in result.memberships)
    assert all(m.low < 0 < m.high for m in result.memberships)


@pytest.mark.parametrize(("more", "is_read"), [(ONE_EPOCH, True), (NOISED, False)])
def test_the_imprint_attack_reads_rows_only_without_noise(make_run, more, is_read):
    result = audit(make_run(0.05, **more))
    assert [i.client for i in result.imprints] == ["0", "1"]
    assert all((i.records > 0) == is_read and i.skipped is None for i in result.imprints)
    assert sum(i.coincidences for i in result.imprints) == 0
    assert (result.privacy is not None and result.privacy.epsilon > 0) != is_read
    _, read, bound, _ = make_sentences(result)
    assert f"reads {sum(i.records for i in result.imprints)} of" in read
    assert ("Differential privacy: none" in bound) == is_read


@dataclass(frozen=True, kw_only=True)
class RowSender(FedAvg):
    """FedAvg whose clients send private rows in the place of a weight."""

    def end(self, client, at):
        return super().end(client, at) | {"0.weight": client.data["private"].x[:8]}


def test_the_imprint_attack_reads_no_reply_that_the_privacy_boundary_refuses():
    phase = RowSender(local_epochs=1, batch_size=8)
    private, held_out = toy.rows(0, 20), toy.rows(9, 20)
    result = attack_by_imprint(toy.client("0", phase), phase, toy.at(), toy.server(), toy.mlp(0), private, held_out)
    assert "boundary" in result.skipped
    assert result.records == 0


MEMBERSHIP = Membership(
    model="shared",
    client=None,
    attack="loss",
    members=10,
    others=10,
    advantage=0.234,
    low=0.1,
    high=0.4,
    auc=0.6,
    auc_low=0.5,
    auc_high=0.7,
)
STATED = Guarantee(nets="both", unit="group", epsilon=math.log(3), delta=0.0)  # an advantage of at most (3 - 1) / (3 + 1)


@pytest.mark.parametrize(
    ("memberships", "privacy", "words"),
    [
        ((), None, ("No membership attack", "privacy.nets")),
        ((-0.1, -0.9), None, ("None of the 2 membership attacks", "no interval of the advantage lies above 0")),
        ((0.1, 0.2, -0.1), None, ("2 of 3 membership attacks", "by 23 percentage points (20 to 40)")),
        ((), STATED.model_copy(update={"epsilon": None}), ("infinite",)),
        ((), STATED, ("epsilon 1.1 at delta 0, of each group", "personal models", "above 0.50")),
        ((), STATED.model_copy(update={"epsilon": 0.005}), ("above 0.01",)),  # tanh(0.0025): 0.00 is too low
    ],
)
def test_the_sentences_of_an_audit(memberships, privacy, words):
    """memberships: the lower ends of the intervals of attacks."""
    attacks = tuple(MEMBERSHIP.model_copy(update={"low": low}) for low in memberships)
    common = {"run": "r", "algorithm": "fml", "round": 3, "level": 0.95, "shadows": 0, "imprints": ()}
    first, bound, limit, note = make_sentences(Audit(memberships=attacks, privacy=privacy, notes=("A note.",), **common))
    assert all(word in f"{first} {bound}" for word in words), (first, bound)
    assert "no upper bound" in limit
    assert note == "A note."


def test_nothing_but_personal_models_is_attacked_where_nothing_is_shared(make_run):
    short = {"local_epochs": 1, "batch_size": 16}
    result = audit(make_run(0.05, algorithm={"name": "independent"}, training=short))
    assert result.imprints == ()
    assert {m.model for m in result.memberships} == {"personal"}


def test_the_command_writes_its_record_and_its_page(make_run, cli, tmp_path):
    folder = make_run(0.05, training={"local_epochs": 1, "batch_size": 16})
    cli.run("audit", folder, "--out", "report")
    record = json.loads((tmp_path / "report" / "audit.json").read_text())
    assert (record["format"], len(record["memberships"]), len(record["imprints"])) == (1, 10, 2)
    assert (tmp_path / "report" / "audit.html").read_text().startswith("<!doctype html>")
    assert not (folder / "audit.json").exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_in_the_place_of_the_page_is_found_before_the_run_is_read(cli, tmp_path, in_tmp_path, is_link):
    page, folder = tmp_path / "report" / "audit.html", tmp_path / "report" / ("pages" if is_link else "audit.html")
    folder.mkdir(parents=True)
    if is_link:
        page.symlink_to(folder)
    err = cli.fail("audit", "no-run", "--out", "report")
    assert "audit.html: " in err
    assert "no-run" not in err


def test_data_that_changed_are_refused(make_run, tmp_path):
    folder = make_run(0.05, training={"local_epochs": 1, "batch_size": 16})
    npz(tmp_path / "noise.npz", x=np.zeros((300, 1, 4, 4), np.float32), y=np.arange(300) % 2)
    with pytest.raises(RunError, match="not those that the run was trained on"):
        audit(folder)
    (folder / "summary.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        audit(folder)
    with pytest.raises(RunError, match="is not a run's folder"):
        audit(tmp_path / "nowhere")
    assert not (folder / "audit.json").exists()
