from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmutual.data.division import Division, Table, divide
from fedmutual.data.draws import Index, count_classes
from fedmutual.data.splits import hold_out
from fedmutual.errors import ConfigError, DataError
from own_data import config

KINDS: list[dict[str, Any]] = [
    {"kind": "iid", "clients": 4},
    {"kind": "shards", "clients": 4, "classes_per_client": 2},
    {"kind": "dirichlet", "clients": 4, "alpha": 0.4},
    {"kind": "domains"},
]
SPLITS: list[dict[str, Any]] = [
    {"preset": "journal"},
    {"preset": "v1"},
    {"preset": "journal", "holdout": 0.1},
    {"validation": 0.25, "holdout": 0.1},
    {"preset": "v1", "public": 0.1, "holdout": 0.1},
]
OF_ALL = {"private": 0.65, "public": 0.1, "validation": 0.1, "test": 0.15}


def table(train: int = 400, test: int = 100, classes: int = 5, groups: int = 0, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    n = train + test
    labels = np.concatenate([np.arange(classes).repeat(4), rng.integers(0, classes, n)])[:n]
    return Table(
        rng.permutation(labels),
        train,
        tuple("abcdefgh"[:classes]),
        rng.integers(0, groups, n).astype(str) if groups else None,
        np.array(["north", "south", "east"])[rng.integers(0, 3, n)],
    )


def kinds_apart(division: Division) -> None:
    """No row is trained on twice, nor trained on and scored on; none held out for two purposes."""
    kinds = ("private", "public")
    private = [r for shares in division.clients.values() for k in kinds for r in shares.get(k, np.empty(0)).tolist()]
    holdout = [r for shares in division.clients.values() for r in shares.get("holdout", [])]
    validation = {r for shares in division.clients.values() for r in shares["validation"].tolist()}
    assert len(private) == len(set(private))
    assert not set(private) & {*division.test.tolist(), *holdout, *validation}
    assert not set(holdout) & {*division.test.tolist(), *validation}


@pytest.mark.parametrize("own_test", [True, False])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_one_use(kind: dict[str, Any], split: dict[str, Any], own_test: bool) -> None:
    rows = table(test=100 if own_test else 0)
    division = divide(config(partition=kind, split=split), rows)
    kinds_apart(division)
    assert np.array_equal(division.test, np.arange(400, 500)) or not own_test
    used = [division.test, *(r for shares in division.clients.values() for r in shares.values())]
    assert set(np.concatenate(used).tolist()) == set(range(len(rows.labels)))  # no row is lost


def mix(rows: Index, table: Table) -> Index:
    return count_classes(table.labels[rows], len(table.classes))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_journal_validation_has_the_clients_own_shards(p: int) -> None:
    rows = table(2000, 500)
    division = divide(config(partition={"kind": "shards", "clients": 5, "classes_per_client": p}), rows)
    validation = [s["validation"] for s in division.clients.values()]
    assert sorted(np.concatenate(validation).tolist()) == list(range(2000, 2500))  # the whole test set, each row once
    test = mix(division.test, rows)
    for shares in division.clients.values():
        private_mix, chosen = mix(shares["private"], rows), mix(shares["validation"], rows)
        assert ((private_mix > 0) == (chosen > 0)).all()
        assert (np.abs(chosen - test / p)[private_mix > 0] < 1).all()  # a class is cut into K p / C = p equal parts


def test_journal_validation_of_equal_clients_is_a_kth_of_the_test_set() -> None:
    rows = table(2000, 500)
    division = divide(config(partition={"kind": "iid", "clients": 5}), rows)
    validation = [s["validation"] for s in division.clients.values()]
    assert sorted(np.concatenate(validation).tolist()) == list(range(2000, 2500))
    assert all(abs(len(v) - 100) <= 1 for v in validation)
    per_class = np.stack([mix(s["private"], rows) for s in division.clients.values()])
    exact = per_class / per_class.sum(0) * mix(division.test, rows)
    assert (np.abs(np.stack([mix(v, rows) for v in validation]) - exact) < 1).all()


@settings(max_examples=40)
@given(st.floats(0.1, 5), st.integers(0, 10_000))
def test_journal_validation_follows_a_dirichlet_clients_mix(alpha: float, seed: int) -> None:
    rows = table(1000, 300, seed=seed)
    division = divide(config(seed=seed, partition={"kind": "dirichlet", "clients": 4, "alpha": alpha}), rows)
    kinds_apart(division)
    for shares in division.clients.values():
        private_mix, chosen = mix(shares["private"], rows), mix(shares["validation"], rows)
        assert len(set(shares["validation"].tolist())) == len(shares["validation"]) <= 75  # 300 / 4
        assert (np.abs(chosen - private_mix / private_mix.sum() * chosen.sum()) < 1).all()


def test_dirichlet_clients_share_validation_rows_only_where_a_class_runs_out() -> None:
    rows = table(1000, 300)
    division = divide(config(partition={"kind": "dirichlet", "clients": 4, "alpha": 1.0}), rows)
    given_out = count_classes(np.concatenate([s["validation"] for s in division.clients.values()]), 1300)
    requested = sum(mix(s["validation"], rows) for s in division.clients.values())
    for c, available in enumerate(mix(division.test, rows)):
        twice = (given_out[rows.labels == c] > 1).sum()
        assert twice == max(0, requested[c] - available)


def test_v1_holds_a_tenth_of_each_clients_own_data_out() -> None:
    rows = table(1000, 300)
    division = divide(config(partition={"kind": "iid", "clients": 4}, split={"preset": "v1", "holdout": 0.2}), rows)
    for shares in division.clients.values():
        assert [len(shares[k]) for k in ("private", "validation", "holdout")] == [175, 25, 50]
        assert (shares["validation"] < 1000).all()
        all_of_it = np.concatenate(list(shares.values()))
        assert (np.abs(mix(shares["validation"], rows) - mix(all_of_it, rows) / 10) <= 1).all()  # in its class mix


def test_seeds_share_the_test_set_that_is_held_out() -> None:
    rows = table(test=0)
    a, b, c = (divide(config(seed=s, rounds=r), rows) for s, r in ((0, 3), (1, 3), (0, 9)))
    assert np.array_equal(a.test, b.test)
    assert len(a.test) == 80
    assert not np.array_equal(a.clients["0"]["private"], b.clients["0"]["private"])
    assert np.array_equal(a.clients["0"]["private"], c.clients["0"]["private"])  # more rounds, the same partition
    assert (np.abs(mix(a.test, rows) - mix(np.arange(400), rows) / 5) <= 1).all()


def test_every_domain_has_its_own_test_rows() -> None:
    rows = table(test=0)
    division = divide(config(partition={"kind": "domains"}), rows)
    assert list(division.clients) == ["east", "north", "south"]
    assert rows.domains is not None
    for name, shares in division.clients.items():
        assert set(rows.domains[np.concatenate(list(shares.values()))]) == {name}
        assert len(shares["validation"]) == round(0.2 * (rows.domains == name).sum())


def test_few_training_but_many_validation_images() -> None:
    rows = table(1000, 500)
    kind = {"kind": "shards", "clients": 5, "classes_per_client": 2}
    full, capped = (divide(config(partition=kind | more), rows) for more in ({}, {"examples": 30}))
    for i, shares in capped.clients.items():
        assert len(shares["private"]) == 30
        assert set(shares["private"].tolist()) < set(full.clients[i]["private"].tolist())
        assert np.array_equal(shares["validation"], full.clients[i]["validation"])
        exact = mix(full.clients[i]["private"], rows) / len(full.clients[i]["private"]) * 30
        assert (np.abs(mix(shares["private"], rows) - exact) < 1).all()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from(SPLITS), st.integers(0, 10_000))
def test_no_group_is_on_both_sides(kind: dict[str, Any], split: dict[str, Any], seed: int) -> None:
    rows = table(600, 0, groups=60, seed=seed)
    division = divide(config(seed=seed, partition=kind, split=split), rows)
    kinds_apart(division)
    assert rows.groups is not None
    sides = {"test": set(rows.groups[division.test])}
    for share in ("private", "public", "validation", "holdout"):
        taken = [rows.groups[s[share]] for s in division.clients.values() if share in s]
        if share != "validation" or "validation" in split or split["preset"] == "v1":  # else they are of the test set
            sides[share] = set(np.concatenate(taken)) if taken else set()
    assert sum(map(len, sides.values())) == len(set.union(*sides.values())) == 60
    assert 0.1 < len(division.test) / 600 < 0.3  # 0.2 of the rows, as near as whole groups come


def test_groups_of_few_rows_are_divided_nearly_as_asked() -> None:
    rows = table(2000, 0, groups=400)
    division = divide(config(partition={"kind": "iid", "clients": 4}, split={"preset": "v1", "holdout": 0.1}), rows)
    assert abs(len(division.test) - 400) <= 5
    for shares in division.clients.values():
        n = sum(map(len, shares.values()))
        assert all(abs(len(shares[k]) / n - 0.1) < 0.05 for k in ("validation", "holdout"))  # clients share groups


def test_a_client_of_one_patient_cannot_be_divided() -> None:
    rows = table(40, 10)
    of_one = Table(rows.labels, 40, rows.classes, np.where(np.arange(50) < 40, "p", "q"), rows.domains)
    with pytest.raises(DataError, match=r"client '0' has 1 group of data\.group_by, too few for"):
        divide(config(split={"validation": 0.2}), of_one)


def test_a_test_set_of_patients_that_are_trained_on() -> None:
    rows = table(groups=3)
    with pytest.raises(DataError, match=r"data\.group_by: '0' has rows in the training and in the test data"):
        divide(config(), rows)


@pytest.mark.parametrize("own_test", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fractions_of_all_rows(kind: dict[str, Any], own_test: bool) -> None:
    rows = table(1000, 100 if own_test else 0)
    division = divide(config(partition=kind, split=OF_ALL), rows)
    kinds_apart(division)
    used = [r for shares in division.clients.values() for part in shares.values() for r in part.tolist()]
    assert sorted(used) == list(range(1000))  # a test set of the data's own is not touched
    assert division.test.tolist() == sorted(np.concatenate([s["test"] for s in division.clients.values()]).tolist())
    for shares in division.clients.values():
        n = sum(map(len, shares.values()))
        sizes = {share: round(OF_ALL[share] * n) for share in ("public", "validation", "test")}
        assert {share: len(part) for share, part in shares.items()} == sizes | {"private": n - sum(sizes.values())}
        client_mix = mix(np.concatenate(list(shares.values())), rows)
        for share, fraction in OF_ALL.items():
            assert (np.abs(mix(shares[share], rows) - fraction * client_mix) < 2.5).all()  # a class mix like its owner's


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(5, 25), min_size=4, max_size=4), st.booleans(), st.integers(0, 10_000))
def test_what_fractions_leave_over_is_unused(kind: dict[str, Any], parts: list[int], grouped: bool, seed: int) -> None:
    rows = table(600, 0, groups=150 if grouped else 0, seed=seed)
    split = dict(zip(("private", "public", "validation", "test"), (p / 100 for p in parts), strict=True))
    division = divide(config(seed=seed, partition=kind, split=split), rows)
    kinds_apart(division)
    for shares in division.clients.values():
        assert set(shares) == set(split)
    used = np.concatenate([rows for shares in division.clients.values() for rows in shares.values()])
    if grouped:  # whole groups over all clients: how near they come is no promise, but that some are left over is
        assert len(used) < 600 or sum(parts) > 95
    else:  # of each client: every share rounds, to one row at least, and what is left over gives way to them
        assert abs(len(used) - 600 * sum(parts) / 100) <= len(division.clients) * len(split)


def test_what_is_left_over_gives_way_to_what_is_asked_for() -> None:
    labels = np.zeros(16, dtype=np.int64)
    fractions = {"test": 0.05, "validation": 0.05, "public": 0.05, "what is left over": 0.8}
    shares = hold_out({"a": np.arange(16)}, labels, None, fractions, np.random.default_rng(0))["a"]
    assert {kind: len(rows) for kind, rows in shares.items()} == {
        "private": 1, "test": 1, "validation": 1, "public": 1, "what is left over": 12
    }  # fmt: skip
    of_four = hold_out({"a": np.arange(16)}, labels, np.arange(16) // 4, fractions, np.random.default_rng(0))["a"]
    assert {kind: len(rows) for kind, rows in of_four.items()} == {
        "private": 4, "test": 4, "validation": 4, "public": 4, "what is left over": 0
    }  # fmt: skip


def test_held_out_rows_do_not_move_with_the_public_share() -> None:
    rows = table(1000, 0)
    small_share, large_share = (
        divide(config(partition={"kind": "domains"}, split=OF_ALL | {"private": 0.75 - p, "public": p}), rows)
        for p in (0.05, 0.15)
    )
    for i, shares in small_share.clients.items():
        assert all(np.array_equal(shares[kind], large_share.clients[i][kind]) for kind in ("validation", "test"))


def of_same_images(images: int = 100, tests: int = 0) -> Table:
    """Three domains of the same images, the test part's numbered on."""
    rng = np.random.default_rng(0)
    labels, bases = rng.integers(0, 4, images + tests), np.arange(images + tests)
    parts = [slice(images), slice(images, None)]
    return Table(
        np.concatenate([np.tile(labels[p], 3) for p in parts]),
        3 * images,
        tuple("abcd"),
        None,
        np.concatenate([np.repeat(["9", "10", "8"], len(labels[p])) for p in parts]),
        np.concatenate([np.tile(bases[p], 3) for p in parts]),
    )


@pytest.mark.parametrize("tests", [0, 20])
@pytest.mark.parametrize(
    "split", [OF_ALL, OF_ALL | {"private": 0.5}, {"validation": 0.2, "public": 0.1, "holdout": 0.1}, {"public": 0.2}]
)
def test_one_split_for_domains_of_the_same_images(split: dict[str, Any], tests: int) -> None:
    rows = of_same_images(100, tests)
    assert rows.bases is not None
    assert rows.domains is not None
    division = divide(config(partition={"kind": "domains"}, split=split), rows)
    assert list(division.clients) == ["9", "10", "8"]  # as the data have them
    first = division.clients["9"]
    for name, shares in division.clients.items():
        assert set(shares) == set(first)
        for kind, part in shares.items():
            assert set(rows.domains[part]) == {name}
            assert set(rows.bases[part]) == set(rows.bases[first[kind]])
    scored = {b for kind in ("validation", "test") for b in rows.bases[first[kind]]}
    assert not scored & {b for kind in ("private", "public") for b in rows.bases[first[kind]]}
    assert np.array_equal(division.test, np.sort(np.concatenate([s["test"] for s in division.clients.values()])))
    separate = divide(config(partition={"kind": "domains"}, split=split | {"shared": False}), rows)
    trained = [set(rows.bases[shares["private"]]) for shares in separate.clients.values()]
    assert trained[0] != trained[1]


def test_one_split_is_for_domains_of_the_same_images() -> None:
    with pytest.raises(ConfigError, match=r"key 'split.shared' = true is for domains that show the same images"):
        divide(config(partition={"kind": "domains"}, split={"shared": True}), table())


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"split": OF_ALL | {"public": 0.2}}, r"are fractions of a client's rows, but their sum is 1\.1"),
        ({"split": {"private": 0.5}}, "'split.private' needs the key 'split.validation'"),
        ({"split": OF_ALL | {"test": 0.0}}, "'split.test' must be above 0: with 'split.private'"),
        ({"split": {"preset": "v1", "public": 0.95}}, "and 'split.public' must leave training data"),
        ({"split": {"validation": 0.0}}, "'split.validation' must be above 0"),
        ({"split": {"validation": 0.6, "holdout": 0.4}}, "must leave training data"),
        ({"split": {"test": 0.0}}, "'split.test' must be above 0"),
    ],
)
def test_fractions_that_leave_nothing(tables: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        divide(config(**tables), table(test=0))


def test_a_client_that_would_be_left_with_nothing() -> None:
    few = Table(np.array([0, 1, 0, 1]), 3, ("a", "b"))
    with pytest.raises(DataError, match=r"client '0' has 1 training example, too few to hold 0\.5 of them out for holdout"):
        divide(config(partition={"clients": 3}, split={"holdout": 0.5}), few)
    with pytest.raises(DataError, match=r"client '\d' gets no validation example.* set split.validation"):
        divide(config(partition={"clients": 2}), few)


def test_domains_that_are_not_there_or_name_no_folder() -> None:
    rows = table()
    with pytest.raises(DataError, match="the data name no domains"):
        divide(config(partition={"kind": "domains"}), Table(rows.labels, 400, rows.classes))
    bad = np.where(np.arange(500) < 250, "a/b", "c")
    with pytest.raises(DataError, match="domain 'a/b' cannot name a client"):
        divide(config(partition={"kind": "domains"}), Table(rows.labels, 400, rows.classes, None, bad))


def test_small_clients_choose_their_groups_before_large_ones() -> None:
    groups = np.array([str(g) for g in range(10) for _ in range(3)])
    labels = np.zeros(30, dtype=np.int64)
    parts = {"large": np.arange(0, 30, 3), "small": np.array([1, 4]), "other": np.array([2, 5, 8])}
    for seed in range(30):
        shares = hold_out(parts, labels, groups, {"validation": 0.1}, np.random.default_rng(seed))
        assert list(shares) == list(parts)
        sides = [{g for s in shares.values() for g in groups[s[kind]]} for kind in ("private", "validation")]
        assert sides[0].isdisjoint(sides[1])
        assert all(len(s["private"]) and len(s["validation"]) for s in shares.values())
