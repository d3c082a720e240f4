"""Cross-validation: every row is scored once, by a model that did not train on it, and a client's folds are one score."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedmutual
import wards
from fedmutual import Config, Site, data
from fedmutual.config import override_config, parse_config
from fedmutual.errors import ConfigError, DataError, RemarkWarning, RunError
from fedmutual.events import Finished
from fedmutual.report.measures import measure_gains
from fedmutual.results.comparison import make_comparisons
from fedmutual.results.folds import join_folds
from fedmutual.results.frame import find_runs, read_runs
from fedmutual.sites.contract import read_contract
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import configure_site, read_site_file
from fedmutual.studies.compare import compare, tune
from fedmutual.studies.study import list_runs
from own_data import config, npz

RNG = np.random.default_rng(0)


def make(tmp_path: Path, rows: int = 53, **arrays: Any) -> dict[str, Any]:
    """Write rows of features with labels 0, 1 and 2; return the table [data]."""
    x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4) / rows
    return npz(tmp_path / "rows.npz", x=x, y=RNG.permutation(np.arange(rows) % 3), **arrays)


def list_shares(about: Mapping[str, Any], folds: int = 5, **tables: Any) -> list[Any]:
    """Return each fold as a federation."""
    split = {"folds": folds, **tables.pop("split", {})}
    return [data.load(config(data=about, split=split | {"fold": k}, **tables)) for k in range(folds)]


@pytest.mark.parametrize("kind", [{"clients": 2}, {"kind": "dirichlet", "clients": 2, "alpha": 1.0}])
def test_every_row_is_scored_once_by_a_model_that_did_not_train_on_it(tmp_path: Path, kind: dict[str, Any]) -> None:
    federations = list_shares(make(tmp_path), partition=kind, split={"holdout": 0.1})
    scored = np.concatenate([f.clients[i].validation.index for f in federations for i in "01"])
    assert sorted(scored) == list(range(53))
    for i in "01":
        rows = np.concatenate([f.clients[i].validation.index for f in federations])
        for federation in federations:
            shares = federation.clients[i]
            parts = [share.index for share in (shares.private, shares.holdout, shares.validation) if share is not None]
            assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(rows))
            counts = np.bincount(shares.validation.labels, minlength=3) - np.bincount(shares.private.store.labels[rows]) / 5
            assert np.abs(counts).max() < 1.5  # the class mix of the client
    tests = [np.sort(np.concatenate([f.clients[i].validation.index for i in "01"])) for f in federations]
    assert all(np.array_equal(f.test.index, rows) for f, rows in zip(federations, tests, strict=True))
    assert len({f.partition["fingerprint"] for f in federations}) == 5


def test_groups_and_domains_stay_whole(tmp_path: Path) -> None:
    numbers = np.arange(60)
    about = make(tmp_path, 60, groups=(numbers // 3).astype(str), domain=np.array(["n", "s"])[numbers % 2])
    federations = list_shares(about | {"group_by": "groups"}, 4, partition={"kind": "domains"})
    seen = list[str]()
    for federation in federations:
        of_fold = {str(g) for i in "ns" for g in np.asarray(federation.clients[i].validation.index) // 3}
        trained = {str(g) for i in "ns" for g in np.asarray(federation.clients[i].private.index) // 3}
        assert not of_fold & trained
        seen += sorted(of_fold)
    assert len(seen) == len(set(seen)) == 20


def test_a_test_set_of_the_data_stays(tmp_path: Path) -> None:
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    y = np.arange(20) % 2
    federations = list_shares(npz(tmp_path / "t.npz", x=x, y=y, x_test=x, y_test=y))
    assert all(np.array_equal(f.test.index, np.arange(20, 40)) for f in federations)
    scored = np.concatenate([f.clients[i].validation.index for f in federations for i in "01"])
    assert sorted(scored) == list(range(20))


@pytest.mark.parametrize(
    ("split", "more", "words"),
    [
        ({"folds": 5, "fold": 5}, {}, "the folds are numbered from 0 to 4"),
        ({"folds": 5, "test": 0.3}, {}, "split.test"),
        ({"folds": 5, "validation": 0.3}, {}, "split.validation"),
        ({"folds": 5, "private": 0.3, "validation": 0.1}, {}, "split.private"),
        ({"fold": 1}, {}, "split.fold"),
        ({"folds": 5}, {"partition": {"kind": "pfllib"}}, "split.folds"),
        ({"folds": 5}, {"privacy": {"nets": "meme", "sigma": 1.0}}, "with privacy.nets remove it"),
    ],
)
def test_keys_that_contradict_folds(split: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"split": split, **more})


def test_a_client_with_few_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"client '[01]' has 4 rows, too few for 5 folds; lower split\.folds"):
        list_shares(make(tmp_path, 9))


def experiment(tmp_path: Path, **split: Any) -> Config:
    training = {"local_epochs": 1, "batch_size": 8}
    return config(name="folds", rounds=2, data=make(tmp_path), split={"folds": 3, **split}, training=training)


@pytest.mark.run
def test_a_comparison_joins_folds_before_gains_are_judged(tmp_path: Path) -> None:
    runs = compare(experiment(tmp_path), ["fml", "independent"], 2, tmp_path / "out")
    folders = [run.folder.relative_to(tmp_path / "out").as_posix() for run in runs]
    assert folders[:4] == ["fml/0/0", "fml/0/1", "fml/0/2", "fml/1/0"]
    (comparison,) = make_comparisons(read_runs(find_runs(tmp_path / "out")))
    assert {(line.method, len(line.counted)) for line in comparison.methods} == {("FML", 2), ("Local-only", 2)}
    assert "3 folds score every row once; costs are of the first fold." in comparison.remarks
    row = comparison.methods[0].counted[0].get_rows(2)["1"]
    folds = [run.get_rows(2)["1"].values for run in read_runs([r.folder for r in runs[:3]])]
    right = sum(f["accuracy"] * f["examples"] for f in folds)
    assert row.find_number("examples") == sum(f["examples"] for f in folds)
    assert row.find_number("accuracy") == pytest.approx(right / row.values["examples"])
    gains = measure_gains(comparison, comparison.methods[0])
    assert len(gains) == 4  # type: ignore[arg-type]  # two clients, two seeds
    table = fedmutual.read(tmp_path / "out")
    assert len(table.runs) == 4
    last = table.scores[table.scores["last"] & (table.scores["data"] == "test") & table.scores["client"].isna()]
    assert set(last["examples"]) == {53}


@pytest.mark.run
def test_unfinished_folds_have_no_numbers_and_are_resumed(tmp_path: Path) -> None:
    folded = experiment(tmp_path)
    compare(folded, ["fedavg"], 1, tmp_path / "out")
    (tmp_path / "out" / "fedavg" / "0" / "1" / "summary.json").unlink()
    (joined,) = join_folds(read_runs(find_runs(tmp_path / "out")))
    assert (joined.evaluations, joined.finished) == ((), False)
    compare(folded, ["fedavg"], 1, tmp_path / "out", resume=True)
    (joined,) = join_folds(read_runs(find_runs(tmp_path / "out")))
    assert joined.finished
    (partial,) = join_folds(read_runs(find_runs(tmp_path / "out"))[:2])
    assert partial.state == "unfinished: 2 of 3 folds"


@pytest.mark.run
def test_folds_of_which_one_trains_further_have_the_scores_of_an_earlier_round(tmp_path: Path) -> None:
    """Successive halving was stopped while the first fold went on: a resume judges the earlier round as before."""
    folded = experiment(tmp_path)
    compare(override_config(folded, {"rounds": 1}), ["fedavg"], 1, tmp_path / "out")
    (whole,) = join_folds(read_runs(find_runs(tmp_path / "out")), 1)
    first = tmp_path / "out" / "fedavg" / "0" / "0"
    fedmutual.run(fedmutual.load_config(first / "config.toml", rounds=2), first, resume=True)
    for _ in range(2):
        (joined,) = join_folds(read_runs(find_runs(tmp_path / "out")), 1)
        assert joined.evaluations == whole.evaluations
        (first / "summary.json").unlink(missing_ok=True)  # as of a fold that was stopped in a later round


@pytest.mark.run
def test_copies_of_a_run_are_joined_one_by_one(tmp_path: Path) -> None:
    compare(experiment(tmp_path), ["fedavg"], 1, tmp_path / "0")
    copies = [shutil.copytree(tmp_path / "0", tmp_path / name) for name in ("1", "2")]
    runs = [run for out in (tmp_path / "0", *copies) for run in read_runs(find_runs(out))]
    joined = join_folds(runs)
    assert [run.folds for run in joined] == [(3, 3)] * 3
    assert joined[0].evaluations == joined[1].evaluations == joined[2].evaluations


@pytest.mark.sites
def test_real_sites_train_all_folds(tmp_path: Path) -> None:
    """A federation for each fold, of one contract: equal to the folds of one process, and one run to each site."""
    sites, common = wards.with_data(tmp_path), wards.COMMON | wards.TELLING | {"rounds": 2, "split": {"folds": 2}}
    agreed = read_contract(wards.contract(tmp_path, common, sites))
    for run in agreed.list_runs():
        for rounds in (1, 2):  # all begin again after the first round
            job = run.record()
            job["tables"]["rounds"] = rounds
            accepted = wards.accepted(job, agreed.record())
            halves = {i: SiteRuntime(accepted, read_site_file(wards.site(tmp_path, i, sites[i]))) for i in sites}
            Coordinator(accepted, tmp_path / "server" / run.name).run(wards.InMemoryTransport(halves))
    together = parse_config(wards.together(common, sites))
    for (_, (_, one)), run in zip(list_runs(together, tmp_path).items(), agreed.list_runs(), strict=True):
        expected = fedmutual.run(one, tmp_path / "one" / run.name)
        for i in sites:
            model = fedmutual.Run(tmp_path / i / "state" / run.name).personal_model(i)
            assert wards.same(model.state_dict(), expected.personal_model(i).state_dict())
    for i in sites:
        (joined,) = join_folds(read_runs(find_runs(tmp_path / i / "state")))
        assert joined.folds == (2, 2)
        rows = [dict(row.values)["examples"] for row in joined.evaluations[-1].rows if row.model == "personal"]
        assert rows == [599]


@pytest.mark.sites
@pytest.mark.parametrize("change", [{"fold": 3}, {"folds": 4, "fold": 0}, {"folds": 3}, {"fold": 0, "validation": 0.3}])
def test_a_job_is_a_fold_of_the_contract(change: dict[str, Any], tmp_path: Path) -> None:
    agreed = read_contract(wards.contract(tmp_path, wards.COMMON | {"split": {"folds": 3}}, wards.SITES))
    job = agreed.list_runs()[0].record()
    job["tables"]["split"] |= change
    if "fold" not in change:
        del job["tables"]["split"]["fold"]
    with pytest.raises(ConfigError, match=r"its 'split\..*' is .*, and this site agreed to"):
        wards.accepted(job, agreed.record())


@pytest.mark.sites
def test_a_site_chooses_no_fold(tmp_path: Path) -> None:
    contract = read_contract(wards.contract(tmp_path, wards.COMMON | {"split": {"folds": 3}}, wards.SITES))
    settings = read_site_file(wards.site(tmp_path, "north", wards.SITES["north"], split={"fold": 1}))
    with pytest.raises(ConfigError, match=r"'split\.fold' is one for all sites"):
        configure_site(contract, settings)


@pytest.mark.run
def test_one_call_trains_all_folds_and_returns_them_as_one_run(tmp_path: Path) -> None:
    folded, events = experiment(tmp_path), list[Any]()
    run = fedmutual.run(folded, tmp_path / "out", observers=[events.append])
    assert [event.run for event in events if isinstance(event, Finished)] == [(0,), (1,), (2,)]
    assert [fold.folder.relative_to(tmp_path) for fold in run.folds] == [Path("out", fold) for fold in "012"]
    assert (run.finished, run.config.split.fold, "3 folds, finished" in repr(run)) == (True, None, True)
    table = run.history()
    assert next(iter(table)) == "fold"
    assert set(table["fold"]) == {0, 1, 2}
    alone = fedmutual.run(override_config(folded, {"split.fold": 1}), tmp_path / "alone")
    assert alone.folds == ()
    assert wards.same(run.folds[1].personal_model("0").state_dict(), alone.personal_model("0").state_dict())
    assert table[table["fold"] == 1].drop(columns="fold").reset_index(drop=True).equals(alone.history())
    for refuse in (run.global_model, lambda: run.summary, lambda: fedmutual.predict(tmp_path / "out", tmp_path / "x.npz")):
        with pytest.raises(RunError, match=r"has 3 folds, .* use one of them: .*out/0 "):
            refuse()
    (tmp_path / "out" / "2" / "summary.json").unlink()
    assert not fedmutual.Run(tmp_path / "out").finished
    assert fedmutual.run(folded, tmp_path / "out", resume=True).finished


@pytest.mark.run
def test_objects_are_trained_in_folds(tmp_path: Path) -> None:
    x, y = np.arange(80, dtype=np.float32).reshape(40, 2), np.arange(40) // 2 % 2
    sites, net = {name: Site(train=(x[k::2], y[k::2])) for k, name in enumerate("ab")}, nn.Linear(2, 2)
    more: Any = {"rounds": 1, "batch_size": 8, "settings": {"split.folds": 2}, "progress": False}
    run = fedmutual.federate(sites, "fedavg", net, **more)
    comparison = fedmutual.compare(sites, ["fedavg"], net, seeds=1, **more)
    assert [*comparison.runs] == [("fedavg", 0, 0), ("fedavg", 0, 1)]
    assert set(comparison.history()["fold"]) == {0, 1}
    for fold, one in enumerate(run.folds):
        assert wards.same(one.global_model().state_dict(), comparison.runs["fedavg", 0, fold].global_model().state_dict())
    with pytest.raises(ConfigError, match=r"in_place=True: .* set split\.fold"):
        fedmutual.federate(sites, "fedavg", net, in_place=True, **more)
    fedmutual.federate(sites, "fedavg", net, in_place=True, **more | {"settings": {"split.folds": 2, "split.fold": 0}})


@pytest.mark.run
def test_folds_that_end_in_different_rounds_are_shown_at_the_last_round_of_all(tmp_path: Path) -> None:
    """As the page joins them; the first fold ends after round 1, as by records.patience, and the second after round 2."""
    x, y = np.arange(80, dtype=np.float32).reshape(40, 2), np.arange(40) // 2 % 2
    sites, net = {name: Site(train=(x[k::2], y[k::2])) for k, name in enumerate("ab")}, nn.Linear(2, 2)
    more: Any = {"rounds": 2, "batch_size": 8, "settings": {"split.folds": 2}, "progress": False, "lr": 0.003}
    run = fedmutual.federate(sites, "fedavg", net, **more)
    comparison = fedmutual.compare(sites, ["fedavg"], net, seeds=1, **more)
    for folder in (run.folder / "0", comparison.runs["fedavg", 0, 0].folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(line for line in lines if '"round":2' not in line.replace(" ", "")))
    table = run.history()
    assert sorted(set(zip(table["fold"], table["round"], strict=True))) == [(0, 1), (1, 1), (1, 2)]
    rows = table[(table["round"] == 1) & (table["metric"] == "accuracy") & (table["data"] == "validation")]
    mean = rows["value"].mean()
    assert "round 1 of 2" in repr(run)
    assert f"global {100 * mean:.1f} % on validation" in repr(run)
    assert f"fedavg, global: {100 * mean:.1f} %" in repr(comparison)


@pytest.mark.run
def test_a_sweep_chooses_by_the_mean_over_folds(tmp_path: Path) -> None:
    with pytest.warns(RemarkWarning, match=r"scored in another one, .*--tune` chooses for each fold by itself"):
        result = fedmutual.sweep(experiment(tmp_path, holdout=0.2), {"optimizer.lr": [0.1, 0.2]}, out=tmp_path / "out")
    (first, _) = result.tried
    rows = [
        row for run in read_runs(find_runs(tmp_path / "out" / "lr=0.1")) for row in run.last_rows if row.model == "personal"
    ]
    by_client = {i: [dict(row.values) for row in rows if row.client == i] for i in "01"}
    means = [sum(r["accuracy"] * r["examples"] for r in of) / sum(r["examples"] for r in of) for of in by_client.values()]
    assert first.last is not None
    assert first.last.mean == pytest.approx(np.mean(means))
    assert first.examples == sum(r["examples"] for of in by_client.values() for r in of)


@pytest.mark.run
def test_each_fold_is_tuned_by_its_own_rows(tmp_path: Path) -> None:
    folded = experiment(tmp_path)
    chosen = tune(folded, ["fedavg"], 2, tmp_path / "out")
    assert [*chosen] == [("fedavg", 0), ("fedavg", 1), ("fedavg", 2)]
    for fold in range(3):
        (trial, *_) = read_runs(find_runs(tmp_path / "out" / "tune" / "fedavg" / str(fold)))
        assert trial.config["split"]["fold"] == fold
        assert {row.data for row in trial.last_rows} == {"holdout"}
    chosen |= {
        ("fedavg", k): chosen["fedavg", k]._replace(values={"optimizer.lr": rate}) for k, rate in enumerate((0.1, 0.2, 0.3))
    }
    runs = compare(folded, ["fedavg"], 1, tmp_path / "out", tuned=chosen)
    assert [run.config.optimizer.lr for run in runs] == [0.1, 0.2, 0.3]
    (joined,) = join_folds(read_runs(find_runs(tmp_path / "out")))
    assert (joined.folds, joined.finished) == ((3, 3), True)
    assert joined.tuned == {"optimizer.lr": "0.1, 0.2, 0.3 (by fold)"}
