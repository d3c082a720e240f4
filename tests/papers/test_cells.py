"""Experiments as files: what is read and refused, the settings that sweeps chose, and what makes two runs the same."""

import json

import pytest

from committed import read_committed_experiments
from fedmutual.errors import ConfigError
from fedmutual_papers.claims import judge
from fedmutual_papers.experiment_files import read_experiment, read_experiments
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.pages import make_page, render_markdown
from fedmutual_papers.plan import Scale, check, has_effect, list_jobs
from fedmutual_papers.store import ResultStore

pytestmark = pytest.mark.long

IDS = ["table1", "v1-tables", "curves", "dh", "mh", "oh", "newcomer", "rounds", "v1-local", "catfish", "alphabeta"]
IDS += ["stability", "fairness", "tuned", "few-classes", "rotated-mnist", "pacs", "office-home", "h2l-ablation"]
IDS += ["h2l-figures", "benchmark", "privacy", "proxyfl"]
REAL = read_committed_experiments()
THAN, ARM, MEASURES = 'than = "fedavg"', 'arm = "fml"', '["global_test"]\nfigures'


def test_a_cell_is_a_configuration_with_arms(papers):
    table, looker = read_experiment(papers, "table9"), read_experiment(papers, "looker")
    assert [c.name for c in table.cells] == [c.name for c in looker.cells] == ["digits/iid", "digits/noniid"]
    assert [c.id for c in looker.cells] == ["table9/digits/iid", "table9/digits/noniid"]
    assert list(looker.cells[0].arms) == [*table.cells[0].arms, "independent"] == ["fedavg", "fml", "independent"]
    assert [a.paper for a in table.cells[0].arms.values()] == [80.0, 81.5]
    assert [a.paper for a in looker.cells[0].arms.values()] == [None, None, None]  # of another measure
    assert [len(table.choose_cells(only)) for only in (["*noniid"], [])] == [1, 2]


def test_numbers_in_names_sort_as_numbers(papers):
    cell = (papers / "table9/digits/iid.toml").read_text()
    for name in ("n2000", "n500", "n100"):
        (papers / f"table9/{name}.toml").write_text(cell)
    assert [c.name for c in read_experiment(papers, "table9").cells][-3:] == ["n100", "n500", "n2000"]


@pytest.mark.parametrize(("id", "only", "message"), [
    ("tabel9", [], "there is no experiment 'tabel9'; did you mean 'table9'?"),
    ("table9", ["digits/idd"], "--only 'digits/idd' matches no cell of table9; did you mean 'digits/iid'?"),
])  # fmt: skip
def test_the_nearest_name_is_named(papers, id, only, message):
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, id).choose_cells(only)
    assert str(problem.value) == message


@pytest.mark.parametrize(("file", "before", "after", "message"), [
    ("digits/iid.toml", "[cell]", "[cells]", "the key 'cell.row' is missing"),
    ("digits/iid.toml", "paper = 81.50", "papers = 81.50", "'cell.arms.fml.papers'; did you mean 'cell.arms.fml.paper'?"),
    ("digits/iid.toml", "paper = 81.50", 'needs = "federation"', "but 'federation' is not defined"),
    ("digits/iid.toml", "paper = 81.50", 'needs = "fml"', "arm 'fml' needs arm 'fml', but 'fml' is not defined, or"),
    ("digits/iid.toml", "alpha = 0.4", "alhpa = 0.4", "unknown key 'algorithm.alhpa'"),
    ("digits/iid.toml", '"fedavg" }', '"fedavgg" }', "iid.toml, arm 'fedavg': key 'algorithm.name'"),
    ("digits/iid.toml", "rounds = 2", 'rounds = "x"', "iid.toml, arm 'fedavg': key 'rounds'"),
    ("digits/iid.toml", 'algorithm = { name = "fml", alpha = 0.4, beta = 0.6 }', "algorithm = 3", "key 'algorithm"),
    ("digits/iid.toml", "training = { local_epochs = 1, batch_size = 16 }", "training = 3", "key 'training'"),
    ("index.toml", MEASURES, '["global_tset"]\nfigures', "no measure 'global_tset'; did you mean 'global_test'?"),
    ("index.toml", THAN, "", "needs 'than' or 'less'"),
    ("index.toml", "order = 1", "order = ", "not valid TOML"),
    ("index.toml", THAN, f'{THAN}\ntimes = 3\nless = "x"', "needs 'than' without 'less', because it has 'times'"),
    ("index.toml", THAN, f'{THAN}\nper = "client"', "'global_test', which is no measure of each client"),
    ("index.toml", THAN, f'{THAN}\nreadings = [{{ arm = "fml" }}]', "has a reading without a name; give it a 'name'"),
    ("index.toml", MEASURES, '["rounds_to"]\nfigures', "'rounds_to' needs a number: 'rounds_to:0.9'"),
    ("index.toml", MEASURES, '["noise:x"]\nfigures', "measure 'noise:x' needs a number: 'noise:0.9'"),
    ("index.toml", MEASURES, '["noise:nan"]\nfigures', "needs a number"),
    ("index.toml", MEASURES, '["bwt:2"]\nfigures', "measure 'bwt' takes no number; remove ':2'"),
    ("index.toml", ARM, 'arm = "fmll"', "'FML is better than FedAvg.' has no arm 'fmll'; did you mean 'fml'?"),
    ("index.toml", THAN, 'than = "fedagv"', "has no arm 'fedagv'; did you mean 'fedavg'?"),
    ("index.toml", ARM, f'{ARM}\ncells = "digit/*"', "no cell 'digit/*'; did you mean 'digits/iid'?"),
    ("index.toml", ARM, f'{ARM}\nless = "idd"', "matches no cell 'idd'; "),
    ("index.toml", THAN, 'than = "fedavg@digits/idd"', "no cell 'digits/idd'; did you mean 'digits/iid'?"),
    ("index.toml", 'measure = "global_test"\n', 'measure = "own_validation"\nper = "client"\nof = "most"\n', "remove 'of'"),
    ("index.toml", 'figures = ["global_test"]', 'figures = ["swing_own"]', "'swing_own' has no curve that could be drawn"),
    ("index.toml", "order = 1", 'notes = ["rte"]', "names 'rte', which notes.toml does not have; did you mean 'rate'?"),
    ("index.toml", "order = 1", 'code = "their"', "'their', which notes.toml does not have; did you mean 'theirs'?"),
])  # fmt: skip
def test_an_error_names_its_file(papers, file, before, after, message):
    (papers / "notes.toml").write_text(NOTES)
    path = papers / "table9" / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, "table9")
    assert message in str(problem.value)
    assert str(path) in str(problem.value)


def test_a_claim_about_arms_that_share_no_cell_is_refused(papers):
    for name, arm in (("iid", "fml"), ("noniid", "fedavg")):
        path = papers / f"table9/digits/{name}.toml"
        path.write_text(path.read_text().replace(f"[cell.arms.{arm}]", "[cell.arms.other]"))
    with pytest.raises(ConfigError, match=r"'FML is better than FedAvg\.' has 'fml' and 'fedavg' in no cell"):
        read_experiment(papers, "table9")


def test_a_plain_configuration_is_not_a_cell(papers):
    (papers / "table9/plain.toml").write_text("rounds = 2")
    with pytest.raises(ConfigError, match=r"plain.toml: has no table \[cell\]"):
        read_experiment(papers, "table9")


def test_a_folder_that_is_not_there_has_no_experiment_to_name(tmp_path):
    for read in (lambda root: read_experiment(root, "table1"), read_experiments):
        with pytest.raises(ConfigError, match=r"nope: contains no experiment, no \*/index.toml; name another folder"):
            read(tmp_path / "nope")


NOTES = """
[differences]
rate = "One rate for all."

[code]
theirs = ["It never shuffles."]
"""


def test_differences_that_experiments_share_stand_in_one_place(papers):
    (papers / "notes.toml").write_text(NOTES)
    index = papers / "table9/index.toml"
    index.write_text(index.read_text().replace("order = 1", 'notes = ["rate"]\ncode = "theirs"'))
    experiment = read_experiment(papers, "table9")
    assert experiment.differences == ("Digits of 8 by 8 pixels.", "One rate for all.")
    assert (experiment.code, read_experiment(papers, "looker").code) == (("It never shuffles.",), ())


def test_all_ids_are_there():
    assert list(REAL) == IDS


@pytest.mark.parametrize("experiment", REAL.values(), ids=lambda e: e.id)
def test_every_real_cell_is_valid(experiment, tmp_path):
    planned = [job for cell in experiment.cells for job in list_jobs(cell, [0], Scale())]
    assert len(planned) == sum(len(c.arms) for c in experiment.cells)
    assert len({job.fingerprint for job in planned}) > 1
    unrun = read_measured_cells(experiment, ResultStore(tmp_path))
    for claim in experiment.index.claims:  # no claim is idle, no arm or cell misspelt
        assert judge(claim, unrun).lines, claim.text
    assert len(experiment.differences) > 2


def test_table_1_is_whole():
    table = REAL["table1"]
    assert len(table.cells) == 24
    assert all(list(c.arms)[:3] == ["fedavg", "fedprox", "fml"] for c in table.cells)
    papers = {(c.about.column, c.about.row, k): a.paper for c in table.cells for k, a in c.arms.items()}
    assert papers["MNIST MLP", "Non-IID 3", "fml"] == 93.77
    assert papers["CIFAR-100 CNN1", "IID", "fedprox"] == 32.41
    assert papers["CIFAR-10 CNN2", "Non-IID 2", "fedavg"] == 81.17
    assert round(sum(v for v in papers.values() if v is not None), 2) == 5422.25  # added up from the printed table


def test_curves_dh_rounds_and_stability_ask_for_the_runs_of_table_1():
    jobs = {id: [j for c in e.cells for j in list_jobs(c, [0], Scale())] for id, e in REAL.items()}
    prints = {id: {j.fingerprint for j in of_experiment} for id, of_experiment in jobs.items()}
    control = {j.fingerprint for j in jobs["table1"] if j.arm == "fml-from-server"}  # which the figures leave out
    assert len(control) == 1
    assert prints["rounds"] | prints["stability"] < prints["table1"]
    assert prints["table1"] - control < prints["dh"]
    assert prints["table1"] - control < prints["curves"]
    assert prints["v1-local"] == prints["v1-tables"]
    assert prints["v1-tables"].isdisjoint(prints["table1"])  # another split


LR = Scale(None, (("optimizer.lr", 0.1),))


def list_prints(papers, scale=None, here=None, seed=0, id="table9"):
    cell = read_experiment(papers, id).cells[0]
    return {job.arm: job.fingerprint for job in list_jobs(cell, [seed], scale or Scale(), here or {})}


def change(papers, *pairs, name="iid"):
    path = papers / f"table9/digits/{name}.toml"
    for before, after in pairs:
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))


def test_what_tells_in_the_result_makes_another_run(papers):
    fingerprints = list_prints(papers)
    assert len(set(fingerprints.values())) == 2
    for more in ({"seed": 1}, {"scale": Scale(1)}, {"scale": LR}):
        assert list_prints(papers, **more)["fml"] != fingerprints["fml"]
    here = {"engine.name": "stacked", "data.root": "elsewhere", "engine.threads": 2}
    assert list_prints(papers) == list_prints(papers, here=here) == fingerprints
    looker = list_prints(papers, id="looker")  # whoever asks
    assert {k: looker[k] for k in ("fedavg", "fml")} == fingerprints
    change(papers, ("split = { test = 0.5 }", 'split = { test = 0.5, preset = "journal" }'))  # a default, written out
    assert list_prints(papers) == fingerprints
    (papers / "table9/digits/iid.toml").rename(papers / "table9/a.toml")  # whatever it is called
    assert list_prints(papers) == fingerprints


def test_a_limit_above_the_number_of_rounds_has_no_effect(papers):
    cell = read_experiment(papers, "table9").cells[0]
    assert Scale(2).fit_to(cell) == Scale(7).fit_to(cell) == Scale().fit_to(cell)
    changed = (("partition.examples", 20),)
    for scale, words in (
        (Scale(1), "shortened: 1 of 2 rounds"),
        (Scale(), ""),
        (Scale(1, changed), "shortened: 1 of 2 rounds, partition.examples = 20"),
    ):
        assert scale.fit_to(cell).describe(cell) == words


@pytest.mark.parametrize(("arm_rounds", "limit", "cut"), [
    (57, 250, 1),  # 57 exchanges of 175 steps in the place of 10,000 rounds: 1.4 of them
    (57, 2000, 11),  # 11.4
    (57, 5000, 29),  # 28.5, rounded up: half of an arm's rounds is half
    (10_000, 250, 250),
    (2000, 250, 50),
    (20_000, 250, 250),  # an arm with more rounds than the cell, as a federation that others start from
    (20_000, 15_000, 15_000),
    (57, 1, 1),
])  # fmt: skip
def test_each_arm_is_cut_in_proportion_to_its_own_rounds(papers, arm_rounds, limit, cut):
    """Not to its local steps: an arm with two a round is cut as the others."""
    arm = '"algorithm.name" = "fedavg"'
    longer = f'{arm}, "training.local_steps" = 2, rounds = {arm_rounds}'
    change(papers, ("rounds = 2", "rounds = 10_000"), (arm, longer), ("local_epochs = 1", "local_steps = 1"))
    cell = read_experiment(papers, "table9").cells[0]
    rounds = {j.arm: j.config.rounds for j in list_jobs(cell, [0], Scale(limit))}
    assert rounds == {"fedavg": cut, "fml": min(limit, 10_000)}


def test_an_algorithm_setting_applies_to_the_methods_that_have_it(papers):
    cell, changed = read_experiment(papers, "table9").cells[0], Scale(None, (("algorithm.weighting", "uniform"),))
    planned = {j.arm: j.config.algorithm for j in list_jobs(cell, [0], changed)}
    assert planned["fedavg"]["weighting"] == "uniform"
    assert "weighting" not in planned["fml"]


def test_a_key_that_no_arm_accepts_leaves_the_cell_unchanged(papers):
    change(papers, ("[cell.arms.fml]", '[cell.arms.fml]\nset = { "algorithm.name" = "independent" }'))
    changed = Scale(None, (("algorithm.alpha", 0.3),))
    without, with_fml = read_experiment(papers, "table9").cells
    assert changed.fit_to(without) == Scale()
    assert changed.fit_to(with_fml) == changed


def test_keys_that_tell_and_keys_that_do_not():
    assert all(map(has_effect, ("optimizer.lr", "data.name", "engine.precision", "records.evaluate_every", "rounds")))
    assert not any(map(has_effect, ("engine.name", "engine.threads", "data.root", "name", "records.checkpoint_every")))


@pytest.mark.parametrize(("key", "value", "message"), [
    ("seed", 3, "--set seed: cells and arms have their own; use --seeds"),
    ("rounds", 3, "--set rounds: cells and arms have their own; use --rounds"),
    ("name", 3, "--set name: cells and arms have their own; use --out"),
    ("algorithm.name", "fedavg", "--set algorithm.name: cells and arms have their own; write a cell of your own"),
    ("algorithm.alhpa", 0.3, "unknown key 'algorithm.alhpa'; did you mean 'algorithm.alpha'? (of algorithms fedavg, fml)"),
    ("algorithm.mu", 0.3, "key 'algorithm.mu' is a setting of fedprox, and the methods are fedavg, fml; remove it"),
    ("algorithm", {"alpha": 0.3}, "--set algorithm: it is a table; set its keys one by one, as --set algorithm.alpha=..."),
    ("algorithm", 3, "--set algorithm: it is a table"),
    ("optimizer", {"lr": 0.3}, "--set optimizer: it is a table; set its keys one by one, as --set optimizer.name=..."),
    ("clients", {"0": {"share": {}}}, "--set clients: it is a table"),
])  # fmt: skip
def test_what_no_arm_takes_is_not_set(papers, key, value, message):
    cells = read_experiment(papers, "table9").cells
    with pytest.raises(ConfigError) as problem:
        check({key: value}, cells)
    assert str(problem.value).removeprefix("--set: ").startswith(message)
    # what some arm takes is set
    check({"algorithm.alpha": 0.3, "algorithm.alpha.start": 0.3, "algorithm.weighting": "uniform", "data.labels": {}}, cells)


TRIED = [
    {"rounds": "5", "optimizer.lr": rate, "algorithm.mu": mu} for mu in ("0.1", "1.0") for rate in ("0.01", "0.03", "0.1")
]
SWEEP = {
    "format": 1,
    "name": "digits",
    "seeds": [0, 1],
    "by": "global",
    "holdout": 0.1,
    "settings": [{"set": values} for values in TRIED],
    "chosen": TRIED[4],  # mu = 1.0 and lr = 0.03
    "warnings": [],
}


@pytest.fixture
def swept(papers):
    """The made-up papers with a sweep that chose for FedProx, in the place of FedAvg -> (its file, the cell's file)."""
    (papers / "sweeps").mkdir()
    file, cell = papers / "sweeps/digits-fedprox.json", papers / "table9/digits/iid.toml"
    file.write_text(json.dumps(SWEEP))
    arm = 'set = { "algorithm.name" = "fedavg" }'
    cell.write_text(cell.read_text().replace(arm, 'set = { "algorithm.name" = "fedprox" }\nsweep = "digits-fedprox"'))
    return file, cell


@pytest.mark.parametrize(("changes", "rates", "mu"), [
    ((), (0.03, 0.01), 1.0),
    ((('"fedprox" }', '"fedprox", "algorithm.mu" = 0.5 }'),), (0.03, 0.01), 0.5),  # its own settings come after
    ((("paper = 80.00", "rate_times = 0.5"), ("paper = 81.50", "rate_times = 0.5")), (0.015, 0.005), 1.0),
])  # fmt: skip
def test_an_arm_takes_what_its_sweep_chose_and_no_more(papers, swept, changes, rates, mu):
    """A share of the rate is of the sweep's, or else of the cell's."""
    _, cell = swept
    for before, after in changes:
        cell.write_text(cell.read_text().replace(before, after))
    configs = {j.arm: j.config for j in list_jobs(read_experiment(papers, "table9").cells[0], [0], Scale())}
    assert (configs["fedavg"].optimizer.lr, configs["fml"].optimizer.lr) == rates
    assert (configs["fedavg"].algorithm["mu"], configs["fedavg"].rounds) == (mu, 2)


def test_a_share_of_a_rate_that_moves_is_an_error(papers):
    cell = papers / "table9/digits/iid.toml"
    moving = "optimizer.lr = { start = 0.1, end = 0.01 }\n"
    cell.write_text(moving + cell.read_text().replace("paper = 81.50", "rate_times = 0.5"))
    with pytest.raises(ConfigError, match=r"iid.toml, arm 'fml': 'rate_times' needs optimizer.lr as a number"):
        read_experiment(papers, "table9")


@pytest.mark.parametrize(("change", "message"), [
    (None, "there is no such file"),
    ({"format": 2}, "is of format 2"),
    ({"chosen": None}, "chosen: input should be an object"),
    ({"seeds": "x"}, "seeds: input should be a valid array"),
    ({"settings": [{}]}, "it does not have 'set'"),
    ({"settings": SWEEP["settings"][:1]}, "its sweep tried no key with several values"),
])  # fmt: skip
def test_a_sweep_that_chose_nothing_is_named(papers, swept, change, message):
    file, cell = swept
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps({**SWEEP, **change}))
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, "table9")
    assert str(problem.value).startswith(f"{cell}, arm 'fedavg': the sweep 'digits-fedprox' cannot be used (")
    assert message in str(problem.value)


def test_the_report_says_how_a_setting_was_chosen(papers, swept, store, tmp_path):
    experiment = read_experiment(papers, "table9")
    text = render_markdown(make_page(experiment, read_measured_cells(experiment, store)), tmp_path / "docs/pages")
    assert (
        "| optimizer.lr = 0.03, algorithm.mu = 1.0 | sweeps/digits-fedprox.json | "
        "optimizer.lr: 0.01, 0.03, 0.1; algorithm.mu: 0.1, 1.0 | algorithm.mu | shared | 10 % | 5 of 2 | 2 |\n"
    ) in text
    assert "[digits-fedprox.json](../../papers/sweeps/digits-fedprox.json)" in text
    assert "## How settings were chosen" not in render_markdown(make_page(read_experiment(papers, "looker"), []))


def test_a_sweep_command_without_rounds_uses_the_configured_rounds(papers, swept):
    file, _ = swept
    without = [{k: v for k, v in values.items() if k != "rounds"} for values in TRIED]
    file.write_text(json.dumps({**SWEEP, "settings": [{"set": v} for v in without], "chosen": without[0]}))
    (papers / "sweeps/digits.toml").write_text("rounds = 7\n")
    (tuning,) = read_experiment(papers, "table9").cells[0].tunings.values()
    assert (tuning.rounds, tuning.ends) == (7, ["optimizer.lr", "algorithm.mu"])


def test_every_method_of_the_tuned_cells_has_its_own_sweep():
    for cell in read_committed_experiments()["tuned"].cells:
        assert set(cell.tunings) == set(cell.arms)
        for arm, tuning in cell.tunings.items():
            assert tuning.ends == [], "a better rate may lie beyond the grid"
            config = cell.make_config(arm)
            assert config.optimizer.lr == tuning.chosen["optimizer.lr"] * cell.arms[arm].rate_times
            assert tuning.winner.get("algorithm.name", "fml") == config.algorithm["name"]
