"""Differential privacy at real sites: a secret and a budget of each site's own, spent before an answer leaves."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

import fedmutual
from fedmutual.errors import ConfigError, RunError
from fedmutual.privacy.accountant import ORDERS, NoisedSteps, compute_total_epsilon
from fedmutual.privacy.budget import BudgetExceeded, PrivacyBudget
from fedmutual.privacy.mechanism import Release
from fedmutual.privacy.secret import derive_simulation_secret
from fedmutual.sites import contract as contracts
from fedmutual.sites.guarantee import plan_site
from fedmutual.sites.protocol import EVALUATE, WORK, Order, pack_message, read_answer
from fedmutual.sites.site_journal import SiteJournal
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from wards import COMMON, SITES, Federation, contract, run_together, same, site, with_data

pytestmark = pytest.mark.sites

PRIVATE = COMMON | {"privacy": {"nets": "both", "sigma": 2.0}, "share": {"metrics": "none"}, "rounds": 2}
MEME = PRIVATE | {"privacy": {"nets": "meme", "sigma": 2.0}, "algorithm": {"name": "fml", "alpha": 0.4, "beta": 1.0}}
BUDGET = {"epsilon": 50.0}


def half(folder, common=PRIVATE, name="north", budget=BUDGET, say=lambda line: None, **site_tables):
    """A site of a federation of itself alone."""
    folder.mkdir(exist_ok=True)
    path = contract(folder, common, {name: SITES[name]})
    return SiteRuntime(
        contracts.read_submitted_contract(path),
        read_site_file(site(folder, name, SITES[name], privacy=budget, **site_tables)),
        say,
    )


def work(half, round=0, phase=0, shift=0.0, content=False, attempt=0):
    """An order to a half, with its own first model moved so far -> the answer and its tensors."""
    inbox = {k: v + shift if v.is_floating_point() else v for k, v in half.experiment.make_server_state().items()}
    answer = half.carry_out(pack_message(Order(WORK, round, phase, attempt=attempt), inbox))
    return answer if content else read_answer(answer)


def lines(folder, name="north"):
    """The lines of the one ledger of a site."""
    (path,) = (folder / name / "state" / "privacy").glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("common", [PRIVATE, MEME], ids=["both", "meme"])
def test_sites_are_one_process_where_their_secrets_are(tmp_path, common):
    for i in SITES:
        write_secret(tmp_path / i / "state", derive_simulation_secret(0, i))
    federation = Federation(tmp_path, common, site_tables={"privacy": BUDGET}).run()
    run = run_together(tmp_path / "one", common)
    assert federation.equals(run)
    for i in SITES:
        record, record_of_process = (
            fedmutual.Run(federation[i].folder).summary["privacy"],
            run.summary["privacy"]["clients"][i],
        )
        assert (record["clients"][i], record["spent"]) == (record_of_process, record_of_process["epsilon"])


def write_secret(state, secret):
    """Give a site a secret before it draws one."""
    path = state / "privacy" / "secret"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o600)
    path.write_bytes(secret)


def test_each_site_has_its_own_secret_and_its_budget_may_change(tmp_path):
    replies = []
    for k in "ab":
        _, message = work(half(tmp_path / k))
        replies.append(message)
        assert ((tmp_path / k / "north" / "state" / "privacy" / "secret").stat().st_mode & 0o777) == 0o600
    assert not same(*replies)
    answer, message = work(half(tmp_path / "a", budget={"epsilon": 60.0, "delta": 1e-6}), round=1)
    assert (answer.problem, bool(message)) == (None, True)


def test_every_inbox_costs_once(tmp_path):
    runtime = half(tmp_path)
    first = work(runtime, content=True)
    assert len(lines(tmp_path)) == 1
    assert work(runtime, content=True) == first
    assert len(lines(tmp_path)) == 1
    work(runtime, shift=1e-6, attempt=1)  # without a new attempt the site declines
    assert len(lines(tmp_path)) == 2
    assert len({line["label"] for line in lines(tmp_path)}) == 2
    work(runtime, round=1, attempt=1)
    assert [line["round"] for line in lines(tmp_path)] == [1, 1, 2]
    runtime.carry_out(pack_message(Order(EVALUATE, 1, 0, attempt=1), {}))
    assert len(lines(tmp_path)) == 3
    assert all(line["steps"] > 0 and line["federation"] == "wards" for line in lines(tmp_path))


def test_a_crash_before_the_answer_costs_and_the_same_order_again_does_not(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    runtime = half(tmp_path / "a")
    with monkeypatch.context() as broken:
        broken.setattr(SiteJournal, "finish", killed)
        with pytest.raises(Killed):
            work(runtime)
    assert len(lines(tmp_path / "a")) == 1
    second_answer = work(half(tmp_path / "a"), content=True)
    assert len(lines(tmp_path / "a")) == 1
    secret = (tmp_path / "a" / "north" / "state" / "privacy" / "secret").read_bytes()
    write_secret(tmp_path / "b" / "north" / "state", secret)  # of a site which was never killed
    assert work(half(tmp_path / "b"), content=True) == second_answer


def test_what_is_paid_for_is_written_before_a_private_row_is_read(tmp_path, monkeypatch):
    runtime = half(tmp_path)
    read = []

    def watched(self, line, *args, **kwargs):
        read.append(len(lines(tmp_path)))
        raise RuntimeError("stop")

    monkeypatch.setattr("fedmutual.privacy.sampling.Units.sample", watched)
    answer, message = work(runtime)
    assert answer.problem is None
    assert all(torch.equal(message[k], v) for k, v in runtime.experiment.make_server_state().items()), "the update is zero"
    assert read == [1]


def test_a_site_with_a_spent_budget_declines_and_the_federation_continues(tmp_path):
    federation = Federation(tmp_path, PRIVATE | {"rounds": 3}, site_tables={"privacy": BUDGET}, quorum=2)
    heard, cost = [], lines_cost(tmp_path / "measured")
    federation.sites["north"] |= {"privacy": {"epsilon": 1.5 * cost}}
    federation.transport.halves["north"] = federation.start("north", heard.append)
    assert fedmutual.Run(federation.run().server).finished
    answers = [(i, read_answer(content)[0].problem) for i, _, content in federation.transport.answers]
    assert {answer for answer in answers if answer[1]} == {("north", "its privacy budget is spent")}
    assert any("its privacy budget is spent" in note for note in federation.about("north"))
    assert any("privacy.epsilon is" in line and "declines" in line for line in heard)
    before = lines(tmp_path)
    assert (1 <= len(before) < 3, len(lines(tmp_path, "south"))) == (True, 3)
    answer, message = work(federation["north"], round=2, attempt=1)
    assert (answer.problem, message, lines(tmp_path)) == ("its privacy budget is spent", {}, before)


def test_the_plan_of_a_site_says_how_many_rounds_its_budget_covers(tmp_path):
    """The site does so many rounds, and declines the next one."""
    common, planned = PRIVATE | {"rounds": 8}, tmp_path / "planned"
    runtime = half(planned, common, budget={"epsilon": 2 * lines_cost(tmp_path / "measured")})
    site_file, covered = planned / "north" / "site.toml", []
    for round in range(8):
        covered.append(plan_site(planned / "federation.toml", site_file, {})[2][3])
        if work(runtime, round)[0].problem is not None:
            break
    assert covered == [*range(round, -1, -1)]
    assert 1 <= round < 8


def lines_cost(folder):
    """Epsilon of one round at the site north."""
    one = half(folder)
    work(one)
    path = next((folder / "north" / "state" / "privacy").glob("*.jsonl"))
    return PrivacyBudget(path, "wards", "example", 50.0, 1e-5).spent


def test_federations_on_the_same_data_have_one_budget(tmp_path):
    work(half(tmp_path))
    heard = []
    again = half(tmp_path, PRIVATE | {"name": "second", "split": {"preset": "v1", "test": 0.4}}, say=heard.append)
    work(again)
    assert [line["federation"] for line in lines(tmp_path)] == ["wards", "second"]
    assert not any("other data" in line for line in heard)


def test_other_data_of_a_site_spend_from_the_same_budget(tmp_path):
    """A row that is added, or a contract with other columns, is no new budget for the people in all other rows."""
    work(half(tmp_path))
    (path,) = (tmp_path / "north" / "state" / "privacy").glob("*.jsonl")
    once, heard = budget(path).spent, []
    data = with_data(tmp_path)["north"]["data"]
    other = half(tmp_path, PRIVATE | {"name": "other"}, say=heard.append, data=data)
    work(other)
    assert any("the budget counts these data too" in line for line in heard)
    first, second = (tmp_path / "north" / "state" / "privacy").glob("*.jsonl")
    assert budget(first).spent == budget(second).spent > once
    answer, message = work(
        half(tmp_path, PRIVATE | {"name": "third"}, budget={"epsilon": 1.01 * once}, data=data), shift=1e-6
    )
    assert answer.problem == "its privacy budget is spent"
    assert message == {}


def test_the_order_of_the_divergence_is_chosen_before_the_answers_are_seen(tmp_path):
    """The best order for all steps is known only at the end: of mechanisms chosen on the way it would promise too much."""
    privacy_budget = budget(tmp_path / "ledger.jsonl", most=8.0)
    strong, weak = NoisedSteps(0.7, 0.01, 50), NoisedSteps(8.0, 0.9, 50)
    privacy_budget.spend(Release("a", *strong, 0, 0))
    assert privacy_budget.spent == compute_total_epsilon([strong], 1e-5)  # of one kind only the number of steps is chosen
    privacy_budget.spend(Release("b", *weak, 0, 0))
    assert privacy_budget.spent > compute_total_epsilon([strong, weak], 1e-5) * (1 + 1e-6)
    conversion = {order: math.log1p(-1 / order) - math.log(1e-5 * order) / (order - 1) for order in ORDERS}
    gaussian = max(ORDERS, key=lambda order: (8.0 - conversion[order]) / order)
    bound = cost([strong, weak], gaussian)  # dp-accounting bounds the divergence of an order such as 3.9 from above
    assert bound * (1 - 1e-4) < privacy_budget.spent <= bound
    assert privacy_budget.spent == budget(tmp_path / "ledger.jsonl", most=8.0).spent


def cost(taken, order):
    """Epsilon at delta 1e-5 by one Renyi order, by dp-accounting."""
    accountant = RdpAccountant([order])
    for sigma, rate, steps in taken:
        accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps))
    return accountant.get_epsilon(1e-5)


def test_what_does_not_make_a_guarantee_together_is_refused(tmp_path):
    def refused(*words, common=PRIVATE, **given):
        with pytest.raises(ConfigError) as caught:
            half(tmp_path, common, **given)
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value), str(caught.value)

    refused("privacy.epsilon", "missing", budget={})
    refused("share.metrics = 'none'", "does not count", share={"metrics": "all"})
    refused("share.metrics = 'none'", common={k: v for k, v in PRIVATE.items() if k != "share"})
    refused("privacy.nets = 'none'", "privacy.epsilon", "no effect", common=COMMON)
    for key, value in (("epsilon", 3.0), ("delta", 1e-6), ("accountant", "prv")):
        refused(f"privacy.{key}", "site.toml", common=PRIVATE | {"privacy": PRIVATE["privacy"] | {key: value}})
    refused("data.mean", data={"name": "digits", "mean": [0.3], "std": [0.4]})
    refused("beta = 1", common=PRIVATE | {"privacy": {"nets": "meme", "sigma": 1.0}})
    refused("weighting", common=PRIVATE | {"algorithm": {"name": "fedavg"}}, algorithm={})


def release(label="a", steps=10, sigma=2.0):
    return Release(label, sigma, 0.1, steps, 0, 0)


def budget(path, most=50.0, unit="example"):
    return PrivacyBudget(path, "wards", unit, most, 1e-5)


def test_a_ledger_survives_a_cut_line_and_refuses_a_damaged_one(tmp_path):
    path = tmp_path / "ledger.jsonl"
    budget(path).spend(release("a"))
    spent = budget(path).spent
    content = path.read_bytes()
    path.write_bytes(content + b'{"label": "b", "sig')
    assert budget(path).spent == spent
    budget(path).spend(release("c"))
    assert [json.loads(line)["label"] for line in path.read_text().splitlines()] == ["a", "c"]
    assert budget(path).spent > spent
    path.write_bytes(b"nonsense\n" + content)
    with pytest.raises(RunError, match="line 1 is damaged"):
        budget(path)
    path.write_text(content.decode().replace('"sigma":2.0', '"sigma":-2.0'))
    with pytest.raises(RunError, match="damaged"):
        budget(path)


def test_a_ledger_counts_a_label_once_and_stops_at_the_budget(tmp_path):
    path = tmp_path / "ledger.jsonl"
    one = budget(path)
    one.spend(release("a"))
    one.spend(release("a"))
    assert len(path.read_text().splitlines()) == 1
    tight = budget(path, most=one.spent * 1.001)
    tight.spend(release("a"))
    content = path.read_bytes()
    with pytest.raises(BudgetExceeded, match=r"privacy\.epsilon is"):
        tight.spend(release("b"))
    assert path.read_bytes() == content


def find_ledger(state):
    (path,) = (state / "privacy").glob("*.jsonl")
    return path


def edit_ledger(change):
    return lambda state: find_ledger(state).write_bytes(change(find_ledger(state).read_bytes()))


LOSSES = {
    "a ledger": (lambda state: find_ledger(state).unlink(), "has 0 lines"),
    "the folder": (lambda state: shutil.rmtree(state / "privacy"), "has 0 lines"),
    "a line": (edit_ledger(lambda content: content.splitlines(True)[0]), "has 1 line, "),
    "the end of a line": (edit_ledger(lambda content: content[:-20]), "has 1 line, "),
    "a value": (
        edit_ledger(lambda content: content.replace(b'"sigma":2.0', b'"sigma":9.0', 1)),
        "has other lines than the 2 that",
    ),
    "a line of another site": (
        edit_ledger(lambda content: content.replace(b'"label":"', b'"label":"0', 1)),
        "has other lines than the 2 that",
    ),
}


@pytest.mark.parametrize(("lose", "words"), LOSSES.values(), ids=LOSSES)
def test_a_site_that_lost_a_part_of_its_ledger_does_not_start(tmp_path, lose, words):
    """Nor does another federation with the same state folder, nor the running site; with the copy, all go on."""
    runtime, state = half(tmp_path), tmp_path / "north" / "state"
    work(runtime)
    work(runtime, round=1)
    shutil.copytree(state / "privacy", tmp_path / "copy")
    lose(state)
    for name in ("wards", "second"):
        with pytest.raises(RunError, match=words) as caught:
            half(tmp_path, PRIVATE | {"name": name})
        assert "\n" not in str(caught.value)
        assert str(next((tmp_path / "copy").glob("*.jsonl")).name) in str(caught.value)
    answer, message = work(runtime, round=1, attempt=1, shift=1e-6)
    assert (answer.problem, message) == ("it could not do its part; its operator reads why", {})
    shutil.copytree(tmp_path / "copy", state / "privacy", dirs_exist_ok=True)
    answer, _ = work(half(tmp_path), round=1, attempt=1, shift=1e-6)
    assert answer.problem is None
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("lose", ["wards", "privacy/secret", "hidden files"])
def test_a_lost_journal_or_secret_leaves_the_budget_as_spent(tmp_path, lose):
    """So does a copy of the visible files."""
    work(half(tmp_path / "a"))
    state = tmp_path / "a" / "north" / "state"
    spent = budget(find_ledger(state)).spent
    shutil.copytree(state, tmp_path / "b" / "north" / "state", ignore=shutil.ignore_patterns(".*"))
    path = tmp_path / "b" / "north" / "state" / lose
    if path.exists():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    answer, message = work(half(tmp_path / "b", budget={"epsilon": 1.01 * spent}), round=1)
    assert (answer.problem, message) == ("its privacy budget is spent", {})


def test_a_ledger_of_another_site_and_lines_that_no_journal_records_count(tmp_path):
    """A crash between the ledger and the journal leaves such a line."""
    work(half(tmp_path))
    path = find_ledger(tmp_path / "north" / "state")
    spent, content = budget(path).spent, path.read_bytes()
    path.write_bytes(content + content.replace(b'"label":"', b'"label":"0'))
    path.with_name("other.jsonl").write_bytes(content)
    work(half(tmp_path), round=1)
    assert budget(path).spent > 1.5 * spent
    path.write_bytes(content)
    with pytest.raises(RunError, match="has 1 line, but the journal of this site records 3"):
        half(tmp_path)


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_state_folder_of_an_older_version_is_refused_until_its_ledger_is_renamed(tmp_path, is_in_place):
    """`cp -r state/* new/` left the hidden folder behind."""
    work(half(tmp_path))
    state = tmp_path / "north" / "state"
    (state / "earlier").mkdir()
    (state / "earlier" / "diary.json").write_text('{"format": 1, "run": "", "dropped": false, "entries": []}')
    shutil.rmtree(state / "wards")
    old = (state if is_in_place else tmp_path) / ".privacy"
    (state / "privacy").rename(old)
    with pytest.raises(RunError, match=r"whose privacy budget is in the folder '.privacy'; .* rename that folder to"):
        half(tmp_path)
    for ledgers in ("[]", '{"a.jsonl": [1]}', '{"a.jsonl": ["x", "y"]}'):
        (state / "earlier" / "diary.json").write_text(f'{{"format": 1, "ledgers": {ledgers}}}')
        with pytest.raises(RunError, match=r"diary\.json: is damaged: its key 'ledgers'"):
            half(tmp_path)
    (state / "earlier" / "diary.json").write_text('{"format": 1, "run": "", "dropped": false, "entries": []}')
    old.rename(state / "privacy")
    assert work(half(tmp_path), round=1)[0].problem is None
    assert len(lines(tmp_path)) == 2


def test_units_do_not_mix_in_one_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    budget(path).spend(release())
    with pytest.raises(RunError, match=r"privacy\.unit = 'example'"):
        budget(path, unit="group")
    other = tmp_path / "later" / "ledger.jsonl"
    other.parent.mkdir()
    group = budget(other, unit="group")
    budget(other).spend(release())
    with pytest.raises(RunError, match="do not add up"):
        group.spend(release("b"))


def test_a_diverging_loss_does_not_tell_on_a_record(tmp_path):
    """A model that makes some rows overflow is answered like any other: with noise, and no word of it."""
    one = half(tmp_path)
    inbox = {k: v * 1e30 for k, v in one.experiment.make_server_state().items()}
    answer, message = read_answer(one.carry_out(pack_message(Order(WORK, 0, 0), inbox)))
    assert answer.problem is None
    assert all(torch.isfinite(v).all() for v in message.values())
    assert replace(answer, order=Order(WORK, 0, 0)).train == {}
