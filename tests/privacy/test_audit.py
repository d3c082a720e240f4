"""What attacks learn about a run's training rows: something where models memorise, nothing under differential privacy."""

import json

import numpy as np
import pytest

from fedmutual.studies.audit import audit
from fedmutual.studies.audit.membership import measure

MEMORISED = """
rounds = 20
data = { name = "digits" }
partition = { kind = "iid", clients = 2, examples = 60 }
model = { shared = "mlp", personal = "mlp" }
algorithm = { name = "fml" }
training = { local_epochs = 5, batch_size = 16 }
optimizer = { lr = 0.05 }
"""
PRIVATE = ("privacy.nets=both", "privacy.sigma=4", "privacy.clip=0.1", "optimizer.lr=0.05")


@pytest.fixture
def memorised(tmp_path, monkeypatch):
    """The path of an experiment whose models memorise their training rows."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "memorised.toml"
    path.write_text(MEMORISED)
    return path


def test_the_hit_rate_by_hand():
    """Of the six pairs of a member and another row five are in the right order, and one is tied."""
    found = measure(np.array([3.0, 2.0]), np.array([2.0, 1.0, 0.0]))
    assert found.auc == pytest.approx(5.5 / 6)
    assert found.caught == 0.5  # above the largest number of the other rows


def test_numbers_of_one_distribution_show_no_membership():
    rng = np.random.default_rng(1)
    found = measure(rng.normal(size=400), rng.normal(size=400))
    assert found.low < 0.5 < found.high
    assert not found.succeeds


def test_models_that_memorise_disclose_membership_and_messages_give_rows_away(cli, memorised, tmp_path):
    assert cli("run", memorised, "--out", "run")[0] == 0
    code = cli("audit", "run")[0]
    assert code == 0
    result = json.loads((tmp_path / "run" / "audit.json").read_text())
    own = [f for f in result["findings"] if f["target"] == "personal model"]
    assert len(own) == 4  # two clients, two attacks
    assert all(f["membership"]["low"] > 0.5 for f in own)
    assert sum(result["imprint"].values()) > 0
    assert result["epsilon"] == {"0": None, "1": None}
    assert (tmp_path / "run" / "audit.md").is_file()


def test_under_differential_privacy_messages_give_no_row_away(cli, memorised, tmp_path):
    settings = [word for key in PRIVATE for word in ("--set", key)]
    assert cli("run", memorised, *settings, "--out", "run")[0] == 0
    result = audit(tmp_path / "run")
    assert result.imprint == {"0": 0, "1": 0}
    assert all(value is not None for value in result.epsilon.values())
    assert not any(f.membership.low > 0.6 for f in result.findings)


def test_an_audit_changes_no_file_of_the_run_but_its_own(cli, small, tmp_path):
    assert cli("run", small, "--out", "run")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert cli("audit", "run", "--out", "elsewhere")[0] == 0
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["audit.json", "audit.md"]


def test_what_cannot_be_audited_is_one_sentence(cli, small, tmp_path):
    assert cli("run", small, "--set", "algorithm.name=centralised", "--out", "pooled")[0] == 0
    for folder, words in (("pooled", "in one place"), ("missing", "missing")):
        code, _, error = cli("audit", folder)
        assert code == 2
        assert words in error
