"""The gain of each site in one submission: `sites.baseline` and `sites.seeds`, and what of them leaves a site."""

from dataclasses import replace

import pytest

import fedmutual
from fedmutual.config import parse_config
from fedmutual.report.measures import measure_gains
from fedmutual.results.comparison import make_comparisons
from fedmutual.results.frame import find_runs, read_runs
from fedmutual.results.gains import Gains
from fedmutual.sites import contract as contracts
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.protocol import pack_message, read_answer
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from fedmutual.studies import compare
from wards import COMMON, SITES, TELLING, Federation, InMemoryTransport, contract, site, together

pytestmark = pytest.mark.sites

SHORT = COMMON | {"rounds": 2}


def submit(folder, common, sites=SITES, site_tables=None, **given):
    """Carry out all runs of one submission, and return the folder of the results."""
    folder.mkdir()
    path = contract(folder, common, sites, baseline=True, **given)
    for number, run in enumerate(contracts.read_submitted_contract(path).list_runs()):
        settings = {i: read_site_file(site(folder, i, sites[i], **(site_tables or {}))) for i in sites}
        halves = {i: SiteRuntime(run, own) for i, own in settings.items()}
        Coordinator(run, folder / "lead" / str(number)).run(InMemoryTransport(halves))
    return folder / "lead"


def read_gains(*folders):
    """Return the gains of FML over local-only training in some folders, and the comparison."""
    (comparison,) = make_comparisons(read_runs(run for folder in folders for run in find_runs(folder)))
    gains = measure_gains(comparison, next(m for m in comparison.methods if m.algorithm != "independent"))
    assert isinstance(gains, Gains), gains
    return gains, comparison


@pytest.mark.parametrize(
    ("more", "given"),
    [
        ({}, {"seeds": 2}),
        ({"split": {"folds": 2}}, {}),
        ({"algorithm": {"name": "fedavg"}}, {}),
        ({"data": {"classes": COMMON["data"]["classes"], "mean": "federated", "std": "federated"}}, {}),
    ],
    ids=["seeds", "folds", "fedavg", "federated mean"],
)
def test_gains_of_one_submission_are_those_of_compare(more, given, tmp_path):
    common, sites = SHORT | TELLING | more, {i: {"data": {"name": "digits"}} for i in SITES} if more else SITES
    ours, comparison = read_gains(submit(tmp_path / "sites", common, sites, **given))
    config = parse_config(together(common, sites))
    compare.compare(config, (config.algorithm["name"], "independent"), given.get("seeds", 1), tmp_path / "one")
    expected, _ = read_gains(tmp_path / "one")
    assert ours.table.to_dict("list") == expected.table.to_dict("list")
    assert ours.by_client == expected.by_client
    assert [len(ours), comparison.remarks[1:]] == [3 * given.get("seeds", 1), ()]
    if given or "split" in more:
        assert {(e.n, e.unit) for e in ours.by_client.values()} == {(2, "seeds" if given else "folds")}
        assert all(e.half is not None for e in ours.by_client.values())


def test_a_site_that_shares_nothing_sees_its_gain_alone(tmp_path):
    sites = {i: {**tables, "share": {"metrics": "none" if i == "north" else "all"}} for i, tables in SITES.items()}
    federation = Federation(tmp_path, SHORT, sites, baseline=True).run()
    for site_name, _, answer in federation.transport.answers:
        scores = read_answer(answer)[0].scores
        assert {s.model for s in scores} == (set() if not scores else {"personal", "global", "alone"})
        assert not (site_name == "north" and scores)
    gains, comparison = read_gains(federation.server)
    assert [*gains.by_client] == ["south", "west"]
    assert any(remark.startswith("The gain of north is not disclosed") for remark in comparison.remarks)
    own, comparison = read_gains(federation["north"].folder)
    assert [*own.by_client] == ["north"]
    assert comparison.remarks == ()


def test_a_killed_site_goes_on_with_equal_bits(tmp_path):
    whole, broken = (Federation(tmp_path / name, SHORT, baseline=True) for name in ("whole", "broken"))

    def kill(round, phase):
        if round == 1:
            broken.restart()

    broken.transport.before = kill
    histories = [
        [fedmutual.Run(fed[i].folder).history().to_dict("list") for i in SITES] for fed in (whole.run(), broken.run())
    ]
    assert histories[0] == histories[1]
    assert "alone" in histories[0][0]["model"]


def test_an_error_alone_does_not_stop_the_federation(tmp_path, monkeypatch):
    federation, said = Federation(tmp_path, SHORT, baseline=True), []
    federation["north"].say = said.append
    federation["north"]._baseline._say = said.append
    monkeypatch.setattr(federation["north"]._baseline, "_train_round", lambda *_: 1 / 0)
    federation.run()
    assert ["ZeroDivisionError" in line for line in said] == [True]
    assert [*read_gains(federation.server)[0].by_client] == ["south", "west"]


def test_a_score_of_a_network_that_the_contract_does_not_have_is_left_out(tmp_path):
    federation = Federation(tmp_path, SHORT | TELLING)  # without sites.baseline

    def rename(site, order, content):
        answer, message = read_answer(content)
        scores = tuple(replace(score, model="alone") if n == 0 else score for n, score in enumerate(answer.scores))
        return [pack_message(replace(answer, scores=scores), message)]

    federation.transport.change = rename
    assert len([note for note in federation.run().notes if "a score is of a model" in note]) == 2 * len(SITES)


def test_the_runs_of_a_submission(tmp_path):
    path = contract(tmp_path, SHORT | {"seed": 3, "split": {"folds": 2}}, seeds=2)
    runs = contracts.read_contract(path).list_runs()
    assert [(run.name, run.config.seed, run.config.split.fold) for run in runs] == [
        ("wards-seed3-0", 3, 0),
        ("wards-seed3-1", 3, 1),
        ("wards-seed4-0", 4, 0),
        ("wards-seed4-1", 4, 1),
    ]
    assert all([one.name for one in run.list_runs()] == [run.name] for run in runs)
