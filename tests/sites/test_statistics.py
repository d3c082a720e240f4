"""data.mean = "federated" between real sites: statistics before the first round, by masked and by plain sums."""

import json

import numpy as np
import pytest
import torch

import fedmutual
from authority import write_startup
from fedmutual.config import parse_config
from fedmutual.errors import ConfigError, RunError, UserError
from fedmutual.rundir.text import describe_event
from fedmutual.sites import contract as contracts
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.engine import TooFew
from fedmutual.sites.journal import FILE
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.protocol import EVALUATE, pack_message, read_answer, read_order
from fedmutual.sites.secure_sum.messages import CONTENT, WORDS, Stage
from fedmutual.sites.server_journal import ServerJournal
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import build_site, read_site_file
from fedmutual.sites.statistics import SCALING, SUMS
from wards import COMMON, TELLING, InMemoryTransport, contract, same, site, together, with_data

pytestmark = pytest.mark.sites

BY_SUMS = {"mean": "federated", "std": "federated"}
FML = COMMON | TELLING | {"rounds": 2, "data": {"classes": COMMON["data"]["classes"], **BY_SUMS}}
SERVERS = {"masked": {"sum": "masked"}, "fixed": {"sum": "fixed"}}


class Federation:
    """Sites with a third of the digits each, and their server."""

    def __init__(self, folder, kind="masked", common=FML, sites=None, **given):
        folder.mkdir(exist_ok=True)
        self.folder, self.sites, self.notes = folder, sites or with_data(folder), []
        self.agreed = contracts.read_contract(contract(folder, common | {"server": SERVERS[kind]}, self.sites, **given))
        self.transport = Steps({i: self.start(i) for i in self.sites})

    def start(self, name):
        startup = write_startup(self.folder / name / "startup", name)
        return SiteRuntime(self.agreed, read_site_file(site(self.folder, name, self.sites[name])), startup=startup)

    def run(self):
        def note(event):
            if type(event).__name__ == "Noted":
                self.notes += describe_event(event)

        startup = write_startup(self.folder / "server-kit", "server")
        Coordinator(self.agreed, self.folder / "server", startup).run(self.transport, [note])
        return fedmutual.Run(self.folder / "server")

    def about(self):
        return json.loads((self.folder / "server" / "environment.json").read_text())


class Steps(InMemoryTransport):
    """A transport that calls `before(round, phase)` before orders of work; `alter` changes orders, `change` answers."""

    def __init__(self, halves):
        super().__init__(halves)
        self.before = lambda round, phase: None
        self.change = lambda site, order, answer, message: (answer, message)
        self.alter = lambda site, order, inbox: inbox

    def list_connected(self):
        return tuple(self.halves)  # who is away does not answer

    def ask(self, orders, deadline):
        order = next((read_order(content)[0] for content in orders.values()), None)
        if order is not None and order.kind == "work":
            self.before(order.round, order.phase)
        sent = {i: read_order(content) for i, content in orders.items() if i not in self.away}
        altered = {i: pack_message(order, self.alter(i, order, inbox)) for i, (order, inbox) in sent.items()}
        for i, content in super().ask(altered, deadline):
            yield i, pack_message(*self.change(i, read_order(orders[i])[0], *read_answer(content)))

    def asked(self, round):
        """Return the phases of the orders of work of a round, in order."""
        return [read_order(order)[0].phase for _, order, _ in self.answers if read_order(order)[0].round == round]


@pytest.mark.parametrize(("kind", "algorithm"), [("masked", "fml"), ("masked", "fedavg"), ("fixed", "fml")])
def test_real_sites_are_one_process_to_the_bit(tmp_path, kind, algorithm):
    """fedavg weights updates, so that its words are one more than a model has numbers."""
    common = FML | {"algorithm": {"name": algorithm}}
    federation = Federation(tmp_path / kind, kind, common)
    run, one_process = (
        federation.run(),
        fedmutual.run(parse_config(together(common | {"server": SERVERS["fixed"]}, federation.sites)), tmp_path / "one"),
    )
    about, expected = federation.about(), json.loads((tmp_path / "one" / "environment.json").read_text())
    assert about["statistics"] == expected["statistics"]
    assert about["statistics"]["rows"] == sum(about["statistics"]["classes"].values())
    scaling = about["clients"]["north"]["scaling"]
    assert (scaling["mean"], scaling["std"]) == (about["statistics"]["mean"], about["statistics"]["std"])
    assert same(run.global_model().state_dict(), one_process.global_model().state_dict())
    for i in federation.sites:
        if algorithm == "fml":
            mine = fedmutual.Run(federation.folder / i / "state" / "wards")
            assert same(mine.personal_model(i).state_dict(), one_process.personal_model(i).state_dict())
        environment = json.loads((federation.folder / i / "state" / "wards" / "environment.json").read_text())
        assert environment["scaling"]["mean"] == scaling["mean"]
    assert algorithm != "fml" or run.summary["personal"] == one_process.summary["personal"]
    assert federation.notes == []
    lines = [json.loads(line) for line in (federation.folder / "server" / "ledger.jsonl").open()]
    first = [line for line in lines if line["round"] == 0]
    assert [line["client"] for line in first] == list(federation.sites)
    assert {line["phase"] for line in first} == {SUMS}
    count = federation.agreed.layout.count
    assert all(line["up"] == 8 * count if kind == "fixed" else line["up"] > 8 * count for line in first)


def test_under_masks_no_sums_of_a_single_site_leave(tmp_path):
    """Uploads are uniform words, and what the site would have sent unmasked is in its log as a digest only."""
    federation = Federation(tmp_path / "masked")
    federation.run()
    for i in federation.sites:
        lines = read_ledger(tmp_path / "masked" / i / "state" / "wards")
        assert {t["name"] for line in lines for t in line["tensors"]} == {CONTENT, WORDS}
    orders = [(i, read_order(o)[0], read_answer(a)[1]) for i, o, a in federation.transport.answers]
    uploads = [m[WORDS] for _, o, m in orders if (o.round, o.phase) == (-1, Stage.UPLOAD)]
    assert [len(words) for words in uploads] == [federation.agreed.layout.count] * 3
    assert all((words.abs() > 2**40).float().mean() > 0.95 for words in uploads)
    about = federation.about()["statistics"]
    total = torch.stack(uploads).sum(0)
    assert total[0] != about["rows"]  # the masks of seeds are taken off by shares alone


def test_a_site_that_misses_the_start_is_not_in_the_sums_and_has_the_scaling(tmp_path):
    federation = Federation(tmp_path / "fixed", "fixed")

    def before(round, phase):
        federation.transport.away = {"west"} if round < 0 else set()

    federation.transport.before = before
    federation.run()
    statistics = federation.about()["statistics"]
    rows = {i: len(federation.transport.halves[i].experiment.data.clients[i].private) for i in federation.sites}
    assert statistics["rows"] == rows["north"] + rows["south"]
    for i in federation.sites:
        assert federation.transport.halves[i].experiment.data.spaces[i].scaling["mean"] == statistics["mean"]
    assert [note for note in federation.notes if "'west'" in note] == federation.notes
    assert len(federation.notes) == 1


@pytest.mark.parametrize("kind", ["masked", "fixed"])
def test_restarting_at_every_order_asks_once_and_changes_no_bit(tmp_path, kind):
    untouched = Federation(tmp_path / "untouched", kind)
    expected = untouched.run()
    federation = Federation(tmp_path / "restarted", kind, sites=untouched.sites)

    def before(round, phase):
        federation.transport.halves = {i: federation.start(i) for i in federation.sites}

    federation.transport.before = before
    run = federation.run()
    assert same(run.global_model().state_dict(), expected.global_model().state_dict())
    assert federation.about()["statistics"] == untouched.about()["statistics"]


def test_a_restarted_server_does_not_ask_for_statistics_again(tmp_path):
    federation = Federation(tmp_path / "masked")

    class Killed(Exception):
        pass

    def before(round, phase):
        if round == 0 and not federation.transport.answers_before:
            federation.transport.answers_before = len(federation.transport.answers)
            raise Killed

    federation.transport.answers_before = 0
    federation.transport.before = before
    with pytest.raises(Killed):
        federation.run()
    asked = federation.transport.asked(-1)
    federation.run()
    assert federation.transport.asked(-1) == asked
    assert sorted(set(asked)) == list(range(6))
    lines = [json.loads(line) for line in (tmp_path / "masked" / "server" / "ledger.jsonl").open()]
    assert sum(line["phase"] == SUMS for line in lines) == 3


def test_a_server_that_asks_twice_gets_no_second_sum(tmp_path):
    """Not in the same attempt with fewer sites, and not in a new attempt."""
    federation = Federation(tmp_path / "masked")

    def stop(round, phase):
        if round == 0:
            raise InterruptedError

    federation.transport.before = stop
    with pytest.raises(InterruptedError):
        federation.run()
    (tmp_path / "masked" / "server" / FILE).unlink()
    ServerJournal(tmp_path / "masked" / "server").set_fact("attempt", 1)
    with pytest.raises(TooFew):
        federation.run()
    assert sum("was opened before" in note for note in federation.notes) == 3


def scaled(value, inputs=1):
    return {SCALING: torch.full((2, inputs), value, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({}, "no mean and divisor"),
        (scaled(0.25), "another mean"),
        *((scaled(value), "a mean that is not between") for value in (float("nan"), float("inf"), 0.0, 1e-60, 3e-38, 1e16)),
        (scaled(0.5, 2), "no mean and divisor"),
        ({SCALING: torch.ones(2, 1)}, "no mean and divisor"),
    ],
)
def test_a_site_declines_another_scaling_and_does_the_order_with_the_first(tmp_path, changed, word):
    federation = Federation(tmp_path / "fixed", "fixed", FML | {"rounds": 1})
    federation.run()
    half = federation.transport.halves["north"]
    orders = [(read_order(o), a) for i, o, a in federation.transport.answers if i == "north"]
    (order, inbox), answer = next(one for one in orders if one[0][0].kind == EVALUATE)
    rest = {name: tensor for name, tensor in inbox.items() if name != SCALING}
    declined, message = read_answer(half.carry_out(pack_message(order, rest | changed)))
    assert word in declined.problem
    assert message == {}
    assert half.carry_out(pack_message(order, inbox)) == answer


HOSTILE = {
    "impossible": (lambda words: words.index_fill(0, torch.tensor([0]), 5), "impossible"),
    "negative": (lambda words: -words, "impossible"),
    "rows without end": (lambda words: words * 1000, "n_k"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_impossible_sums_of_a_site_are_refused_and_named(tmp_path, name):
    spoil, word = HOSTILE[name]
    federation = Federation(tmp_path / "fixed", "fixed", FML | {"rounds": 1})

    def change(site, order, answer, message):
        return (answer, {SUMS: spoil(message[SUMS])}) if order.round < 0 and site == "west" else (answer, message)

    federation.transport.change = change
    federation.run()
    assert any("'west'" in note and word in note for note in federation.notes)
    rows = {i: len(federation.transport.halves[i].experiment.data.clients[i].private) for i in ("north", "south")}
    assert federation.about()["statistics"]["rows"] == sum(rows.values())


def test_impossible_sums_under_masks_end_the_federation_before_training(tmp_path):
    federation = Federation(tmp_path / "masked")

    def change(site, order, answer, message):
        if (order.round, order.phase, site) == (-1, Stage.UPLOAD, "west"):
            message = {WORDS: message[WORDS] - 10**6}
        return answer, message

    federation.transport.change = change
    with pytest.raises(RunError, match="impossible"):
        federation.run()
    assert federation.transport.asked(0) == []
    assert ServerJournal(tmp_path / "masked" / "server").get_fact(SUMS) is None


@pytest.mark.parametrize("kind", ["masked", "fixed"])
def test_a_site_with_values_beyond_the_range_is_left_out_and_its_operator_learns_why(tmp_path, kind):
    sites = with_data(tmp_path)
    with np.load(tmp_path / "west-digits.npz") as arrays:
        x, y = arrays["x"].astype(np.float32), arrays["y"]
    x[:, 0, 0] = 1e30
    np.savez(tmp_path / "west-digits.npz", x=x, y=y)
    sites |= {"fourth": sites["north"]} if kind == "masked" else {}
    federation, messages = Federation(tmp_path / kind, kind, FML | {"rounds": 1}, sites), []
    federation.transport.halves["west"] = SiteRuntime(
        federation.agreed,
        read_site_file(federation.folder / "west" / "site.toml"),
        messages.append,
        startup=federation.folder / "west" / "startup",
    )
    federation.run()
    assert any("'west'" in note for note in federation.notes)
    assert any("input '0'" in line and "too large" in line for line in messages)
    assert not any("1e+30" in note for note in federation.notes)


@pytest.mark.parametrize(
    ("common", "word"),
    [
        (FML | {"algorithm": {"name": "proxyfl"}}, "'proxyfl'"),
        (FML | {"data": FML["data"] | {"std": [0.4]}}, "both"),
        (FML | {"privacy": {"nets": "both", "sigma": 1.0}, "training": {"local_steps": 2}}, "epsilon"),
    ],
)
def test_a_contract_that_cannot_have_statistics_is_refused(tmp_path, common, word):
    with pytest.raises(ConfigError, match=word):
        contracts.read_contract(contract(tmp_path, common))


def test_two_sites_have_no_masked_statistics(tmp_path):
    with pytest.raises(ConfigError, match="3 to 20 sites"):
        contracts.read_contract(contract(tmp_path, FML | {"server": SERVERS["masked"]}, {"north": {}, "south": {}}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"mean": [0.1], "std": [0.2]}, ("data.mean", "all clients")),
        ({"classes": ["0", "1"], "name": "npz"}, ("data.classes",)),
    ],
)
def test_a_site_with_its_own_scaling_or_classes_is_refused(tmp_path, data, words):
    sites = with_data(tmp_path)
    path = tmp_path / "few.npz"
    np.savez(path, x=np.zeros((40, 8, 8), np.uint8), y=np.arange(40) % 2)
    sites["north"] = {**sites["north"], "data": {**sites["north"]["data"], "root": str(path), **data}}
    agreed = contracts.read_contract(contract(tmp_path, FML, sites))
    with pytest.raises(UserError) as caught:
        build_site(agreed, read_site_file(site(tmp_path, "north", sites["north"])))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_site_that_is_sent_another_scaling_under_masks_is_named_and_opens_nothing(tmp_path):
    federation = Federation(tmp_path / "masked")

    def alter(site, order, inbox):
        return inbox | scaled(0.5) if (site, order.round, order.phase) == ("west", 0, 0) else inbox

    federation.transport.alter = alter
    with pytest.raises(TooFew):
        federation.run()
    assert any("another model" in note and "'west'" in note for note in federation.notes)
    assert not (tmp_path / "masked" / "server" / "metrics.jsonl").exists()


def write_tables(folder, names=("age", "sex", "pulse")):
    """Return sites with a table each: empty cells, a category, and the columns in another order at each site."""
    rng, sites = np.random.default_rng(0), {}
    for k, name in enumerate(("north", "south", "west")):
        columns = {"age": rng.integers(20, 90, 60), "sex": rng.choice(["f", "m", ""], 60), "pulse": rng.integers(50, 99, 60)}
        columns = {column: columns[column].astype(str) for column in (*names[k:], *names[:k])}
        columns["age"] = np.where(rng.random(60) < 0.2, "", columns["age"])
        rows = zip(*columns.values(), np.where(np.arange(60) % 2, "ill", "well"), strict=True)
        lines = [",".join((*columns, "label")), *map(",".join, rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        sites[name] = {"data": {"name": "csv", "root": str(folder / f"{name}.csv")}}
    return sites


TABLES = FML | {"rounds": 1, "optimizer": {"lr": 0.02}}


def test_columns_of_real_sites_are_those_of_one_process(tmp_path):
    columns = {"age": "number", "sex": ["f", "m"], "pulse": {"kind": "number", "fill": 60.0}}
    common = TABLES | {"data": {"classes": ["well", "ill"], "columns": columns, **BY_SUMS}}
    sites = write_tables(tmp_path)
    federation = Federation(
        tmp_path / "masked", "masked", common, sites, input=[4], columns=["age", "sex=f", "sex=m", "pulse"]
    )
    run = federation.run()
    one_process = fedmutual.run(parse_config(together(common | {"server": SERVERS["fixed"]}, sites)), tmp_path / "one")
    statistics = federation.about()["statistics"]
    assert statistics == json.loads((tmp_path / "one" / "environment.json").read_text())["statistics"]
    assert statistics["inputs"] == ["age", "sex", "pulse"]
    assert statistics["missing"][0] > 0
    assert statistics["missing"][1] > 0
    assert statistics["missing"][2] == 0
    assert statistics["mean"][1] is None
    steps = federation.transport.halves["west"].experiment.data.space.scaling["columns"]
    assert [step.get("fill") for step in steps] == [statistics["mean"][0], None, 60]
    assert same(run.global_model().state_dict(), one_process.global_model().state_dict())


def test_named_columns_need_the_names_in_the_contract(tmp_path):
    """Without them nobody could compare the order of the columns."""
    common = TABLES | {"data": {"classes": ["well", "ill"], **BY_SUMS}}
    (tmp_path / "a.csv").write_text("age,pulse,label\n" + "31,60,ill\n45,71,well\n" * 20)
    tables = {"data": {"name": "csv", "root": str(tmp_path / "a.csv")}}
    path = site(tmp_path, "north", tables)
    with pytest.raises(UserError, match=r"sites\.columns"):
        build_site(contracts.read_contract(contract(tmp_path, common, {"north": tables}, input=[2])), read_site_file(path))
    agreed = contracts.read_contract(contract(tmp_path, common, {"north": tables}, input=[2], columns=["age", "pulse"]))
    assert build_site(agreed, read_site_file(path)).data.space.columns == ("age", "pulse")
