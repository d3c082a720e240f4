"""Which rows each algorithm trains on, and is scored on: test and validation rows of nobody, public ones as it says."""

from itertools import combinations

import numpy as np
import pytest

from fedmutual.config import parse_config
from fedmutual.errors import ConfigError
from fedmutual.federation.build import build
from fedmutual.studies.compare import list_variants

SPLITS = {
    "fractions of all": {"private": 0.5, "public": 0.2, "validation": 0.1, "test": 0.15},
    "of the training rows": {"public": 0.2, "validation": 0.1, "holdout": 0.1},
}
PARTITIONS = {
    "turned": {"data.angles": [0, 90], "data.per_class": 20, "partition.kind": "domains"},
    "turned, a split each": {
        "data.angles": [0, 90],
        "data.per_class": 20,
        "partition.kind": "domains",
        "split.shared": False,
    },
    "shards": {"partition.kind": "shards", "partition.clients": 3, "partition.classes_per_client": 4},
}


def make_experiment(algorithm, split="fractions of all", partition="turned", **changes):
    tables = {"data.name": "digits", "algorithm.name": algorithm, "model.shared": "mlp", "algorithm.public_batch": 8}
    if algorithm not in ("fedh2l", "fedmd"):
        del tables["algorithm.public_batch"]
    tables |= {f"split.{k}": v for k, v in SPLITS[split].items()} | PARTITIONS[partition] | changes
    return build(parse_config({}, overrides=tables))


def index(rows):
    return set(np.asarray(rows.index).tolist())


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("algorithm", ["fml", "fedavg", "fedh2l", "fedmd", "aggregate", "independent", "centralised"])
def test_no_client_trains_on_evaluation_rows_of_any_client(algorithm, split, partition):
    experiment = make_experiment(algorithm, split, partition)
    held = set().union(*(index(s.validation) for s in experiment.data.clients.values()), index(experiment.data.test))
    held |= set().union(*(index(s.holdout) for s in experiment.data.clients.values() if s.holdout is not None))
    for client in experiment.clients:
        rows = experiment.load_rows(client)
        trained = index(rows["private"]) | (index(rows["public"]) if "public" in rows else set())
        assert trained
        assert not trained & held
    if partition == "turned":  # nor on another turn of it
        base = {row % 200 for row in held}
        assert not {row % 200 for i in experiment.clients for row in index(experiment.load_rows(i)["private"])} & base


def test_what_each_algorithm_learns_from():
    data = make_experiment("independent").data
    rows_by_client = {i: (index(s.private), index(s.public)) for i, s in data.clients.items()}
    everybody = set().union(*(public for _, public in rows_by_client.values()))
    for i, (private, public) in rows_by_client.items():
        assert not private & everybody
        expected = {
            "independent": private | public,
            "fedavg": private | public,
            "fml": private | public,
            "aggregate": private | everybody,
            "fedh2l": private | everybody,
            "fedmd": private,
        }
        for name, rows in expected.items():
            assert index(make_experiment(name).load_rows(i)["private"]) == rows, name
        for local, rows in (("private+own-public", private | public), ("private", private)):
            assert index(make_experiment("fedh2l", **{"algorithm.local_data": local}).load_rows(i)["private"]) == rows
        assert index(make_experiment("fedh2l", **{"algorithm.labels": False}).load_rows(i)["private"]) == private | public
    centralised = make_experiment("centralised")
    assert index(centralised.load_rows("pooled")["private"]) == set().union(*(p | q for p, q in rows_by_client.values()))


def test_the_public_set_is_all_nodes_and_labels_of_others_are_hidden_where_they_stay_home():
    for labels in (True, False):
        experiment = make_experiment("fedh2l", **{"algorithm.labels": labels})
        for i in experiment.clients:
            client = experiment.build_client(i)
            assert client.seeds is not None
            positions = [set(r) for r in client.seeds.owners.values()]
            assert set().union(*positions) == set(range(len(client.data["public"])))
            assert not any(a & b for a, b in combinations(positions, 2))
            seen = experiment.load_rows(i)["public"].labels
            is_own = np.isin(np.arange(len(seen)), list(client.seeds.owners[i]))
            assert (seen[is_own] >= 0).all()
            assert (seen[~is_own] >= 0).all() == labels
            assert labels or (seen[~is_own] == -1).all()


def test_a_domain_is_scored_on_its_own_the_others_and_all_test_rows():
    experiment = make_experiment("fedh2l")
    for i, shares in experiment.data.clients.items():
        rows = experiment.load_rows(i)
        assert index(rows["test.own"]) == index(shares.test)
        assert index(rows["test.own"]) | index(rows["test.others"]) == index(rows["test"])
        assert not index(rows["test.own"]) & index(rows["test.others"])
        assert index(rows["validation.all"]) >= index(rows["validation"])
        scored = {spec.data for spec in experiment.make_plan({}).evaluations[i]}
        assert scored == {"validation", "test", "test.own", "test.others", "validation.all"}


@pytest.mark.parametrize("kind", ["one", "two"])
def test_a_regression_or_too_little_public_data_is_refused(kind, cli, tmp_path, in_tmp_path):
    """One sentence, and nothing written."""
    split = 'split = { public = 0.2 }\nalgorithm = { name = "fedh2l", public_batch = 500 }'
    if kind == "two":
        split = 'algorithm = { name = "fedmd" }'
    (tmp_path / "a.toml").write_text(f'data = {{ name = "digits" }}\npartition = {{ clients = 2 }}\n{split}\n')
    err = cli.fail("run", "a.toml", "--out", "out")
    assert "Traceback" not in err
    message = "increase split.public" if kind == "one" else "needs a public seed set"
    assert message in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_validation_rows_that_are_test_rows_choose_nothing_pooled_with_a_remark():
    common = {"data.name": "digits", "model.shared": "mlp", "algorithm.name": "fedh2l", "algorithm.public_batch": 8}
    experiment = build(parse_config({}, overrides=common | {"split.public": 0.2} | PARTITIONS["turned"]))
    assert "validation.all" not in experiment.load_rows("0")
    assert any("validation rows are test rows" in note for note in experiment.make_plan({}).notes)
    assert not any("validation rows are test rows" in note for note in make_experiment("fedh2l").make_plan({}).notes)
    for by, is_remarked in ((None, False), ("holdout", False), ("validation", True)):
        chosen = common | {"split.public": 0.2, "split.holdout": 0.1, "records.best_by": by} | PARTITIONS["turned"]
        notes = build(parse_config({}, overrides=chosen)).make_plan({}).notes
        assert any("validation rows are test rows" in note for note in notes) == is_remarked, by


def test_methods_of_steps_and_of_epochs_are_not_compared_unless_all_count_steps():
    config = parse_config({}, overrides={"data.name": "digits", "split.public": 0.2})
    with pytest.raises(ConfigError, match="fedh2l counts gradient steps and fml passes over the data"):
        list_variants(config, ["fml", "fedh2l"])
    config = parse_config({}, overrides={"data.name": "digits", "split.public": 0.2, "training.local_steps": 3})
    assert {s.config.training.local_steps for s in list_variants(config, ["fml", "fedh2l"])} == {3}
    config = parse_config({}, overrides={"data.name": "digits", "split.public": 0.2, "algorithm.name": "fedh2l"})
    assert {s.config.training.local_steps for s in list_variants(config, ["independent", "fedh2l"])} == {1}
